"""How prepare waits for what will pass: without the ledger's lock, and looking at little, however many claims wait.

After a mass deletion by force a claim waits for each device of the node. If each looked through the ledger several
times a second, under its lock, the runtime's hook would not get that lock in its time.
"""

from __future__ import annotations

import random
import threading
import time

from railmate.claims.allocation import Holder
from railmate.claims.ledger import Ledger

#: Seconds between two looks; what is waited for may be the kernel's, or another instance of the driver frees it.
POLL = 0.25
#: Seconds, from and to, after which a claim is looked at again though the record of who has its device is as it was.
_LOOK_ANYWAY = 8.0, 15.0


class Waiting:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._news = ledger, threading.Condition()
        self.stopped = False

    def freed(self) -> None:
        """Something was given back."""
        with self._news:
            self._news.notify_all()

    def stop(self) -> None:
        """Nobody waits any longer."""
        self.stopped = True
        self.freed()

    def rest(self, seconds: float, given_up: threading.Event) -> None:
        """Wait so long, less when this is stopped or ``given_up`` is set."""
        until = time.monotonic() + seconds
        while not self.stopped and not given_up.is_set() and (left := until - time.monotonic()) > 0:
            with self._news:
                self._news.wait(min(POLL, left))

    def pause(self, holder: Holder | None, deadline: float, given_up: threading.Event) -> bool:
        """Wait until it is worth looking again; False when it is not: the deadline (monotonic seconds) has come, this
        was stopped, or ``given_up`` is set. ``holder``: the claim that is in the way, where one is; then its record
        must have changed since."""
        until = time.monotonic() + (random.uniform(*_LOOK_ANYWAY) if holder else POLL)
        while not self.stopped and not given_up.is_set() and (now := time.monotonic()) < deadline:
            if now >= until or (holder and self._ledger.mark(holder.uid) != holder.mark):
                return True
            with self._news:
                news = self._news.wait(min(POLL, until - now, deadline - now))
            if news and not holder:
                return True
        return False
