"""Commands in the virtual node. The agent of the node runs on this machine here; nothing of it needs the node."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.shell import HarnessError
from harness.vnode_channel import Channel
from harness.vnode_disk import GUEST_FILES


@pytest.fixture
def channel() -> Iterator[Channel]:
    agent = subprocess.Popen(
        [sys.executable, str(GUEST_FILES / "agent.py"), "127.0.0.1", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert agent.stdout
        match = re.search(r"port (\d+)", agent.stdout.readline())
        assert match
        yield Channel(int(match[1]))
    finally:
        agent.terminate()
        agent.wait()
        agent.stdout.close()  # type: ignore[union-attr]


def here(command: str, channel: Channel, **options: object) -> tuple[int, str, str]:
    done = channel.execute(["sh", "-c", command], **options)  # type: ignore[arg-type]
    return done.code, done.stdout.decode(), done.stderr.decode()


def test_output_and_exit_status_come_back_apart(channel: Channel) -> None:
    assert here("echo out; echo err >&2; exit 7", channel) == (7, "out\n", "err\n")


def test_a_signals_end_is_told_as_a_shell_tells_it(channel: Channel) -> None:
    assert here("kill -TERM $$", channel)[0] == 128 + 15


def test_input_arrives_whole_also_when_it_is_large(channel: Channel) -> None:
    data = os.urandom(3_000_000)
    assert channel.execute(["cat"], stdin=data).stdout == data


def test_a_command_that_reads_none_of_its_input_ends_all_the_same(channel: Channel) -> None:
    assert channel.execute(["true"], stdin=bytes(3_000_000)).code == 0


def test_variables_are_added_to_the_environment(channel: Channel) -> None:
    assert here('echo "$GREETING"; [ -n "$PATH" ]', channel, env={"GREETING": "hello"}) == (0, "hello\n", "")


def test_a_program_that_is_not_there_is_named(channel: Channel) -> None:
    with pytest.raises(HarnessError, match="no-such-program: No such file or directory"):
        channel.execute(["no-such-program"])


def test_a_failed_command_says_what_it_said(channel: Channel) -> None:
    with pytest.raises(HarnessError, match=r"(?s)failed with code 3:.*not today"):
        channel.run("sh", "-c", "echo not today >&2; exit 3")


def test_commands_run_side_by_side(channel: Channel, tmp_path: Path) -> None:
    """Each of two waits for what the other does."""
    first, second = tmp_path / "first", tmp_path / "second"
    os.mkfifo(first)
    os.mkfifo(second)
    results: list[int] = []
    commands = (f"echo a > {first}; cat {second}", f"cat {first}; echo b > {second}")
    threads = [
        threading.Thread(target=lambda c=one: results.append(here(c, channel, timeout=20)[0]))
        for one in commands
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [0, 0]


def test_what_a_command_leaves_behind_does_not_hold_its_end_up(channel: Channel) -> None:
    began = time.monotonic()
    code, output, _ = here("sleep 60 & echo $!", channel, timeout=20)
    os.kill(int(output), 9)
    assert code == 0
    assert time.monotonic() - began < 10


def test_silence_for_too_long_ends_the_command(channel: Channel, tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="gave no sign of life for 1 s"):
        here(f"echo $$ > {tmp_path}/pid; exec sleep 60", channel, timeout=1)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/cmdline").exists() and b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the command outlived its connection"
        time.sleep(0.05)


def test_files_and_directories_go_in_and_come_back(channel: Channel, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "below").mkdir(parents=True)
    (source / "below/file").write_bytes(os.urandom(200_000))
    (source / "program").write_text("#!/bin/sh\n")
    (source / "program").chmod(0o755)
    there, back = tmp_path / "there/copy", tmp_path / "back"
    channel.put(source, str(there))
    assert (there / "below/file").read_bytes() == (source / "below/file").read_bytes()
    assert os.access(there / "program", os.X_OK)
    back.mkdir()
    (back / "old").touch()
    channel.get(str(there), back)
    assert sorted(path.name for path in back.rglob("*")) == ["below", "file", "program"]
    channel.get(str(there / "below/file"), tmp_path / "one")
    assert (tmp_path / "one").read_bytes() == (source / "below/file").read_bytes()


def test_a_file_that_is_not_there_cannot_be_fetched(channel: Channel, tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="absent"):
        channel.get(f"{tmp_path}/absent", tmp_path / "copy")


def test_nobody_listening_is_no_answer() -> None:
    assert not Channel(1).answers(seconds=1)
