"""A GPU that NVIDIA's driver lost is noticed, also when sysfs shows nothing; what the library does harms nobody.

The library is the stub of tests/nvml, in a real helper process.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue

import pynvml
import pytest

from harness.machines import MACHINES, Machine, load_machine
from harness.nvmlstub import FACTS_VARIABLE, build, write_facts
from railmate.health import nvmlevents
from railmate.health.damping import Damping
from railmate.health.model import Health
from railmate.health.monitor import HealthMonitor
from railmate.health.nvml import NvmlWatch
from unit.health.health_tree import Tree, dgx_a100

FIRST, SECOND = "0000:07:00.0", "0000:0f:00.0"
PATIENCE = 20.0
LOST = f"fail nvmlDeviceGetMemoryInfo 15 {FIRST}"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


class Driver:
    """What the library answers from."""

    def __init__(self, path: Path) -> None:
        self._machine: Machine = load_machine(MACHINES / "dgx-a100.yaml")
        self._path = path
        self.says()

    def says(self, *rules: str) -> None:
        write_facts(self._machine, self._path.with_suffix(".new"), rules=rules).rename(self._path)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setenv(FACTS_VARIABLE, str(tmp_path / "facts"))
    return Driver(tmp_path / "facts")


class Watched:
    def __init__(self, library: Path | str, **options: float) -> None:
        self.news: Queue[set[str]] = Queue()
        options = {"period": 0.2, "again": 0.2, **options}
        self.watch = NvmlWatch(
            str(library), [FIRST, SECOND], lambda: self.news.put(set(self.watch.lost())), **options
        )

    def next(self) -> set[str]:
        return self.news.get(timeout=PATIENCE)


@contextmanager
def running(watched: Watched) -> Iterator[None]:
    thread = threading.Thread(target=watched.watch.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        watched.watch.stop()
        thread.join(PATIENCE)
    assert not thread.is_alive()


def logged(caplog: pytest.LogCaptureFixture, words: str) -> Callable[[], bool]:
    return lambda: any(words in message for message in caplog.messages)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_event_structure_is_nvidias_own() -> None:
    theirs, ours = pynvml.c_nvmlEventData_t, nvmlevents._EventData
    assert ctypes.sizeof(theirs) == ctypes.sizeof(ours)
    offsets = [getattr(theirs, name).offset for name, _ in theirs._fields_]
    assert offsets == [getattr(ours, name).offset for name, _ in ours._fields_]
    assert pynvml.nvmlEventTypeXidCriticalError == nvmlevents._XID_EVENT
    assert nvmlevents._TIMEOUT == pynvml.NVML_ERROR_TIMEOUT
    assert nvmlevents._GPU_IS_LOST == pynvml.NVML_ERROR_GPU_IS_LOST


def test_gpu_that_is_lost_is_told_and_that_it_is_back(library: Path, driver: Driver) -> None:
    watched = Watched(library)
    with running(watched):
        driver.says(LOST)
        assert watched.next() == {FIRST}
        driver.says()
        assert watched.next() == set()


def test_event_that_the_gpu_fell_off_the_bus_is_told_before_the_next_look(
    library: Path, driver: Driver
) -> None:
    watched = Watched(library, period=3600.0)
    with running(watched):
        time.sleep(
            0.5
        )  # whether the helper waits already cannot be seen; an event before that is heard as well
        driver.says(f"xid {SECOND} 79")
        assert watched.next() == {SECOND}


def test_other_errors_are_logged_and_no_reason_to_call_the_gpu_lost(
    library: Path, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.says(f"xid {FIRST} 31")
    watched = Watched(library)
    with running(watched):
        wait_for(logged(caplog, f"GPU {FIRST}: Xid 31."), "the error in the log")
    assert watched.news.empty()


def test_gpu_that_was_lost_before_is_told_too(library: Path, driver: Driver) -> None:
    driver.says(f"fail nvmlDeviceGetHandleByPciBusId_v2 15 {FIRST}")
    watched = Watched(library)
    with running(watched):
        assert watched.next() == {FIRST}


def test_library_that_crashes_over_a_lost_gpu_leaves_it_lost(library: Path, driver: Driver) -> None:
    watched = Watched(library)
    with running(watched):
        driver.says(LOST)
        assert watched.next() == {FIRST}
        driver.says("crash nvmlInit_v2", "crash nvmlEventSetWait_v2")
        time.sleep(1.0)  # several tries
        assert watched.watch.lost() == {FIRST}
        driver.says()
        assert watched.next() == set()


def test_library_that_hangs_is_ended_and_asked_anew(
    library: Path, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    driver.says("hang nvmlDeviceGetMemoryInfo")
    watched = Watched(library, silence=0.5)
    with running(watched):
        wait_for(logged(caplog, "gave no answer"), "the hang in the log")
        driver.says(LOST)
        assert watched.next() == {FIRST}


def test_driver_without_events_is_looked_at_in_turn(library: Path, driver: Driver) -> None:
    driver.says("fail nvmlEventSetCreate 3", LOST)
    watched = Watched(library)
    with running(watched):
        assert watched.next() == {FIRST}


def test_driver_that_is_too_old_to_wait_for_events_is_looked_at_in_turn(
    driver: Driver, tmp_path: Path
) -> None:
    driver.says(LOST)
    watched = Watched(build(tmp_path / "old", "OLD_DRIVER"))
    with running(watched):
        assert watched.next() == {FIRST}


@pytest.mark.parametrize("library_name", ["/nowhere/libnvidia-ml.so.1"])
def test_machine_without_the_library_is_told_once(
    library_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    watched = Watched(library_name, again=0.05)
    with running(watched):
        wait_for(logged(caplog, "cannot be loaded"), "the reason in the log")
        time.sleep(0.5)
    assert len([one for one in caplog.messages if "cannot be loaded" in one]) == 1
    assert watched.news.empty()


def test_lost_gpu_taints_itself_and_its_pair_at_once_and_not_for_ever(
    library: Path, driver: Driver, tmp_path: Path
) -> None:
    """With a look once an hour, from the library's word to the taint."""
    tree = Tree(tmp_path / "machine", dgx_a100(2))
    told: Queue[dict[str, str]] = Queue()
    watched = Watched(library)
    monitor = HealthMonitor(
        tree.sys,
        tree.offer,
        tree.inventory,
        pcie_links=True,
        on_change=lambda taints: told.put(dict(taints)),
        lost=lambda: watched.watch.lost(),
        period=3600.0,
        damping=Damping(settle=0.0),
    )
    watched.watch._changed = monitor.recheck
    monitor.look()
    threads = [threading.Thread(target=one, daemon=True) for one in (monitor.run, monitor.deliver)]
    for thread in threads:
        thread.start()
    try:
        with running(watched):
            driver.says(LOST)
            wanted = {device.name: "gpu-lost" for device in tree.offer.devices if FIRST in device.gpus}
            assert len(wanted) == 3, "the GPU, its pair and the whole node"
            assert told.get(timeout=PATIENCE) == wanted
            (device, *_) = [one for one in monitor.devices() if one.name in wanted]
            assert device.health is Health.UNHEALTHY
            assert "NVML" in device.message
            driver.says()
            assert told.get(timeout=PATIENCE) == {}
            assert {device.health for device in monitor.devices()} == {Health.HEALTHY}
    finally:
        monitor.stop()
        for thread in threads:
            thread.join(PATIENCE)
