"""What pods hold stays published, and so counted, while the machine would be offered otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from railmate.inventory.model import Inventory
from railmate.publish.exclusive import Preference, without_counters
from railmate.publish.model import OfferedDevice
from railmate.publish.shared import SharedPfs
from railmate.publish.slices import resource_slices
from railmate_api import attributes as names
from unit.publish.offers import Scanned, changed, check_invariants, of_kind, offer_of, without_driver
from unit.publish.test_slice_objects import check_api_limits


def held_of(device: OfferedDevice) -> OfferedDevice:
    """As the ledger knows it."""
    return OfferedDevice(device.name, "", {}, gpus=device.gpus, nics=device.nics, partition=device.partition)


def shares_of(device: OfferedDevice, shares: int) -> OfferedDevice:
    """As the ledger knows it."""
    return OfferedDevice(device.name, "", {}, nics=device.nics, sub_interfaces=shares)


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


# --- shared ports
ALL_SHARED = (SharedPfs("*", 16),)
PORT = "0000:0c:00.0"


def shared_port(inventory: Inventory) -> OfferedDevice:
    (device,) = [
        one
        for one in of_kind(offer_of(inventory, shared_pfs=ALL_SHARED), "rdma-shared")
        if one.nics == (PORT,)
    ]
    return device


def enslaved(inventory: Inventory) -> Inventory:
    netdevs = tuple(replace(one, master="bond0") for one in inventory.functions[PORT].netdevs)
    return changed(inventory, {PORT: {"netdevs": netdevs}})


def test_a_shared_port_in_use_is_offered_as_ever(scanned: Scanned) -> None:
    inventory = scanned("dgx-a100", 0)
    held = [shares_of(shared_port(inventory), 2)]
    assert offer_of(inventory, shared_pfs=ALL_SHARED, held=held) == offer_of(inventory, shared_pfs=ALL_SHARED)


@pytest.mark.parametrize("vfs", [0, 4])
@pytest.mark.parametrize("why", ["no rule any more", "exclusive mode", "in a bond", "without netdev"])
def test_a_port_that_pods_share_and_that_is_not_shared_any_more_stays_published_and_is_not_offered_whole(
    scanned: Scanned, why: str, vfs: int
) -> None:
    before = scanned("dgx-a100", vfs)
    held = shares_of(shared_port(before), 2)
    rules = () if why == "no rule any more" else ALL_SHARED
    now = {
        "exclusive mode": lambda: replace(before, rdma_netns_mode="exclusive"),
        "in a bond": lambda: enslaved(before),
        "without netdev": lambda: changed(before, {PORT: {"netdevs": ()}}),
    }.get(why, lambda: before)()
    offer = offer_of(now, shared_pfs=rules, held=[held])
    (kept,) = of_kind(offer, names.KIND_HELD)
    assert (kept.name, kept.nics, kept.sub_interfaces) == (held.name, (PORT,), 2)
    assert [one.name for one in offer.devices if PORT in one.nics] == [held.name], (
        "neither alone nor in a pair"
    )
    assert any(f"{PORT} is no longer shared, but pods still have shares of it" in one for one in offer.notes)
    check_invariants(offer)
    check_api_limits(resource_slices(offer, "railmate.dev", "node1"))
    for preference in Preference:
        assert held.name in without_counters(offer, preference).by_name
    # and the VFs beside it are what they were
    ended = offer_of(now, shared_pfs=rules)
    assert [one for one in offer.devices if one.kind == "rdma-vf"] == [
        one for one in ended.devices if one.kind == "rdma-vf" and PORT not in one.nics
    ]
    if vfs == 0:
        assert any(one.kind == "pair" and PORT in one.nics for one in ended.devices), (
            "once its pods have ended"
        )


def test_a_shared_port_in_use_is_never_published_as_one_for_a_single_claim(scanned: Scanned) -> None:
    """A claim that was given a share before would be taken for one that has the whole port."""
    inventory = scanned("dgx-a100", 0)
    offer = offer_of(inventory, held=[shares_of(shared_port(inventory), 3)])
    (body,) = [
        one
        for item in resource_slices(offer, "railmate.dev", "node1")
        for one in item["spec"].get("devices", [])
        if one["name"].startswith("shared-")
    ]
    assert body["allowMultipleAllocations"] is True
    assert body["capacity"]["subInterfaces"]["value"] == "3", "all of them are taken"
    assert body["attributes"] == {"kind": {"string": "held"}}


def test_a_shared_port_that_is_gone_from_the_machine_stays_published_while_pods_have_shares_of_it(
    scanned: Scanned,
) -> None:
    inventory = scanned("dgx-a100", 0)
    held = shares_of(shared_port(inventory), 1)
    functions = {address: one for address, one in inventory.functions.items() if address != PORT}
    gone = replace(
        inventory, functions=functions, nics=tuple(one for one in inventory.nics if one.address != PORT)
    )
    offer = offer_of(gone, shared_pfs=ALL_SHARED, held=[held])
    assert [one.name for one in of_kind(offer, names.KIND_HELD)] == [held.name]
    check_invariants(offer)
