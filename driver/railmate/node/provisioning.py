"""VFs that the administrator asked for are made before devices are published, and again when a NIC has lost them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace
from pathlib import Path

from railmate.inventory.addressed import addressed_functions, addressed_names
from railmate.inventory.model import Inventory
from railmate.provision.apply import KeptFromClaims, apply
from railmate.provision.plan import WHOLE_MEANWHILE, PfChange, Refusal, plan
from railmate.provision.unfinished import Unfinished
from railmate.topology.model import Topology
from railmate_api.provisioning import VfProvisioning

log = logging.getLogger(__name__)

#: How often VFs are tried to be made while nothing else changes (a driver that was just loaded may not be ready), and
#: the seconds in between at least.
_TRIES, _PAUSE = 3, 10.0


@dataclass(frozen=True, slots=True)
class _Try:
    """``failures``: how often in a row VFs were to be made, or to be finished, and were not; ``at``: when it was last
    tried."""

    what: PfChange | Refusal
    failures: int = 0
    at: float = 0.0

    @property
    def unfinished(self) -> bool:
        return 0 < self.failures < _TRIES


class Provisioner:
    """``report`` gets a sentence for each physical function that cannot have what the rules say. ``addressed`` gives
    the names of netdevs with IP addresses."""

    def __init__(
        self,
        wanted: VfProvisioning | None,
        sysfs_root: Path,
        report: Callable[[str], None],
        kept_from_claims: KeptFromClaims,
        unfinished: Unfinished,
        clock: Callable[[], float] = time.monotonic,
        addressed: Callable[[], Set[str]] = addressed_names,
    ) -> None:
        self._wanted, self._sysfs_root, self._report = wanted, sysfs_root, report
        self._kept_from_claims, self._unfinished, self._clock = kept_from_claims, unfinished, clock
        self._addressed = addressed
        self._tried: dict[str, _Try] = {}
        self._awaiting: frozenset[str] = frozenset()

    @property
    def awaiting(self) -> frozenset[str]:
        """Physical functions that a rule gives VFs, as long as that has not failed for good. While they have none they
        are not to be given away whole: a pod would keep them from ever getting their VFs.

        What has failed for good is not remembered over a start of the driver: a restart is how an administrator who
        has mended the cause asks for another attempt (the reports say so), and a port that a pod has got meanwhile
        could not be attempted. The price is that a free port which still refuses is away for the time of the attempts,
        some 20 seconds."""
        return self._awaiting

    @property
    def again_in(self) -> float | None:
        """Seconds until something is to be tried again; None: nothing is."""
        due = [one.at + _PAUSE - self._clock() for one in self._tried.values() if one.unfinished]
        return max(0.0, min(due)) if due else None

    def provision(self, inventory: Inventory, topology: Topology, uplinks: Set[str], held: Set[str]) -> bool:
        """Make what is missing; True when the machine has to be looked at again, because something was changed or
        ``awaiting`` is another.

        What was tried is tried again only when its facts have changed, or some times when VFs could not be made: a NIC
        that refuses is not asked every minute, and one that lost its VFs (its driver was loaded anew) gets them back.
        """
        if self._wanted is None:
            return False
        addressed = addressed_functions(inventory, self._addressed())
        unfinished = self._unfinished.addresses()
        whole = plan(inventory, topology.roles, self._wanted, uplinks, held, addressed, unfinished)
        tried, self._tried = self._tried, {}
        awaiting, changed = set(self._awaiting), False
        facts: list[PfChange | Refusal] = [*whole.changes, *whole.refusals]
        for one in facts:
            last = tried.get(one.address)
            if last is None or last.what != one or self._is_due(last):
                failures = last.failures if last is not None and last.what == one else 0
                last = self._try(one, inventory, failures)
                changed = changed or isinstance(one, PfChange)
            self._tried[one.address] = last
            given_up = isinstance(one, Refusal) or last.failures >= _TRIES or not one.rule.vfs
            (awaiting.discard if given_up else awaiting.add)(one.address)
        before, self._awaiting = self._awaiting, frozenset(awaiting)
        return changed or before != self._awaiting

    def _is_due(self, last: _Try) -> bool:
        return last.unfinished and self._clock() >= last.at + _PAUSE

    def _try(self, one: PfChange | Refusal, inventory: Inventory, failures: int) -> _Try:
        if isinstance(one, Refusal):
            self._tell([f"{one.address} is not provisioned: {one.reason}."])
            return _Try(one)
        outcome = apply(one, inventory, self._kept_from_claims, self._sysfs_root, self._unfinished)
        if outcome.made:
            self._tell(outcome.problems)
            # so it is now; if it has lost its VFs again by the next look, that is new
            return _Try(replace(one, present=one.rule.vfs, resize=False, finish=False))
        counted = one.resize or one.finish
        now = _Try(one, (failures + 1 if outcome.again else _TRIES) if counted else 0, self._clock())
        if now.unfinished:
            for problem in outcome.problems:
                log.warning("%s It is tried again.", problem)
        else:
            self._tell([problem.removesuffix(".") + f"{_whole(one)}." for problem in outcome.problems])
        return now

    def _tell(self, problems: Iterable[str]) -> None:
        for problem in problems:
            log.error("%s", problem)
            self._report(problem)


def _whole(change: PfChange) -> str:
    return WHOLE_MEANWHILE if change.resize and not change.present else ""
