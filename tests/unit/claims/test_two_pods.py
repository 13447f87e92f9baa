"""Several pods that want one NIC: one has it, the others are told, and get it after that one."""

from __future__ import annotations

from collections import Counter

import pytest
from claims_netdevs import World
from claims_world import VFS, claim, ref, sandbox, uid
from test_reconcile import new_process

from railmate.claims.sandbox import Sandbox
from railmate.errors import RailmateError

BOTH = ("pod-1", "pod-2")
FIRST = sandbox("sandbox-1", "pod-1", "/run/netns/1")
SECOND = sandbox("sandbox-2", "pod-2", "/run/netns/2")


def place(world: World) -> str:
    return world.netdevs.where[VFS[0]][0]


@pytest.fixture
def prepared(world: World) -> World:
    """The claim and its two pods came in one go, and both were scheduled before the kubelet asked."""
    world.prepared(1, "vf-0", pods=BOTH)
    return world


def refused(world: World, one: Sandbox) -> str:
    with pytest.raises(RailmateError) as caught:
        world.state.attach(one)
    with pytest.raises(RailmateError):
        world.state.check(one, [uid(1)])
    return str(caught.value)


@pytest.mark.parametrize(("first", "second"), [(FIRST, SECOND), (SECOND, FIRST)])
def test_whose_sandbox_comes_first_gets_it_and_the_other_is_told(
    prepared: World, first: Sandbox, second: Sandbox
) -> None:
    prepared.state.attach(first)
    prepared.state.check(first, [uid(1)])
    told = refused(prepared, second)
    assert f"is in pod {first.pod}, and a NIC can be in one pod only" in told
    assert "ResourceClaimTemplate" in told
    assert place(prepared) == str(first.netns)
    assert prepared.gates == [f"{uid(1)}.{first.id}"]


def test_the_other_gets_it_afterwards(prepared: World) -> None:
    prepared.state.attach(FIRST)
    refused(prepared, SECOND)
    prepared.state.detach(FIRST.id)
    prepared.state.attach(SECOND)
    prepared.state.check(SECOND, [uid(1)])
    assert place(prepared) == "/run/netns/2"


def test_a_restart_leaves_it_where_it_is_and_repairs_what_is_missing(prepared: World) -> None:
    prepared.state.attach(SECOND)
    prepared.ledger.close_gate(uid(1))
    prepared.restart()
    prepared.state.synchronize([FIRST, SECOND])
    repaired: Counter[str] = Counter()
    round_of = new_process(prepared, repaired)
    round_of._sandboxes = lambda: {"pod-1": FIRST, "pod-2": SECOND}
    round_of.run()
    assert place(prepared) == "/run/netns/2"
    assert prepared.gates == [f"{uid(1)}.sandbox-2"]
    assert repaired == {"missing gate marker": 1}


def test_the_kubelets_restart_refuses_neither(prepared: World) -> None:
    prepared.state.attach(FIRST)
    assert prepared.state.prepare(ref(), patience=0).devices
    prepared.state.check(FIRST, [uid(1)])


def test_a_second_pod_that_comes_later_does_not_keep_the_first_from_a_new_sandbox(world: World) -> None:
    world.prepared(1, "vf-0")
    world.state.attach(FIRST)
    world.api.put(claim(1, "vf-0", pods=BOTH))
    assert world.state.prepare(ref(), patience=0).devices, "the kubelet has restarted"
    again = sandbox("sandbox-3", "pod-1", "/run/netns/3")
    world.state.attach(again)
    world.state.check(again, [uid(1)])
    assert "is in pod team/pod-1" in refused(world, SECOND)
