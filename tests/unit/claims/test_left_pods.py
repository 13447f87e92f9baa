"""NICs that leave their pod by themselves: a driver that is bound anew makes its netdev on the node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from claims_netdevs import HOST, World
from claims_world import DRIVER, VFS, Clock, sandbox, share, uid

from railmate.attach.errors import AttachError
from railmate.claims.reconcile import Reconciler
from railmate.claims.records import ClaimRef
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.surroundings import ClaimObserver, Surroundings
from railmate.errors import RailmateError

POD = "/run/netns/1"
GATE = f"{uid(1)}.sandbox-1"


@pytest.fixture
def told(world: World) -> list[tuple[str, str]]:
    """Events on claims: reason and message."""
    found: list[tuple[str, str]] = []

    class Observer(ClaimObserver):
        def claim_event(self, claim: ClaimRef, reason: str, message: str) -> None:
            found.append((reason, message))

    world.restart(around=Surroundings(observer=Observer()))
    return found


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def repairs() -> list[str]:
    return []


@pytest.fixture
def reconciler(world: World, repairs: list[str], told: list[tuple[str, str]], clock: Clock) -> Reconciler:
    """While the runtime cannot be asked."""
    plugin = world.root / "plugins" / DRIVER
    files = RuntimeFiles(DRIVER, plugin, world.root / "cdi", plugin / "gate")
    world.restart(around=replace(world.state.moves.around, repaired=repairs.append))
    state = world.state
    return Reconciler(
        world.api,
        world.ledger,
        files,
        state.moves,
        state.unprepare,
        on_node=lambda address: world.netdevs.where[address][0] == HOST,
        clock=clock,
    )


@pytest.fixture
def reconcile(reconciler: Reconciler) -> Callable[[], None]:
    """One round of repairs."""
    return reconciler.run


def bind_anew(world: World, number: int = 0) -> None:
    """The VF's driver; its netdev is on the node then, whatever namespace it was in."""
    world.netdevs.where[VFS[number]] = (HOST, "eth7")


def test_no_container_is_made_without_the_nic_that_has_left_its_pod(world: World) -> None:
    world.prepared(1, "vf-0")
    world.state.attach(sandbox())
    world.state.check(sandbox(), [uid(1)])
    bind_anew(world)
    with pytest.raises(
        RailmateError, match=f"{VFS[0]} of ResourceClaim team/claim-1 is not in pod team/pod-1"
    ):
        world.state.check(sandbox(), [uid(1)])


def test_the_nic_is_attached_again_and_its_user_is_told(world: World, told: list[tuple[str, str]]) -> None:
    world.prepared(1, "vf-0")
    world.state.attach(sandbox())
    bind_anew(world)
    world.state.attach(sandbox())
    assert world.netdevs.where[VFS[0]][0] == POD
    assert world.gates == [GATE]
    world.state.check(sandbox(), [uid(1)])
    ((reason, message),) = told
    assert reason == "NicAttachedAgain"
    assert VFS[0] in message
    assert "team/pod-1" in message


def test_the_minute_round_finds_it_too_without_the_runtime(
    world: World, reconcile: Callable[[], None], repairs: list[str]
) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    bind_anew(world)
    reconcile()
    assert world.netdevs.where[VFS[0]][0] == POD
    assert repairs == ["NIC that had left its pod"]
    reconcile()
    assert repairs == ["NIC that had left its pod"]


def test_it_is_not_waited_for_the_round_when_the_kernel_tells_of_a_device(
    world: World, reconciler: Reconciler, repairs: list[str]
) -> None:
    world.prepared(1, "pair-0")
    world.prepared(2, "vf-1")
    world.state.attach(sandbox())
    world.netdevs.looks = 0
    assert not reconciler.await_ends()
    assert world.netdevs.looks == 0, "what is in its pod costs nothing"
    bind_anew(world)
    assert not reconciler.await_ends(), "the kernel tells of the next one, too"
    assert world.netdevs.where[VFS[0]][0] == POD
    assert repairs == ["NIC that had left its pod"]


def test_what_is_on_the_node_since_its_pod_has_ended_goes_into_none(
    world: World, reconciler: Reconciler, repairs: list[str], told: list[tuple[str, str]]
) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    bind_anew(world)
    world.netdevs.gone.add(POD)
    assert not reconciler.await_ends()
    assert (world.gates, told, repairs) == ([], [], ["ended namespace"])
    assert world.netdevs.all_home()


