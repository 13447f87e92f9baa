"""The virtual node itself: what is left of one that did not come up, and of one that was ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness import vnode
from harness.shell import HarnessError
from harness.vnode import VirtualNode
from harness.vnode_channel import Done


def processes_of(directory: Path) -> list[str]:
    """Command lines of processes that work in a directory."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and (entry / "cwd").readlink().is_relative_to(directory):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended
    return found


@pytest.mark.long  # starts a second machine, twice
def test_a_boot_that_hangs_is_tried_once_more_and_leaves_nothing(
    virtual_node: VirtualNode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """No boot is over within a second. ``virtual_node``: so that what is needed is there."""
    monkeypatch.setattr(vnode, "_BOOT_SECONDS", 1)
    node = VirtualNode(tmp_path / "hanging")
    seen: list[list[str]] = []
    stop = node.stop
    monkeypatch.setattr(node, "stop", lambda: (seen.append(processes_of(tmp_path)), stop()))
    with pytest.raises(HarnessError, match=r"does not answer after \d+ s"):
        node.start()
    assert capfd.readouterr().err.count("vnode: booting") == 2
    assert [len(running) for running in seen] == [0, 2, 2]  # GPUs and QEMU, both times
    assert processes_of(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long  # starts a second machine
def test_a_node_that_was_left_running_is_ended_by_another_process_without_a_trace(
    virtual_node: VirtualNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VirtualNode, "_await_agent", lambda self: None)
    monkeypatch.setattr(VirtualNode, "_set_up", lambda self, settings: None)
    directory = tmp_path / "left"
    VirtualNode(directory).start(tied=False)
    assert len(processes_of(tmp_path)) == 2
    other = VirtualNode(directory)  # knows nothing but the directory
    assert all(other.running().values())
    other.stop()
    assert not any(other.running().values())
    assert processes_of(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_several_commands_and_files_pass_through_at_once(virtual_node: VirtualNode, tmp_path: Path) -> None:
    data = os.urandom(1_000_000)
    (tmp_path / "sent").write_bytes(data)
    channel = virtual_node.channel
    channel.put(tmp_path / "sent", "/tmp/there/received")
    channel.get("/tmp/there/received", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data
    done = channel.execute(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert done == Done(3, b"out\n", b"err\n")


def test_the_kernel_is_one_that_can_move_soft_roce(virtual_node: VirtualNode) -> None:
    release = virtual_node.channel.run("uname", "-r")
    assert int(release.split(".")[0]) >= 7
    assert "netns exclusive" in virtual_node.channel.run("rdma", "system")
