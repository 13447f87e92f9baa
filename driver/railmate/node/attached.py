"""Looks at what was attached, in a thread of its own, so that no hook waits for the kernel's GID table."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable

from railmate.claims.attempt import attempt
from railmate.claims.ledger import Ledger
from railmate.claims.observation import Observations, is_settled
from railmate.claims.records import ClaimRef, Entry
from railmate.claims.surroundings import ClaimObserver
from railmate.errors import RailmateError

log = logging.getLogger(__name__)

#: Seconds between the looks at a claim whose GID is not there yet; after the last one it is told as it is.
_PAUSES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
#: Seconds that a container's creation may wait for the looks: a sandbox takes longer than they do, as a rule.
PATIENCE = 0.5


class AttachedClaims(ClaimObserver):
    """Hears of attached claims, has them looked at, and passes them on to ``reports`` once, with what was seen."""

    def __init__(self, ledger: Ledger, observations: Observations, reports: ClaimObserver) -> None:
        self._ledger, self._observations, self._reports = ledger, observations, reports
        self._news = threading.Condition()
        self._due: dict[str, tuple[float, int]] = {}  # claim UID -> when to look, and how often it was looked
        self._untold: set[str] = set()  # claims whose report was given up for now
        self._others: set[tuple[str, str]] = (
            set()
        )  # what was untold when one looked last: claim UID and sandbox
        self._stopping = False

    # --- what the claims' verbs tell
    def attached(self, entry: Entry) -> None:
        self._enqueue(entry.claim.uid)

    def released(self, claim: ClaimRef) -> None:
        with self._news:
            self._due.pop(claim.uid, None)
            self._untold.discard(claim.uid)
        self._reports.released(claim)

    def claim_event(self, claim: ClaimRef, reason: str, message: str) -> None:
        self._reports.claim_event(claim, reason, message)

    def catch_up(self, entries: Iterable[Entry]) -> None:
        """What an earlier process attached and did not come to look at, or to tell."""
        for uid, _ in _untold(entries):
            self._enqueue(uid)

    def take_over(self, entries: Iterable[Entry]) -> None:
        """Call it now and then: what another instance attached beside this one and did not come to tell before it
        ended. It may still be about to tell what has become untold since the last call."""
        untold = _untold(entries)
        with self._news:
            left = {uid for uid, _ in untold & self._others} - self._due.keys() - self._untold
            self._others = untold
        for uid in left:
            self._enqueue(uid)

    # --- what became of the reports
    def told(self, entry: Entry, final: bool) -> None:
        """What was seen of the claim was told, or never will be; or, not ``final``, it was given up for now."""
        if final:
            attempt(lambda: self._observations.note_told(entry))
        else:
            with self._news:
                self._untold.add(entry.claim.uid)

    def retry(self) -> None:
        """Look at, and tell, what was given up for now. Costs nothing where nothing was."""
        with self._news:
            untold, self._untold = self._untold, set()
        for uid in untold:
            self._enqueue(uid)

    def _enqueue(self, uid: str) -> None:
        with self._news:
            self._due[uid] = (time.monotonic(), 0)
            self._news.notify_all()

    # --- what containers need
    def entries(self, uids: Collection[str], patience: float = PATIENCE) -> list[Entry]:
        """The claims as they are known when they have been looked at, or when patience is over."""
        with self._news:
            self._news.wait_for(lambda: self._due.keys().isdisjoint(uids) or self._stopping, patience)
        found = (self._ledger.get(uid) for uid in uids)
        return [entry for entry in found if entry is not None]

    # --- the thread
    def run(self) -> None:
        """Blocking; run it in a daemon thread."""
        while True:
            with self._news:
                while not self._stopping and not self._is_due():
                    self._news.wait(self._pause())
                if self._stopping:
                    return
                uid = min(self._due, key=lambda one: self._due[one])
                job = self._due[uid]
            self._look(uid, job)

    def stop(self) -> None:
        with self._news:
            self._stopping = True
            self._news.notify_all()

    def _is_due(self) -> bool:
        return any(due <= time.monotonic() for due, _ in self._due.values())

    def _pause(self) -> float | None:
        if not self._due:
            return None
        return max(0.0, min(due for due, _ in self._due.values()) - time.monotonic())

    def _look(self, uid: str, job: tuple[float, int]) -> None:
        looks = job[1] + 1
        entry = self._observe(uid)
        again = (
            entry is not None
            and entry.seen is not None
            and looks < len(_PAUSES)
            and not all(is_settled(nic) for nic in entry.seen.nics)
        )
        with self._news:
            if self._due.get(uid) != job:
                return  # attached anew or released meanwhile
            if again:
                self._due[uid] = (time.monotonic() + _PAUSES[looks], looks)
                return
            del self._due[uid]
            self._news.notify_all()
        if entry is not None and entry.attachment is not None:
            self._reports.attached(entry)

    def _observe(self, uid: str) -> Entry | None:
        try:
            return self._observations.observe(uid)
        except RailmateError as error:
            log.warning("claim %s: what its pod sees cannot be looked at: %s", uid, error)
        except Exception:
            log.exception("claim %s: what its pod sees cannot be looked at", uid)
        try:
            return self._ledger.get(uid)  # it is attached all the same
        except RailmateError as error:
            log.warning("%s", error)
            return None


def _untold(entries: Iterable[Entry]) -> set[tuple[str, str]]:
    """UID and sandbox of each claim that is in its pod and of which people were not told what is seen there."""
    found = set()
    for entry in entries:
        at, seen = entry.attachment, entry.seen
        if at is None or not at.complete:
            continue
        if seen is None or seen.sandbox != at.sandbox or seen.told is False:
            found.add((entry.claim.uid, at.sandbox))
    return found
