"""How the pool is cut into slices: what changes in one place of the machine rewrites little of what is published."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railmate.explain.model import Node
from railmate.explain.parse import parse_slice
from railmate.explain.pools import gather_pools
from railmate.inventory.model import Inventory
from railmate.publish.devices import build_offer
from railmate.publish.model import Offer, OfferedDevice
from railmate.publish.slices import resource_slices
from railmate.publish.writes import plan_writes
from railmate.topology.analyze import analyze
from unit.publish.offered_machines import Case, cases, largest_inventory
from unit.publish.offers import check_invariants, without_driver
from unit.publish.test_slice_objects import check_api_limits

Scanned = Callable[[str, int], Inventory]


def slices(inventory: Inventory) -> list[dict[str, Any]]:
    offer = build_offer(inventory, analyze(inventory))
    return resource_slices(offer, "railmate.dev", "node1", node_uid="0" * 36)


def rewritten(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> tuple[int, bool]:
    """How many slices are written, and whether the pool needs a new generation."""
    plan = plan_writes(before, after)
    return len(plan.update) + len(plan.create) + len(plan.delete), plan.generation == 2


@pytest.fixture(scope="module")
def largest() -> Inventory:
    return largest_inventory()


def test_eight_gpus_and_128_vfs_a_nic_are_within_all_limits(largest: Inventory) -> None:
    found = slices(largest)
    check_api_limits(found)
    check_invariants(build_offer(largest, analyze(largest)))
    assert sum(len(item["spec"].get("devices", [])) for item in found) == 8 + 1 + 8 + 8 * 127
    assert len(found) == 18


def test_a_lost_vf_rewrites_one_slice(largest: Inventory) -> None:
    nic = next(nic for nic in largest.nics if nic.vf_index == 70)
    assert rewritten(slices(largest), slices(without_driver(largest, nic.address))) == (1, False)


def test_a_vf_that_comes_back_rewrites_one_slice(largest: Inventory) -> None:
    nic = next(nic for nic in largest.nics if nic.vf_index == 3)
    assert rewritten(slices(without_driver(largest, nic.address)), slices(largest)) == (1, False)


def test_what_is_new_about_all_gpus_rewrites_one_slice(largest: Inventory) -> None:
    other = replace(largest, gpus=tuple(replace(gpu, product="NVIDIA H200") for gpu in largest.gpus))
    assert rewritten(slices(largest), slices(other)) == (1, False)


def without_gpu(inventory: Inventory, address: str) -> Inventory:
    return replace(
        inventory,
        gpus=tuple(gpu for gpu in inventory.gpus if gpu.address != address),
        functions={key: one for key, one in inventory.functions.items() if key != address},
    )


def of_machine(name: str, scanned: Scanned) -> Inventory:
    return largest_inventory() if name == "largest" else scanned("dgx-a100", 4)


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "back"])
@pytest.mark.parametrize("machine", ["dgx", "largest"])
def test_a_gpu_that_is_lost_or_comes_back_rewrites_two_slices_and_no_device_is_ever_out_of_reach(
    machine: str, lost: bool, scanned: Scanned
) -> None:
    """Its counter and its devices, one after the other: what a scheduler sees in between is a pool that it can use."""
    whole = of_machine(machine, scanned)
    less = without_gpu(whole, whole.gpus[2].address)
    before, after = (slices(one) for one in ((whole, less) if lost else (less, whole)))
    plan = plan_writes(before, after)
    assert (len(plan.update), plan.create, plan.delete, plan.generation) == (2, set(), set(), 1)
    now = {item["metadata"]["name"]: item for item in before}
    wanted = {item["metadata"]["name"]: item for item in after}
    problems = []
    for name in sorted(plan.update, key=lambda one: one == plan.last):
        now[name] = wanted[name]
        (pool,) = gather_pools([parse_slice(one) for one in now.values()], Node("node1"))
        problems.append(pool.problem)
    assert problems == ["", ""]
    assert list(now.values()) == after


def test_counters_that_go_while_others_come_take_a_new_generation(scanned: Scanned) -> None:
    whole = scanned("dgx-a100", 4)
    one, other = (slices(without_gpu(whole, whole.gpus[place].address)) for place in (2, 5))
    assert rewritten(one, other) == (2, True)


def test_any_change_of_a_usual_node_rewrites_its_one_slice_of_devices(scanned: Scanned) -> None:
    inventory = scanned("dgx-a100", 4)
    for address in ("0000:0c:00.2", "0000:0c:00.1"):
        assert rewritten(slices(inventory), slices(without_driver(inventory, address))) == (1, False)


def test_slices_of_a_node_are_few(scanned: Scanned) -> None:
    assert [len(slices(scanned("dgx-a100", vfs))) for vfs in (0, 1, 4, 16)] == [2, 2, 2, 4]


@pytest.mark.parametrize("case", cases(), ids=lambda case: str(case.name))
def test_slices_have_the_devices_in_the_order_of_the_offer(case: Case) -> None:
    """The scheduler walks slices by name and devices by place."""
    found = resource_slices(case.offer, "railmate.dev", "node1")
    check_api_limits(found)
    published = [device["name"] for item in found for device in item["spec"].get("devices", [])]
    assert published == [device.name for device in case.offer.devices]


def test_order_is_the_offers_also_where_switches_alternate(largest: Inventory) -> None:
    """Two NICs of one switch with another's between them in PCI order."""
    rails = sorted({nic.function.physical_function or nic.address for nic in largest.nics})
    topology = analyze(largest)
    chosen = {rail: ("b", "a")[place % 2] for place, rail in enumerate(rails)}
    switches = {
        address: chosen.get(function.physical_function or address, "a")
        for address, function in largest.functions.items()
    }
    offer = build_offer(largest, replace(topology, switches=switches))
    found = resource_slices(offer, "railmate.dev", "node1")
    published = [device["name"] for item in found for device in item["spec"].get("devices", [])]
    assert published == [device.name for device in offer.devices]
    vfs = [device.attributes["railmate.dev/pcieSwitch"] for device in offer.devices if not device.gpus]
    assert vfs == sorted(vfs, reverse=vfs[0] == "b"), "one switch is filled before the next is opened"


