"""A restart of the driver does not make a flapping link calm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from railmate.health import memory
from railmate.health.damping import Damped, Damping, damp
from railmate.health.model import HEALTHY, Health, Reason, Verdict
from railmate.health.monitor import HealthMonitor
from railmate.node.watching import recalled
from unit.health.health_tree import Tree

DOWN = Verdict(Health.UNHEALTHY, Reason.LINK_DOWN, "has no carrier.")
BOOT = "boot-1"
FLAPPING = Damped(
    Verdict(Health.UNHEALTHY, Reason.FLAPPING, "It fell."), HEALTHY, 71.0, (10.0, 40.5, 70.0), 370.0, 3
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def through_json(states: dict[str, Damped], boot: str = BOOT) -> dict[str, Damped]:
    return memory.from_json(json.loads(json.dumps(memory.to_json(states, BOOT))), boot)


def test_what_was_kept_is_what_was_known() -> None:
    states = {"0000:04:00.0": FLAPPING, "0000:03:00.0": damp(None, DOWN, 5.0, Damping())}
    assert through_json(states) == states


def test_functions_that_are_and_were_well_are_not_kept() -> None:
    assert through_json({"0000:04:00.0": damp(None, HEALTHY, 5.0, Damping(), 7)}) == {}


def test_another_boot_begins_anew() -> None:
    """Its clock does, too."""
    assert through_json({"0000:04:00.0": FLAPPING}, "boot-2") == {}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"version": 1}', b'{"version": 1, "boot_id": "boot-1"}']
    + [
        json.dumps({"version": 1, "boot_id": BOOT, "states": states}).encode()
        for states in ([], {"a": 5}, {"a": {"shown": {"health": "Odd", "reason": None, "message": ""}}})
    ],
)  # fmt: skip
def test_damaged_record_is_not_used(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "health.json").write_bytes(content)
    assert recalled(tmp_path / "health.json", BOOT) == {}


def test_next_process_holds_a_flapping_link_as_long_as_this_one_would(tree: Tree) -> None:
    clock, kept = Clock(), dict[str, Damped]()

    def process(before: dict[str, Damped]) -> HealthMonitor:
        def remember(states: Any) -> None:
            kept.clear()
            kept.update(states)

        return HealthMonitor(
            tree.sys, tree.offer, tree.inventory, pcie_links=True, clock=clock, before=before, remember=remember,
            damping=Damping(settle=10, falls=3, window=120, hold=300),
        )  # fmt: skip

    first = process({})
    first.look()
    for _ in range(3):
        for carrier in (False, True):
            tree.set_carrier(tree.pf, carrier)
            clock.now += 5
            first.look()
    clock.now += 50
    second = process(through_json(kept))
    second.look()
    assert second.taints[tree.pair.name] == "nic-flapping"
    clock.now += 260
    second.look()
    assert second.taints == {}


def test_fall_while_no_driver_ran_counts(tree: Tree) -> None:
    clock, kept = Clock(), dict[str, Damped]()
    rule = Damping(settle=10, falls=2, window=120, hold=300)
    first = HealthMonitor(
        tree.sys, tree.offer, tree.inventory, pcie_links=True, clock=clock, remember=kept.update, damping=rule
    )
    first.look()
    for carrier in (False, True):
        tree.set_carrier(tree.pf, carrier)
        clock.now += 5
        first.look()
    tree.set_carrier(tree.pf, False)
    tree.set_carrier(tree.pf, True)
    clock.now += 20
    second = HealthMonitor(
        tree.sys, tree.offer, tree.inventory, pcie_links=True, clock=clock, before=through_json(kept), damping=rule
    )  # fmt: skip
    second.look()
    assert second.taints[tree.pair.name] == "nic-flapping"


def test_nothing_is_written_while_nothing_changes(tree: Tree) -> None:
    clock, written = Clock(), list[int]()
    one = HealthMonitor(
        tree.sys, tree.offer, tree.inventory, pcie_links=True, clock=clock,
        remember=lambda states: written.append(len(states)),
    )  # fmt: skip
    for _ in range(20):
        one.look()
        clock.now += 5
    assert len(written) == 1
