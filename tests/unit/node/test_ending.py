"""A successor leaves the runtime to an instance that is ending."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from own_process import in_a_process_of_its_own

from railmate.node.ending import Ending


def waited(ending: Ending, at_most: float) -> tuple[bool, float]:
    began = time.monotonic()
    return asyncio.run(ending.ended(at_most)), time.monotonic() - began


def test_where_nobody_ends_nobody_waits(tmp_path: Path) -> None:
    done, seconds = waited(Ending(tmp_path), 10)
    assert done
    assert seconds < 0.2
    assert list(tmp_path.iterdir()) == [], "looking leaves nothing"


def test_it_is_waited_for_until_it_has_ended_in_whatever_way(tmp_path: Path) -> None:
    with in_a_process_of_its_own(Ending(tmp_path).begin):
        done, seconds = waited(Ending(tmp_path), 0.6)
        assert not done
        assert seconds >= 0.6
    done, seconds = waited(Ending(tmp_path), 10)
    assert done
    assert seconds < 0.2


def test_two_that_end_at_once_do_not_wait_for_each_other(tmp_path: Path) -> None:
    with in_a_process_of_its_own(Ending(tmp_path).begin):
        began = time.monotonic()
        Ending(tmp_path).begin()
        assert time.monotonic() - began < 0.2


def test_a_directory_that_cannot_be_written_keeps_nobody_from_ending(tmp_path: Path) -> None:
    Ending(tmp_path / "gone").begin()
    assert waited(Ending(tmp_path / "gone"), 10)[0]
