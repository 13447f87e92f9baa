"""Where a claim goes, and what is said when it goes nowhere. The allocator itself is asked in the component tier."""

from __future__ import annotations

import time

import pytest
from explain_world import KIND, SWITCH, claim, device, held, machine, names, on_node, request, slices, verdict

from railmate.explain.render import verdict_json, verdict_text
from railmate.explain.verdict import ERROR, FITS, NO, NOT_LOOKED_AT, TOO_LARGE


def sentences(one: object) -> list[str]:
    return [change.sentence for change in one.changes]  # type: ignore[attr-defined]


def test_first_fit_takes_devices_in_the_order_of_the_slices() -> None:
    assert names(on_node(machine(), claim(request("pairs", "pair", 3)))) == [
        "pair-0-0",
        "pair-0-1",
        "pair-1-0",
    ]


def test_gpu_of_a_pair_goes_out_once() -> None:
    one = on_node(machine(), claim(request("pair", "pair"), request("gpus", "gpu", 3)))
    assert names(one) == ["pair-0-0", "gpu-0-1", "gpu-1-0", "gpu-1-1"]


def test_seven_of_eight_names_the_pod_that_has_the_missing_pair() -> None:
    one = on_node(
        machine(switches=4), claim(request("pairs", "pair", 8)), taken=(held("c", "gpu-2-1", pod="trainer"),)
    )
    assert one.outcome == NO
    assert one.reason is not None
    (shortage,) = one.reason.shortages
    assert (one.reason.request, shortage.kind, shortage.wanted) == ("pairs", "counters", 8)
    assert [str(holder) for holder in shortage.holders] == ["gpu-2-1: pod team/trainer"]
    assert "7 instead of 8 pair in request pairs" in sentences(one)
    assert "after pod team/trainer ends" in sentences(one)


def test_constraint_that_no_switch_meets_is_named_and_dropped() -> None:
    one = on_node(machine(), claim(request("gpus", "gpu", 3), match=SWITCH))
    assert one.reason is not None
    assert one.reason.shortages[0].kind == "constraint"
    assert one.changes[0].sentence.startswith("any pcieSwitch: without constraint matchAttribute")


def test_clause_of_a_selector_that_fails_is_told_alone() -> None:
    expression = f'{KIND.format("gpu")} && device.attributes["railmate.dev"].?pcieSwitch.orValue("") == "s9"'
    one = on_node(machine(), claim(request("gpu", "gpu", 1, expression)))
    assert one.reason is not None
    (shortage,) = one.reason.shortages
    assert shortage.kind == "selector"
    clause = 'device.attributes["railmate.dev"].?pcieSwitch.orValue("") == "s9"'
    assert shortage.sentence == f"0 of 4 devices meet selector: {clause}; 1 wanted"
    assert one.changes[0].kind == "selector"


def test_request_that_fails_is_the_first_that_cannot_be_met_with_those_before_it() -> None:
    one = on_node(
        machine(), claim(request("pairs", "pair", 4), request("vf", "rdma-vf"), request("gpu", "gpu"))
    )
    assert one.reason is not None
    assert one.reason.request == "gpu"
    assert one.reason.shortages[0].kind == "earlier"


def test_each_alternative_says_why() -> None:
    alternatives = [
        {"name": "many", "deviceClassName": "pair", "count": 9},
        {
            "name": "none",
            "deviceClassName": "gpu",
            "count": 1,
            "selectors": [{"cel": {"expression": "false"}}],
        },
    ]
    one = on_node(machine(), claim({"name": "either", "firstAvailable": alternatives}))
    assert one.reason is not None
    assert [shortage.request for shortage in one.reason.shortages] == ["either/many", "either/none"]


def test_taint_is_named_and_tolerating_it_is_the_last_thing_suggested() -> None:
    published = machine(switches=1, gpus=1)
    taint = {"key": "railmate.dev/unhealthy", "value": "nic-link-down", "effect": "NoSchedule"}
    published[1]["spec"]["devices"][0]["taints"] = [taint]
    one = on_node(published, claim(request("pair", "pair")))
    assert one.reason is not None
    assert one.reason.shortages[0].kind == "taint"
    assert [change.kind for change in one.changes] == ["toleration"]
    assert "railmate.dev/unhealthy=nic-link-down:NoSchedule" in one.changes[0].sentence


def test_selector_that_reads_what_a_device_lacks_stops_the_scheduler_on_all_nodes() -> None:
    published = [*machine("n1"), *machine("n2")]
    del published[3]["spec"]["devices"][0]["attributes"][SWITCH]
    expression = 'device.attributes["railmate.dev"].pcieSwitch == "s1"'
    whole = verdict(published, claim(request("pair", "pair", 1, expression)))
    assert [one.outcome for one in whole.nodes] == [FITS, ERROR]
    assert not whole.fits
    assert "no such key: pcieSwitch" in whole.stopped


def test_device_of_a_pool_that_is_being_rewritten_is_not_given_out() -> None:
    one = on_node(machine()[1:], claim(request("gpu", "gpu")))
    assert one.outcome == NO
    assert one.detail == "pool n1 is incomplete: 1 of 2 slices of generation 1 are there"


def test_unknown_class_is_an_error() -> None:
    assert "no DeviceClass nosuch" in verdict(machine(), claim(request("x", "nosuch"))).stopped


def test_more_than_32_devices_in_a_claim_are_an_error() -> None:
    assert "a claim holds 32" in verdict(machine(), claim(request("x", "gpu", 33))).stopped


