"""Threads for the kubelet's verbs, and whether they still get anywhere."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass

#: Calls at the same time. Prepares may each wait for a device, and one that need not must not stand behind them until
#: its time is over: more than the pods of a node, which are 110 as a rule.
_COUNTS = {"prepare": 128, "unprepare": 8}


@dataclass(frozen=True, slots=True)
class Workers:
    """Threads for the verbs, which block. Prepare may wait for an unprepare, so the two do not share them."""

    prepare: Executor
    unprepare: Executor


class WorkerPools:
    """The pools of a process, each with a small task of ours in it that has to come through."""

    def __init__(self) -> None:
        self._pools = {
            name: ThreadPoolExecutor(count, thread_name_prefix=name) for name, count in _COUNTS.items()
        }
        self.workers = Workers(self._pools["prepare"], self._pools["unprepare"])
        self._lock = threading.Lock()
        self._tasks: dict[str, tuple[float, Future[None]]] = {}  # by pool: when it was handed in, and itself
        self._ended = False

    def stuck_for(self) -> dict[str, float]:
        """By the name of the pool: seconds since a task was handed in that no thread has come to yet. Each call
        hands in another where the former has come through, so it must be called now and then."""
        now = time.monotonic()
        with self._lock:
            if self._ended:
                return {}
            for name, pool in self._pools.items():
                if name not in self._tasks or self._tasks[name][1].done():
                    self._tasks[name] = now, pool.submit(lambda: None)
            return {name: now - since for name, (since, task) in self._tasks.items() if not task.done()}

    def shutdown(self) -> None:
        with self._lock:
            self._ended = True
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
