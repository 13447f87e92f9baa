"""Physical functions that pods share: which are offered, how, and what is said of those that are not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from railmate.errors import UsageError
from railmate.inventory.model import Inventory, Netdev
from railmate.publish.exclusive import Preference, without_counters
from railmate.publish.model import overlap
from railmate.publish.shared import SharedPfs, parse_shared_pfs, without_shared
from railmate.publish.slices import gate_probe, resource_slices
from railmate.topology.analyze import analyze
from railmate.topology.model import Role
from railmate_api import attributes as names
from unit.publish.offers import Scanned, changed, check_invariants, of_kind, offer_of

ALL = (SharedPfs("*", 16),)
PF = "0000:0c:00.0"


def rails(inventory: Inventory) -> list[str]:
    roles = analyze(inventory).roles
    return [nic.address for nic in inventory.nics if not nic.is_vf and roles[nic.address] == Role.RAIL]


def name_of(inventory: Inventory, address: str) -> str:
    return inventory.functions[address].netdevs[0].name


def enslaved(inventory: Inventory, address: str) -> Inventory:
    netdevs = tuple(replace(one, master="bond0") for one in inventory.functions[address].netdevs)
    return changed(inventory, {address: {"netdevs": netdevs}})


def test_nothing_is_shared_unless_somebody_says_so(scanned: Scanned) -> None:
    assert of_kind(offer_of(scanned("dgx-a100", 4)), "rdma-shared") == []


def test_a_pattern_shares_every_rail_and_nothing_else(scanned: Scanned) -> None:
    inventory = scanned("dgx-a100", 4)
    offer = offer_of(inventory, shared_pfs=ALL)
    check_invariants(offer)
    assert sorted(device.nics[0] for device in of_kind(offer, "rdma-shared")) == sorted(rails(inventory))
    assert {device.sub_interfaces for device in of_kind(offer, "rdma-shared")} == {16}


def test_vfs_and_pairs_of_a_shared_function_stay_what_they_were(scanned: Scanned) -> None:
    inventory = scanned("dgx-a100", 4)
    without, offer = offer_of(inventory), offer_of(inventory, shared_pfs=ALL)
    assert [one for one in offer.devices if one.kind != "rdma-shared"] == list(without.devices)
    assert offer.counter_sets == without.counter_sets
    # and lie where they lay, so that no slice changes but those that the shared ones are in
    before, after = (resource_slices(one, "railmate.dev", "node1") for one in (without, offer))
    kept = [
        device
        for item in after
        for device in item["spec"].get("devices", [])
        if "shared" not in device["name"]
    ]
    assert kept == [device for item in before for device in item["spec"].get("devices", [])]


def test_a_function_without_vfs_is_shared_and_then_not_whole(scanned: Scanned) -> None:
    inventory = scanned("dgx-a100", 0)
    offer = offer_of(inventory, shared_pfs=ALL)
    check_invariants(offer)
    assert Counter(device.kind for device in offer.devices) == {
        "gpu": 8, "rdma-shared": 6, "pair": 2, "rdma-vf": 2
    }, "two of this machine's ports have no netdev, and stay whole"  # fmt: skip
    assert any("shared, so they are not offered whole, alone or in pairs" in note for note in offer.notes)


def test_one_of_several_rules_counts_the_first_that_fits(scanned: Scanned) -> None:
    inventory = scanned("dgx-a100", 4)
    offer = offer_of(inventory, shared_pfs=(SharedPfs(PF.upper(), 3), *ALL))
    assert {one.nics[0]: one.sub_interfaces for one in of_kind(offer, "rdma-shared")}[PF] == 3
    assert Counter(one.sub_interfaces for one in of_kind(offer, "rdma-shared")) == {3: 1, 16: 7}


def test_a_model_selects_its_rails(scanned: Scanned) -> None:
    inventory = scanned("dgx-a100", 4)
    function = inventory.functions[PF]
    model = f"{function.vendor:04x}:{function.device:04x}"
    offer = offer_of(inventory, shared_pfs=(SharedPfs(model, 2),))
    assert len(of_kind(offer, "rdma-shared")) == 8


@pytest.mark.parametrize("by", ["address", "name"])
def test_a_function_that_is_no_rail_is_shared_when_it_is_named(scanned: Scanned, by: str) -> None:
    inventory = scanned("dgx-a100", 4)
    other = next(
        nic.address
        for nic in inventory.nics
        if not nic.is_vf and nic.address not in rails(inventory) and nic.function.netdevs
        and nic.function.netdevs[0].link_type == "ether" and nic.function.rdma_devices
    )  # fmt: skip
    rule = SharedPfs(other if by == "address" else name_of(inventory, other), 4)
    (device,) = of_kind(offer_of(inventory, shared_pfs=(rule,)), "rdma-shared")
    assert device.nics == (other,)


def test_the_nodes_uplink_is_shared_only_when_it_is_named(scanned: Scanned) -> None:
    inventory = scanned("dgx-a100", 4)
    options = {"excluded": frozenset({PF}), "shared_pfs": ALL}
    offer = offer_of(inventory, **options)
    assert PF not in {one.nics[0] for one in of_kind(offer, "rdma-shared")}
    assert any(f"NIC {PF} is not shared: the node's uplink" in note for note in offer.notes)
    named = offer_of(inventory, **options | {"shared_pfs": (SharedPfs(name_of(inventory, PF), 2),)})
    assert [one.nics for one in of_kind(named, "rdma-shared")] == [(PF,)]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"netdevs": ()}, "no netdev on the node"),
        ({"netdevs": (Netdev("ib0", link_type="infiniband"),)}, "no Ethernet"),
        ({"rdma_devices": ()}, "no RDMA device"),
        ({"driver": "vfio-pci"}, "held by driver vfio-pci"),
    ],
)
def test_what_cannot_be_shared_is_told_with_the_cause(
    scanned: Scanned, change: dict[str, object], why: str
) -> None:
    inventory = changed(scanned("dgx-a100", 4), {PF: change})
    offer = offer_of(inventory, shared_pfs=(SharedPfs(PF, 2),))
    assert of_kind(offer, "rdma-shared") == []
    assert any(f"NIC {PF} is not shared: " in note and why in note for note in offer.notes)


def test_a_port_of_a_bond_is_never_shared(scanned: Scanned) -> None:
    inventory = enslaved(scanned("dgx-a100", 4), PF)
    offer = offer_of(inventory, shared_pfs=(SharedPfs(PF, 2),))
    assert of_kind(offer, "rdma-shared") == []
    assert any("part of bond0" in note for note in offer.notes)


def test_on_a_node_in_exclusive_mode_nothing_is_shared_and_the_way_out_is_told(scanned: Scanned) -> None:
    inventory = replace(scanned("dgx-a100", 4), rdma_netns_mode="exclusive")
    offer = offer_of(inventory, shared_pfs=ALL)
    assert of_kind(offer, "rdma-shared") == []
    assert any("rdma system set netns shared" in note for note in offer.notes)


def test_a_rule_that_fits_nothing_is_told(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 4), shared_pfs=(SharedPfs("nosuch*", 2),))
    assert "the rule to share nosuch* fits no physical function of this machine" in offer.notes


def test_a_shared_device_says_where_it_is_as_its_vfs_do(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 4), shared_pfs=ALL)
    (device,) = [one for one in of_kind(offer, "rdma-shared") if one.nics == (PF,)]
    vf = next(one for one in of_kind(offer, "rdma-vf") if one.facts.get(names.PF_PCI_BUS_ID) == PF)
    for name in (names.PCIE_SWITCH, names.RAIL, names.NUMA_NODE, names.PCIE_ROOT, names.LINK_SPEED):
        assert device.attributes[name] == vf.attributes[name], name
    switches = {one.attributes[names.PCIE_SWITCH] for one in of_kind(offer, "gpu")}
    assert device.attributes[names.PCIE_SWITCH] in switches, "matchAttribute joins it with a GPU"
    assert device.told[names.PF_NAME] == vf.told[names.PF_NAME]


def test_a_slice_has_it_as_one_device_for_many_claims_of_one_share_each(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 4), shared_pfs=ALL)
    (body,) = [
        device
        for item in resource_slices(offer, "railmate.dev", "node1")
        for device in item["spec"].get("devices", [])
        if device["name"] == "shared-0000-0c-00-0"
    ]
    assert body["allowMultipleAllocations"] is True
    assert body["capacity"] == {
        "subInterfaces": {"value": "16", "requestPolicy": {"default": "1", "validValues": ["1"]}}
    }
    assert "consumesCounters" not in body


def test_no_other_device_may_be_allocated_twice(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 4), shared_pfs=ALL)
    for item in resource_slices(offer, "railmate.dev", "node1"):
        for device in item["spec"].get("devices", []):
            assert ("allowMultipleAllocations" in device) == device["name"].startswith("shared-")


def test_a_server_that_knows_no_shares_gets_no_shared_device(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 4), shared_pfs=ALL)
    reduced = without_shared(offer)
    assert reduced.devices == offer_of(scanned("dgx-a100", 4)).devices
    assert reduced.sections == offer.sections
    asked = {field for device in gate_probe("railmate.dev", "node1")["spec"]["devices"] for field in device}
    assert "allowMultipleAllocations" in asked


@pytest.mark.parametrize("preference", list(Preference))
def test_without_counters_sharing_stays(scanned: Scanned, preference: Preference) -> None:
    offer = without_counters(offer_of(scanned("dgx-a100", 4), shared_pfs=ALL), preference)
    assert len(of_kind(offer, "rdma-shared")) == 8


def test_shares_of_one_function_are_apart_and_the_whole_is_in_each(scanned: Scanned) -> None:
    (device, *_) = of_kind(offer_of(scanned("dgx-a100", 4), shared_pfs=ALL), "rdma-shared")
    one, other = device.parts_with("a"), device.parts_with("b")
    assert not overlap(one, other)
    assert overlap(one, one)
    assert overlap(one, device.nics)
    assert overlap(device.nics, one)


@pytest.mark.parametrize(
    ("text", "nic", "number"),
    [
        ("enp*=16", "enp*", 16),
        ("15b3:101e=1", "15b3:101e", 1),
        ("0000:0c:00.0=1024", "0000:0c:00.0", 1024),
        ("*=8", "*", 8),
    ],
)
def test_a_rule_is_read(text: str, nic: str, number: int) -> None:
    assert parse_shared_pfs(text) == SharedPfs(nic, number)


@pytest.mark.parametrize(
    "text",
    [
        "enp12s0",
        "=4",
        "enp*=",
        "enp*=0",
        "enp*=1025",
        "enp*=-1",
        "enp*=four",
        "a b=4",
        "enp*=4.0",
        "",
        "enp*=٤",
    ],
)
def test_a_rule_that_is_none_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(UsageError, match="--shared-pfs"):
        parse_shared_pfs(text)
