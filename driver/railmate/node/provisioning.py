"""VFs that the administrator asked for are made before devices are published, and again when a NIC has lost them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path

from railmate.inventory.model import Inventory
from railmate.provision.apply import apply
from railmate.provision.plan import PfChange, ProvisioningPlan, Refusal, plan
from railmate.topology.model import Topology
from railmate_api.provisioning import VfProvisioning

log = logging.getLogger(__name__)


class Provisioner:
    """``report`` gets a sentence for each physical function that cannot have what the rules say."""

    def __init__(
        self, wanted: VfProvisioning | None, sysfs_root: Path, report: Callable[[str], None]
    ) -> None:
        self._wanted, self._sysfs_root, self._report = wanted, sysfs_root, report
        self._tried: dict[str, PfChange | Refusal] = {}

    def provision(self, inventory: Inventory, topology: Topology, uplinks: Set[str], held: Set[str]) -> bool:
        """Make what is missing; True when something was changed, so that the machine has to be looked at again.

        What was tried is tried again only when its facts have changed: a NIC that refuses is not asked every minute,
        and one that lost its VFs (its driver was loaded anew) gets them back.
        """
        if self._wanted is None:
            return False
        whole = plan(inventory, topology.roles, self._wanted, uplinks, held)
        tried, self._tried = self._tried, {}
        changed = False
        facts: list[PfChange | Refusal] = [*whole.changes, *whole.refusals]
        for one in facts:
            self._tried[one.address] = one
            if tried.get(one.address) == one:
                continue
            only = ProvisioningPlan((one,)) if isinstance(one, PfChange) else ProvisioningPlan((), (one,))
            problems = apply(only, inventory, held, self._sysfs_root)
            if isinstance(one, PfChange):
                changed = True
                if not problems:
                    # so it is now; if it has lost its VFs again by the next look, that is new
                    self._tried[one.address] = replace(one, present=one.rule.vfs, resize=False)
            for problem in problems:
                log.error("%s", problem)
                self._report(problem)
        return changed
