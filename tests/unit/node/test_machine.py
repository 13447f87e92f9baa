"""The machine watched: what changed is told once, what is held never vanishes silently, nothing ends the watch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import railmate.node.machine as module
from harness.machines import MACHINES, load_machine
from harness.sysfs import write_tree
from railmate.inventory.model import Inventory
from railmate.node.machine import MachineWatch, View, first_look, look, remember
from railmate.node.provisioning import Provisioner
from railmate.node.settings import Settings
from railmate.publish.model import Offer, OfferedDevice
from railmate.topology.analyze import analyze
from unit.claims.claims_world import VFS, inventory, offer

EMPTY = analyze(Inventory())
NO_VFS = Provisioner(None, Path("/sys"), print)


def view(devices: int = 3, gone: Set[str] = frozenset()) -> View:
    return View(inventory(), Offer(offer().devices[:devices]), EMPTY, frozenset(gone))


@pytest.fixture
def settings(tmp_path: Path, machine_root: Callable[..., Path]) -> Settings:
    gate = tmp_path / "gate"
    gate.touch()
    root = machine_root("dgx-a100", 2)
    found = Settings(
        "node1",
        sysfs_root=root / "sys",
        proc_root=root / "proc",
        kubelet_dir=tmp_path / "kubelet",
        gate_binary=gate,
    )
    found.plugin_dir.mkdir(parents=True)
    return found


class Watched:
    """A watch whose looks are given, and what it told."""

    def __init__(self, settings: Settings, patch: pytest.MonkeyPatch, first: View) -> None:
        self.changed: list[View] = []
        self.gone: list[Set[str]] = []
        self.looks: list[View | Exception] = []
        self.asked: list[tuple[Inventory, Set[str]]] = []
        self.held: Callable[[], Set[str]] = lambda: {VFS[0]}
        self.fail: Exception | None = None
        patch.setattr(module, "look", self._look)
        self.watch = MachineWatch(settings, first, lambda: self.held(), self._changed, self._gone, NO_VFS)

    def _look(
        self, settings: Settings, before: Inventory, held: Set[str], devices: Sequence[OfferedDevice]
    ) -> View:
        assert devices == ()
        self.asked.append((before, held))
        found = self.looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def _changed(self, now: View) -> None:
        if self.fail:
            raise self.fail
        self.changed.append(now)

    def _gone(self, addresses: Set[str]) -> None:
        if self.fail:
            raise self.fail
        self.gone.append(addresses)

    def see(self, *looks: View | Exception) -> None:
        for one in looks:
            self.looks.append(one)
            self.watch.look_again()


@pytest.fixture
def watched(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(settings, monkeypatch, view())


def test_same_machine_is_told_to_nobody(watched: Watched) -> None:
    watched.see(view(), view())
    assert watched.changed == []
    assert watched.gone == []


def test_changed_offer_is_told_once(watched: Watched) -> None:
    watched.see(view(4), view(4))
    assert watched.changed == [view(4)]


def test_each_look_knows_what_the_last_one_found_and_what_is_held(watched: Watched) -> None:
    watched.see(view())
    assert watched.asked == [(inventory(), {VFS[0]})]


def test_missing_hardware_is_told_once_and_again_after_it_was_back(watched: Watched) -> None:
    missing = view(gone={VFS[0]})
    watched.see(missing, missing, view(), missing)
    assert watched.gone == [{VFS[0]}, {VFS[0]}]


def test_only_what_is_newly_missing_is_told(watched: Watched) -> None:
    watched.see(view(gone={VFS[0]}), view(gone={VFS[0], VFS[1]}))
    assert watched.gone == [{VFS[0]}, {VFS[1]}]


@pytest.mark.parametrize("error", [OSError("busy"), RuntimeError("odd"), KeyError("x")])
def test_look_that_fails_leaves_everything_as_it_was(watched: Watched, error: Exception) -> None:
    watched.see(error)
    assert watched.changed == []
    watched.see(view(4))
    assert watched.changed == [view(4)]


def test_ledger_that_cannot_be_read_is_no_reason_to_end(watched: Watched) -> None:
    def unreadable() -> Set[str]:
        raise OSError("Too many open files")

    watched.held = unreadable
    watched.see()
    watched.watch.look_again()
    assert watched.asked == []


@pytest.mark.parametrize("what", ["changed", "gone"])
def test_listener_that_fails_hears_of_it_at_the_next_look(watched: Watched, what: str) -> None:
    news = view(4) if what == "changed" else view(gone={VFS[0]})
    watched.fail = RuntimeError("odd")
    watched.see(news)
    watched.fail = None
    watched.see(news)
    assert (watched.changed, watched.gone) == (([news], []) if what == "changed" else ([], [{VFS[0]}]))


def test_kernel_without_events_is_looked_at_all_the_same(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> Any:
        raise OSError("Protocol not supported")

    monkeypatch.setattr(module, "DeviceEvents", refuse)
    monkeypatch.setattr(module, "_EVERY", 0.01)
    told = threading.Event()
    monkeypatch.setattr(watched.watch, "_changed", lambda now: told.set())
    watched.looks = [view(4)] * 1000
    thread = threading.Thread(target=watched.watch.run, daemon=True)
    thread.start()
    try:
        assert told.wait(10)
    finally:
        watched.watch.stop()
        thread.join(10)
    assert not thread.is_alive()


def test_event_is_passed_on_before_the_look(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Events:
        def wait(self, seconds: float) -> bool:
            return True

    def event() -> None:
        order.append("event")

    def look_again() -> None:
        order.append("look")
        watched.watch.stop()

    monkeypatch.setattr(module, "DeviceEvents", Events)
    monkeypatch.setattr(watched.watch, "_event", event)
    monkeypatch.setattr(watched.watch, "look_again", look_again)
    watched.watch.run()
    assert order == ["event", "look"]


# --- real looks
def test_second_look_at_the_same_machine_offers_the_same(settings: Settings) -> None:
    first = look(settings)
    assert len(first.offer.devices) > 8
    assert look(settings, first.inventory, {first.offer.devices[0].gpus[0]}).offer == first.offer


def test_next_process_knows_what_pods_hold(settings: Settings) -> None:
    """A netdev that is in a pod is absent from sysfs; what is published of its VF must not change for a restart."""
    first = look(settings)
    vf = next(device.nics[0] for device in first.offer.devices if device.nics)
    richer = replace(first.inventory.functions[vf], driver="only-the-first-process-knew")
    functions = {**first.inventory.functions, vf: richer}
    nics = tuple(replace(n, function=richer) if n.address == vf else n for n in first.inventory.nics)
    remember(settings, replace(first, inventory=replace(first.inventory, functions=functions, nics=nics)))
    assert first_look(settings, {vf}, NO_VFS).inventory.functions[vf].driver == "only-the-first-process-knew"
    assert first_look(settings, set(), NO_VFS).inventory.functions[vf] == first.inventory.functions[vf]


def test_a_device_that_a_pod_has_stays_offered_as_held_until_it_is_given_back(settings: Settings) -> None:
    group = OfferedDevice("group-of-before", "", {}, gpus=(look(settings).inventory.gpus[0].address,))
    for found in (look(settings, devices=[group]), first_look(settings, set(), NO_VFS, devices=[group])):
        assert found.offer.by_name["group-of-before"].kind == "held"
    assert "group-of-before" not in look(settings).offer.by_name


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"functions": 5}'])
def test_damaged_memory_is_not_used(settings: Settings, content: bytes) -> None:
    (settings.plugin_dir / module._SEEN).write_bytes(content)
    assert first_look(settings, set(), NO_VFS).offer == look(settings).offer


# --- what is said about it
def test_what_is_odd_is_said_when_it_is_new_and_not_again(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    odd = replace(view(), inventory=replace(inventory(), warnings=("0000:07:00.0: its file makes no sense",)))
    less = replace(odd, offer=replace(odd.offer, notes=("vf-9 is not offered: it has no driver",)))
    watched.see(odd, odd, less, less)
    assert [one for one in caplog.messages if "makes no sense" in one or "not offered" in one] == [
        "0000:07:00.0: its file makes no sense",
        "vf-9 is not offered: it has no driver",
    ]


def test_what_a_claim_took_during_the_look_is_looked_at_as_held(watched: Watched) -> None:
    """Prepare may have taken a VF's driver away while the machine was looked at: that changes nothing published."""
    answers = [set[str](), {VFS[1]}]
    watched.held = lambda: answers.pop(0) if answers else {VFS[1]}
    without = view(2)
    watched.looks.append(without)  # it has lost its driver and would no longer be offered
    watched.see(view())
    assert [held for _, held in watched.asked] == [set(), {VFS[1]}]
    assert watched.changed == []


def test_a_vf_that_is_bound_to_another_driver_for_a_claim_is_published_as_before(
    settings: Settings, tmp_path: Path
) -> None:
    """Also by the next process; and not for anybody else: one that an administrator has bound is not offered."""
    write_tree(load_machine(MACHINES / "dgx-a100.yaml", 2), tmp_path / "own")
    settings = replace(settings, sysfs_root=tmp_path / "own/sys", proc_root=tmp_path / "own/proc")
    first = look(settings)
    vf = next(device.nics[0] for device in first.offer.devices if device.kind == "rdma-vf")
    remember(settings, first)
    driver = settings.sysfs_root / "bus/pci/devices" / vf / "driver"
    driver.unlink()
    driver.symlink_to("../../../bus/pci/drivers/vfio-pci")
    assert look(settings, first.inventory, {vf}).offer == first.offer
    assert first_look(settings, {vf}, NO_VFS).offer == first.offer
    others = look(settings, first.inventory)
    assert vf not in {nic for one in others.offer.devices for nic in one.nics}
    assert any("held by driver vfio-pci" in note for note in others.offer.notes)