def test_what_is_allocated_with_admin_access_is_free_for_others() -> None:
    watching = held("monitor", "gpu-0-0")
    watching["status"]["allocation"]["devices"]["results"][0]["adminAccess"] = True
    assert names(on_node(machine(), claim(request("gpu", "gpu")), taken=(watching,))) == ["gpu-0-0"]


def test_more_allocated_than_counted_is_told_as_such() -> None:
    """As after a change of the offer: nothing with counters goes out then."""
    taken = (held("a", "pair-0-0"), held("b", "gpu-0-0"))
    one = on_node(machine(), claim(request("pair", "pair")), taken=taken)
    assert one.reason is not None
    assert "more is allocated than the pool's counters have" in one.reason.shortages[0].sentence


def pairs_one_by_one(count: int) -> dict[str, object]:
    """The form that takes the scheduler past its time-out: a matchAttribute for each pair."""
    wanted = claim(
        *(request(f"{kind}{n}", of) for n in range(count) for kind, of in (("g", "gpu"), ("v", "rdma-vf")))
    )
    wanted["spec"]["devices"]["constraints"] = [
        {"requests": [f"g{n}", f"v{n}"], "matchAttribute": SWITCH} for n in range(count)
    ]
    return wanted


@pytest.mark.parametrize("vfs", [8, 32])
def test_constrained_pairs_one_gpu_short_are_refused_within_the_time(vfs: int) -> None:
    """10 s and no answer of the scheduler's own allocator (facts: 6 pairs, 5 GPUs, 8 VFs a switch)."""
    published = machine(switches=4, gpus=2, vfs=vfs)
    began = time.process_time()
    one = on_node(published, pairs_one_by_one(8), taken=(held("c", "gpu-0-0"),))
    assert one.outcome == NO
    assert time.process_time() - began < 2.2
    assert one.reason is not None
    assert one.reason.request == "g7"


def test_end_of_the_time_is_said_and_not_taken_for_a_no() -> None:
    published = [*machine("n1"), *machine("n2")]
    whole = verdict(published, claim(request("pairs", "pair", 9)), seconds=0)
    assert {one.outcome for one in whole.nodes} <= {TOO_LARGE, NOT_LOOKED_AT}
    assert whole.fits is None


def test_time_holds_for_many_nodes_and_those_not_reached_say_so() -> None:
    """Each node another, or they would be judged together."""
    published = [one for n in range(100) for one in machine(f"n{n:04}", switches=4, vfs=n)]
    whole = verdict(published, claim(request("pairs", "pair", 9)), seconds=0.01)
    outcomes = [one.outcome for one in whole.nodes]
    assert len(outcomes) == 100
    assert NOT_LOOKED_AT in outcomes
    assert set(outcomes) <= {NO, TOO_LARGE, NOT_LOOKED_AT}
    assert whole.fits is None
    text = verdict_text(whole)
    assert "fits on no node" not in text
    assert f"{outcomes.count(NOT_LOOKED_AT)} nodes were not looked at" in text
    assert "next step: a larger --timeout" in text
    assert verdict_json(whole)["fits"] is None


def test_nearest_change_of_all_nodes_is_the_smallest() -> None:
    published = [*machine("n1", switches=1), *machine("n2", switches=2)]
    near = verdict(published, claim(request("pairs", "pair", 5))).nearest()
    assert near is not None
    assert (near[0].node, near[1].value) == ("n2", "4")


def test_devices_for_every_node_are_found_from_every_node() -> None:
    rack = slices(
        "rack", {"devices": [{"name": "nic", "attributes": {"speed": {"int": 400}}}]}, driver="nic.example"
    )
    del rack[0]["spec"]["nodeName"]
    rack[0]["spec"]["allNodes"] = True
    classes = {"rack": ['device.driver == "nic.example" && device.attributes["nic.example"].speed >= 400']}
    whole = verdict([*machine("n1"), *machine("n2"), *rack], claim(request("nic", "rack")), classes=classes)
    assert [names(one) for one in whole.nodes] == [["nic"], ["nic"]]


def test_form_that_takes_the_scheduler_past_its_time_is_told_with_the_better_one() -> None:
    text = verdict_text(verdict(machine(switches=4), pairs_one_by_one(5)))
    assert "has 5 constraints" in text
    assert "railmate claim --pairs N" in text
    assert "constraints: where" not in verdict_text(
        verdict(machine(), claim(request("p", "pair", 2), match=SWITCH))
    )


def test_pod_with_more_claims_than_can_be_searched_is_too_large_and_no_crash() -> None:
    published = slices(
        "n1", *({"devices": [device(f"d{n}-{m}", "gpu", 0) for m in range(64)]} for n in range(12))
    )
    wanted = (claim(request("r", "gpu", 32), name=f"c{n}") for n in range(24))
    assert on_node(published, *wanted).outcome in (FITS, TOO_LARGE)


def test_machine_without_switches_is_told_by_the_class_of_its_pairs() -> None:
    published = machine(switches=1)
    for one in published[1]["spec"]["devices"]:
        del one["attributes"][SWITCH]
    bare = 'device.attributes["railmate.dev"].?pcieSwitch.hasValue()'
    classes = {
        "gpu-rdma-pair.railmate.dev": [KIND.format("pair"), bare],
        "gpu-rdma-pair-numa.railmate.dev": [KIND.format("pair"), f"!{bare}"],
    }
    one = on_node(published, claim(request("pairs", "gpu-rdma-pair.railmate.dev", 2)), classes=classes)
    assert sentences(one) == [
        "class gpu-rdma-pair-numa.railmate.dev instead of gpu-rdma-pair.railmate.dev in request pairs"
    ]
