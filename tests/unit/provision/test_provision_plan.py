"""Which NICs get VFs, and which are left alone whatever a rule says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from railmate.inventory.model import Inventory, Netdev, PciFunction
from railmate.inventory.scan import scan
from railmate.provision.plan import ProvisioningPlan, plan
from railmate.topology.analyze import analyze
from railmate.topology.model import Role
from railmate_api.provisioning import PfRule, decode_provisioning

RAILS = ["0000:0c:00.0", "0000:12:00.0", "0000:4b:00.0", "0000:54:00.0"]  # the first four of a DGX A100


def rules(*given: Mapping[str, Any]) -> Any:
    document = {"apiVersion": "railmate.dev/v1alpha1", "kind": "VfProvisioning", "rules": list(given)}
    return decode_provisioning(document)


RAILS_GET_FOUR = rules({"select": {"role": "rail"}, "vfs": 4})


@pytest.fixture(scope="module")
def bare(machine_root: Callable[..., Path]) -> Inventory:
    """A DGX A100 whose NICs could have VFs and have none."""
    found = scan(machine_root("dgx-a100", 0) / "sys")
    able = {
        address: replace(one, max_virtual_functions=8) if one.netdevs else one
        for address, one in found.functions.items()
    }
    return with_functions(found, able)


@pytest.fixture(scope="module")
def with_two_vfs(machine_root: Callable[..., Path]) -> Inventory:
    found = scan(machine_root("dgx-a100", 2) / "sys")
    able = {
        address: replace(one, max_virtual_functions=8) if one.virtual_functions else one
        for address, one in found.functions.items()
    }
    return with_functions(found, able)


def with_functions(inventory: Inventory, functions: Mapping[str, PciFunction]) -> Inventory:
    nics = tuple(replace(nic, function=functions[nic.address]) for nic in inventory.nics)
    return replace(inventory, functions=functions, nics=nics)


def changed(inventory: Inventory, address: str, **fields: Any) -> Inventory:
    one = replace(inventory.functions[address], **fields)
    return with_functions(inventory, {**inventory.functions, address: one})


def planned(
    inventory: Inventory,
    wanted: Any,
    uplinks: Set[str] = frozenset(),
    held: Set[str] = frozenset(),
    addressed: Set[str] = frozenset(),
    unfinished: Set[str] = frozenset(),
) -> ProvisioningPlan:
    return plan(inventory, analyze(inventory).roles, wanted, uplinks, held, addressed, unfinished)


def test_every_rail_gets_its_vfs_and_no_other_nic_does(bare: Inventory) -> None:
    found = planned(bare, RAILS_GET_FOUR)
    assert len(found.changes) == 8
    assert [one.address for one in found.changes][:4] == RAILS
    assert all(one.resize and one.present == 0 and one.rule.vfs == 4 for one in found.changes)
    assert found.refusals == ()


def test_the_first_rule_that_fits_counts(bare: Inventory) -> None:
    wanted = rules(
        {"select": {"address": RAILS[1].upper()}, "vfs": 1}, {"select": {"role": "rail"}, "vfs": 8}
    )
    by_address = {one.address: one.rule.vfs for one in planned(bare, wanted).changes}
    assert by_address[RAILS[1]] == 1
    assert by_address[RAILS[0]] == 8


@pytest.mark.parametrize(
    "select",
    [
        {"vendor": "15b3"},
        {"model": "15B3:101B"},
        {"name": "*"},
        {"vendor": "15b3", "role": "rail"},
    ],
)
def test_a_selector_wants_all_its_fields_to_hold(bare: Inventory, select: Mapping[str, str]) -> None:
    chosen = {one.address for one in planned(bare, rules({"select": select, "vfs": 1})).changes}
    assert set(RAILS) <= chosen
    assert not planned(bare, rules({"select": {**select, "address": "0000:ff:00.0"}, "vfs": 1})).changes
    assert not planned(bare, rules({"select": {**select, "name": "nothing-*"}, "vfs": 1})).changes


def test_a_management_nic_is_selected_by_its_address_or_role_only(bare: Inventory) -> None:
    roles = {**analyze(bare).roles, RAILS[0]: Role.MANAGEMENT}
    by_vendor = plan(bare, roles, rules({"select": {"vendor": "15b3"}, "vfs": 1}), frozenset(), frozenset())
    assert RAILS[0] not in {one.address for one in by_vendor.changes}
    for select in ({"address": RAILS[0]}, {"role": "management"}):
        said = plan(bare, roles, rules({"select": select, "vfs": 1}), frozenset(), frozenset())
        assert [one.address for one in said.changes] == [RAILS[0]]


def test_a_nic_that_pods_have_shares_of_is_not_re_sized(with_two_vfs: Inventory) -> None:
    """Its netdev may be made anew by that, and the sub-interfaces over it would be gone."""
    wanted = rules({"select": {"role": "rail"}, "vfs": 4})
    found = planned(with_two_vfs, wanted, held={RAILS[0]})
    assert [(one.address, "share" in one.reason) for one in found.refusals] == [(RAILS[0], True)]


def test_a_nic_that_has_its_vfs_keeps_them(with_two_vfs: Inventory) -> None:
    found = planned(with_two_vfs, rules({"select": {"role": "rail"}, "vfs": 2, "mtu": 9000}))
    assert len(found.changes) == 8
    assert not any(one.resize for one in found.changes)


def test_idle_vfs_are_made_anew_when_the_number_changes(with_two_vfs: Inventory) -> None:
    found = planned(with_two_vfs, rules({"select": {"address": RAILS[0]}, "vfs": 3}))
    assert [(one.present, one.resize) for one in found.changes] == [(2, True)]


def vf_of(inventory: Inventory, physical: str) -> str:
    return inventory.functions[physical].virtual_functions[1]


USES: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "a netdev that is elsewhere": ({"netdevs": (), "driver": "mlx5_core"}, "another network namespace"),
    "vfio-pci": ({"netdevs": (), "driver": "vfio-pci"}, "vfio-pci has it"),
    "a bond": ({"netdevs": (Netdev("ens1v0", master="bond0"),)}, "part of a bond"),
}


@pytest.mark.parametrize(("fields", "said"), USES.values(), ids=USES)
def test_a_nic_with_a_vf_in_use_is_never_resized(
    with_two_vfs: Inventory, fields: Mapping[str, Any], said: str
) -> None:
    vf = vf_of(with_two_vfs, RAILS[0])
    inventory = changed(with_two_vfs, vf, **fields)
    found = planned(inventory, rules({"select": {"address": RAILS[0]}, "vfs": 4}))
    assert found.changes == ()
    (refusal,) = found.refusals
    assert vf in refusal.reason
    assert said in refusal.reason
    assert "drain the node" in refusal.reason


def test_a_nic_whose_vf_is_the_nodes_way_out_or_has_its_address_is_never_resized(
    with_two_vfs: Inventory,
) -> None:
    vf, wanted = vf_of(with_two_vfs, RAILS[0]), rules({"select": {"address": RAILS[0]}, "vfs": 8})
    for found, said in (
        (planned(with_two_vfs, wanted, uplinks={vf}), "it carries the node's own traffic"),
        (planned(with_two_vfs, wanted, addressed={vf}), "has an IP address"),
    ):
        assert found.changes == ()
        assert f"{vf} is in use: " in found.refusals[0].reason
        assert said in found.refusals[0].reason


def test_an_address_of_the_physical_function_keeps_nobody_from_making_vfs(bare: Inventory) -> None:
    assert RAILS[0] in {one.address for one in planned(bare, RAILS_GET_FOUR, addressed={RAILS[0]}).changes}


def test_vfs_that_were_begun_are_finished_or_made_anew(with_two_vfs: Inventory) -> None:
    """The number of VFs alone does not tell."""
    for vfs, expected in ((2, (False, True)), (3, (True, False))):
        wanted = rules({"select": {"address": RAILS[0]}, "vfs": vfs})
        (change,) = planned(with_two_vfs, wanted, unfinished={RAILS[0]}).changes
        assert (change.resize, change.finish) == expected
    (change,) = planned(with_two_vfs, rules({"select": {"address": RAILS[0]}, "vfs": 2})).changes
    assert not change.finish


def test_another_mtu_waits_for_vfs_in_use(with_two_vfs: Inventory) -> None:
    vf = vf_of(with_two_vfs, RAILS[0])
    (netdev,) = with_two_vfs.functions[RAILS[0]].netdevs
    for now, waits in ((1500, True), (9000, False)):
        inventory = changed(with_two_vfs, RAILS[0], netdevs=(replace(netdev, mtu=now),))
        wanted = rules({"select": {"address": RAILS[0]}, "vfs": 2, "mtu": 9000})
        (change,) = planned(inventory, wanted, held={vf}).changes
        assert (change.mtu_waits, dict(change.busy)) == (waits, {vf: "a claim holds it"})
        assert not planned(inventory, wanted).changes[0].mtu_waits


def test_a_vf_that_a_claim_holds_is_in_use(with_two_vfs: Inventory) -> None:
    vf = vf_of(with_two_vfs, RAILS[0])
    found = planned(with_two_vfs, rules({"select": {"address": RAILS[0]}, "vfs": 0}), held={vf})
    assert found.changes == ()
    assert "a claim holds it" in found.refusals[0].reason


def test_a_whole_port_that_a_claim_holds_is_not_touched(with_two_vfs: Inventory) -> None:
    select = {"select": {"address": RAILS[0]}, "mtu": 9000}
    assert planned(with_two_vfs, rules(select | {"vfs": 2}), held={RAILS[0]}) == ProvisioningPlan((), ())
    found = planned(with_two_vfs, rules(select | {"vfs": 3}), held={RAILS[0]})
    assert found.changes == ()
    assert "a claim holds the whole port" in found.refusals[0].reason


def test_the_nodes_own_way_out_is_never_touched(bare: Inventory) -> None:
    found = planned(bare, RAILS_GET_FOUR, uplinks={RAILS[0]})
    assert RAILS[0] not in {one.address for one in found.changes}
    assert [one.address for one in found.refusals] == [RAILS[0]]
    assert "the node's own traffic" in found.refusals[0].reason


def test_more_than_the_nic_can_have_is_refused_with_the_way_out(bare: Inventory) -> None:
    found = planned(bare, rules({"select": {"address": RAILS[0]}, "vfs": 9}))
    assert found.changes == ()
    assert "9 VFs are wanted and it can have 8" in found.refusals[0].reason
    assert "NUM_OF_VFS" in found.refusals[0].reason


def test_a_nic_without_driver_is_refused(bare: Inventory) -> None:
    inventory = changed(bare, RAILS[0], driver=None)
    found = planned(inventory, rules({"select": {"address": RAILS[0]}, "vfs": 1}))
    assert "it has no driver" in found.refusals[0].reason


def test_vfs_are_no_physical_functions(with_two_vfs: Inventory) -> None:
    everything = rules({"select": {"name": "*"}, "vfs": 2})
    vfs = {nic.address for nic in with_two_vfs.nics if nic.is_vf}
    assert vfs
    found = planned(with_two_vfs, everything)
    assert vfs.isdisjoint(one.address for one in (*found.changes, *found.refusals))


def test_no_rule_no_change(bare: Inventory) -> None:
    assert planned(bare, rules({"select": {"name": "no-such-nic"}, "vfs": 1})) == ProvisioningPlan()


def test_a_rule_keeps_what_it_does_not_mention() -> None:
    (rule,) = rules({"select": {"role": "rail"}, "vfs": 1}).rules
    assert rule == PfRule(rule.select, 1, None, None)
