"""What pods hold stays published, and so counted, while the machine would be offered otherwise."""

from __future__ import annotations

from railmate.publish.exclusive import Preference, without_counters
from railmate.publish.model import OfferedDevice
from railmate.publish.slices import resource_slices
from railmate_api import attributes as names
from unit.publish.offers import Scanned, check_invariants, of_kind, offer_of, without_driver
from unit.publish.test_slice_objects import check_api_limits


def held_of(device: OfferedDevice) -> OfferedDevice:
    """As the ledger knows it."""
    return OfferedDevice(device.name, "", {}, gpus=device.gpus, nics=device.nics, partition=device.partition)


def test_what_is_offered_is_not_offered_twice(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 4))
    assert offer_of(scanned("dgx-a100", 4), held=[held_of(one) for one in offer.devices[:9]]) == offer


def test_a_pair_that_has_another_vf_now_and_is_held_with_the_first_stays_and_excludes_the_new_one(
    scanned: Scanned,
) -> None:
    inventory = scanned("dgx-a100", 4)
    pair = of_kind(offer_of(inventory), "pair")[0]
    other = offer_of(without_driver(inventory, pair.nics[0]), held=[held_of(pair)])
    (kept,) = of_kind(other, names.KIND_HELD)
    assert (kept.name, kept.parts) == (pair.name, pair.parts)
    assert dict(kept.attributes) == {names.KIND: "held"}, "no class picks it"
    (new,) = [one for one in of_kind(other, "pair") if one.gpus == pair.gpus]
    assert new.nics != pair.nics
    assert set(kept.consumes) & set(new.consumes)
    check_invariants(other)
    check_api_limits(resource_slices(other, "railmate.dev", "node1"))


def test_a_group_that_settings_no_longer_have_stays_until_it_is_given_back(scanned: Scanned) -> None:
    inventory = scanned("dgx-a100", 1)
    group = of_kind(offer_of(inventory, switch_groups=True), "group")[0]
    now = offer_of(inventory, held=[held_of(group)])
    assert of_kind(now, names.KIND_HELD)[0].parts == group.parts
    check_invariants(now)
    for offer in (offer_of(inventory, nics_only=True, held=[held_of(group)]), now):
        vfs = [one for one in of_kind(offer, "rdma-vf") if one.nics[0] in group.nics]
        assert len(vfs) == 2
        assert all(one.consumes for one in vfs), "and its VFs are not given out alone"
        check_invariants(offer)
    assert not of_kind(offer_of(inventory), names.KIND_HELD)


def test_the_order_in_which_claims_came_changes_nothing(scanned: Scanned) -> None:
    groups = [held_of(one) for one in of_kind(offer_of(scanned("dgx-a100", 1), switch_groups=True), "group")]
    one, other = (offer_of(scanned("dgx-a100", 1), held=held) for held in (groups, groups[::-1]))
    assert one == other


def test_a_server_without_counters_gives_out_nothing_that_is_held(scanned: Scanned) -> None:
    inventory = scanned("dgx-a100", 4)
    pair = of_kind(offer_of(inventory), "pair")[0]
    offer = offer_of(without_driver(inventory, pair.nics[0]), held=[held_of(pair)])
    for preference in Preference:
        reduced = without_counters(offer, preference)
        assert of_kind(reduced, names.KIND_HELD)
        assert [one.kind for one in reduced.devices if pair.gpus[0] in one.gpus] == ["held"]
