"""The monitor on a machine that breaks and is mended."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from railmate.health.damping import Damping
from railmate.health.model import DeviceHealth, Health
from railmate.health.monitor import HealthMonitor
from railmate.publish.model import Offer
from unit.health.health_tree import Tree, dgx_a100

PATIENCE = 20.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def monitor(tree: Tree, **options: Any) -> HealthMonitor:
    return HealthMonitor(tree.sys, tree.offer, tree.inventory, pcie_links=True, **options)


def by_name(one: HealthMonitor) -> dict[str, DeviceHealth]:
    return {device.name: device for device in one.devices()}


@contextmanager
def running(one: HealthMonitor) -> Iterator[None]:
    threads = [threading.Thread(target=target, daemon=True) for target in (one.run, one.deliver)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        one.stop()
        for thread in threads:
            thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)


def test_every_offered_device_is_told_in_the_offers_order(tree: Tree, clock: Clock) -> None:
    one = monitor(tree, clock=clock)
    assert one.devices() == ()  # nothing is said before the first look
    before = time.time()
    one.look()
    assert [device.name for device in one.devices()] == [device.name for device in tree.offer.devices]
    assert {device.health for device in one.devices()} == {Health.HEALTHY}
    assert all(before <= device.checked <= time.time() for device in one.devices())
    assert one.taints == {}


def test_dead_gpu_taints_itself_and_its_pair(tree: Tree, clock: Clock) -> None:
    tree.lose(tree.gpu)
    one = monitor(tree, clock=clock)
    one.look()
    wanted = {device.name: "gpu-lost" for device in tree.offer.devices if tree.gpu in device.gpus}
    assert len(wanted) == 3, "the GPU, its pair and the whole node"
    assert one.taints == wanted
    assert tree.gpu in by_name(one)[tree.pair.name].message


def settles(one: HealthMonitor, clock: Clock, wanted: dict[str, str]) -> None:
    """All is well again: the taints stay for a while, then nothing is left of them."""
    clock.now += 5
    one.look()
    assert one.taints == wanted
    clock.now += 10
    one.look()
    assert one.taints == {}
    assert {device.health for device in one.devices()} == {Health.HEALTHY}


def test_cable_pulled_taints_all_vfs_and_the_pair_and_plugged_clears(tree: Tree, clock: Clock) -> None:
    one = monitor(tree, clock=clock)
    one.look()
    tree.set_carrier(tree.pf, False)
    clock.now += 5
    one.look()
    behind = {tree.pf, *tree.inventory.functions[tree.pf].virtual_functions}
    wanted = {device.name: "nic-link-down" for device in tree.offer.devices if behind & set(device.nics)}
    assert len(wanted) >= 2
    assert one.taints == wanted
    tree.set_carrier(tree.pf, True)
    settles(one, clock, wanted)


@pytest.mark.parametrize("end", ["gpu", "nic"])
def test_slow_pcie_link_taints_what_is_behind_it_and_full_speed_clears(
    tree: Tree, clock: Clock, end: str
) -> None:
    one = monitor(tree, clock=clock)
    one.look()
    slow = tree.gpu if end == "gpu" else tree.pf
    behind = {slow, *tree.inventory.functions[slow].virtual_functions}
    tree.set_link(slow, "16.0 GT/s PCIe", "4")
    clock.now += 5
    one.look()
    wanted = {
        device.name: f"{end}-pcie-link-degraded"
        for device in tree.offer.devices
        if behind & {*device.gpus, *device.nics}
    }
    assert tree.pair.name in wanted
    assert len(wanted) < len(tree.offer.devices)
    assert one.taints == wanted
    assert by_name(one)[tree.pair.name].health is Health.UNHEALTHY
    tree.set_link(slow, "16.0 GT/s PCIe", "16")
    settles(one, clock, wanted)


def test_unbound_vf_taints_what_has_it_and_nothing_else(tree: Tree, clock: Clock) -> None:
    (tree.function(tree.vf) / "driver").unlink()
    one = monitor(tree, clock=clock)
    one.look()
    assert set(one.taints) == {device.name for device in tree.offer.devices if tree.vf in device.nics}
    assert set(one.taints.values()) == {"nic-driver-unbound"}


def test_flapping_link_is_held(tree: Tree, clock: Clock) -> None:
    one = monitor(tree, clock=clock, damping=Damping(settle=10, falls=3, window=120, hold=300))
    one.look()
    for _ in range(3):
        for carrier in (False, True):
            tree.set_carrier(tree.pf, carrier)
            clock.now += 5
            one.look()
    clock.now += 250
    one.look()
    assert one.taints[tree.pair.name] == "nic-flapping"
    assert "fell 3 times" in by_name(one)[tree.pair.name].message
    clock.now += 60
    one.look()
    assert one.taints == {}


def test_unknown_is_told_and_taints_nothing(tree: Tree, clock: Clock) -> None:
    (tree.function(tree.gpu) / "config").unlink()
    one = monitor(tree, clock=clock)
    one.look()
    assert by_name(one)[tree.pair.name].health is Health.UNKNOWN
    assert one.taints == {}


def test_answer_that_is_too_old_is_unknown(tree: Tree, clock: Clock) -> None:
    """A read of a dying device may never come back."""
    one = monitor(tree, clock=clock)
    one.look()
    clock.now += 29
    assert {health.health for health in by_name(one).values()} == {Health.HEALTHY}
    clock.now += 2
    assert {device.health for device in one.devices()} == {Health.UNKNOWN}
    assert "hangs" in by_name(one)[tree.pair.name].message


def test_other_offer_is_looked_at_and_what_was_known_stays(tree: Tree, clock: Clock) -> None:
    one = monitor(tree, clock=clock)
    one.look()
    tree.set_carrier(tree.pf, False)
    clock.now += 5
    one.look()
    tree.set_carrier(tree.pf, True)
    one.update(Offer(tree.offer.devices[:1]), tree.inventory)
    clock.now += 5
    one.look()
    assert one.taints == {tree.pair.name: "nic-link-down"}  # still settling: not a first look
    assert [device.name for device in one.devices()] == [tree.pair.name]


def test_listener_hears_of_changes_only(tree: Tree, clock: Clock) -> None:
    heard: list[int] = []
    one = monitor(tree, clock=clock)
    unsubscribe = one.subscribe(lambda: heard.append(len(one.devices())))
    one.look()
    assert heard == [len(tree.offer.devices)]
    clock.now += 5
    one.look()
    assert len(heard) == 1
    tree.lose(tree.gpu)
    one.look()
    assert len(heard) == 2
    unsubscribe()
    unsubscribe()  # does no harm
    (tree.function(tree.vf) / "driver").unlink()
    one.look()
    assert len(heard) == 2


def test_changes_are_logged_once(tree: Tree, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    one = monitor(tree, clock=clock)
    one.look()
    assert caplog.messages == []
    tree.lose(tree.gpu)
    for _ in range(3):
        one.look()
    assert len([m for m in caplog.messages if "is unhealthy" in m]) == 3  # the GPU, its pair, the node


def test_running_monitor_looks_when_told(tree: Tree) -> None:
    """Long before its period is over."""
    told: Queue[Mapping[str, str]] = Queue()
    one = monitor(tree, period=3600.0, on_change=told.put, damping=Damping(settle=0))
    looked = threading.Event()
    one.subscribe(looked.set)
    with running(one):
        assert looked.wait(PATIENCE)
        tree.lose(tree.gpu)
        one.recheck()
        assert set(told.get(timeout=PATIENCE).values()) == {"gpu-lost"}


def test_running_monitor_looks_by_itself(tree: Tree) -> None:
    told: Queue[Mapping[str, str]] = Queue()
    one = monitor(tree, period=0.3, on_change=told.put, damping=Damping(settle=0))
    looked = threading.Event()
    one.subscribe(looked.set)
    with running(one):
        assert looked.wait(PATIENCE)
        tree.set_carrier(tree.pf, False)
        assert set(told.get(timeout=PATIENCE).values()) == {"nic-link-down"}
        tree.set_carrier(tree.pf, True)
        assert told.get(timeout=PATIENCE) == {}


def test_taints_are_told_again_when_the_telling_failed(tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
    told: Queue[Mapping[str, str]] = Queue()
    failures = [RuntimeError("API server away")]

    def tell(taints: Mapping[str, str]) -> None:
        if failures:
            raise failures.pop()
        told.put(taints)

    tree.lose(tree.gpu)
    with running(monitor(tree, period=0.3, on_change=tell)):
        assert set(told.get(timeout=PATIENCE).values()) == {"gpu-lost"}
    assert "API server away" in caplog.text


def test_slow_telling_holds_up_no_look(tree: Tree) -> None:
    entered, leave = threading.Event(), threading.Event()

    def tell(taints: Mapping[str, str]) -> None:
        entered.set()
        leave.wait(PATIENCE)

    tree.lose(tree.gpu)
    one = monitor(tree, period=0.3, on_change=tell)
    with running(one):
        assert entered.wait(PATIENCE)
        news = threading.Event()
        one.subscribe(news.set)
        tree.set_carrier(tree.pf, False)
        assert news.wait(PATIENCE)
        leave.set()


def test_look_that_fails_is_not_the_last(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    one = monitor(tree, period=0.3)
    looked, failures = threading.Event(), [RuntimeError("odd")]
    look = one.look

    def failing() -> None:
        if failures:
            raise failures.pop()
        look()

    monkeypatch.setattr(one, "look", failing)
    one.subscribe(looked.set)
    with running(one):
        assert looked.wait(PATIENCE)


@pytest.mark.parametrize(("vfs", "milliseconds"), [(4, 40), (16, 60)])
def test_look_costs_little(
    tmp_path: Path, record_property: Callable[[str, object], None], vfs: int, milliseconds: float
) -> None:
    """CPU time of one look, once a period of 5 s. The bound leaves room for a busy machine."""
    tree = Tree(tmp_path / "machine", dgx_a100(vfs))
    one = monitor(tree)
    one.look()
    costs = []
    for _ in range(5):
        before = time.thread_time()
        one.look()
        costs.append((time.thread_time() - before) * 1000)
    record_property("milliseconds of CPU", min(costs))
    assert min(costs) < milliseconds


def test_a_vf_on_its_way_to_another_driver_is_not_ill_and_one_without_is(tree: Tree, clock: Clock) -> None:
    vf = tree.vf
    (tree.function(vf) / "driver").unlink()
    on_its_way = {vf}
    one = monitor(tree, clock=clock, changing=lambda: on_its_way)
    one.look()
    assert one.taints == {}
    assert {health.health for health in by_name(one).values()} == {Health.HEALTHY}
    on_its_way.clear()
    one.look()
    assert set(one.taints.values()) == {"nic-driver-unbound"}
