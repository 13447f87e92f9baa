"""From real machines to offered devices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from railmate.publish.attributes import gpu_attributes
from railmate.topology.analyze import analyze
from railmate_api import attributes as names
from unit.publish.offers import (
    DGX_SWITCHES,
    Scanned,
    away_from_home,
    check_invariants,
    of_kind,
    offer_of,
    parent_of,
    shuffled,
    without_driver,
)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("vfs", [0, 1, 2, 4, 16])
def test_dgx_a100_keeps_the_invariants(scanned: Scanned, vfs: int, share: bool) -> None:
    check_invariants(offer_of(scanned("dgx-a100", vfs), share_pair_vfs=share))


@pytest.mark.parametrize("machine", ["aws-p5en", "aws-p4d", "tuolumne-mi300a", "b200-8gpu", "lassen-p9"])
def test_other_machines_keep_the_invariants(scanned: Scanned, machine: str) -> None:
    check_invariants(offer_of(scanned(machine, 0)))


def test_dgx_a100_with_4_vfs_has_8_pairs_8_gpus_and_3_free_vfs_a_rail(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 4))
    assert Counter(device.kind for device in offer.devices) == {"pair": 8, "node": 1, "gpu": 8, "rdma-vf": 24}
    kept = {nic for pair in of_kind(offer, "pair") for nic in pair.nics}
    assert kept.isdisjoint(nic for vf in of_kind(offer, "rdma-vf") for nic in vf.nics)


def test_pairs_of_dgx_a100_are_the_right_ones(scanned: Scanned) -> None:
    inventory = scanned("dgx-a100", 4)
    pairs = {
        device.gpus[0]: [parent_of(inventory, nic) for nic in device.nics]
        for device in of_kind(offer_of(inventory), "pair")
    }
    assert pairs == {
        "0000:07:00.0": ["0000:12:00.0"],
        "0000:0f:00.0": ["0000:0c:00.0"],
        "0000:47:00.0": ["0000:54:00.0"],
        "0000:4e:00.0": ["0000:4b:00.0"],
        "0000:87:00.0": ["0000:94:00.0"],
        "0000:90:00.0": ["0000:8d:00.0"],
        "0000:b7:00.0": ["0000:cc:00.0"],
        "0000:bd:00.0": ["0000:ba:00.0"],
    }


def test_pair_carries_both_halves(scanned: Scanned) -> None:
    pair = of_kind(offer_of(scanned("dgx-a100", 4)), "pair")[0]
    wanted = {
        names.KIND: "pair",
        names.PCIE_SWITCH: "0000:01:00.0",
        names.DISTANCE: "PXB",
        names.GPU_PCI_BUS_ID: "0000:07:00.0",
        names.NIC_PCI_BUS_ID: pair.nics[0],
        names.PCI_BUS_ID: "0000:07:00.0",
        names.PCIE_ROOT: "pci0000:00",
        names.NUMA_NODE: 3,
        names.RAIL: analyze(scanned("dgx-a100", 4)).rails[pair.nics[0]],
        names.VENDOR: "nvidia",
        names.TOPOLOGY_SOURCE: "sysfs",
    }
    assert {name: pair.attributes.get(name) for name in wanted} == wanted


@pytest.mark.parametrize("name", ["dgx-a100", "b200-8gpu", "aws-p4d"])
def test_all_that_is_known_can_be_published(scanned: Scanned, name: str) -> None:
    less, everything = (offer_of(scanned(name, 0), all_attributes=every) for every in (False, True))
    assert [one.name for one in everything.devices] == [one.name for one in less.devices]
    for few, many in zip(less.devices, everything.devices, strict=True):
        assert many.told == few.told
        too_long = {name for name, value in few.told.items() if len(str(value)) > 64}
        assert many.facts.keys() == too_long
        assert {names.TOPOLOGY_SOURCE, names.MACHINE_CLASS} <= many.attributes.keys()
    check_invariants(everything)


def test_the_pod_is_told_more_than_the_cluster(scanned: Scanned) -> None:
    inventory = scanned("dgx-a100", 4)
    pair = of_kind(offer_of(inventory), "pair")[0]
    parent = inventory.functions[parent_of(inventory, pair.nics[0])]
    wanted = {
        names.LINK_LAYER: "Ethernet",
        names.LINK_SPEED: 200000,
        names.MACHINE_CLASS: "switched",
        names.DRIVER_VERSION: "535.183.01",
        names.MODE: "vf",
        names.VF_INDEX: 0,
        names.PF_NAME: parent.netdevs[0].name,
        names.PF_PCI_BUS_ID: parent.address,
        names.RDMA_DEVICE: inventory.functions[pair.nics[0]].rdma_devices[0].name,
    }
    assert {name: pair.facts.get(name) for name in wanted} == wanted
    assert pair.told == {**pair.attributes, **pair.facts}


def test_vf_carries_what_users_select_on(scanned: Scanned) -> None:
    vf = of_kind(offer_of(scanned("dgx-a100", 4)), "rdma-vf")[0]
    wanted = {
        names.KIND: "rdma-vf",
        names.PCI_BUS_ID: vf.nics[0],
        names.PCIE_SWITCH: "0000:01:00.0",
        names.RAIL: 0,
        names.LINK_LAYER: "Ethernet",
        names.LINK_SPEED: 200000,
    }
    assert {name: vf.attributes.get(name) for name in wanted} == wanted
    assert vf.facts[names.VF_INDEX] == 1


def test_without_vfs_the_whole_port_is_offered_in_its_pair_and_alone(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 0))
    assert Counter(device.kind for device in offer.devices) == {"pair": 8, "node": 1, "gpu": 8, "rdma-vf": 8}
    assert {device.told[names.MODE] for device in offer.devices if device.nics} == {"pf"}
    check_invariants(offer)


def test_lone_vfs_are_as_many_as_is_said(scanned: Scanned) -> None:
    for most, found in ((None, 24), (2, 16), (1, 8), (0, 0)):
        offer = offer_of(scanned("dgx-a100", 4), lone_vfs=most)
        assert len(of_kind(offer, "rdma-vf")) == found
        assert len(of_kind(offer, "pair")) == 8
        check_invariants(offer)
    assert not of_kind(offer_of(scanned("dgx-a100", 0), lone_vfs=0), "rdma-vf")


def test_a_single_vf_is_offered_both_ways_under_one_counter(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 1))
    assert Counter(device.kind for device in offer.devices) == {"pair": 8, "node": 1, "gpu": 8, "rdma-vf": 8}
    for pair in of_kind(offer, "pair"):
        (vf,) = [device for device in of_kind(offer, "rdma-vf") if device.nics == pair.nics]
        assert vf.consumes
        assert set(vf.consumes) < set(pair.consumes)


def test_share_pair_vfs_offers_every_vf_alone(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 4), share_pair_vfs=True)
    assert Counter(device.kind for device in offer.devices) == {"pair": 8, "node": 1, "gpu": 8, "rdma-vf": 32}
    assert sum(bool(vf.consumes) for vf in of_kind(offer, "rdma-vf")) == 8


def test_counters_of_a_machine_are_one_set(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 4), share_pair_vfs=True)
    assert {name: len(counters) for name, counters in offer.counter_sets.items()} == {"node": 16}


@pytest.mark.parametrize("kind", ["pair", "gpu", "rdma-vf"])
def test_first_fit_fills_one_switch_before_it_opens_the_next(scanned: Scanned, kind: str) -> None:
    switches = [
        device.attributes[names.PCIE_SWITCH] for device in of_kind(offer_of(scanned("dgx-a100", 4)), kind)
    ]
    assert list(dict.fromkeys(switches)) == DGX_SWITCHES
    assert switches == sorted(switches, key=DGX_SWITCHES.index)


def test_p5en_gives_each_gpu_its_two_nics(scanned: Scanned) -> None:
    offer = offer_of(scanned("aws-p5en", 0))
    pairs = of_kind(offer, "pair")
    assert [pair.nics for pair in pairs][:2] == [
        ("0000:55:00.0", "0000:56:00.0"),
        ("0000:57:00.0", "0000:58:00.0"),
    ]
    assert sorted(nic for pair in pairs for nic in pair.nics) == sorted(
        {nic for pair in pairs for nic in pair.nics}
    )
    assert len(pairs) == 8
    assert pairs[0].attributes[names.NIC_PCI_BUS_ID] == "0000:55:00.0,0000:56:00.0"


def test_p4d_where_gpus_share_a_nic_offers_groups_and_no_pair(scanned: Scanned) -> None:
    """A NIC between two GPUs as a pair of either would be handed out twice."""
    offer = offer_of(scanned("aws-p4d", 0))
    assert Counter(device.kind for device in offer.devices) == {"group": 4, "gpu": 8, "rdma-vf": 4}
    assert all(names.PCIE_SWITCH not in device.attributes for device in offer.devices)
    assert {device.attributes[names.TOPOLOGY_SOURCE] for device in offer.devices} == {"numa"}
    group = of_kind(offer, "group")[0]
    wanted = {
        names.GPU_COUNT: 2,
        names.NIC_COUNT: 1,
        names.GPU_PCI_BUS_ID: "0000:10:1c.0,0000:10:1d.0",
        names.NIC_PCI_BUS_ID: "0000:10:1b.0",
        names.DISTANCE: "PHB",
        names.VENDOR: "nvidia",
        names.NUMA_NODE: 0,
    }
    assert {name: group.attributes.get(name) for name in wanted} == wanted
    assert (group.gpus, group.nics) == (("0000:10:1c.0", "0000:10:1d.0"), ("0000:10:1b.0",))
    check_invariants(offer)


def test_group_that_lost_a_gpu_is_a_pair_of_the_other(scanned: Scanned) -> None:
    offer = offer_of(without_driver(scanned("aws-p4d", 0), "0000:10:1c.0"))
    assert Counter(device.kind for device in offer.devices) == {"group": 3, "pair": 1, "gpu": 7, "rdma-vf": 4}
    (pair,) = of_kind(offer, "pair")
    assert (pair.gpus, pair.nics) == (("0000:10:1d.0",), ("0000:10:1b.0",))
    check_invariants(offer)


def test_name_of_a_group_stands_for_its_hardware(scanned: Scanned) -> None:
    whole = offer_of(scanned("dgx-a100", 2), switch_groups=True)
    less = offer_of(without_driver(scanned("dgx-a100", 2), "0000:0c:00.1"), switch_groups=True)
    names_of = [{one.name: one.parts for one in of_kind(offer, "group")} for offer in (whole, less)]
    assert names_of[0].keys() != names_of[1].keys()
    assert all(names_of[1].get(name, parts) == parts for name, parts in names_of[0].items())


@pytest.mark.parametrize("vfs", [0, 1, 4])
def test_switch_groups_are_all_of_a_switch(scanned: Scanned, vfs: int) -> None:
    offer = offer_of(scanned("dgx-a100", vfs), switch_groups=True)
    check_invariants(offer)
    groups = of_kind(offer, "group")
    assert [group.attributes[names.PCIE_SWITCH] for group in groups] == DGX_SWITCHES
    pairs = {part for pair in of_kind(offer, "pair") for part in pair.parts}
    assert pairs == {part for group in groups for part in group.parts}, "they take no further VFs"
    assert {group.attributes[names.GPU_COUNT] for group in groups} == {2}


def test_switch_with_one_pair_is_no_group(scanned: Scanned) -> None:
    assert not of_kind(offer_of(scanned("b200-8gpu", 0), switch_groups=True), "group")


# --- stability
def test_same_machine_same_offer(scanned: Scanned) -> None:
    inventory = scanned("dgx-a100", 4)
    assert offer_of(inventory) == offer_of(shuffled(inventory))


def test_offer_does_not_change_while_a_vf_is_in_a_pod(scanned: Scanned) -> None:
    """Its netdev is not on the node then. A driver that starts at that moment must publish the same."""
    inventory = scanned("dgx-a100", 4)
    away = away_from_home(inventory, "0000:0c:00.1", "0000:0c:00.2")
    assert offer_of(away) == offer_of(inventory)


def test_long_product_name_is_cut_to_what_the_api_takes(scanned: Scanned) -> None:
    gpu = replace(scanned("dgx-a100", 0).gpus[0], product="Ü" * 60)
    value = gpu_attributes(gpu)[names.PRODUCT]
    assert isinstance(value, str)
    assert 0 < len(value.encode()) <= 64
