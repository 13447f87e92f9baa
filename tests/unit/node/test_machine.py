"""The machine watched: what changed is told once, what is held never vanishes silently, nothing ends the watch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import railmate.node.machine as module
import railmate.node.provisioning as provisioning
from harness.machines import MACHINES, load_machine
from harness.sysfs import write_tree
from railmate.claims.holdings import Held
from railmate.inventory.model import Inventory
from railmate.node.machine import MachineWatch, View, first_look, look, remember
from railmate.node.provisioning import Provisioner
from railmate.node.settings import Settings
from railmate.provision.apply import Outcome
from railmate.provision.unfinished import Unfinished
from railmate.publish.model import Offer, OfferedDevice
from railmate.topology.analyze import analyze
from railmate_api.provisioning import decode_provisioning
from unit.claims.claims_world import VFS, inventory, offer

EMPTY = analyze(Inventory())


@contextmanager
def nobody(physical_function: str) -> Iterator[Set[str]]:
    yield frozenset()


NONE_BEGUN = Unfinished(Path("/nonexistent"), "this boot")
NO_VFS = Provisioner(None, Path("/sys"), print, nobody, NONE_BEGUN)


def held(*addresses: str, devices: tuple[OfferedDevice, ...] = ()) -> Held:
    return Held(frozenset(addresses), frozenset(), devices)


def holding(*addresses: str, devices: tuple[OfferedDevice, ...] = ()) -> Callable[[], Held]:
    return lambda: held(*addresses, devices=devices)


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
        self.held: Callable[[], Held] = holding(VFS[0])
        self.fail: Exception | None = None
        patch.setattr(module, "look", self._look)
        self.watch = MachineWatch(settings, first, lambda: self.held(), self._changed, self._gone, NO_VFS)

    def _look(self, settings: Settings, before: Inventory, held: Held, awaiting: frozenset[str]) -> View:
        self.asked.append((before, held.addresses))
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
    def unreadable() -> Held:
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
    assert look(settings, first.inventory, held(first.offer.devices[0].gpus[0])).offer == first.offer


def test_next_process_knows_what_pods_hold(settings: Settings) -> None:
    """A netdev that is in a pod is absent from sysfs; what is published of its VF must not change for a restart."""
    first = look(settings)
    vf = next(device.nics[0] for device in first.offer.devices if device.nics)
    richer = replace(first.inventory.functions[vf], driver="only-the-first-process-knew")
    functions = {**first.inventory.functions, vf: richer}
    nics = tuple(replace(n, function=richer) if n.address == vf else n for n in first.inventory.nics)
    remember(settings, replace(first, inventory=replace(first.inventory, functions=functions, nics=nics)))
    known = first_look(settings, holding(vf), NO_VFS).inventory.functions[vf]
    assert known.driver == "only-the-first-process-knew"
    assert first_look(settings, holding(), NO_VFS).inventory.functions[vf] == first.inventory.functions[vf]


def test_a_device_that_a_pod_has_stays_offered_as_held_until_it_is_given_back(settings: Settings) -> None:
    group = OfferedDevice("group-of-before", "", {}, gpus=(look(settings).inventory.gpus[0].address,))
    now = held(devices=(group,))
    for found in (look(settings, held=now), first_look(settings, lambda: now, NO_VFS)):
        assert found.offer.by_name["group-of-before"].kind == "held"
    assert "group-of-before" not in look(settings).offer.by_name


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"functions": 5}'])
def test_damaged_memory_is_not_used(settings: Settings, content: bytes) -> None:
    (settings.plugin_dir / module._SEEN).write_bytes(content)
    assert first_look(settings, holding(), NO_VFS).offer == look(settings).offer


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
    answers = [held(), held(VFS[1])]
    watched.held = lambda: answers.pop(0) if answers else held(VFS[1])
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
    assert look(settings, first.inventory, held(vf)).offer == first.offer
    assert first_look(settings, holding(vf), NO_VFS).offer == first.offer
    others = look(settings, first.inventory)
    assert vf not in {nic for one in others.offer.devices for nic in one.nics}
    assert any("held by driver vfio-pci" in note for note in others.offer.notes)


# --- what an earlier process prepares while this one starts
class Taking:
    """A claim is prepared by the earlier process right after this one has asked what is held, ``after`` times."""

    def __init__(self, take: Callable[[], None], now: Held, after: int = 1) -> None:
        self._take, self._now, self._after = take, now, after
        self.asked = 0

    def __call__(self) -> Held:
        self.asked += 1
        if self.asked == self._after:
            self._take()
        return self._now if self.asked > self._after else held()


def own_tree(settings: Settings, tmp_path: Path, vfs: int = 2) -> Settings:
    write_tree(load_machine(MACHINES / "dgx-a100.yaml", vfs), tmp_path / "own")
    return replace(settings, sysfs_root=tmp_path / "own/sys", proc_root=tmp_path / "own/proc")


def test_what_is_prepared_during_the_first_look_is_published_as_before(
    settings: Settings, tmp_path: Path
) -> None:
    settings = own_tree(settings, tmp_path)
    first = look(settings)
    remember(settings, first)
    vf = next(device.nics[0] for device in first.offer.devices if device.kind == "rdma-vf")
    driver = settings.sysfs_root / "bus/pci/devices" / vf / "driver"

    def take() -> None:
        driver.unlink()
        driver.symlink_to("../../../bus/pci/drivers/vfio-pci")

    assert first_look(settings, Taking(take, held(vf)), NO_VFS).offer == first.offer


def test_a_device_that_is_prepared_during_the_first_look_stays_published(settings: Settings) -> None:
    """This process would offer the machine otherwise; the claim's device is one of the earlier one's."""
    group = OfferedDevice("group-of-before", "", {}, gpus=(look(settings).inventory.gpus[0].address,))
    taking = Taking(lambda: None, held(*group.gpus, devices=(group,)))
    assert first_look(settings, taking, NO_VFS).offer.by_name["group-of-before"].kind == "held"


def test_shares_that_are_prepared_during_a_look_count(settings: Settings) -> None:
    share = OfferedDevice("shared-of-before", "", {}, nics=("0000:0c:00.0",), sub_interfaces=1)
    taking = Taking(lambda: None, Held(frozenset(), frozenset(share.nics), (share,)))
    assert "shared-of-before" in first_look(settings, taking, NO_VFS).offer.by_name


def test_claims_that_come_faster_than_looks_do_not_keep_a_process_from_starting(settings: Settings) -> None:
    count = iter(range(1000))
    found = first_look(settings, lambda: held(*(f"0000:f0:{n:02x}.0" for n in range(next(count)))), NO_VFS)
    assert found.offer == look(settings).offer


# --- a NIC that is to have VFs
PORT = "0000:0c:00.0"
TWO_VFS = decode_provisioning(
    {
        "apiVersion": "railmate.dev/v1alpha1",
        "kind": "VfProvisioning",
        "rules": [{"select": {"address": PORT}, "vfs": 2}],
    }
)


def test_a_port_is_not_given_away_whole_before_its_vfs_are_made(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only when they cannot be made, and then people are told."""
    settings = own_tree(settings, tmp_path, vfs=0)
    refused = Outcome(("the NIC says no.",), made=False, again=True)
    monkeypatch.setattr(provisioning, "apply", lambda *arguments: refused)
    told: list[str] = []
    now = [0.0]
    provisioner = Provisioner(TWO_VFS, settings.sysfs_root, told.append, nobody, NONE_BEGUN, lambda: now[0])

    def offered(view: View) -> set[str]:
        return {one.kind for one in view.offer.devices if PORT in one.nics}

    whole = offered(look(settings))
    assert whole == {"pair", "rdma-vf", "node"}
    first = first_look(settings, holding(), provisioner)
    assert offered(first) == set()
    assert any(f"{PORT} is not offered: its VFs" in note for note in first.offer.notes)
    seen: list[View] = []
    watch = MachineWatch(settings, first, holding(), seen.append, lambda gone: None, provisioner)
    for _ in range(4):
        assert provisioner.again_in == 10.0
        now[0] += 9.9
        watch.look_again()
        assert seen == []
        if told:
            break
        now[0] += 0.1
        watch.look_again()
        if provisioner.again_in is None:
            break
    assert told == ["the NIC says no. Until then it is offered as a whole port."]
    assert offered(seen[-1]) == whole
