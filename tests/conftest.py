"""Fixtures that several tiers use."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from harness.machines import MACHINES, load_machine
from harness.sysfs import write_tree
from railmate.inventory.model import Inventory
from railmate.inventory.scan import scan


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