def sectioned(sizes: Mapping[str, int], **held: int) -> list[list[str]]:
    devices = [
        OfferedDevice(f"{section}{n}", "gpu", {}, section=section)
        for section, count in held.items()
        for n in range(count)
    ]
    found = resource_slices(Offer(tuple(devices), sections=sizes), "railmate.dev", "node1")
    return [[device["name"] for device in item["spec"]["devices"]] for item in found]


def test_sections_share_a_slice_while_all_of_both_fits() -> None:
    assert [len(one) for one in sectioned({"a": 30, "b": 34, "c": 1}, a=2, b=3, c=1)] == [5, 1]


def test_an_empty_section_keeps_its_place() -> None:
    sizes = {"a": 40, "b": 40, "c": 40}
    assert [len(one) for one in sectioned(sizes, a=40, c=40)] == [40, 40]
    assert [len(one) for one in sectioned(sizes, a=40, b=1, c=40)] == [40, 1, 40]


def test_a_large_section_is_cut_and_the_next_uses_the_rest() -> None:
    assert [len(one) for one in sectioned({"a": 100, "b": 20}, a=100, b=20)] == [64, 56]
    assert [len(one) for one in sectioned({"a": 100, "b": 28}, a=64, b=28)] == [64, 28]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 150)), max_size=8))
def test_no_slice_is_ever_too_full(sections: list[tuple[int, int]]) -> None:
    """Whatever was reserved and whatever came."""
    sizes = {f"s{n}-": reserved for n, (reserved, _) in enumerate(sections)}
    found = sectioned(sizes, **{f"s{n}-": count for n, (_, count) in enumerate(sections)})
    assert all(len(one) <= 64 for one in found)
    assert sum(map(len, found)) == sum(count for _, count in sections)


# --- bytes
#: What the design's bench measured for 8 pairs, 8 GPUs and 24 VFs (JSON as it is sent).
BUDGET = 19_200


def test_a_node_of_eight_gpus_and_32_vfs_is_two_slices_within_its_bytes(scanned: Scanned) -> None:
    found = slices(scanned("dgx-a100", 4))
    size = len(json.dumps(found, separators=(",", ":")))
    print(f"dgx-a100, 4 VFs a NIC: {len(found)} slices, {size} bytes")
    assert len(found) == 2
    assert size <= BUDGET
