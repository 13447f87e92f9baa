"""A move gives an RDMA device other character devices: uverbs and umad free their numbers and take the lowest that are
free (disable_device() and enable_device() in drivers/infiniband/core/device.c). A container must get its own ones."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from claims_netdevs import HOST, Killed, World
from claims_world import DRIVER, VFS, config, inventory, ref, sandbox, share, uid, view

import railmate.claims.attachments as attachments
import railmate.claims.strays as strays
from railmate.attach.model import AttachedNetdev, MoveRequest, NetdevReturn, ReturnRequest
from railmate.attach.rdmalook import char_devices
from railmate.claims.ledger import Ledger
from railmate.claims.observation import Observations
from railmate.claims.reconcile import Reconciler
from railmate.claims.records import Entry
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.surroundings import Surroundings
from railmate.errors import RailmateError


@dataclass
class Numbers:
    """The kernel's: each RDMA device has one of uverbs and umad, and sysfs shows which."""

    sysfs: Path
    has: dict[str, int] = field(default_factory=dict)  # function -> its number
    unseen: set[str] = field(default_factory=set)

    def take(self, address: str) -> None:
        self.free(address)
        number = next(n for n in range(99) if n not in self.has.values())
        self.has[address] = number
        if address in self.unseen:
            return
        for group, name in (("infiniband_verbs", "uverbs"), ("infiniband_mad", "umad")):
            place = self.sysfs / "bus/pci/devices" / address / group / f"{name}{number}"
            place.mkdir(parents=True)
            (place / "ibdev").write_text("its name may be any\n")

    def of(self, device: str, pci_address: str | None = None) -> tuple[str, ...]:
        """As a node's view has it."""
        number = device.removeprefix("mlx5_")
        known = VFS[int(number)] if number.isdigit() else None
        return char_devices(self.sysfs, device, pci_address or known)

    def free(self, address: str) -> None:
        self.has.pop(address, None)
        shutil.rmtree(self.sysfs / "bus/pci/devices" / address, ignore_errors=True)


