"""Work for sandboxes: in order for each, and independent of who still waits for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from railmate.errors import RailmateError

log = logging.getLogger(__name__)

T = TypeVar("T")


class WorkQueue:
    """Runs each key's work one piece after the other; different keys' at the same time.

    The work is a task of its own: it goes on when the runtime stops waiting or the connection breaks, because
    half a change to the kernel is worse than one that comes late. Failures are logged here.
    """

    def __init__(self) -> None:
        self._last: dict[str, asyncio.Task[object]] = {}  # of each key, the piece all later ones wait for
        self._barrier: asyncio.Task[object] | None = None  # what everything later waits for
        self._all: set[asyncio.Task[object]] = set()

    def submit(
        self, key: str, what: str, work: Callable[[], Awaitable[T]], *, barrier: bool = False
    ) -> asyncio.Task[T]:
        """Start ``work`` when all earlier work of ``key`` has ended. ``what`` names it in the log.

        A ``barrier`` starts when all earlier work of all keys has ended, and all later work waits for it.
        """
        earlier = (
            set(self._all) if barrier else {t for t in (self._last.get(key), self._barrier) if t is not None}
        )
        task = asyncio.create_task(self._run(earlier, what, work), name=what)
        self._last[key] = task
        if barrier:
            self._barrier = task
        self._all.add(task)

        def ended(_: object) -> None:
            self._all.discard(task)
            if self._last.get(key) is task:
                del self._last[key]
            if self._barrier is task:
                self._barrier = None
            if not task.cancelled():
                task.exception()  # it is in the log; asyncio need not complain that nobody asked

        task.add_done_callback(ended)
        return task

    async def _run(
        self, earlier: set[asyncio.Task[object]], what: str, work: Callable[[], Awaitable[T]]
    ) -> T:
        if earlier:
            await asyncio.wait(earlier)
        start = time.perf_counter()
        try:
            return await work()
        except RailmateError as error:
            log.warning("%s: %s", what, error)
            raise
        except Exception:
            log.exception("%s failed", what)
            raise
        finally:
            log.debug("%s took %.1f ms", what, (time.perf_counter() - start) * 1e3)

    async def drain(self, grace: float) -> None:
        """Wait until all work has ended, at most ``grace`` seconds."""
        if self._all:
            _, left = await asyncio.wait(set(self._all), timeout=grace)
            for task in left:
                log.warning("%s had not ended after %g s", task.get_name(), grace)
