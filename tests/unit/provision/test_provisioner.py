"""What was tried is tried again only when its facts have changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import railmate.node.provisioning as module
from railmate.inventory.model import Inventory, Netdev, Nic, PciFunction
from railmate.node.provisioning import Provisioner
from railmate.provision.plan import ProvisioningPlan
from railmate.topology.analyze import analyze
from railmate_api.provisioning import decode_provisioning

PHYSICAL = "0000:0c:00.0"
TOPOLOGY = analyze(Inventory())
TWO = decode_provisioning(
    {
        "apiVersion": "railmate.dev/v1alpha1",
        "kind": "VfProvisioning",
        "rules": [{"select": {"address": PHYSICAL}, "vfs": 2}],
    }
)


def machine(vfs: int, most: int = 8) -> Inventory:
    addresses = tuple(f"0000:0c:00.{index + 1}" for index in range(vfs))
    functions = [
        PciFunction(
            PHYSICAL, ("pci0000:00", PHYSICAL), 0x020000, 0x15B3, 0x101B, driver="mlx5_core",
            virtual_functions=addresses, max_virtual_functions=most, netdevs=(Netdev("ens1"),),
        )
    ]  # fmt: skip
    functions += [
        PciFunction(
            one, ("pci0000:00", one), 0x020000, 0x15B3, 0x101C, driver="mlx5_core",
            physical_function=PHYSICAL, netdevs=(Netdev(f"ens1v{index}"),),
        )
        for index, one in enumerate(addresses)
    ]  # fmt: skip
    nics = tuple(
        Nic(one, None if one.physical_function is None else i - 1) for i, one in enumerate(functions)
    )
    return Inventory({one.address: one for one in functions}, nics=nics)


@contextmanager
def nobody(physical_function: str) -> Iterator[frozenset[str]]:
    yield frozenset()


class Watched:
    def __init__(self, patch: pytest.MonkeyPatch, problems: Sequence[str] = ()) -> None:
        self.applied: list[ProvisioningPlan] = []
        self.reports: list[str] = []
        self.problems = list(problems)
        self.now = 0.0
        patch.setattr(module, "apply", self._apply)
        self.provisioner = Provisioner(TWO, Path("/sys"), self.reports.append, nobody, lambda: self.now)

    def _apply(self, plan: ProvisioningPlan, *_: Any) -> list[str]:
        self.applied.append(plan)
        return list(self.problems) if plan.changes or plan.refusals else []

    def look(self, inventory: Inventory) -> bool:
        return self.provisioner.provision(inventory, TOPOLOGY, frozenset(), frozenset())

    def resizes(self) -> int:
        return sum(change.resize for plan in self.applied for change in plan.changes)


def test_vfs_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    assert watched.look(machine(0))
    assert [watched.look(machine(2)) for _ in range(3)][1:] == [False, False]
    assert watched.resizes() == 1


def test_a_nic_that_refuses_is_asked_three_times_and_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, ["the NIC says no."])
    for _ in range(100):
        watched.look(machine(0))
        watched.now += 1.0
    assert watched.resizes() == 3
    assert watched.reports == ["the NIC says no. Until then it is offered as a whole port."]


def test_a_nic_that_was_not_ready_gets_its_vfs_and_nobody_is_alarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, ["the NIC says no."])
    watched.look(machine(0))
    watched.problems, watched.now = [], 10.0
    assert watched.look(machine(0))
    assert not watched.look(machine(2))
    assert watched.resizes() == 2
    assert watched.reports == []


def test_a_nic_is_awaited_until_its_vfs_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, ["the NIC says no."])
    assert watched.provisioner.awaiting == frozenset()
    watched.look(machine(0))
    assert watched.provisioner.awaiting == {PHYSICAL}
    watched.look(Inventory())
    assert watched.provisioner.awaiting == {PHYSICAL}, "its driver is loaded anew"
    for _ in range(3):
        watched.now += 10.0
        watched.look(machine(0))
    assert watched.provisioner.awaiting == frozenset()
    assert watched.provisioner.again_in is None


def test_a_nic_that_can_have_no_vfs_is_offered_whole_and_people_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch)
    watched.look(machine(0))
    assert watched.provisioner.awaiting == {PHYSICAL}
    assert watched.look(machine(0, most=0)), "it is looked at again, since it is offered now"
    (refusal,) = watched.applied[-1].refusals
    assert refusal.reason.endswith("Until then it is offered as a whole port")
    assert watched.provisioner.awaiting == frozenset()


def test_a_nic_that_lost_its_vfs_gets_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    for vfs in (0, 2, 2, 0):
        watched.look(machine(vfs))
    assert watched.resizes() == 2


def test_a_nic_that_lost_its_vfs_again_before_anybody_looked_gets_them_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch)
    for _ in range(2):
        assert watched.look(machine(0))
    assert watched.resizes() == 2


def test_nothing_is_looked_at_without_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    nothing = Provisioner(None, Path("/sys"), watched.reports.append, nobody)
    assert not nothing.provision(machine(0), TOPOLOGY, frozenset(), frozenset())
    assert watched.applied == []
