"""Taints in slices: all that health changes there."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railmate.publish.model import Offer, OfferedDevice
from railmate.publish.slices import keep_taint_times, resource_slices, slice_specs

PLAIN = Offer(tuple(OfferedDevice(f"vf-{i}", "rdma-vf", {"railmate.dev/vfIndex": i}) for i in range(150)))


def slices(offer: Offer = PLAIN, **taints: str) -> list[dict[str, object]]:
    return resource_slices(
        offer, "railmate.dev", "node1", taints={k.replace("_", "-"): v for k, v in taints.items()}
    )


def test_tainted_device_takes_no_new_claims_and_keeps_its_pods() -> None:
    (found,) = [
        d for spec in slice_specs(PLAIN, {"vf-70": "nic-link-down"}) for d in spec["devices"] if "taints" in d
    ]
    assert found["name"] == "vf-70"
    assert found["taints"] == [
        {"key": "railmate.dev/unhealthy", "value": "nic-link-down", "effect": "NoSchedule"}
    ]


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from([d.name for d in PLAIN.devices]), st.just("nic-lost")))
def test_taints_are_the_only_difference(taints: dict[str, str]) -> None:
    """No device moves, and the limit of 64 devices a slice with taints holds."""
    without = resource_slices(PLAIN, "railmate.dev", "node1")
    tainted = resource_slices(PLAIN, "railmate.dev", "node1", taints=taints)
    names = set()
    for item in tainted:
        assert len(item["spec"]["devices"]) <= 64
        for device in item["spec"]["devices"]:
            if device.pop("taints", None):
                names.add(device["name"])
    assert names == set(taints)
    assert json.dumps(tainted) == json.dumps(without)


def test_taint_of_a_device_that_is_not_offered_is_left_out() -> None:
    assert slices(vf_999="nic-gone") == slices()


def stored(**taints: str) -> list[dict[str, object]]:
    """As the server keeps it: with the time."""
    found = copy.deepcopy(slices(**taints))
    for item in found:
        for device in item["spec"]["devices"]:  # type: ignore[index]
            for taint in device.get("taints", []):
                taint["timeAdded"] = "2026-11-29T12:00:00Z"
    return found


def test_taint_that_stays_keeps_its_time() -> None:
    wanted = slices(vf_3="nic-link-down")
    keep_taint_times(wanted, stored(vf_3="nic-link-down"))
    assert wanted == stored(vf_3="nic-link-down")


@pytest.mark.parametrize("before", [{}, {"vf_3": "nic-lost"}, {"vf_4": "nic-link-down"}])
def test_new_taint_takes_no_others_time(before: dict[str, str]) -> None:
    wanted = slices(vf_3="nic-link-down")
    keep_taint_times(wanted, stored(**before))
    assert wanted == slices(vf_3="nic-link-down")
