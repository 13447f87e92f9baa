"""Claims with admin access (KEP-5018): they look at a device beside whoever has it, and hold nothing."""

from __future__ import annotations

import pytest
from claims_netdevs import HOST, World
from claims_world import BOOT, GPUS, VFS, claim, config, ref, result, sandbox, uid

from railmate.claims.allocation import ClaimError
from railmate.claims.holdings import Holdings

ADMIN_POD = sandbox("sandbox-9", "admin", "/run/netns/9")


def look(world: World, *devices: str) -> None:
    """Claim 9, of the administrator's pod."""
    world.prepared(
        9,
        *(result(device, f"look{n}", adminAccess=True) for n, device in enumerate(devices)),
        pods=("admin",),
    )


def paths(world: World, number: int) -> set[str]:
    devices = world.spec(number)["devices"]
    return {node["path"] for device in devices for node in device["containerEdits"].get("deviceNodes", [])}


def test_a_device_that_a_pod_has_can_be_looked_at_and_one_that_is_looked_at_can_be_had(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    look(world, "pair-0", "pair-1")
    world.prepared(2, "pair-1", pods=("pod-2",))
    held = Holdings(world.ledger, BOOT).owners()
    assert {address: owner.name for address, owner in held.items()} == {
        GPUS[0]: "claim-1", VFS[0]: "claim-1", GPUS[1]: "claim-2", VFS[1]: "claim-2",
    }  # fmt: skip
    with pytest.raises(ClaimError, match="still held by ResourceClaim team/claim-1"):
        world.prepared(3, "pair-0", pods=("pod-3",))


def test_it_gets_the_device_nodes_and_the_netdev_stays_where_it_is(world: World) -> None:
    look(world, "pair-0")
    world.state.attach(ADMIN_POD)
    assert paths(world, 9) >= {"/dev/nvidia0", "/dev/nvidiactl", "/dev/infiniband/uverbs0"}
    assert world.netdevs.where[VFS[0]] == (HOST, "vf0")
    assert world.gates == []


def test_its_container_waits_for_nothing(world: World) -> None:
    look(world, "pair-0")
    assert "hooks" not in str(world.spec(9)), "no gate"
    world.state.check(ADMIN_POD, [uid(9)])


def test_its_end_takes_nothing_from_the_pod_that_has_the_device(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    look(world, "pair-0")
    world.state.attach(ADMIN_POD)
    world.state.detach(ADMIN_POD.id)
    world.state.unprepare(ref(9))
    assert world.netdevs.where[VFS[0]][0] == "/run/netns/1"
    world.state.check(sandbox(), [uid(1)])
    assert world.gates == [f"{uid(1)}.sandbox-1"]
    assert [name for name in world.specs if uid(9) in name] == []


def test_beside_a_device_of_its_own_only_that_moves(world: World) -> None:
    one = claim(9, result("vf-1", "own"), result("vf-0", "look", adminAccess=True), pods=("admin",))
    world.api.put(one)
    world.state.prepare(ref(9), patience=0)
    world.state.attach(ADMIN_POD)
    world.state.check(ADMIN_POD, [uid(9)])
    assert world.netdevs.where[VFS[1]][0] == "/run/netns/9"
    assert world.netdevs.where[VFS[0]] == (HOST, "vf0")
    assert {"/dev/infiniband/uverbs0", "/dev/infiniband/uverbs1"} <= paths(world, 9)


def test_several_pods_may_look_with_one_claim(world: World) -> None:
    world.prepared(9, result("pair-0", adminAccess=True), pods=("admin", "admin-2"))
    for number, pod in enumerate(("admin", "admin-2")):
        one = sandbox(f"sandbox-{number}", pod, f"/run/netns/{number}")
        world.state.attach(one)
        world.state.check(one, [uid(9)])


def test_settings_are_for_who_holds_the_device(world: World) -> None:
    world.prepared(9, result("vf-0", adminAccess=True), configs=[config(mtu=1400)], pods=("admin",))
    entry = world.ledger.get(uid(9))
    assert entry is not None
    (device,) = entry.devices
    assert (device.admin_access, device.nics) == (True, ())
