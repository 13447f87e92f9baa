"""Nodes that are alike are judged once, and each is told by its own names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from explain_world import claim, held, machine, request, slices, verdict

from railmate.explain.model import Node
from railmate.explain.parse import Seen, parse_claim, parse_slice
from railmate.explain.reads import attributes_read
from railmate.explain.search import Search
from railmate.explain.sorts import Sites
from railmate.explain.verdict import FITS, NO, Verdict

KIND = 'device.attributes["railmate.dev"].?kind.orValue("") == "gpu"'


def sorts(published: list[dict[str, Any]], *taken: dict[str, Any], reads: frozenset[str] | None) -> int:
    seen: Seen = {}
    parsed = [parse_slice(one, seen) for one in published]
    sites = Sites(parsed, tuple(map(parse_claim, taken)), reads)
    names = {one.place.node for one in parsed if one.place is not None and one.place.node}
    return len({sites.site(Node(name)).sort for name in names})


def with_uuids(node: str) -> list[dict[str, Any]]:
    published = machine(node)
    for one in published[1]["spec"]["devices"]:
        one["attributes"]["uuid"] = {"string": f"{node}-{one['name']}"}
    return published


def many(count: int, **more: Any) -> list[dict[str, Any]]:
    return [one for n in range(count) for one in machine(f"n{n}", **more)]


def test_nodes_of_equal_slices_are_of_one_sort_whatever_their_generation() -> None:
    published = many(3)
    for one in published[:2]:
        one["spec"]["pool"]["generation"] = 7
    assert sorts(published, reads=None) == 1


def test_what_a_wish_cannot_see_makes_no_difference() -> None:
    published = [*with_uuids("a"), *with_uuids("b")]
    assert sorts(published, reads=frozenset({"kind", "pcieSwitch"})) == 1
    assert sorts(published, reads=frozenset({"kind", "uuid"})) == 2
    assert sorts(published, reads=None) == 2


@pytest.mark.parametrize("what", ["taken", "shared", "more", "taint", "attribute", "incomplete", "order"])
def test_what_decides_makes_a_sort_of_its_own(what: str) -> None:
    published, taken = many(2), []
    devices = published[1]["spec"]["devices"]
    if what == "taken":
        taken = [held("c", "gpu-0-0", pool="n0")]
    elif what == "shared":
        taken = [held("c", "gpu-0-0", pool="n0"), held("d", "gpu-0-0", pool="n1")]
        taken[0]["status"]["allocation"]["devices"]["results"][0]["shareID"] = "x"
    elif what == "more":
        devices.pop()
    elif what == "taint":
        devices[0]["taints"] = [{"key": "k", "effect": "NoSchedule"}]
    elif what == "attribute":
        devices[0]["attributes"]["railmate.dev/kind"] = {"string": "other"}
    elif what == "incomplete":
        published[0]["spec"]["pool"] = {**published[0]["spec"]["pool"], "generation": 2}
    else:
        devices.reverse()
    assert sorts(published, *taken, reads=frozenset({"kind"})) == 2


def test_device_that_some_nodes_reach_is_a_difference() -> None:
    rack = slices("rack", {"devices": [{"name": "nic"}]}, driver="nic.example")
    del rack[0]["spec"]["nodeName"]
    rack[0]["spec"]["nodeSelector"] = {
        "nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]
    }
    assert sorts([*many(3), *rack], reads=None) == 2


@pytest.mark.parametrize(
    ("expression", "read"),
    [
        ('device.driver == "railmate.dev"', set()),
        (KIND, {"kind"}),
        ('device.attributes["a"].kind == device.attributes[device.driver].?rail.orValue("")', {"kind", "rail"}),
        ('device.capacity["a"].memory.isGreaterThan(quantity("1"))', set()),
        ('"kind" in device.attributes["railmate.dev"]', None),
        ('device.attributes["railmate.dev"].exists(k, k == "uuid")', None),
        ('device.attributes[?"railmate.dev"].hasValue()', None),
        ('cel.bind(d, device, d.attributes["a"].uuid == "x")', None),
        ('cel.bind(a, device.attributes["a"], a.uuid == "x")', None),
        ('device.attributes["railmate.dev"]["uuid"] == "x"', None),
    ],
)  # fmt: skip
def test_attributes_that_an_expression_may_see_are_known_or_all(
    expression: str, read: set[str] | None
) -> None:
    assert attributes_read([expression]) == read


def judged(*taken: dict[str, Any]) -> Verdict:
    return verdict(many(4), claim(request("pairs", "pair", 4)), taken=taken)


def test_each_node_of_a_sort_gets_its_own_devices_holders_and_changes() -> None:
    taken = [held(f"c{n}", "gpu-0-1", pool=f"n{n}", pod=f"p{n}") for n in (2, 0, 1)]
    whole = judged(*taken)
    assert [one.outcome for one in whole.nodes] == [NO, NO, NO, FITS]
    assert {one.device.pool for one in whole.nodes[3].devices} == {"n3"}
    for number, one in enumerate(whole.nodes[:3]):
        assert one.reason is not None
        (shortage,) = one.reason.shortages
        assert [str(held) for held in shortage.holders] == [f"gpu-0-1: pod team/p{number}"]
        assert f"after pod team/p{number} ends" in [change.sentence for change in one.changes]


def test_devices_of_all_nodes_that_fit_are_theirs() -> None:
    whole = verdict(many(3), claim(request("pairs", "pair", 2)))
    for one in whole.nodes:
        assert one.outcome == FITS
        assert [placed.device.id[1:] for placed in one.devices] == [
            (one.node, "pair-0-0"), (one.node, "pair-0-1")
        ]  # fmt: skip


def test_same_devices_held_by_one_claim_or_by_two_are_told_apart() -> None:
    one = judged(held("a", "gpu-0-0", "gpu-0-1", pool="n0", pod="a"),
                 held("b", "gpu-0-0", pool="n1", pod="b"), held("c", "gpu-0-1", pool="n1", pod="c"))  # fmt: skip
    first, second = ({c.sentence for c in one.nodes[n].changes} for n in (0, 1))
    assert "after pod team/a ends" in first
    assert not {"after pod team/b ends", "after pod team/c ends"} & second
    assert "when all 2 claims on this node are released" in second


def counting(solve: Callable[[Search], Any], calls: list[int]) -> Callable[[Search], Any]:
    def counted(search: Search) -> Any:
        calls.append(1)
        return solve(search)

    return counted


def test_search_is_done_once_for_each_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but one lack a GPU, and each of them is told who has it: node by node that is seconds."""
    published = many(200, switches=4)
    taken = tuple(held(f"c{n}", "gpu-0-0", pool=f"n{n}", pod=f"p{n}") for n in range(199))
    searches: list[int] = []
    monkeypatch.setattr(Search, "solve", counting(Search.solve, searches))
    whole = verdict(published, claim(request("pairs", "pair", 8)), taken=taken, seconds=60)
    assert len(searches) < 30
    assert [one.node for one in whole.nodes if one.outcome == FITS] == ["n199"]
    assert all(one.reason is not None and one.changes for one in whole.nodes if one.outcome == NO)
