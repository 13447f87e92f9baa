"""Fixtures that several tiers use."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from harness.machines import MACHINES, load_machine
from harness.sysfs import write_tree
from railmate.inventory.model import Inventory
from railmate.inventory.scan import scan

ROOT = Path(__file__).parent

# How long an example takes says more of the machine's load than of the code.
settings.register_profile("railmate", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("railmate")


#: What is one of a kind: all its tests are one worker's, and begin at once, because most of their time is waiting.
ALONE = ("tests/e2e/vnode", "tests/e2e", "tests/component with an API server", "tests/component")


def lane(nodeid: str) -> str:
    """Tests of one lane run in one process, in order: those of the cluster, of the virtual node, of a control plane, of
    the host's interfaces; of the rest, those of a file."""
    file = nodeid.partition("::")[0]
    found = next((one for one in ALONE if file.startswith(f"{one}/")), file)
    return (
        f"{found} with an API server" if found == "tests/component" and _asks_an_api_server(file) else found
    )


@cache
def _asks_an_api_server(file: str) -> bool:
    text = (ROOT.parent / file).read_text()
    return "Cluster" in text or "ControlPlane" in text


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers of ``-n`` take lanes in the order of the tests."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = {name: place for place, name in enumerate(ALONE)}
        items.sort(key=lambda item: places.get(lane(item.nodeid), len(places)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return lane(nodeid)

    return Lanes(config, log)


@pytest.fixture
def figures(record_property: Callable[[str, object], None]) -> Callable[[object], None]:
    """``figures(text)``: what a test has measured or counted, shown at the end of the run."""
    return lambda text: record_property("figures", str(text))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports: list[Sequence[tuple[str, object]]] = [
        report.user_properties
        for group in terminalreporter.stats.values()
        for report in group
        if getattr(report, "when", None) == "call"
    ]
    lines = [str(value) for properties in reports for name, value in properties if name == "figures"]
    if lines:
        terminalreporter.section("figures")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def machine_root(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """``machine_root(name, VFs per rail)``: a directory with the machine's ``sys`` and ``proc``. Read only."""

    @cache
    def root(name: str, vfs_per_rail: int = 0) -> Path:
        directory = tmp_path_factory.mktemp(name)
        write_tree(load_machine(MACHINES / f"{name}.yaml", vfs_per_rail), directory)
        return directory

    return root


@pytest.fixture(scope="session")
def scanned(machine_root: Callable[[str, int], Path]) -> Callable[[str, int], Inventory]:
    """``scanned(name, VFs per rail)``: the inventory that a scan of the machine's tree gives."""

    @cache
    def inventory(name: str, vfs_per_rail: int = 0) -> Inventory:
        root = machine_root(name, vfs_per_rail)
        return scan(root / "sys", root / "proc")

    return inventory


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """What the garbage collector ends while a failure's source is parsed (a task nobody awaited is logged with its own
    source) makes CPython before 3.11.8 raise SystemError, and the whole run ends there (CPython's issue 106905)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if enabled:
            gc.enable()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A failure is told when it happens: the run goes on for minutes."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} failed ({report.when}):\n{report.longreprtext[-2000:]}", file=sys.stderr)