def test_the_gate_is_closed_while_it_cannot_be_attached_and_its_user_is_told_why(
    world: World, reconcile: Callable[[], None], repairs: list[str], told: list[tuple[str, str]]
) -> None:
    world.prepared(1, "vf-0")
    world.state.attach(sandbox())
    bind_anew(world)
    world.netdevs.attach_error = AttachError("Device or resource busy")
    with pytest.raises(RailmateError, match="Device or resource busy"):
        world.state.attach(sandbox())
    reconcile()
    assert (world.gates, repairs) == ([], [])
    assert {reason for reason, _ in told} == {"NicNotInPod"}
    assert "Device or resource busy" in told[0][1]
    world.netdevs.attach_error = None
    reconcile()
    assert (world.gates, repairs) == ([GATE], ["NIC that had left its pod"])


def test_a_nic_that_is_still_there_is_left_to_the_container_that_uses_it(world: World) -> None:
    world.prepared(1, "vf-0", "vf-1")
    world.state.attach(sandbox())
    bind_anew(world, 1)
    world.netdevs.moves.clear()
    world.netdevs.attach_error = AttachError("Device or resource busy")
    with pytest.raises(RailmateError):
        world.state.attach(sandbox())
    assert world.netdevs.where[VFS[0]] == (POD, "net1")
    world.netdevs.attach_error = None
    world.state.attach(sandbox())
    assert world.netdevs.moves == [f"vf1 to {POD} as net2"]
    entry = world.ledger.get(uid(1))
    assert entry is not None
    assert entry.attachment is not None
    assert [one.name for one in entry.attachment.netdevs] == ["net1", "net2"]


def test_a_share_whose_port_was_bound_anew_is_made_again(world: World) -> None:
    world.prepared(1, share(1))
    world.state.attach(sandbox())
    world.netdevs.subs.clear()
    with pytest.raises(RailmateError, match="not in pod"):
        world.state.check(sandbox(), [uid(1)])
    world.state.attach(sandbox())
    world.state.check(sandbox(), [uid(1)])


def test_the_node_is_looked_at_once_for_all_claims_of_a_container(world: World) -> None:
    """Each entry into a namespace costs, and the runtime waits."""
    world.prepared(1, "vf-0")
    world.prepared(2, "vf-1")
    world.prepared(3, "gpu-0")
    world.state.attach(sandbox())
    world.netdevs.looks = 0
    world.state.check(sandbox(), [uid(1), uid(2), uid(3)])
    assert world.netdevs.looks == 1


def test_on_the_host_network_there_is_nothing_to_look_for(world: World) -> None:
    world.prepared(1, "vf-0")
    world.state.attach(sandbox(netns=None))
    world.state.check(sandbox(netns=None), [uid(1)])
    world.state.attach(sandbox(netns=None))
    assert world.netdevs.looks == 0


def test_what_cannot_be_attached_again_is_tried_soon_and_then_ever_more_seldom(
    world: World, reconciler: Reconciler, clock: Clock, told: list[tuple[str, str]]
) -> None:
    """Each try moves the netdev in and home again, of which the kernel tells, too."""
    world.prepared(1, "vf-0")
    world.state.attach(sandbox())
    bind_anew(world)
    world.netdevs.attach_error = AttachError("the MTU is more than the physical function's")
    pauses = [reconciler.await_ends() for _ in range(30)]
    assert pauses == [1.0] * 9 + [2.0] * 21
    assert len(told) == 10, "the kernel's word is no reason for more"
    clock.now += 2
    assert reconciler.await_ends() == 4
    assert len(told) == 11
    world.netdevs.attach_error = None
    clock.now += 60
    assert reconciler.await_ends() is None
    assert world.netdevs.where[VFS[0]][0] == POD


def test_a_closed_gate_is_told_when_the_container_is_made_and_opened_when_all_is_in_place(
    world: World, reconciler: Reconciler, repairs: list[str]
) -> None:
    """Who attached a NIC again may end, or fail, right after the move: its RDMA device comes after its netdev."""
    world.prepared(1, "vf-0")
    world.state.attach(sandbox())
    world.ledger.close_gate(uid(1))
    with pytest.raises(
        RailmateError, match="the gate of ResourceClaim team/claim-1 is closed for pod team/pod-1"
    ):
        world.state.check(sandbox(), [uid(1)])
    assert reconciler.await_ends() is None
    assert world.gates == [GATE]
    assert repairs == ["missing gate marker"]
    world.state.check(sandbox(), [uid(1)])
