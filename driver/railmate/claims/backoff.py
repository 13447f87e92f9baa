"""When what was tried in vain is worth trying again: some prompt tries, then pauses that double."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

#: Seconds between two looks for what is about to come, and how many such looks it gets. Then the pauses double, up to
#: the time between two rounds of repairs.
PROMPT = 1.0
_PROMPT_TRIES = 10
_LONGEST = 60.0


class Backoff:
    """By key. Use it in one thread, or inside a lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tried: dict[str, tuple[int, float]] = {}  # how often in vain, and when it is due

    def keep(self, keys: Collection[str]) -> None:
        """All others are forgotten: should they come again they are new."""
        self._tried = {key: one for key, one in self._tried.items() if key in keys}

    def forget(self, key: str) -> None:
        self._tried.pop(key, None)

    def is_due(self, key: str) -> bool:
        return self._tried.get(key, (0, 0.0))[1] <= self._clock()

    def tried(self, key: str) -> None:
        tries = self._tried.get(key, (0, 0.0))[0] + 1
        pause = 0.0 if tries < _PROMPT_TRIES else min(2.0 ** (tries - _PROMPT_TRIES + 1), _LONGEST)
        self._tried[key] = tries, self._clock() + pause

    def pause(self, keys: Collection[str]) -> float | None:
        """Seconds until the first of these is due, ``PROMPT`` at least; None where there are none."""
        dues = [self._tried.get(key, (0, 0.0))[1] for key in keys]
        return max(PROMPT, min(dues) - self._clock()) if dues else None
