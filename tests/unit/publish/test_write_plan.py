"""Which slices are written, and with which generation, so that the scheduler always sees one whole pool."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from railmate.publish.model import Offer, OfferedDevice
from railmate.publish.slices import resource_slices
from railmate.publish.writes import plan_writes

DRIVER, NODE = "railmate.dev", "node1"


def offer(devices: int = 3, counted: bool = True) -> Offer:
    consumes = (("switch-0", "gpu-0", 1),) if counted else ()
    return Offer(
        tuple(
            OfferedDevice(f"gpu-{i}", "gpu", {"railmate.dev/rail": i}, consumes=consumes)
            for i in range(devices)
        ),
        {"switch-0": {"gpu-0": 1}} if counted else {},
    )


def stored(offered: Offer, generations: list[int]) -> list[dict[str, Any]]:
    items = resource_slices(offered, DRIVER, NODE, node_uid="u")
    for item, generation in zip(items, generations, strict=False):
        item["spec"]["pool"]["generation"] = generation
        item["metadata"]["resourceVersion"] = "1"
    return items


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([0, 1, 3, 64, 65, 130]),
    st.sampled_from([0, 1, 3, 64, 65, 130]),
    st.lists(st.integers(1, 3), min_size=6, max_size=6),
    st.sets(st.integers(0, 5)),
)
def test_after_the_plan_the_pool_is_what_is_wanted(
    before: int, after: int, generations: list[int], missing: set[int]
) -> None:
    """Whatever is stored, one round of writes leaves slices of one generation with the wanted contents."""
    existing = [i for n, i in enumerate(stored(offer(before), generations)) if n not in missing]
    desired = resource_slices(offer(after), DRIVER, NODE, node_uid="u")
    plan = plan_writes(existing, desired)
    result = {item["metadata"]["name"]: item for item in existing}
    for name in plan.delete:
        del result[name]
    for item in resource_slices(offer(after), DRIVER, NODE, node_uid="u", generation=plan.generation or 1):
        if item["metadata"]["name"] in plan.update | plan.create:
            result[item["metadata"]["name"]] = item
    pools = [item["spec"]["pool"] for item in result.values()]
    assert {pool["resourceSliceCount"] for pool in pools} == {len(result)} == {len(desired)}
    assert len({pool["generation"] for pool in pools}) == 1
    highest = max((item["spec"]["pool"]["generation"] for item in existing), default=0)
    kept = [
        i for i in existing if i["metadata"]["name"] in result and i["metadata"]["name"] not in plan.update
    ]
    if not kept:
        assert pools[0]["generation"] >= highest
    assert [result[i["metadata"]["name"]]["spec"].get("devices") for i in desired] == [
        i["spec"].get("devices") for i in desired
    ]


def test_stale_slice_of_a_higher_generation_does_not_split_the_pool() -> None:
    existing = stored(offer(3), [1, 1])
    stale = copy.deepcopy(existing[0])
    stale["metadata"]["name"] = "00009-railmate.dev-node1"
    stale["spec"]["pool"]["generation"] = 5
    existing[1]["spec"]["devices"].pop()
    plan = plan_writes([*existing, stale], resource_slices(offer(3), DRIVER, NODE, node_uid="u"))
    generations = {
        plan.generation if item["metadata"]["name"] in plan.update else item["spec"]["pool"]["generation"]
        for item in existing
    }
    assert len(generations) == 1
