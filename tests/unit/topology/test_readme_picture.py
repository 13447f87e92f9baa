"""The README's picture is what ``railmate topology -o svg`` draws of the demo's machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.machines import DEMO_MACHINE, DEMO_VFS_PER_RAIL, load_machine
from harness.sysfs import write_tree
from railmate.cli.main import main

ROOT = Path(__file__).resolve().parents[3]


def test_the_picture_in_the_readme_is_drawn_from_the_demo_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tree(load_machine(DEMO_MACHINE, vfs_per_rail=DEMO_VFS_PER_RAIL), tmp_path)
    assert main(["topology", "--sysfs-root", str(tmp_path / "sys"), "-o", "svg"]) == 0
    assert "](examples/node.svg)" in (ROOT / "README.md").read_text()
    assert capsys.readouterr().out == (ROOT / "examples" / "node.svg").read_text()
