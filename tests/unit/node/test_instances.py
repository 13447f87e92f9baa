"""The slices are the youngest instance's, as long as that lives."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from railmate.node.instances import Instances


@contextmanager
def in_a_process_of_its_own(instances: Instances) -> Iterator[None]:
    """It publishes, and is killed at the end."""
    ready, written = os.pipe()
    pid = os.fork()
    if pid == 0:
        instances.enter()
        os.write(written, b".")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"."
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(written)


def files(plugin_dir: Path) -> int:
    return len(list((plugin_dir / "instances").iterdir()))


def test_an_elder_is_outdone_once_a_younger_publishes_and_until_it_is_killed(tmp_path: Path) -> None:
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    elder.enter()
    assert not elder.outdone(), "nobody publishes beside it"
    with in_a_process_of_its_own(younger):
        assert elder.outdone()
        assert files(tmp_path) == 2
    assert not elder.outdone()
    assert files(tmp_path) == 1, "what the killed one left is removed"


def test_a_younger_is_not_outdone_by_an_elder(tmp_path: Path) -> None:
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    with in_a_process_of_its_own(elder):
        younger.enter()
        assert not younger.outdone()
        assert files(tmp_path) == 2, "an elder's file stays while it lives"


def test_an_instance_does_not_outdo_itself_however_often_it_publishes(tmp_path: Path) -> None:
    one = Instances(tmp_path)
    one.enter()
    one.enter()
    assert not one.outdone()
    assert files(tmp_path) == 1


def test_one_that_ends_leaves_the_slices_to_the_elder_before_it_has_ended(tmp_path: Path) -> None:
    """An update that is taken back: the younger ends, and may wait half a minute for its calls."""
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    elder.enter()
    younger.enter()
    assert elder.outdone()
    younger.leave()
    younger.enter()  # as a write that was under way does
    assert not elder.outdone()
    assert files(tmp_path) == 1


def test_what_instances_left_is_removed_when_another_begins(tmp_path: Path) -> None:
    for _ in range(3):
        with in_a_process_of_its_own(Instances(tmp_path)):
            pass
    last = Instances(tmp_path)
    last.enter()
    assert files(tmp_path) == 1


def test_strange_files_and_a_directory_that_cannot_be_written_outdo_nobody(tmp_path: Path) -> None:
    (tmp_path / "instances").mkdir()
    (tmp_path / "instances/notes.txt").write_text("not ours")
    one = Instances(tmp_path)
    one.enter()
    assert not one.outdone()
    absent = Instances(tmp_path / "instances/notes.txt")
    absent.enter()
    assert not absent.outdone()
