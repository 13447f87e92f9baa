"""Kills a driver at every step of making VFs, starts the next one and compares the end with the undisturbed one.

Run by test_provisioning_sweep as a program of its own, as crash_sweep is. The steps are seen in the same way (see
sweep_steps); the kernel is unit.provision.fake_pf, since no NIC can be killed under a driver so often.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from component.sweep_steps import AFTER, BEFORE, Steps, forked
from railmate.node.provisioning import Provisioner
from railmate.provision.unfinished import Unfinished
from railmate.topology.analyze import analyze
from railmate_api.provisioning import decode_provisioning
from unit.provision.fake_pf import PF, FakePf, nobody

_BOOT = "this boot"
_MOST_LOOKS = 5


@dataclass(frozen=True)
class Scenario:
    """What the physical function has at first, and what its rule says."""

    vfs: int
    rule: dict[str, Any]
    autoprobe: str = "1"


SCENARIOS = {
    "the first VFs": Scenario(0, {"vfs": 3}),
    "more VFs and another MTU": Scenario(2, {"vfs": 3, "mtu": 9000}),
    "no VFs any more": Scenario(2, {"vfs": 0}),
    "another mode of the switch": Scenario(2, {"vfs": 3, "eswitch": "switchdev"}),
    "VFs that are to have no drivers": Scenario(0, {"vfs": 3}, autoprobe="0"),
}


class Sweep:
    def __init__(self, scenario: Scenario, root: Path) -> None:
        self.scenario, self.root = scenario, root
        self.fake = FakePf(root / "sys")
        self.fake.patch(pytest.MonkeyPatch())  # for the whole life of this program
        rule = {"select": {"address": PF}, **scenario.rule}
        document = {"apiVersion": "railmate.dev/v1alpha1", "kind": "VfProvisioning", "rules": [rule]}
        self.rules = decode_provisioning(document)
        self.failures: list[str] = []
        self.cases = 0

    def run(self) -> list[str]:
        """The names of the steps."""
        self._begin()
        steps: list[str] = self._forked(self._count)
        wanted = self._end()
        drivers = {driver for _, driver in wanted["VFs"].values()}
        expected = (
            {"vfdriver" if self.scenario.autoprobe == "1" else None} if self.scenario.rule["vfs"] else set()
        )
        if drivers != expected or wanted["left on disk"]:
            raise AssertionError(f"wrong without any kill: {wanted}")
        for number, step in enumerate(steps, 1):
            for when in (BEFORE, AFTER):
                self.cases += 1
                self._begin()
                try:
                    self._forked(lambda number=number, when=when: self._die(number, when), dies=True)
                    self._forked(self._driver)
                    if (found := self._end()) != wanted:
                        raise AssertionError(f"{found} instead of {wanted}")
                except Exception as error:
                    self.failures.append(f"killed {when} step {number} ({step}): {error}")
        return steps

    def _begin(self) -> None:
        self.fake.setup(self.scenario.vfs, autoprobe=self.scenario.autoprobe)
        shutil.rmtree(self.root / "plugin", ignore_errors=True)
        (self.root / "plugin").mkdir()

    def _end(self) -> dict[str, Any]:
        left = [path.name for path in (self.root / "plugin").rglob("*") if path.is_file()]
        return {**self.fake.state(), "left on disk": left}

    def _driver(self) -> None:
        """One driver's start and its first looks."""
        provisioner = Provisioner(
            self.rules,
            self.fake.root,
            lambda message: None,
            nobody,
            Unfinished(self.root / "plugin/provisioning", _BOOT),
            addressed=frozenset,
        )
        for _ in range(_MOST_LOOKS):
            seen = self.fake.inventory()
            if not provisioner.provision(seen, analyze(seen), frozenset(), frozenset()):
                return

    def _count(self) -> list[str]:
        steps = Steps()
        self.fake.around = steps.unseen
        steps.arm()
        self._driver()
        steps.counting = False
        return steps.names

    def _die(self, number: int, when: str) -> None:
        steps = Steps()
        self.fake.around = steps.unseen
        steps.arm(number, when)
        self._driver()

    def _forked(self, work: Callable[[], Any], dies: bool = False) -> Any:
        return forked(work, self.root / "answer", dies)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("root", type=Path)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    sweep = Sweep(SCENARIOS[options.scenario], options.root)
    steps = sweep.run()
    print(json.dumps({"steps": steps, "cases": sweep.cases, "failures": sweep.failures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
