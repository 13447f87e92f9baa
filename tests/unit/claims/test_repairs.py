"""Repairs when everything is against them: odd files, failing kernel and API, claims that outlive their pods."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from claims_world import BOOT, DRIVER, VFS, FakeClaims, claim, offer, ref, uid, view
from claims_world import sandbox as make_sandbox
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import railmate.claims.attachments as attachments
import railmate.claims.reconcile as reconcile
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
from railmate.claims.attachments import Attachments, attempt
from railmate.claims.ledger import Ledger
from railmate.claims.reconcile import Reconciler
from railmate.claims.records import ClaimRef
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.state import ClaimState
from railmate.errors import RailmateError
from railmate.kube.errors import ApiError
from railmate.publish.model import Offer


class Api(FakeClaims):
    error: Exception | None = None

    def get_claim(self, namespace: str, name: str) -> dict[str, Any]:
        if self.error:
            self.gets += 1
            raise self.error
        if name not in self.claims:
            self.gets += 1
            raise ApiError(f'resourceclaims "{name}" not found', 404, "NotFound")
        return super().get_claim(namespace, name)


@dataclass
class Kernel:
    """Answers of the kernel: which namespaces there are, and what became of netdevs."""

    namespaces: set[str] = field(default_factory=lambda: {"/run/netns/1"})
    returns: dict[str, NetdevReturn] = field(default_factory=dict)  # by address; else: home
    asked: list[list[str]] = field(default_factory=list)
    error: Exception | None = None

    def snapshot(self, name: str, address: str) -> NetdevSnapshot:
        return NetdevSnapshot(address, name, "02:00:00:00:00:01", 1500, True, address)

    def attach_all(self, requests: list[MoveRequest], netns: Path) -> list[AttachedNetdev]:
        return [AttachedNetdev(r.snapshot.pci_address, r.name, 7, r.snapshot.mac, 1500) for r in requests]

    def return_all(
        self, requests: list[ReturnRequest], netns: Path | None, *, wait: float = 1.0
    ) -> list[NetdevReturn]:
        if self.error:
            raise self.error
        addresses = [request.snapshot.pci_address for request in requests]
        self.asked.append(addresses)
        home = ReturnState.ALREADY_HOME
        return [
            self.returns.get(address, NetdevReturn(address, home, request.snapshot.name))
            for address, request in zip(addresses, requests, strict=True)
        ]

    def lose(self, address: str) -> None:
        self.returns[address] = NetdevReturn(address, ReturnState.LOST, None)


@dataclass
class World:
    root: Path
    api: Api
    kernel: Kernel

    def __post_init__(self) -> None:
        self.repairs: list[str] = []
        self.start()

    def start(self) -> None:
        """A new process on the same disk."""
        self.ledger = Ledger(self.plugin)
        self.files = RuntimeFiles(DRIVER, self.plugin, self.cdi, self.plugin / "gate")
        self.state = ClaimState(self.api, view(), self.ledger, self.files, BOOT)
        self.moves: Attachments = self.state.moves
        self.reconciler = Reconciler(
            self.api, self.ledger, self.files, self.moves, self.state.unprepare, self.repairs.append
        )

    @property
    def plugin(self) -> Path:
        return self.root / "plugins" / DRIVER

    @property
    def cdi(self) -> Path:
        return self.root / "cdi"

    def spec(self, number: int = 1) -> Path:
        return self.cdi / f"{DRIVER}-claim-{uid(number)}.json"

    def metadata(self, number: int = 1) -> Path:
        return self.plugin / "dra-device-metadata" / uid(number)

    def attached(self, number: int = 1, device: str = "pair-0", netns: str | None = "/run/netns/1") -> None:
        self.prepared(number, device)
        self.state.attach(make_sandbox(netns=netns))

    def prepared(self, number: int = 1, device: str = "pair-0") -> None:
        self.api.put(claim(number, device))
        self.state.prepare(ref(number), patience=0)

    @property
    def gates(self) -> list[str]:
        return sorted(path.name for path in (self.plugin / "attached").iterdir())

    def picture(self) -> dict[str, bytes]:
        return {str(p.relative_to(self.root)): p.read_bytes() for p in self.root.rglob("*") if p.is_file()}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    kernel = Kernel()
    monkeypatch.setattr(verbs, "snapshot", kernel.snapshot)
    monkeypatch.setattr(attachments, "attach_all", kernel.attach_all)
    monkeypatch.setattr(attachments, "return_all", kernel.return_all)
    monkeypatch.setattr(reconcile, "is_namespace", lambda path: str(path) in kernel.namespaces)
    return World(tmp_path, Api(), kernel)


# --- nothing to do
def test_right_state_is_left_alone_and_the_api_is_asked_once_a_claim(world: World) -> None:
    world.attached()
    world.start()
    before, asked = world.picture(), world.api.gets
    for _ in range(3):
        world.reconciler.run()
    assert world.picture() == before
    assert world.repairs == []
    assert world.api.gets == asked + 1


def test_what_prepare_wrote_needs_no_repair(world: World) -> None:
    """Whatever the order of a device's attributes is."""
    attributes = {"zone": "z", "railmate.dev/distance": "PXB", "alpha": 1, "middle": True}
    devices = tuple(replace(device, attributes=attributes) for device in offer().devices)
    world.state.update(view(offer=Offer(devices)))
    world.attached()
    world.reconciler.run()
    assert world.repairs == []


