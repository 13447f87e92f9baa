"""GPUs that share a NIC: each with a VF of its own where there are enough, and all together as one device."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from railmate.inventory.model import Inventory
from railmate.publish.devices import OfferOptions, build_offer
from railmate.publish.exclusive import Preference, without_counters
from railmate.publish.model import Offer
from railmate.topology.analyze import analyze
from railmate.topology.model import Distance
from railmate_api import attributes as names
from unit.publish.offered_machines import Case, four_nics, recorded
from unit.publish.offers import check_invariants, of_kind, offer_of, parent_of, without_driver


def kinds(offer: Offer) -> Counter[str]:
    return Counter(device.kind for device in offer.devices)


def vfs(inventory: Inventory, port: str) -> tuple[str, ...]:
    return inventory.functions[port].virtual_functions


@pytest.mark.parametrize("count", [2, 4, 7])
def test_each_gpu_has_a_pair_with_a_vf_of_its_own_beside_the_group(count: int) -> None:
    case = four_nics(count)
    found = {"pair": 8, "group": 4, "node": 1, "gpu": 8, "rdma-vf": 4 * (count - 2)}
    assert kinds(case.offer) == Counter({kind: n for kind, n in found.items() if n})
    pairs = of_kind(case.offer, "pair")
    assert len({nic for pair in pairs for nic in pair.nics}) == 8
    for pair in pairs:
        (nic,), (gpu,) = pair.nics, pair.gpus
        assert {parent_of(case.inventory, nic)} == case.right[gpu]
    check_invariants(case.offer)


def test_pair_says_where_it_is_as_any_pair_does() -> None:
    pair, other, *_ = of_kind(four_nics(4).offer, "pair")
    wanted = {
        names.PCIE_SWITCH: "0000:01:00.0",
        names.DISTANCE: "PIX",
        names.TOPOLOGY_SOURCE: "sysfs",
        names.GPU_PCI_BUS_ID: "0000:10:00.0",
        names.NIC_PCI_BUS_ID: "0000:40:00.1",
        names.RAIL: 0,
    }
    assert {name: pair.attributes.get(name) for name in wanted} == wanted
    assert other.attributes[names.NIC_PCI_BUS_ID] == "0000:40:00.2"


def test_group_is_all_gpus_with_the_first_ones_vf() -> None:
    offer = four_nics(4).offer
    first = of_kind(offer, "group")[0]
    assert (first.gpus, first.nics) == (("0000:10:00.0", "0000:11:00.0"), ("0000:40:00.1",))
    gpus = [one for one in of_kind(offer, "pair") if set(one.gpus) & set(first.gpus)]
    assert set(first.consumes) == {use for one in gpus for use in one.consumes}, "the same counters"


@pytest.mark.parametrize(
    "case", [four_nics(0), four_nics(1), recorded("aws-p4d", 0)], ids=lambda case: case.name
)
def test_with_fewer_vfs_than_gpus_or_none_there_is_the_group_alone(case: Case) -> None:
    found = kinds(case.offer)
    assert (found["group"], found["pair"], found["gpu"]) == (4, 0, 8)
    check_invariants(case.offer)


def test_vfs_that_cannot_be_offered_do_not_count() -> None:
    inventory = four_nics(3).inventory
    for lost, pairs in ((1, 8), (2, 6)):
        offer = offer_of(without_driver(inventory, *vfs(inventory, "0000:40:00.0")[:lost]))
        assert (kinds(offer)["pair"], kinds(offer)["group"]) == (pairs, 4)
        check_invariants(offer)


def test_a_lost_gpu_changes_nothing_for_the_one_beside_it() -> None:
    inventory = four_nics(4).inventory
    whole = offer_of(inventory)
    for lost in ("0000:10:00.0", "0000:11:00.0"):
        less = offer_of(without_driver(inventory, lost))
        left = {one.name: one.parts for one in of_kind(less, "pair")}
        assert left == {one.name: one.parts for one in of_kind(whole, "pair") if lost not in one.gpus}
        assert len(of_kind(less, "group")) == 3
        check_invariants(less)


def test_vfs_of_pairs_can_be_offered_alone_as_well() -> None:
    case = replace(four_nics(2), options=OfferOptions(share_pair_vfs=True))
    assert kinds(case.offer) == {"pair": 8, "group": 4, "node": 1, "gpu": 8, "rdma-vf": 8}
    check_invariants(case.offer)


@pytest.mark.parametrize("count", [0, 2])
def test_whole_switches_of_shared_nics_take_each_gpu_once(count: int) -> None:
    """Here a group is a whole switch, so there is nothing to add."""
    case = four_nics(count)
    assert (
        build_offer(case.inventory, analyze(case.inventory), OfferOptions(switch_groups=True)).devices
        == case.offer.devices
    )


def test_a_server_without_counters_keeps_the_pairs() -> None:
    assert kinds(without_counters(four_nics(2).offer, Preference.PAIRS)) == {"pair": 8}


def test_the_way_of_each_gpu_is_its_own() -> None:
    """Of a group the worst is told, of a pair its own."""
    topology = analyze(four_nics(2).inventory)
    assert [pair.gpus for pair in topology.shares] == [(gpu,) for pair in topology.pairs for gpu in pair.gpus]
    assert {share.distance for share in topology.shares} == {Distance.PIX}
    assert not analyze(recorded("dgx-a100", 4).inventory).shares
