"""The verbs of the driver, with netdevs that exist in memory only."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from claims_world import (
    DRIVER,
    VFS,
    FakeClaims,
    claim,
    config,
    inventory,
    ref,
    result,
    sandbox,
    state,
    uid,
    view,
)

import railmate.claims.attachments as attachments
import railmate.claims.state as verbs
from railmate.attach.errors import AttachError
from railmate.attach.model import (
    AttachedNetdev,
    MoveRequest,
    NetdevReturn,
    NetdevSnapshot,
    ReturnRequest,
    ReturnState,
)
from railmate.claims.ledger import Ledger
from railmate.claims.plan import ClaimError
from railmate.claims.state import ClaimState
from railmate.errors import RailmateError

HOST = "host"


class Killed(BaseException):
    """The process ends here: nothing after this line runs."""


@dataclass
class FakeNetdevs:
    """Where each VF's netdev is: (namespace, name). All-or-none moves, as the real functions promise."""

    where: dict[str, tuple[str, str]] = field(
        default_factory=lambda: {address: (HOST, f"vf{number}") for number, address in enumerate(VFS)}
    )
    gone: set[str] = field(default_factory=set)  # namespaces that have ended
    stuck: set[str] = field(default_factory=set)
    attach_error: BaseException | None = None
    return_error: Exception | None = None
    killed_after_move: bool = False
    moves: list[str] = field(default_factory=list)

    def snapshot(self, name: str, address: str) -> NetdevSnapshot:
        if self.where.get(address) != (HOST, name):
            raise AttachError(f"netdev {name} of {address} is not on the host; is it in a pod?")
        return NetdevSnapshot(address, name, "02:00:00:00:00:01", 1500, True, address)

    def attach_all(self, requests: Sequence[MoveRequest], netns: Path) -> list[AttachedNetdev]:
        if self.attach_error:
            raise self.attach_error
        if str(netns) in self.gone:
            raise AttachError(f"network namespace {netns} does not exist any more")
        for request in requests:
            self.where[request.snapshot.pci_address] = (str(netns), request.name)
            self.moves.append(f"{request.snapshot.name} to {netns} as {request.name}")
        if self.killed_after_move:
            raise Killed
        return [AttachedNetdev(r.snapshot.pci_address, r.name, 7, r.snapshot.mac, 1500) for r in requests]

    def return_all(
        self, requests: Sequence[ReturnRequest], netns: Path | None, *, wait: float = 1.0
    ) -> list[NetdevReturn]:
        if self.return_error:
            raise self.return_error
        return [self._return(request, str(netns)) for request in requests]

    def _return(self, request: ReturnRequest, netns: str) -> NetdevReturn:
        address, home = request.snapshot.pci_address, request.snapshot.name
        place = self.where.get(address)
        if place is None:
            return NetdevReturn(address, ReturnState.LOST, None)
        if place[0] == HOST or netns in self.gone:
            self.where[address] = (HOST, home)
            return NetdevReturn(address, ReturnState.ALREADY_HOME, home)
        if address in self.stuck:
            return NetdevReturn(address, ReturnState.FAILED, place[1], ("Device or resource busy",))
        self.where[address] = (HOST, home)
        self.moves.append(f"{home} home")
        return NetdevReturn(address, ReturnState.RETURNED, home)

    def all_home(self) -> bool:
        return all(place == (HOST, f"vf{VFS.index(address)}") for address, place in self.where.items())


@pytest.fixture
def netdevs(monkeypatch: pytest.MonkeyPatch) -> FakeNetdevs:
    fake = FakeNetdevs()
    monkeypatch.setattr(verbs, "snapshot", fake.snapshot)
    for name in ("attach_all", "return_all"):
        monkeypatch.setattr(attachments, name, getattr(fake, name))
    return fake


@dataclass
class World:
    root: Path
    api: FakeClaims
    netdevs: FakeNetdevs
    state: ClaimState

    def restart(self, **more: Any) -> None:
        """A new process: only the disk is left."""
        self.state = state(self.root, self.api, **more)

    def prepared(self, number: int = 1, *devices: Any, **more: Any) -> None:
        self.api.put(claim(number, *devices, **more))
        self.state.prepare(ref(number), patience=0)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.root / "plugins" / DRIVER)

    @property
    def gates(self) -> list[str]:
        return sorted(path.name for path in self.ledger.attached_dir.iterdir())

    @property
    def specs(self) -> list[str]:
        return sorted(path.name for path in (self.root / "cdi").glob("*"))

    def spec(self, number: int = 1) -> Any:
        return json.loads((self.root / "cdi" / f"{DRIVER}-claim-{uid(number)}.json").read_text())

    def clean(self) -> bool:
        left = [path for path in self.root.rglob("*") if path.is_file() and path.name != "serialize.lock"]
        return not left and self.netdevs.all_home()


