"""Offers without counters: nothing under two names, and as much as can be of what is preferred."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railmate.publish.devices import OfferOptions, build_offer
from railmate.publish.exclusive import Preference, lost, without_counters
from railmate.publish.model import Offer, OfferedDevice, overlap
from railmate.topology.analyze import analyze
from unit.publish.offered_machines import recorded
from unit.publish.test_notes import one_switch

PAIRS, PARTS = Preference.PAIRS, Preference.PARTS


@pytest.mark.parametrize(
    ("machine", "vfs", "groups", "preference", "left"),
    [
        ("dgx-a100", 4, False, PAIRS, {"pair": 8, "rdma-vf": 24}),
        ("dgx-a100", 4, False, PARTS, {"gpu": 8, "rdma-vf": 24}),
        ("dgx-a100", 1, False, PARTS, {"gpu": 8, "rdma-vf": 8}),
        ("dgx-a100", 0, False, PAIRS, {"pair": 8}),
        ("dgx-a100", 4, True, PAIRS, {"pair": 8, "rdma-vf": 24}),
        ("aws-p4d", 0, False, PAIRS, {"group": 4}),
        ("aws-p4d", 0, False, PARTS, {"gpu": 8, "rdma-vf": 4}),
    ],
)
def test_what_is_left_is_what_is_preferred(
    machine: str, vfs: int, groups: bool, preference: Preference, left: dict[str, int]
) -> None:
    reduced = without_counters(recorded(machine, vfs, switch_groups=groups).offer, preference)
    assert Counter(device.kind for device in reduced.devices) == left


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 8), st.integers(1, 12), st.integers(0, 3), st.booleans(), st.sampled_from(Preference))
def test_no_two_devices_share_hardware_and_none_is_left_out_in_vain(
    gpus: int, nics: int, vfs: int, groups: bool, preference: Preference
) -> None:
    inventory = one_switch(gpus, nics, vfs)
    offer = build_offer(
        inventory, analyze(inventory), OfferOptions(share_pair_vfs=True, switch_groups=groups)
    )
    reduced = without_counters(offer, preference)
    taken: set[str] = set()
    for device in reduced.devices:
        assert not overlap(device.parts, taken)
        assert not device.consumes
        taken |= device.parts
    for device in offer.devices:
        assert device.name in reduced.by_name or overlap(device.parts, taken)
    assert not reduced.counter_sets
    order = {device.name: place for place, device in enumerate(offer.devices)}
    assert [order[one.name] for one in reduced.devices] == sorted(order[one.name] for one in reduced.devices)


def test_the_loss_is_counted_in_words() -> None:
    offer = recorded("dgx-a100", 2, switch_groups=True).offer
    assert lost(offer, without_counters(offer, PAIRS)) == "4 groups, 1 whole node, 8 GPUs alone"
    assert lost(offer, without_counters(offer, PARTS)) == "8 pairs, 4 groups, 1 whole node"
    assert lost(offer, offer) == ""


def test_parts_of_a_gpu_and_the_whole_are_the_same_hardware() -> None:
    whole = OfferedDevice("gpu", "gpu", {}, gpus=("0000:01:00.0",))
    parts = [
        OfferedDevice(f"part{n}", "gpu-partition", {}, gpus=whole.gpus, partition=f"xcp{n}") for n in range(2)
    ]
    offer = Offer((whole, *parts))
    assert [one.name for one in without_counters(offer, PAIRS).devices] == ["gpu"]
    assert [one.name for one in without_counters(Offer(tuple(parts)), PAIRS).devices] == ["part0", "part1"]
    assert overlap(["0000:01:00.0/xcp0"], ["0000:01:00.0/xcp1"]) == frozenset()
    assert overlap(["0000:01:00.0"], ["0000:01:00.0/xcp1"]) == {"0000:01:00.0"}
    assert overlap(["0000:01:00.0/xcp1"], ["0000:01:00.0"]) == {"0000:01:00.0/xcp1"}
