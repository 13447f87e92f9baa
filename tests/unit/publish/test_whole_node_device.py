"""All GPUs of a node, each with its NIC, as one device: where it is there, and what it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from railmate.publish.devices import OfferOptions, build_offer
from railmate.publish.exclusive import Preference, lost, without_counters
from railmate.publish.model import Offer, OfferedDevice
from railmate.topology.analyze import analyze
from railmate_api import attributes as names
from unit.publish.offered_machines import Case, cases, four_nics, recorded
from unit.publish.offers import Scanned, check_invariants, of_kind, offer_of, without_driver
from unit.publish.test_offer_parts import MIG, cut


def whole(offer: Offer) -> OfferedDevice:
    (node,) = of_kind(offer, names.KIND_NODE)
    return node


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_machine_whose_gpus_all_have_a_nic_on_their_switch_is_one_device_too(case: Case) -> None:
    offer = case.offer
    pairs = [one for one in of_kind(offer, names.KIND_PAIR) if names.PCIE_SWITCH in one.attributes]
    if len(pairs) < len(case.inventory.gpus):
        assert not of_kind(offer, names.KIND_NODE)
        return
    node = whole(offer)
    assert node.parts == frozenset(part for pair in pairs for part in pair.parts)
    assert node.attributes[names.GPU_COUNT] == len(pairs)
    check_invariants(offer)


def test_most_machines_with_switches_have_it() -> None:
    assert sum(bool(of_kind(case.offer, names.KIND_NODE)) for case in cases()) >= 9


def test_it_says_how_much_it_is_and_the_pod_is_told_of_which_parts(scanned: Scanned) -> None:
    node = whole(offer_of(scanned("dgx-a100", 4)))
    assert node.attributes == {
        names.KIND: "node",
        names.GPU_COUNT: 8,
        names.NIC_COUNT: 8,
        names.DISTANCE: "PXB",
        names.VENDOR: "nvidia",
        names.PRODUCT: "NVIDIA A100-SXM4-40GB",
    }
    gpus, nics = (str(node.told[name]).split(",") for name in (names.GPU_PCI_BUS_ID, names.NIC_PCI_BUS_ID))
    pairs = {one.gpus[0]: one.nics[0] for one in of_kind(offer_of(scanned("dgx-a100", 4)), "pair")}
    assert dict(zip(gpus, nics, strict=True)) == pairs, "the n-th NIC is the n-th GPU's"
    assert gpus == sorted(gpus)


@pytest.mark.parametrize("vfs", [0, 1, 4])
def test_it_excludes_all_that_has_a_part_of_it(scanned: Scanned, vfs: int) -> None:
    offer = offer_of(scanned("dgx-a100", vfs))
    taken = {(name, counter) for name, counter, _ in whole(offer).consumes}
    for device in offer.devices:
        if device.gpus:
            assert {(name, counter) for name, counter, _ in device.consumes} <= taken
    check_invariants(offer)


def test_a_machine_that_is_not_whole_is_not_offered_as_one(scanned: Scanned) -> None:
    inventory = scanned("dgx-a100", 4)
    without_nic = offer_of(
        inventory, excluded=frozenset(inventory.functions["0000:0c:00.0"].virtual_functions)
    )
    for offer in (
        offer_of(without_driver(inventory, "0000:07:00.0")),
        offer_of(cut(inventory, "0000:07:00.0", "MIG", *MIG)),
        without_nic,
        offer_of(scanned("aws-p4d", 0)),  # no switch
        four_nics(0).offer,  # groups
    ):
        assert of_kind(offer, names.KIND_GPU)
        assert not of_kind(offer, names.KIND_NODE)


def test_gpus_that_share_a_nic_are_in_it_with_a_vf_each() -> None:
    node = whole(four_nics(2).offer)
    assert (len(set(node.gpus)), len(set(node.nics))) == (8, 8)


def test_its_name_stands_for_its_hardware(scanned: Scanned) -> None:
    names_of = {whole(offer_of(scanned("dgx-a100", vfs))).name for vfs in (0, 1, 4)}
    assert len(names_of) == 2, "the first VFs are the same with one and with four"


def test_a_server_without_counters_keeps_what_it_is_made_of(scanned: Scanned) -> None:
    offer = recorded("dgx-a100", 2).offer
    for preference in Preference:
        assert not of_kind(without_counters(offer, preference), names.KIND_NODE)
    assert lost(offer, without_counters(offer, Preference.PAIRS)) == "1 whole node, 8 GPUs alone"


def test_its_place_is_behind_what_it_is_made_of_and_before_gpus(scanned: Scanned) -> None:
    inventory = scanned("dgx-a100", 2)
    offer = build_offer(inventory, analyze(inventory), OfferOptions(switch_groups=True))
    kinds = list(dict.fromkeys(one.kind for one in offer.devices))
    assert kinds == ["pair", "group", "node", "gpu", "rdma-vf"]


def test_all_that_is_known_of_it_is_published_as_far_as_the_api_takes_it(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 4), all_attributes=True)
    node = whole(offer)
    assert names.MACHINE_CLASS in node.attributes
    assert names.GPU_PCI_BUS_ID in node.facts
    assert any("left out of 1 device as published" in note for note in offer.notes) is False
    assert replace(node, attributes={}, facts={}).parts == node.parts