@pytest.fixture
def world(tmp_path: Path, netdevs: FakeNetdevs) -> World:
    api = FakeClaims()
    return World(tmp_path, api, netdevs, state(tmp_path, api))


# --- prepare
def test_prepare_answers_devices_with_their_cdi_ids(world: World) -> None:
    world.api.put(claim(1, "pair-0"))
    answer = world.state.prepare(ref(1))
    assert [device.device for device in answer.devices] == ["pair-0"]
    assert list(answer.cdi_ids["pair-0"]) == [f"railmate.dev/claim={uid(1)}-pair-0"]
    (device,) = world.spec()["devices"]
    assert device["name"] == f"{uid(1)}-pair-0"
    assert world.gates == []


def test_prepare_is_one_request_to_the_api_and_a_second_call_changes_nothing(world: World) -> None:
    world.prepared(1, "pair-0")
    before = world.ledger.get(uid(1))
    first = world.state.prepare(ref(1))
    assert world.api.gets == 2
    assert world.ledger.get(uid(1)) == before
    assert list(first.cdi_ids["pair-0"]) == [f"railmate.dev/claim={uid(1)}-pair-0"]


def test_second_prepare_writes_the_files_again(world: World) -> None:
    """The CDI directory is a tmpfs, and others may empty it."""
    world.prepared(1, "pair-0")
    spec = world.spec()
    for path in (world.root / "cdi").iterdir():
        path.unlink()
    metadata = list(world.root.rglob("metadata.json"))
    for path in metadata:
        path.unlink()
    world.restart()
    world.state.prepare(ref(1))
    assert world.spec() == spec
    assert all(path.exists() for path in metadata)


def test_second_prepare_while_the_device_is_in_the_pod_leaves_it_there(world: World) -> None:
    """The kubelet asks again after its restart."""
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    world.restart()
    world.state.prepare(ref(1), patience=0)
    assert world.netdevs.where[VFS[0]] == ("/run/netns/1", "net1")
    assert world.gates == [f"{uid(1)}.sandbox-1"]
    world.state.check(sandbox(), [uid(1)])


def test_prepare_again_for_the_claims_next_pod(world: World) -> None:
    """A claim that outlives its pod, prepared again after a kubelet restart: the new pod gets the NIC."""
    world.prepared(1, "vf-0", pods=("pod-1",))
    world.api.put(claim(1, "vf-0", pods=("pod-2",)))
    world.state.prepare(ref(1), patience=0)
    second = sandbox("sandbox-2", "pod-2", "/run/netns/2")
    world.state.attach(second)
    world.state.check(second, [uid(1)])


def test_prepare_again_of_a_claim_that_was_replaced_is_refused(world: World) -> None:
    world.prepared(1, "pair-0")
    other = claim(1, "pair-1")
    other["metadata"]["uid"] = uid(7)
    world.api.put(other)
    with pytest.raises(ClaimError, match="replaced"):
        world.state.prepare(ref(1), patience=0)


def test_prepare_again_after_another_allocation_gives_the_new_devices(world: World) -> None:
    world.prepared(1, "pair-0")
    world.api.put(claim(1, "pair-1"))
    answer = world.state.prepare(ref(1), patience=0)
    assert [device.device for device in answer.devices] == ["pair-1"]


def test_bad_claim_leaves_nothing_behind(world: World) -> None:
    world.api.put(claim(1, "pair-0", configs=[config(mtu=1)]))
    with pytest.raises(ClaimError, match="mtu"):
        world.state.prepare(ref(1))
    assert world.clean()


def test_bad_claim_is_refused_at_once(world: World) -> None:
    """Waiting helps only with what passes."""
    world.api.put(claim(1, "pair-9"))
    began = time.monotonic()
    with pytest.raises(ClaimError):
        world.state.prepare(ref(1), patience=30)
    assert time.monotonic() - began < 2


def test_failed_write_of_the_cdi_spec_is_made_good_by_the_next_prepare(world: World) -> None:
    (world.root / "cdi").write_text("in the way")
    world.api.put(claim(1, "pair-0"))
    with pytest.raises((OSError, RailmateError)):
        world.state.prepare(ref(1), patience=0)
    (world.root / "cdi").unlink()
    world.state.prepare(ref(1), patience=0)
    assert world.specs == [f"railmate.dev-claim-{uid(1)}.json"]


