"""Unprepare: everything comes back, from the ledger alone."""

from __future__ import annotations

import pytest
from claims_netdevs import World
from claims_world import (
    VFS,
    ref,
    sandbox,
    uid,
)

from railmate.errors import RailmateError


def test_unprepare_leaves_nothing(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    world.state.unprepare(ref(1))
    assert world.clean()
    world.state.unprepare(ref(1))


def test_unprepare_needs_no_api(world: World) -> None:
    world.prepared(1, "pair-0")
    world.api.claims.clear()
    world.restart()
    world.state.unprepare(ref(1))
    assert world.clean()
    assert world.api.gets == 1


def test_unprepare_of_an_unknown_claim_is_fine_and_touches_nobody(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    world.state.unprepare(ref(2))
    world.state.check(sandbox(), [uid(1)])
    assert world.specs


def test_unprepare_removes_files_whose_entry_was_lost(world: World) -> None:
    world.prepared(1, "pair-0")
    world.ledger.drop(uid(1))
    world.state.unprepare(ref(1))
    assert world.clean()


def test_unprepare_after_the_namespace_has_ended(world: World) -> None:
    """containerd restarted: no StopPodSandbox ever came."""
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    world.netdevs.gone.add("/run/netns/1")
    world.state.unprepare(ref(1))
    assert world.clean()


def test_stuck_netdev_keeps_the_claim_until_it_is_home(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    world.netdevs.stuck.add(VFS[0])
    with pytest.raises(RailmateError, match=VFS[0]):
        world.state.unprepare(ref(1))
    assert world.gates == []
    assert set(world.ledger.entries()) == {uid(1)}
    world.netdevs.stuck.clear()
    world.state.unprepare(ref(1))
    assert world.clean()


def test_lost_netdev_does_not_keep_the_claim(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    del world.netdevs.where[VFS[0]]
    world.state.unprepare(ref(1))
    assert world.ledger.entries() == {}
