"""Processes and cgroups of the bench: found again, ended, and never somebody else's."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import cgroups
from harness.forward import forward
from harness.process import ProcessRecord, start
from harness.shell import HarnessError, run


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = start(["sleep", "600"], tmp_path / "log")
    yield process
    process.kill()
    process.wait()


def test_recorded_process_is_found_again_and_ended(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    ProcessRecord.of(sleeper.pid).save(tmp_path / "record")
    record = ProcessRecord.load(tmp_path / "record")
    assert record is not None
    assert record.alive()
    record.stop()
    assert not record.alive()
    assert sleeper.wait() == -signal.SIGTERM


def test_another_process_under_the_same_pid_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    record = ProcessRecord.of(sleeper.pid)
    for stranger in (
        dataclasses.replace(record, started=record.started + 1),
        dataclasses.replace(record, boot="another boot"),
    ):
        assert not stranger.alive()
        stranger.stop()
    assert sleeper.poll() is None
    record.stop()


def test_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    stubborn = start(["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 600; done"], tmp_path / "log")
    while not (tmp_path / "log").read_text():
        assert stubborn.poll() is None
    ProcessRecord.of(stubborn.pid).stop(grace=0.1)
    assert stubborn.wait() == -signal.SIGKILL


def test_unreadable_record_counts_as_none(tmp_path: Path) -> None:
    assert ProcessRecord.load(tmp_path / "absent") is None
    (tmp_path / "bad").write_text('{"pid": 1}')
    assert ProcessRecord.load(tmp_path / "bad") is None


def test_tied_process_ends_with_a_killed_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c",
         "import pathlib, sys, signal; from harness.process import start;"
         "print(start(['sleep', '600'], pathlib.Path(sys.argv[1])).pid, flush=True); signal.pause()", tmp_path / "log"],
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert parent.stdout is not None
    child = ProcessRecord.of(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    assert child.wait(10)


def test_failed_command_is_shown_with_its_words() -> None:
    with pytest.raises(HarnessError, match=r"(?s)`sh -c .*` failed with code 3:.*went wrong"):
        run(["sh", "-c", "echo went wrong >&2; exit 3"])
    with pytest.raises(HarnessError, match="no-such-program is missing"):
        run(["no-such-program"])


def test_cgroup_tree_is_removed_from_every_hierarchy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [tmp_path / "memory", tmp_path / "unified"]
    for point in points:
        (point / "common" / "ours" / "pod" / "container").mkdir(parents=True)
        (point / "other").mkdir()
    monkeypatch.setattr(cgroups, "mount_points", lambda: points)
    cgroups.remove("common/ours")
    assert [sorted(p.name for p in point.iterdir()) for point in points] == [["other"], ["other"]]


def test_cgroup_of_another_engine_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "common" / "ours").mkdir(parents=True)
    (tmp_path / "common" / "theirs").mkdir()
    monkeypatch.setattr(cgroups, "mount_points", lambda: [tmp_path])
    cgroups.remove("common/ours")
    assert [path.name for path in (tmp_path / "common").iterdir()] == ["theirs"]


def test_busy_cgroup_is_named_with_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "cgroup.procs").write_text("4711\n")
    monkeypatch.setattr(cgroups, "mount_points", lambda: [tmp_path])
    monkeypatch.setattr(cgroups, "_SECONDS", 0.1)
    with pytest.raises(HarnessError, match=r"ours cannot be removed; processes in it: 4711"):
        cgroups.remove("ours")


def test_cgroup_hierarchies_are_read_from_the_mount_table(tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text(
        "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n"
        "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
    )
    found = cgroups.mount_points(tmp_path / "mounts")
    assert found == [Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/unified")]


def test_forwarder_carries_both_ways_and_ends_with_its_process(sleeper: subprocess.Popen[bytes]) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper())  # answers after the client's end of file
        await writer.drain()
        writer.close()

    async def scenario() -> bytes:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        inner = server.sockets[0].getsockname()[1]
        listener = socket.create_server(("127.0.0.1", 0))
        outer = listener.getsockname()[1]
        task = asyncio.create_task(forward(listener, inner, sleeper.pid))
        reader, writer = await asyncio.open_connection("127.0.0.1", outer)
        writer.write(b"hello")
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        sleeper.kill()
        await asyncio.wait_for(task, 10)
        server.close()
        return answer

    assert asyncio.run(scenario()) == b"HELLO"
    sleeper.wait()


def test_frozen_cgroups_are_thawed_in_both_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "mount_points", lambda: [tmp_path / "freezer", tmp_path / "unified"])
    v1, v2 = tmp_path / "freezer/ours/pod/freezer.state", tmp_path / "unified/ours/pod/cgroup.freeze"
    other = tmp_path / "freezer/theirs/freezer.state"
    for path, state in ((v1, "FROZEN\n"), (v2, "1\n"), (other, "FROZEN\n")):
        path.parent.mkdir(parents=True)
        path.write_text(state)
    cgroups.thaw("ours")
    assert (v1.read_text(), v2.read_text(), other.read_text()) == ("THAWED", "0", "FROZEN\n")