def test_full_disk_is_an_error_for_people(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    world.api.put(claim(1, "pair-0"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(RailmateError, match="No space left on device"):
            world.state.prepare(ref(1), patience=0)
    world.state.prepare(ref(1), patience=0)


def test_two_claims_of_a_pod_have_different_interfaces(world: World) -> None:
    world.prepared(1, "vf-0")
    world.prepared(2, "vf-1")
    world.prepared(3, "vf-2", pods=("pod-3",))
    entries = world.ledger.entries()
    assert [entries[uid(n)].nics[0].interface for n in (1, 2, 3)] == ["net1", "net2", "net1"]


def test_netdev_on_its_way_home_is_waited_for(world: World) -> None:
    """Its namespace has just ended: the kernel brings it back in a moment."""
    world.netdevs.where[VFS[0]] = ("/run/netns/old", "net1")
    world.api.put(claim(1, "vf-0"))
    timer = threading.Timer(0.3, lambda: world.netdevs.where.update({VFS[0]: (HOST, "vf0")}))
    timer.start()
    world.state.prepare(ref(1), patience=10)
    timer.join()
    assert world.specs


def test_netdev_that_does_not_come_home_is_an_error(world: World) -> None:
    world.netdevs.where[VFS[0]] = ("/run/netns/old", "net1")
    world.api.put(claim(1, "vf-0"))
    with pytest.raises(ClaimError, match="vf0"):
        world.state.prepare(ref(1), patience=0.1)
    assert world.ledger.entries() == {}


def test_vf_that_was_in_a_pod_when_the_driver_started_is_attached_to_the_next(world: World) -> None:
    """The driver looked at the machine while the netdev was away; the pod after that must get it all the same."""
    found = inventory()
    away = replace(found.functions[VFS[0]], netdevs=())
    world.prepared(1, "vf-0")
    world.state.attach(sandbox())
    world.restart(node=view(inventory=replace(found, functions={**found.functions, VFS[0]: away})))
    world.state.detach("sandbox-1")
    world.state.unprepare(ref(1))
    world.api.put(claim(2, "vf-0", pods=("pod-2",)))
    second = sandbox("sandbox-2", "pod-2", "/run/netns/2")
    try:
        world.state.prepare(ref(2), patience=0.1)
        world.state.attach(second)
        world.state.check(second, [uid(2)])
    except RailmateError:
        return  # refused, and said so
    assert world.netdevs.where[VFS[0]][0] == "/run/netns/2"


# --- devices that another claim holds
@pytest.mark.parametrize("device", ["pair-0", "gpu-0", "vf-0", "wide"])
def test_held_hardware_is_refused_under_every_name(world: World, device: str) -> None:
    world.prepared(1, "pair-0")
    world.api.put(claim(2, device))
    with pytest.raises(ClaimError) as caught:
        world.state.prepare(ref(2), patience=0)
    assert "claim-1" in str(caught.value)
    assert "claim-2" in str(caught.value)
    assert set(world.ledger.entries()) == {uid(1)}
    assert world.specs == [f"railmate.dev-claim-{uid(1)}.json"]


def test_neighbours_are_no_overlap(world: World) -> None:
    for number, device in enumerate(["pair-0", "pair-1", "vf-2", "vf-3"], start=1):
        world.prepared(number, device, pods=(f"pod-{number}",))
    assert len(world.specs) == 4


def test_prepare_waits_for_the_claim_that_is_about_to_end(world: World) -> None:
    """After a force delete the scheduler hands a device on at once; an error would cost the pod a minute."""
    world.prepared(1, "pair-0")
    world.api.put(claim(2, "pair-0", pods=("pod-2",)))
    timer = threading.Timer(0.3, world.state.unprepare, (ref(1),))
    began = time.monotonic()
    timer.start()
    world.state.prepare(ref(2), patience=20)
    assert time.monotonic() - began < 5
    timer.join()
    assert set(world.ledger.entries()) == {uid(2)}


def test_prepare_sees_what_another_instance_frees(world: World) -> None:
    """Rolling update: unprepare goes to the new instance while the old one waits."""
    world.prepared(1, "pair-0")
    world.api.put(claim(2, "pair-0", pods=("pod-2",)))
    other = state(world.root, world.api)
    timer = threading.Timer(0.3, other.unprepare, (ref(1),))
    timer.start()
    world.state.prepare(ref(2), patience=20)
    timer.join()


def test_waiting_prepare_keeps_nobody_else_waiting(world: World) -> None:
    world.prepared(1, "pair-0")
    world.api.put(claim(2, "pair-0"), claim(3, "pair-1", pods=("pod-3",)))
    waiting = threading.Thread(target=lambda: _swallow(lambda: world.state.prepare(ref(2), patience=1.5)))
    waiting.start()
    began = time.monotonic()
    world.state.prepare(ref(3), patience=0)
    world.state.attach(sandbox("sandbox-3", "pod-3", "/run/netns/3"))
    assert time.monotonic() - began < 1.0
    waiting.join()


def test_error_after_the_wait_says_how_long(world: World) -> None:
    world.prepared(1, "pair-0")
    world.api.put(claim(2, "pair-0"))
    began = time.monotonic()
    with pytest.raises(ClaimError, match="Waited"):
        world.state.prepare(ref(2), patience=0.5)
    assert 0.4 < time.monotonic() - began < 3


def test_of_two_claims_for_one_device_exactly_one_is_prepared(world: World) -> None:
    world.api.put(*(claim(n, "pair-0", pods=(f"pod-{n}",)) for n in range(1, 9)))
    outcomes: list[bool] = []

    def prepare(number: int) -> None:
        try:
            state(world.root, world.api).prepare(ref(number), patience=0)
            outcomes.append(True)
        except ClaimError:
            outcomes.append(False)

    threads = [threading.Thread(target=prepare, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False] * 7 + [True]


def _swallow(what: Any) -> None:
    try:
        what()
    except RailmateError:
        pass


# --- unprepare
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


# --- attach, check, detach
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

    def fail_for_second(requests: Sequence[MoveRequest], netns: Path) -> list[AttachedNetdev]:
        if requests[0].snapshot.name == "vf1":
            raise AttachError("vf1 is busy")
        return real(requests, netns)

    attachments.attach_all = fail_for_second  # the fixture restores it
    with pytest.raises(RailmateError, match="vf1 is busy"):
        world.state.attach(sandbox())
    assert world.netdevs.all_home()
    assert world.gates == []


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


# --- synchronize: after a reconnect, after a crash
def test_synchronize_attaches_what_is_missing(world: World) -> None:
    world.prepared(1, "pair-0")
    world.restart()
    world.state.synchronize([sandbox()])
    world.state.check(sandbox(), [uid(1)])


def test_synchronize_leaves_alone_what_is_right(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    moves = list(world.netdevs.moves)
    world.restart()
    world.state.synchronize([sandbox(), sandbox("stranger", "stranger", "/run/netns/9")])
    assert world.netdevs.moves == moves
    world.state.check(sandbox(), [uid(1)])


def test_synchronize_takes_back_from_dead_sandboxes(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    world.netdevs.gone.add("/run/netns/1")
    world.restart()
    world.state.synchronize([])
    assert world.netdevs.all_home()
    assert world.gates == []


def test_synchronize_moves_on_to_the_pods_living_sandbox(world: World) -> None:
    """The runtime lists the dead sandbox of the pod as well; it is not among the live ones."""
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    world.netdevs.gone.add("/run/netns/1")
    second = sandbox("sandbox-2", netns="/run/netns/2")
    world.restart()
    world.state.synchronize([second])
    world.state.check(second, [uid(1)])
    assert world.gates == [f"{uid(1)}.sandbox-2"]


@pytest.mark.parametrize(
    "error", [AttachError("busy"), OSError(errno.EIO, "input/output"), ValueError("odd")]
)
def test_synchronize_never_raises_and_goes_on_with_the_rest(world: World, error: Exception) -> None:
    world.prepared(1, "vf-0")
    world.prepared(2, "vf-1", pods=("pod-2",))
    world.state.attach(sandbox())
    world.netdevs.return_error = error
    second = sandbox("sandbox-2", "pod-2", "/run/netns/2")
    world.state.synchronize([second])
    world.state.check(second, [uid(2)])


def test_kill_between_move_and_completion_is_made_good(world: World) -> None:
    world.prepared(1, "pair-0")
    world.netdevs.killed_after_move = True
    with pytest.raises(Killed):
        world.state.attach(sandbox())
    assert world.gates == [], "the gate stays closed"
    world.netdevs.killed_after_move = False
    world.restart()
    world.state.synchronize([sandbox()])
    world.state.check(sandbox(), [uid(1)])
    assert world.netdevs.where[VFS[0]] == ("/run/netns/1", "net1")
    world.state.unprepare(ref(1))
    assert world.clean()


def test_kill_between_move_and_completion_and_then_the_pod_is_gone(world: World) -> None:
    world.prepared(1, "pair-0")
    world.netdevs.killed_after_move = True
    with pytest.raises(Killed):
        world.state.attach(sandbox())
    world.restart()
    world.state.unprepare(ref(1))
    assert world.clean()


@pytest.mark.parametrize("step", range(1, 30))
def test_kill_at_any_file_operation_ends_as_if_nothing_had_happened(
    world: World, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Prepare, attach, detach, unprepare; the process ends at the n-th write or removal, and all is asked again."""
    from railmate import files

    count = 0

    def dying(real: Any) -> Any:
        def wrapper(*arguments: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count == step:
                raise Killed
            return real(*arguments, **more)

        return wrapper

    monkeypatch.setattr(files, "write_bytes", dying(files.write_bytes))
    monkeypatch.setattr(files, "remove", dying(files.remove))
    world.api.put(claim(1, "pair-0"))
    verbs_in_order = [
        lambda: world.state.prepare(ref(1), patience=0),
        lambda: world.state.attach(sandbox()),
        lambda: world.state.check(sandbox(), [uid(1)]),
        lambda: world.state.detach("sandbox-1"),
        lambda: world.state.unprepare(ref(1)),
    ]
    for number, verb in enumerate(verbs_in_order):
        try:
            verb()
        except Killed:
            world.restart()
            world.state.synchronize([sandbox()] if number < 3 else [])
            verb()
    assert world.clean()


# --- reboot
def test_claim_prepared_before_a_reboot_is_prepared_anew(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    world.netdevs.where[VFS[0]] = (HOST, "vf0")
    world.ledger.close_gate(uid(1))
    world.restart(boot="boot-2")
    world.state.prepare(ref(1), patience=0)
    entry = world.ledger.get(uid(1))
    assert entry is not None
    assert (entry.boot_id, entry.attachment) == ("boot-2", None)
    second = sandbox("sandbox-2", netns="/run/netns/2")
    world.state.attach(second)
    world.state.check(second, [uid(1)])


def test_marker_from_before_a_reboot_opens_nothing(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    world.netdevs.where[VFS[0]] = (HOST, "vf0")
    world.restart(boot="boot-2")
    world.state.prepare(ref(1), patience=0)
    assert world.gates == []


# --- what is written for the runtime
def test_gate_and_metadata_are_in_the_spec_once_a_request(world: World) -> None:
    world.prepared(1, result("vf-0", "a"), result("vf-1", "a"), result("pair-1", "b"), template="nics")
    edits = [device["containerEdits"] for device in world.spec(1)["devices"]]
    assert ["hooks" in one for one in edits] == [True, False, True]
    assert ["mounts" in one for one in edits] == [True, False, True]
    (hook,) = edits[0]["hooks"]
    assert hook["hookName"] == "createRuntime"
    assert hook["args"][2] == uid(1)
    (mount,) = edits[0]["mounts"]
    assert mount["containerPath"] == (
        "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/nics/a/railmate.dev-metadata.json"
    )
    text = Path(mount["hostPath"]).read_text()
    objects = [json.loads(line) for line in text.splitlines()]
    assert [one["apiVersion"] for one in objects] == [
        "metadata.resource.k8s.io/v1beta1",
        "metadata.resource.k8s.io/v1alpha1",
    ]
    (request,) = objects[0]["requests"]
    assert request["name"] == "a"
    assert [device["name"] for device in request["devices"]] == ["vf-0", "vf-1"]
    assert request["devices"][0]["networkData"]["interfaceName"] == "net1"
    assert request["devices"][0]["networkData"]["hardwareAddress"] == "02:00:00:00:00:01"


def test_every_answered_cdi_id_is_in_the_spec(world: World) -> None:
    world.api.put(claim(1, result("gpu-0", "g"), result("gpu-1", "g"), result("vf-2", "n")))
    world.restart(
        node=view(vendor_cdi=lambda: {"GPU-0": "nvidia.com/gpu=GPU-0", "GPU-1": "nvidia.com/gpu=GPU-1"})
    )
    answer = world.state.prepare(ref(1), patience=0)
    named = {f"railmate.dev/claim={device['name']}" for device in world.spec(1)["devices"]}
    answered = [cdi_id for ids in answer.cdi_ids.values() for cdi_id in ids]
    assert {cdi_id for cdi_id in answered if cdi_id.startswith("railmate.dev/")} == named
    assert list(answer.cdi_ids["gpu-1"]) == ["nvidia.com/gpu=GPU-1"]
    assert all(device["containerEdits"] for device in world.spec(1)["devices"])