def test_idle_node_asks_the_api_nothing(world: World) -> None:
    world.reconciler.run()
    world.attached()  # by this process: the kubelet will release it
    asked = world.api.gets
    world.reconciler.run()
    assert world.api.gets == asked


# --- files and gates
@pytest.mark.parametrize(
    "damage",
    [
        lambda world: world.spec().unlink(),
        lambda world: world.spec().write_text("{}"),
        lambda world: world.spec().write_bytes(b""),
        lambda world: next(world.metadata().rglob("metadata.json")).unlink(),
        lambda world: next(world.metadata().rglob("metadata.json")).write_text("changed"),
    ],
)
def test_what_the_runtime_reads_is_written_again(world: World, damage: Callable[[World], None]) -> None:
    world.attached()
    before = world.picture()
    damage(world)
    world.reconciler.run()
    assert world.picture() == before
    assert world.repairs == ["CDI spec"]


def test_cdi_directory_that_is_gone_is_made_again(world: World) -> None:
    world.attached()
    before = world.picture()
    world.spec().unlink()
    world.cdi.rmdir()
    world.reconciler.run()
    assert world.picture() == before


def test_gate_that_was_lost_opens_again(world: World) -> None:
    world.attached()
    before = world.gates
    world.ledger.close_gate(uid(1))
    world.reconciler.run()
    assert world.gates == before
    assert world.repairs == ["missing gate marker"]


def test_gate_of_an_attachment_that_is_not_complete_stays_closed(world: World) -> None:
    world.attached()
    entry = world.ledger.get(uid(1))
    assert entry is not None
    assert entry.attachment is not None
    world.ledger.put(entry.with_attachment(replace(entry.attachment, complete=False)))
    world.reconciler.run()
    assert world.gates == []
    assert world.repairs == ["stale gate marker"]


def test_claim_of_a_gpu_alone_gets_no_gate(world: World) -> None:
    world.attached(device="gpu-0")
    world.reconciler.run()
    assert world.gates == []
    assert world.repairs == []


@pytest.mark.parametrize("odd", ["", ".", "..", "x y", "*", "..."])
def test_odd_names_in_the_cdi_directory_delete_nothing_else(world: World, odd: str) -> None:
    world.attached()
    before = world.picture()
    (world.cdi / f"{DRIVER}-claim-{odd}.json").write_text("{}")
    world.reconciler.run()
    assert {path: data for path, data in world.picture().items() if path in before} == before


