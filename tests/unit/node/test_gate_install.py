"""How the gate gets onto the node, and what is done when it cannot."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from railmate import files
from railmate.errors import RailmateError
from railmate.node.gateinstall import GateInstaller
from railmate.node.settings import Settings


class Node:
    """A gate of the image, where it is installed, and what was said about it."""

    def __init__(self, root: Path) -> None:
        self.gate, self.said = root / "gate", list[str]()
        self.gate.write_bytes(b"\x7fELF one")
        self.kubelet = root / "kubelet"
        settings = Settings(node_name="node1", gate_binary=self.gate, kubelet_dir=self.kubelet)
        self.installed, self.installer = settings.installed_gate, GateInstaller(settings, self.said.append)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "write_bytes", _no_space)


def test_gate_is_installed_executable_and_replaced_when_it_changes(node: Node) -> None:
    node.installer.look()
    assert node.installed.read_bytes() == b"\x7fELF one"
    assert node.installed.stat().st_mode & 0o555 == 0o555
    before = node.installed.stat().st_ino
    node.installer.look()
    assert node.installed.stat().st_ino == before, "the same file is left alone"
    node.gate.write_bytes(b"\x7fELF two")
    node.installer.look()
    assert node.installed.read_bytes() == b"\x7fELF two"
    assert node.installed.stat().st_ino != before, "renamed into place, never written over"
    assert node.said == []


def test_gate_that_cannot_be_installed_is_said_in_words(node: Node) -> None:
    node.kubelet.write_text("in the way")
    with pytest.raises(RailmateError, match="mounted, and writable"):
        node.installer.look()


def test_full_disk_is_no_reason_to_end_where_an_older_gate_serves(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new image on a full node: without a driver nothing would be given back, and the disk stay full."""
    node.installer.look()
    node.gate.write_bytes(b"\x7fELF two")
    monkeypatch.setattr(files, "write_bytes", _no_space)
    node.installer.look()
    assert node.installed.read_bytes() == b"\x7fELF one"
    (message,) = node.said
    assert "No space left" in message
    assert str(node.installed) in message
    monkeypatch.undo()
    node.installer.look()
    assert node.installed.read_bytes() == b"\x7fELF two", "tried again"


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("there", ["nothing", "an empty file", "a file that nobody may run"])
def test_full_disk_ends_the_driver_where_no_gate_serves(node: Node, there: str) -> None:
    node.installed.parent.mkdir(parents=True)
    if there != "nothing":
        node.installed.write_bytes(b"" if there == "an empty file" else b"\x7fELF one")
        node.installed.chmod(0o755 if there == "an empty file" else 0o644)
        node.gate.write_bytes(b"\x7fELF two")
    with pytest.raises(RailmateError, match="No space left"):
        node.installer.look()
    assert node.said == []


def _no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
