"""A device that several claims share is told by its share."""

from __future__ import annotations

from claims_netdevs import World
from claims_world import claim, ref, result, uid


def test_share_is_answered_and_remembered(world: World) -> None:
    world.api.put(claim(1, result("gpu-0", shareID="share-1"), result("gpu-1", request="other")))
    first = world.state.prepare(ref(1))
    assert [device.share_id for device in first.devices] == ["share-1", None]
    world.restart()
    entry = world.ledger.get(uid(1))
    assert entry is not None
    assert [device.share_id for device in entry.devices] == ["share-1", None]
    assert world.state.prepare(ref(1)).devices == first.devices