@pytest.mark.parametrize("place", ["claims", "attached", "strays", "metadata", "cdi"])
def test_files_that_a_killed_writer_left_are_removed(world: World, place: str) -> None:
    world.attached()
    before = world.picture()
    directories = {"cdi": world.cdi, "metadata": next(world.metadata().iterdir())}
    directory = directories.get(place, world.plugin / place)
    targets = {"cdi": world.spec(), "metadata": directory / "metadata.json"}
    from railmate import files

    def killed(path: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
        with pytest.raises(KeyboardInterrupt):
            files.write_bytes(targets.get(place, directory / f"{uid(1)}.json"), b"half", durable=False)
    assert world.picture() != before
    world.reconciler.run()
    assert world.picture() == before


# --- namespaces
def test_netdevs_of_an_ended_namespace_are_brought_home(world: World) -> None:
    world.attached()
    world.kernel.namespaces.clear()
    world.reconciler.run()
    assert world.kernel.asked == [[VFS[0]]]
    assert world.gates == []
    entry = world.ledger.get(uid(1))
    assert entry is not None
    assert entry.attachment is None
    assert world.repairs == ["ended namespace"]
    world.reconciler.run()
    assert world.repairs == ["ended namespace"]


def test_pod_on_the_host_network_has_no_namespace_that_could_end(world: World) -> None:
    world.attached(netns=None)
    before = world.picture()
    world.kernel.namespaces.clear()
    world.reconciler.run()
    assert world.picture() == before


def test_trouble_with_one_claim_does_not_keep_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.attached(1)
    world.attached(2, "pair-1")
    world.spec(2).unlink()
    world.kernel.namespaces.clear()
    world.kernel.error = AttachError("no")
    world.reconciler.run()
    entries = world.ledger.entries().values()
    assert all(entry.attachment for entry in entries), "what could not be brought home is not forgotten"
    world.kernel.error = None
    world.reconciler.run()
    assert not any(entry.attachment for entry in world.ledger.entries().values())
    assert world.spec(2).exists()


@pytest.mark.parametrize("error", [RailmateError("no"), OSError(errno.EMFILE, "many"), KeyError("odd")])
def test_a_round_never_raises(world: World, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail() -> Any:
        raise error

    monkeypatch.setattr(world.ledger, "entries", fail)
    world.reconciler.run()


# --- strays
def test_lost_netdev_is_put_right_when_it_is_back(world: World) -> None:
    world.attached()
    world.kernel.lose(VFS[0])
    world.state.unprepare(ref(1))
    assert [stray.name for stray in world.ledger.strays()] == ["vf0"]
    world.start()  # whatever process there is by then
    world.reconciler.run()
    assert world.ledger.strays() != [], "it is not back yet"
    assert world.repairs == []
    world.kernel.returns.clear()
    world.reconciler.run()
    assert world.ledger.strays() == []
    assert world.repairs == ["stray netdev"]


def test_only_the_lost_netdev_of_a_claim_is_a_stray(world: World) -> None:
    world.attached(device="wide")
    world.kernel.lose(VFS[1])
    world.state.unprepare(ref(1))
    assert [stray.pci_address for stray in world.ledger.strays()] == [VFS[1]]


def test_no_strays_ask_the_kernel_nothing(world: World) -> None:
    assert world.moves.fetch_strays() == 0
    assert world.kernel.asked == []


def test_netdev_that_came_home_under_a_wrong_name_is_tried_again(world: World) -> None:
    world.attached()
    world.kernel.returns[VFS[0]] = NetdevReturn(
        VFS[0], ReturnState.ALREADY_HOME, "rm00000c001", ("its name vf0 is taken by another device",)
    )
    world.state.unprepare(ref(1))
    world.reconciler.run()
    assert [stray.name for stray in world.ledger.strays()] == ["vf0"]
    world.kernel.returns.clear()
    world.reconciler.run()
    assert world.ledger.strays() == []


def test_stray_that_is_no_record_is_removed(world: World) -> None:
    for number, text in enumerate(["", "{", "[]", "5", "{}", '{"pci_address": "x"}', "\xff", "[" * 100_000]):
        (world.plugin / "strays" / f"{number}.json").write_text(text, "latin-1")
    assert world.ledger.strays() == []
    assert list((world.plugin / "strays").iterdir()) == []


def test_stray_that_cannot_be_read_at_the_moment_is_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ledger.put_stray(world.kernel.snapshot("vf0", VFS[0]))
    with monkeypatch.context() as patch:

        def busy(path: Path) -> bytes:
            raise OSError(errno.EMFILE, "Too many open files")

        patch.setattr(Path, "read_bytes", busy)
        with pytest.MonkeyPatch.context():
            attempt(world.ledger.strays)
    assert [stray.name for stray in world.ledger.strays()] == ["vf0"]


def test_stray_is_written_once_an_address(world: World) -> None:
    for _ in range(2):
        world.ledger.put_stray(world.kernel.snapshot("vf0", VFS[0]))
    world.ledger.drop_stray(VFS[0])
    world.ledger.drop_stray(VFS[0])
    assert world.ledger.strays() == []


# --- markers
def test_markers_are_read_as_they_were_written(world: World) -> None:
    world.ledger.open_gate(uid(1), "a")
    world.ledger.open_gate(uid(1), "b.c")
    world.ledger.open_gate(uid(2), "a")
    (world.plugin / "attached" / ".hidden").touch()
    (world.plugin / "attached" / "nodot").touch()
    assert world.ledger.markers() == {uid(1): {"a", "b.c"}, uid(2): {"a"}}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=40)
)
def test_no_file_among_the_markers_stops_a_round(world: World, name: str) -> None:
    if not world.api.claims:
        world.prepared()
    try:
        (world.plugin / "attached" / name).touch()
    except OSError:
        return
    world.reconciler.run()
    assert world.ledger.get(uid(1)) is not None
    assert world.spec().exists()


