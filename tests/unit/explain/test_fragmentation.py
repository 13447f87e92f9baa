"""railmate explain --cluster: what is still to be had together."""

from __future__ import annotations

import json
from typing import Any

import pytest
from explain_world import SWITCH, claim, device, held, machine, names, on_node, request, slices

from railmate.explain.cluster import NodeState, cluster_state
from railmate.explain.model import Node
from railmate.explain.parse import parse_claim, parse_slice
from railmate.explain.render import cluster_json, cluster_text
from railmate.explain.verdict import World


def state(*taken: dict[str, Any], published: list[dict[str, Any]] | None = None) -> NodeState:
    slices = tuple(map(parse_slice, published or machine(switches=2)))
    (one,) = cluster_state(World(slices, {}, tuple(map(parse_claim, taken)), (Node("n1"),)))
    return one


def counts(one: NodeState) -> tuple[int, ...]:
    return (
        one.free_pairs,
        one.free_gpus,
        one.stranded_gpus,
        one.idle_nics,
        one.largest_switch,
        one.largest_node,
    )


def test_empty_node_has_everything_and_strands_nothing() -> None:
    assert counts(state()) == (4, 4, 0, 0, 2, 4)


def test_gpu_taken_alone_leaves_its_nic_without_a_gpu() -> None:
    assert counts(state(held("c", "gpu-0-0"))) == (3, 3, 0, 1, 2, 3)


def test_vf_taken_alone_leaves_its_gpu_without_a_nic() -> None:
    assert counts(state(held("c", "vf-0-0"), held("d", "vf-1-1"))) == (2, 4, 2, 0, 1, 2)


def test_pair_taken_strands_neither_half() -> None:
    assert counts(state(held("c", "pair-0-0"))) == (3, 3, 0, 0, 2, 3)


def test_nic_of_a_pair_whose_gpu_went_out_in_a_group_is_not_idle() -> None:
    """The group has another VF of the same NIC, and a VF that is kept for its pair goes nowhere else."""
    published = machine(switches=1)
    counters = [
        one["consumesCounters"][0] for one in published[1]["spec"]["devices"] if one["name"][:4] == "gpu-"
    ]
    group = {
        "name": "group-0",
        "attributes": {"railmate.dev/kind": {"string": "group"}},
        "consumesCounters": [
            {**counters[0], "counters": {**counters[0]["counters"], **counters[1]["counters"]}}
        ],
    }
    published[1]["spec"]["devices"].append(group)
    assert counts(state(published=published)) == (2, 2, 0, 0, 2, 2)
    assert counts(state(held("c", "group-0"), published=published)) == (0, 0, 0, 0, 0, 0)
    assert counts(state(held("c", "gpu-0-1"), published=published)) == (1, 1, 0, 1, 1, 1)


def test_tainted_pair_counts_as_not_free_and_its_gpu_as_stranded() -> None:
    published = machine(switches=1)
    taint = {"key": "railmate.dev/unhealthy", "value": "nic-link-down", "effect": "NoSchedule"}
    published[1]["spec"]["devices"][0]["taints"] = [taint]
    one = state(published=published)
    assert counts(one) == (1, 2, 1, 0, 1, 1)
    assert one.unhealthy == 1


@pytest.mark.parametrize("taken", [(), ("gpu-0-0",), ("vf-0-1", "gpu-1-0"), ("pair-1-1", "vf-0-0", "vf-0-1")])
def test_largest_asks_are_what_the_allocator_gives_and_no_more(taken: tuple[str, ...]) -> None:
    claims = tuple(held(f"c{n}", one) for n, one in enumerate(taken))
    one = state(*claims)
    for size, match in ((one.largest_node, None), (one.largest_switch, SWITCH)):
        if size:
            assert (
                len(names(on_node(machine(), claim(request("p", "pair", size), match=match), taken=claims)))
                == size
            )
        assert not names(on_node(machine(), claim(request("p", "pair", size + 1), match=match), taken=claims))


def test_where_gpus_come_in_groups_the_largest_ask_is_of_groups() -> None:
    groups = [device(f"group-{n}", "group", n // 2, f"g{n % 2}") for n in range(4)]
    counters = {f"g{n}": {"value": "1"} for n in range(2)}
    sets = [{"name": f"switch-{n}", "counters": counters} for n in range(2)]
    published = slices("n1", {"sharedCounters": sets}, {"devices": groups})
    one = state(held("c", "group-0"), published=published)
    assert (one.largest_switch, one.largest_node) == (2, 3)
    assert cluster_text([one]).splitlines()[-1].endswith("3 groups on 1")


def test_table_has_a_line_a_node_and_says_what_fits() -> None:
    lines = cluster_text([state(held("c", "vf-0-0"))]).splitlines()
    assert lines[0].split()[:2] == ["NODE", "PAIRS"]
    assert lines[1].split()[:4] == ["n1", "3/4", "4/4", "1"]
    assert "3 of 4 pairs are free; 1 free GPUs have no NIC left" in lines
    assert lines[-1].endswith("3 pairs on 1")
    assert json.loads(json.dumps(cluster_json([state()])))["nodes"][0]["largestSwitch"] == 2