@pytest.fixture
def numbers(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Numbers:
    """Exclusive mode: what moves has new numbers."""
    found = Numbers(tmp_path / "sys")
    for address in VFS:
        found.take(address)
    attach_all, return_all = attachments.attach_all, attachments.return_all

    def attach(requests: Sequence[MoveRequest], netns: Path, *rest: object) -> list[AttachedNetdev]:
        for request in requests:
            if isinstance(request, MoveRequest):
                found.take(request.snapshot.pci_address)
        return attach_all(requests, netns, *rest)  # type: ignore[arg-type]

    def back(requests: Sequence[ReturnRequest], netns: Path | None) -> list[NetdevReturn]:
        for request in requests:
            found.take(request.snapshot.pci_address)
        return return_all(requests, netns)

    monkeypatch.setattr(attachments, "attach_all", attach)
    for module in (attachments, strays):
        monkeypatch.setattr(module, "return_all", back)
    restart(world, found)
    return found


def restart(world: World, numbers: Numbers) -> None:
    plugin = world.root / "plugins" / DRIVER
    files = RuntimeFiles(DRIVER, plugin, world.root / "cdi", plugin / "gate")
    observations = Observations(world.ledger, files, numbers.sysfs, Path("/host/dev"))
    around = Surroundings(refreshed=observations.refreshed)
    world.restart(node=view(char_devices=numbers.of), around=around)


def nodes(world: World, number: int = 1) -> list[str]:
    """Of the claim's containers, without those of GPUs."""
    (device,) = world.spec(number)["devices"]
    found = [node["hostPath"] for node in device["containerEdits"]["deviceNodes"]]
    return [path.rpartition("/")[2] for path in found if "/infiniband/" in path]


def hook_word(world: World) -> str:
    (device,) = world.spec(1)["devices"]
    return str(device["containerEdits"]["hooks"][0]["args"][4])


def marker_word(world: World) -> str:
    (marker,) = world.ledger.attached_dir.glob(f"{uid(1)}.*")
    return marker.read_text().partition("\n")[2]


def test_a_move_that_changes_the_numbers_changes_the_spec_before_the_gate_opens(
    world: World, numbers: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers.free(VFS[0])  # bound to vfio-pci for another claim
    world.prepared(1, "vf-1")
    assert nodes(world) == ["uverbs1", "umad1", "rdma_cm"]
    before = hook_word(world)
    when_it_opened: list[list[str]] = []
    real = Ledger.open_gate

    def open_gate(ledger: Ledger, *arguments: object, **more: object) -> None:
        when_it_opened.append(nodes(world))
        real(ledger, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Ledger, "open_gate", open_gate)
    world.state.attach(sandbox())
    assert when_it_opened == [["rdma_cm", "uverbs0", "umad0"]]
    assert hook_word(world) == marker_word(world) != before, "a container of the spec before does not start"
    numbers.take(VFS[0])
    assert numbers.has[VFS[0]] == 1, "and what the claim was prepared with is another's"
    world.restart()
    world.state.prepare(ref(1), patience=0)  # the kubelet asks again, and the spec is written again
    assert nodes(world) == ["rdma_cm", "uverbs0", "umad0"]


def test_the_next_sandbox_has_the_numbers_that_it_was_given(world: World, numbers: Numbers) -> None:
    world.prepared(1, "vf-1")
    world.state.attach(sandbox())
    numbers.free(VFS[0])
    world.state.attach(sandbox("sandbox-2", netns="/run/netns/2"))
    assert nodes(world) == ["rdma_cm", "uverbs0", "umad0"]


def test_a_pod_on_the_host_network_has_the_numbers_of_this_moment(world: World, numbers: Numbers) -> None:
    """Its devices do not move, but have been in the pod that had the claim before."""
    world.prepared(1, "vf-1")
    numbers.free(VFS[0])
    numbers.take(VFS[1])
    world.state.attach(sandbox(netns=None))
    assert nodes(world) == ["rdma_cm", "uverbs0", "umad0"]


@pytest.mark.parametrize(
    ("mode", "device", "netns", "expected"),
    [
        ("exclusive", "vf-1", "/run/netns/1", True),
        ("shared", "vf-1", "/run/netns/1", False),
        ("exclusive", "vf-1", None, False),
        ("exclusive", share(1), "/run/netns/1", False),
        ("exclusive", "gpu-0", "/run/netns/1", False),
    ],
    ids=["exclusive mode", "shared mode", "on the host network", "a share of a port", "no NIC"],
)
def test_it_is_known_before_whether_an_attach_changes_the_numbers(
    world: World, mode: str, device: dict[str, Any] | str, netns: str | None, expected: bool
) -> None:
    """Then the runtime must not read the spec before it has ended."""
    configs = [config(kind="RdmaSharedConfig")] if not isinstance(device, str) else None
    world.prepared(1, device, configs=configs)
    world.state.update(view(inventory=replace(inventory(), rdma_netns_mode=mode)))
    assert world.state.renews_nodes(sandbox(netns=netns)) is expected
    assert not world.state.renews_nodes(sandbox(pod="another", netns=netns))


def test_where_nothing_moves_nothing_is_written(
    world: World, numbers: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.prepared(1, "vf-1")
    monkeypatch.setattr(RuntimeFiles, "write", lambda *_: pytest.fail("the spec is right already"))
    world.state.attach(sandbox())
    assert nodes(world) == ["uverbs1", "umad1", "rdma_cm"]


def test_a_device_without_its_character_devices_keeps_the_gate_closed_and_comes_home(
    world: World, numbers: Numbers
) -> None:
    world.prepared(1, "vf-1")
    numbers.unseen.add(VFS[1])
    with pytest.raises(RailmateError, match=r"mlx5_1 of 0000:0c:00\.2 has no character device"):
        world.state.attach(sandbox())
    assert world.gates == []
    assert world.netdevs.all_home()
    numbers.unseen.clear()
    world.state.attach(sandbox())
    assert world.gates == [f"{uid(1)}.sandbox-1"]


def test_a_share_of_a_port_has_no_more_of_it_than_when_it_was_prepared(
    world: World, numbers: Numbers
) -> None:
    """With umad one pod could change the port that all others use."""
    world.prepared(1, share(1), configs=[config(kind="RdmaSharedConfig")])
    assert nodes(world) == ["uverbs9", "rdma_cm"]
    numbers.take("0000:0c:00.0")
    world.state.attach(sandbox())
    assert nodes(world) == ["rdma_cm", "uverbs4"]


# --- a driver that is bound anew while its NIC is in a pod
def leave(world: World, numbers: Numbers) -> None:
    """The second VF's netdev is on the node again, and its numbers will be others."""
    numbers.free(VFS[0])
    world.netdevs.where[VFS[1]] = (HOST, "eth7")


def test_a_nic_that_comes_back_to_its_pod_with_a_new_number_gets_no_container_with_the_old(
    world: World, numbers: Numbers
) -> None:
    world.prepared(1, "vf-1")
    world.state.attach(sandbox())
    leave(world, numbers)
    with pytest.raises(RailmateError, match="other device nodes"):
        world.state.attach(sandbox())  # for a container that has the old ones already
    assert nodes(world) == ["rdma_cm", "uverbs0", "umad0"]
    assert hook_word(world) == marker_word(world)
    world.state.check(sandbox(), [uid(1)])


@pytest.mark.parametrize("ended", [Killed(), RailmateError("no character device at the moment")])
@pytest.mark.parametrize("again", ["a container is made", "a round of repairs"])
def test_whoever_ends_between_move_and_gate_leaves_no_gate_for_the_old_numbers(
    world: World, numbers: Numbers, ended: BaseException, again: str
) -> None:
    """The NIC is in its pod by then, so nothing is to be moved."""
    world.prepared(1, "vf-1")
    world.state.attach(sandbox())
    leave(world, numbers)

    def end(entry: Entry) -> Entry:
        raise ended

    world.restart(around=Surroundings(refreshed=end))
    with pytest.raises(type(ended)):
        world.state.attach(sandbox())
    assert world.gates == []
    restart(world, numbers)
    if again == "a container is made":
        world.state.attach(sandbox())
    else:
        plugin = world.root / "plugins" / DRIVER
        files = RuntimeFiles(DRIVER, plugin, world.root / "cdi", plugin / "gate")
        Reconciler(world.api, world.ledger, files, world.state.moves, world.state.unprepare).run()
    assert nodes(world) == ["rdma_cm", "uverbs0", "umad0"]
    assert hook_word(world) == marker_word(world)
    entry = world.ledger.get(uid(1))
    assert entry is not None
    assert entry.nodes_word == marker_word(world), "the record says so, too"
