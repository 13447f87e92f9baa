"""Attach, check and detach: the gate is open exactly while the devices are in the sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from claims_netdevs import HOST, World
from claims_world import (
    VFS,
    ref,
    sandbox,
    uid,
)

import railmate.claims.attachments as attachments
from railmate.attach.errors import AttachError
from railmate.attach.model import AttachedNetdev, MoveRequest
from railmate.errors import RailmateError


def test_attach_moves_the_netdev_and_opens_the_gate(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    assert world.netdevs.where[VFS[0]] == ("/run/netns/1", "net1")
    assert world.gates == [f"{uid(1)}.sandbox-1"]
    world.state.check(sandbox(), [uid(1)])


def test_attach_twice_moves_once(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    world.state.attach(sandbox())
    assert len(world.netdevs.moves) == 1


def test_attach_again_opens_a_gate_that_was_lost(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    world.ledger.close_gate(uid(1))
    world.state.attach(sandbox())
    assert world.gates == [f"{uid(1)}.sandbox-1"]


def test_pod_without_claims_is_none_of_our_business(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox(pod="stranger"))
    assert world.netdevs.moves == []
    assert world.gates == []


def test_claim_of_a_gpu_alone_needs_no_gate(world: World) -> None:
    world.prepared(1, "gpu-0")
    world.state.check(sandbox(), [uid(1)])
    assert "hooks" not in world.spec()["devices"][0]["containerEdits"]


def test_new_sandbox_of_the_same_pod_gets_the_netdev(world: World) -> None:
    """The pause process was killed, and no StopPodSandbox came."""
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    second = sandbox("sandbox-2", netns="/run/netns/2")
    world.state.attach(second)
    assert world.netdevs.where[VFS[0]] == ("/run/netns/2", "net1")
    assert world.gates == [f"{uid(1)}.sandbox-2"]
    with pytest.raises(RailmateError):
        world.state.check(sandbox(), [uid(1)])


def test_late_stop_of_the_old_sandbox_leaves_the_new_one_alone(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    second = sandbox("sandbox-2", netns="/run/netns/2")
    world.state.attach(second)
    world.state.detach("sandbox-1")
    world.state.check(second, [uid(1)])


def test_second_pod_on_the_claim_is_refused_and_told_why(world: World) -> None:
    world.prepared(1, "vf-0")
    world.state.attach(sandbox())
    second = sandbox("sandbox-2", "pod-2", "/run/netns/2")
    world.state.attach(second)
    with pytest.raises(RailmateError, match="one pod only") as caught:
        world.state.check(second, [uid(1)])
    assert "team/pod-1" in str(caught.value)
    assert "ResourceClaimTemplate" in str(caught.value)
    assert world.gates == [f"{uid(1)}.sandbox-1"]


def test_second_pod_is_not_told_to_wait_when_the_first_is_gone(world: World) -> None:
    """Nothing will ever attach the claim to it: 'starts by itself' would be a lie."""
    world.prepared(1, "vf-0")
    world.state.attach(sandbox())
    world.state.detach("sandbox-1")
    with pytest.raises(RailmateError) as caught:
        world.state.check(sandbox("sandbox-2", "pod-2", "/run/netns/2"), [uid(1)])
    assert "by itself" not in str(caught.value)


def test_check_names_a_claim_that_is_not_prepared(world: World) -> None:
    with pytest.raises(RailmateError, match="not prepared") as caught:
        world.state.check(sandbox(), [uid(5)])
    assert uid(5) in str(caught.value)
    assert "Delete the pod" in str(caught.value)


def test_check_before_attach_says_that_it_passes(world: World) -> None:
    world.prepared(1, "vf-0")
    with pytest.raises(RailmateError, match="by itself"):
        world.state.check(sandbox(), [uid(1)])


def test_pod_on_the_host_network_keeps_the_netdev_on_the_node(world: World) -> None:
    world.prepared(1, "pair-0")
    host = sandbox(netns=None)
    world.state.attach(host)
    world.state.check(host, [uid(1)])
    assert world.netdevs.moves == []
    assert world.gates == [f"{uid(1)}.sandbox-1"]
    world.state.detach("sandbox-1")
    world.state.unprepare(ref(1))
    assert world.netdevs.moves == []
    assert world.clean()


def test_failed_attach_closes_everything_and_can_be_repeated(world: World) -> None:
    world.prepared(1, "pair-0")
    world.netdevs.attach_error = AttachError("netdev vf0 cannot be given to the pod as net1: File exists")
    with pytest.raises(RailmateError) as caught:
        world.state.attach(sandbox())
    assert "team/pod-1" in str(caught.value)
    assert "File exists" in str(caught.value)
    assert world.gates == []
    entry = world.ledger.get(uid(1))
    assert entry is not None
    assert entry.attachment is None
    world.netdevs.attach_error = None
    world.state.attach(sandbox("sandbox-2", netns="/run/netns/2"))
    assert world.netdevs.where[VFS[0]] == ("/run/netns/2", "net1")


def test_second_claim_that_cannot_be_attached_takes_the_first_one_back(world: World) -> None:
    """attach promises: when it raises, what was moved is home again."""
    world.prepared(1, "vf-0")
    world.prepared(2, "vf-1")
    real = world.netdevs.attach_all

    def fail_for_second(requests: Sequence[MoveRequest], netns: Path, *alone: object) -> list[AttachedNetdev]:
        if any(request.snapshot.name == "vf1" for request in requests):
            raise AttachError("vf1 is busy")
        return real(requests, netns)

    attachments.attach_all = fail_for_second  # the fixture restores it
    with pytest.raises(RailmateError, match="vf1 is busy"):
        world.state.attach(sandbox())
    assert world.netdevs.all_home()
    assert world.gates == []


def test_claim_that_cannot_be_attached_takes_nothing_from_a_claim_that_was_before(world: World) -> None:
    """A container may be running with the first while that of the second is tried again and again."""
    world.prepared(1, "vf-0")
    world.state.attach(sandbox())
    world.prepared(2, "vf-1")
    world.netdevs.attach_error = AttachError("vf1 is busy")
    with pytest.raises(RailmateError, match="vf1 is busy"):
        world.state.attach(sandbox())
    assert world.netdevs.where[VFS[0]] is not None
    first, second = world.ledger.get(uid(1)), world.ledger.get(uid(2))
    assert first is not None
    assert first.attached_to(sandbox().id)
    assert second is not None
    assert second.attachment is None
    assert len(world.gates) == 1


def test_all_claims_of_a_pod_are_moved_in_one_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each entry into a namespace costs, and all pods of the node wait."""
    world.prepared(1, "vf-0")
    world.prepared(2, "vf-1", "vf-2")
    calls: list[int] = []

    def counted(requests: Sequence[MoveRequest], netns: Path, *alone: object) -> list[AttachedNetdev]:
        calls.append(len(requests))
        return real(requests, netns)

    real = world.netdevs.attach_all
    monkeypatch.setattr(attachments, "attach_all", counted)
    world.state.attach(sandbox())
    assert calls == [3]
    assert world.gates == [f"{uid(1)}.sandbox-1", f"{uid(2)}.sandbox-1"]
    world.state.check(sandbox(), [uid(1), uid(2)])


def test_detach_brings_all_claims_of_the_sandbox_home(world: World) -> None:
    world.prepared(1, "vf-0")
    world.prepared(2, "vf-1")
    world.state.attach(sandbox())
    world.state.detach("sandbox-1")
    assert world.netdevs.all_home()
    assert world.gates == []
    world.state.detach("sandbox-1")


def test_one_stuck_claim_does_not_keep_the_others_in_the_pod(world: World) -> None:
    world.prepared(1, "vf-0")
    world.prepared(2, "vf-1")
    world.state.attach(sandbox())
    world.netdevs.stuck.add(VFS[0])
    with pytest.raises(RailmateError, match=VFS[0]):
        world.state.detach("sandbox-1")
    assert world.netdevs.where[VFS[1]] == (HOST, "vf1")
