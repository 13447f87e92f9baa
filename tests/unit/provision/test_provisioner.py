"""What was tried is tried again only when its facts have changed."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import railmate.node.provisioning as module
from railmate.inventory.model import Inventory, Netdev, Nic, PciFunction
from railmate.node.provisioning import Provisioner
from railmate.provision.apply import Outcome
from railmate.provision.plan import PfChange
from railmate.provision.unfinished import Unfinished
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


NINE_THOUSAND = replace(TWO, rules=(replace(TWO.rules[0], mtu=9000),))
NONE_BEGUN = Unfinished(Path("/nonexistent"), "this boot")


def machine(vfs: int, most: int = 8) -> Inventory:
    addresses = tuple(f"0000:0c:00.{index + 1}" for index in range(vfs))
    functions = [
        PciFunction(
            PHYSICAL, ("pci0000:00", PHYSICAL), 0x020000, 0x15B3, 0x101B, driver="mlx5_core",
            virtual_functions=addresses, max_virtual_functions=most, netdevs=(Netdev("ens1", mtu=1500),),
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


MADE, REFUSED = Outcome(), Outcome(("the NIC says no.",), made=False, again=True)


class Watched:
    """A provisioner, and a machine at which everything comes out as ``outcome`` says."""

    def __init__(self, patch: pytest.MonkeyPatch, outcome: Outcome = MADE) -> None:
        self.applied: list[PfChange] = []
        self.reports: list[str] = []
        self.outcome = outcome
        self.now = 0.0
        self.addressed: frozenset[str] = frozenset()
        patch.setattr(module, "apply", self._apply)
        self.provisioner = self.started(NONE_BEGUN)

    def started(self, unfinished: Unfinished) -> Provisioner:
        return Provisioner(
            TWO,
            Path("/sys"),
            self.reports.append,
            nobody,
            unfinished,
            lambda: self.now,
            lambda: self.addressed,
        )

    def _apply(self, change: PfChange, *_: Any) -> Outcome:
        self.applied.append(change)
        return self.outcome

    def look(
        self, inventory: Inventory, held: Set[str] = frozenset(), uplinks: Set[str] = frozenset()
    ) -> bool:
        return self.provisioner.provision(inventory, TOPOLOGY, uplinks, held)

    def resizes(self) -> int:
        return sum(change.resize for change in self.applied)


def test_vfs_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    assert watched.look(machine(0))
    assert [watched.look(machine(2)) for _ in range(3)][1:] == [False, False]
    assert watched.resizes() == 1


def test_a_nic_that_refuses_is_asked_three_times_and_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, REFUSED)
    for _ in range(100):
        watched.look(machine(0))
        watched.now += 1.0
    assert watched.resizes() == 3
    assert watched.reports == ["the NIC says no. Until then it is offered as a whole port."]


def test_a_nic_that_was_not_ready_gets_its_vfs_and_nobody_is_alarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, REFUSED)
    watched.look(machine(0))
    watched.outcome, watched.now = MADE, 10.0
    assert watched.look(machine(0))
    assert not watched.look(machine(2))
    assert watched.resizes() == 2
    assert watched.reports == []


def test_a_nic_is_awaited_until_its_vfs_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, REFUSED)
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
    assert watched.reports[-1].endswith("Until then it is offered as a whole port.")
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
    nothing = Provisioner(None, Path("/sys"), watched.reports.append, nobody, NONE_BEGUN)
    assert not nothing.provision(machine(0), TOPOLOGY, frozenset(), frozenset())
    assert watched.applied == []


def test_what_another_attempt_cannot_mend_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, Outcome(("it has no embedded switch.",), made=False, again=False))
    for _ in range(3):
        watched.look(machine(0))
        watched.now += 10.0
    assert watched.resizes() == 1
    assert watched.reports == ["it has no embedded switch. Until then it is offered as a whole port."]
    assert watched.provisioner.awaiting == frozenset()


def test_what_went_wrong_beside_is_told_once_and_the_vfs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, Outcome(("VF 0 takes no MAC.",)))
    for vfs in (0, 2, 2):
        watched.look(machine(vfs))
        watched.now += 10.0
    assert len(watched.applied) == 1
    assert watched.reports == ["VF 0 takes no MAC."]


def test_what_a_killed_driver_has_begun_is_finished_and_tried_three_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody would see it in the number of VFs, which is as wanted."""
    watched = Watched(monkeypatch, Outcome(("no driver.",), made=False, again=True))
    begun = Unfinished(tmp_path / "provisioning", "this boot")
    begun.begin(PHYSICAL, True)
    watched.provisioner = watched.started(begun)
    for _ in range(50):
        watched.look(machine(2))
        watched.now += 1.0
    assert [(one.resize, one.finish) for one in watched.applied] == [(False, True)] * 3
    assert watched.reports == ["no driver."]


def test_an_mtu_that_waits_for_pods_is_tried_again_when_the_vfs_are_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch)
    watched.provisioner._wanted = NINE_THOUSAND
    vf = machine(2).functions[PHYSICAL].virtual_functions[0]
    for held in ({vf}, {vf}, frozenset(), frozenset()):
        watched.look(machine(2), held=held)
    assert [(one.mtu_waits, list(one.busy)) for one in watched.applied] == [(True, [vf]), (False, [])]


@pytest.mark.parametrize("way", ["uplink", "address"])
def test_a_nic_is_not_re_sized_under_a_vf_that_the_node_itself_uses(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    watched = Watched(monkeypatch)
    three = machine(3)
    vf = three.functions[PHYSICAL].virtual_functions[0]
    watched.addressed = frozenset({"ens1v0"} if way == "address" else ())
    watched.look(three, uplinks=frozenset({vf} if way == "uplink" else ()))
    assert watched.applied == []
    (told,) = watched.reports
    assert f"{vf} is in use: " in told
    assert ("the node's own traffic" if way == "uplink" else "has an IP address") in told
