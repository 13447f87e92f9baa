"""Hands on the newest of something, from a thread of its own: who has it is not held up by who takes it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds until what could not be handed on is tried again.
_AGAIN = 5.0


class Newest(Generic[T]):
    """``take`` may block for long. What came meanwhile is left out but for the last. ``run`` blocks until ``stop``.
    ``last``: what was handed on already, if anything."""

    def __init__(self, take: Callable[[T], None], again: float = _AGAIN, last: T | None = None) -> None:
        self._take, self._again, self._last = take, again, last
        self._lock = threading.Lock()
        self._waiting: list[T] = []
        self._news = threading.Event()
        self._stopping = threading.Event()

    def put(self, one: T) -> None:
        with self._lock:
            self._waiting.append(one)
            self._last = one
        self._news.set()

    def repeat(self) -> None:
        """Hand on the last one once more."""
        with self._lock:
            if not self._waiting and self._last is not None:
                self._waiting.append(self._last)
        self._news.set()

    def stop(self) -> None:
        self._stopping.set()
        self._news.set()

    def run(self) -> None:
        while not self._stopping.is_set():
            self._news.wait()
            self._news.clear()
            with self._lock:
                waiting, self._waiting = self._waiting, []
            if not waiting or self._stopping.is_set():
                continue
            try:
                self._take(waiting[-1])
            except Exception:
                log.exception("trying again in %.0f s", self._again)
                self._stopping.wait(self._again)
                with self._lock:
                    self._waiting.insert(0, waiting[-1])
                self._news.set()