# --- claims that ended while no driver ran


def test_inherited_claim_that_is_no_longer_allocated_is_released(world: World) -> None:
    """A ResourceClaim of its own outlives its pods, under the same UID."""
    world.attached()
    world.kernel.namespaces.clear()
    world.api.claims["claim-1"]["status"] = {}
    world.start()
    world.reconciler.run()
    assert world.ledger.entries() == {}


def test_inherited_claim_that_is_allocated_elsewhere_by_now_is_released(world: World) -> None:
    world.attached()
    world.kernel.namespaces.clear()
    (result,) = world.api.claims["claim-1"]["status"]["allocation"]["devices"]["results"]
    result["pool"] = "node2"
    world.start()
    world.reconciler.run()
    assert world.ledger.entries() == {}


@pytest.mark.parametrize(
    "error", [ApiError("not reachable"), ApiError("no", 403, "Forbidden"), ApiError("no", 500, "")]
)
def test_api_that_does_not_know_is_asked_again_and_nothing_is_released(world: World, error: ApiError) -> None:
    world.attached()
    world.start()
    world.api.error, before = error, world.picture()
    world.reconciler.run()
    assert world.picture() == before
    world.api.error, world.api.claims = None, {}
    world.kernel.namespaces.clear()
    world.reconciler.run()
    assert world.ledger.entries() == {}


def test_answer_that_is_no_claim_releases_nothing(world: World) -> None:
    world.attached()
    world.api.claims["claim-1"] = {"kind": "Status"}
    world.start()
    before = world.picture()
    world.reconciler.run()
    assert world.picture() == before


def test_release_that_fails_is_tried_again(world: World) -> None:
    world.attached()
    world.api.claims.clear()
    world.kernel.namespaces.clear()
    world.start()
    world.kernel.error = AttachError("busy")
    world.reconciler.run()
    assert world.ledger.entries().keys() == {uid(1)}
    world.kernel.error = None
    world.reconciler.run()
    assert world.ledger.entries() == {}


def test_claim_that_was_released_in_time_is_not_asked_about(world: World) -> None:
    world.attached()
    world.start()
    world.api.error = ApiError("not reachable")
    world.reconciler.run()
    world.state.unprepare(ref(1))
    asked = world.api.gets
    world.reconciler.run()
    assert world.api.gets == asked


def test_released_claim_is_the_one_that_was_recorded(world: World) -> None:
    world.attached(1)
    world.attached(2, "pair-1")
    del world.api.claims["claim-2"]
    world.kernel.namespaces.clear()
    released: list[ClaimRef] = []
    world.start()
    reconciler = Reconciler(
        world.api, world.ledger, world.files, world.moves, released.append, world.repairs.append
    )
    reconciler.run()
    assert released == [ref(2)]


# --- both
def test_a_reboot_leaves_no_open_gate_and_no_attachment(world: World) -> None:
    """All namespaces and the CDI directory are gone; the ledger is from before."""
    world.attached()
    world.spec().unlink()
    world.kernel.namespaces.clear()
    world.start()
    world.reconciler.run()
    assert world.gates == []
    assert json.loads((world.plugin / "claims" / f"{uid(1)}.json").read_text())["attachment"] is None
