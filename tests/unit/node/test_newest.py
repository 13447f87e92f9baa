"""Who looks at the machine does not wait for the API server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue

from railmate.node.newest import Newest

PATIENCE = 20.0


@contextmanager
def running(one: Newest[int]) -> Iterator[None]:
    thread = threading.Thread(target=one.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        one.stop()
        thread.join(PATIENCE)
    assert not thread.is_alive()


def test_putting_does_not_wait_and_only_the_last_of_what_came_meanwhile_is_taken() -> None:
    taken: Queue[int] = Queue()
    leave = threading.Event()

    def take(one: int) -> None:
        taken.put(one)
        leave.wait(PATIENCE)

    newest = Newest(take)
    with running(newest):
        newest.put(1)
        assert taken.get(timeout=PATIENCE) == 1
        for number in (2, 3, 4):
            newest.put(number)
        leave.set()
        assert taken.get(timeout=PATIENCE) == 4
    assert taken.empty()


def test_what_could_not_be_taken_is_tried_again() -> None:
    taken: Queue[int] = Queue()
    failures = [RuntimeError("odd")]

    def take(one: int) -> None:
        if failures:
            raise failures.pop()
        taken.put(one)

    newest = Newest(take, again=0.01)
    with running(newest):
        newest.put(1)
        assert taken.get(timeout=PATIENCE) == 1


def test_what_is_newer_is_taken_in_place_of_what_failed() -> None:
    taken: Queue[int] = Queue()
    failed = threading.Event()

    def take(one: int) -> None:
        if one == 1:
            failed.set()
            raise RuntimeError("odd")
        taken.put(one)

    newest = Newest(take, again=0.01)
    with running(newest):
        newest.put(1)
        assert failed.wait(PATIENCE)
        newest.put(2)
        assert taken.get(timeout=PATIENCE) == 2


def test_the_last_is_handed_on_once_more_and_never_in_place_of_a_newer() -> None:
    taken: Queue[int] = Queue()
    newest = Newest(taken.put, last=1)
    newest.repeat()
    with running(newest):
        assert taken.get(timeout=PATIENCE) == 1
        newest.put(2)
        newest.repeat()
        assert taken.get(timeout=PATIENCE) == 2
    Newest(taken.put).repeat()  # nothing to hand on
