"""The matching: every ratio comes out even, nearest first, in PCI order, and nothing is given twice."""

from __future__ import annotations

import pytest

from railmate.topology.matching import groups, match


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{index:02d}" for index in range(count)]


def same(_gpu: str, _card: str) -> int:
    return 0


@pytest.mark.parametrize(
    ("gpus", "cards"),
    [(1, 1), (2, 1), (8, 4), (8, 8), (8, 16), (8, 32), (3, 2), (8, 3), (5, 7), (16, 1), (1, 9)],
)
def test_every_ratio_is_even_and_complete(gpus: int, cards: int) -> None:
    result = match(names("g", gpus), names("c", cards), same)
    assert sorted(gpu for held, _ in result for gpu in held) == names("g", gpus)
    assert sorted(card for _, held in result for card in held) == names("c", cards)
    assert len(result) == min(gpus, cards)
    for side in (0, 1):
        sizes = {len(unit[side]) for unit in result}
        assert max(sizes) - min(sizes) <= 1


def test_equals_go_by_pci_order() -> None:
    assert match(names("g", 2), names("c", 2), same) == [(("g00",), ("c00",)), (("g01",), ("c01",))]
    assert match(names("g", 3), names("c", 2), same) == [(("g00", "g01"), ("c00",)), (("g02",), ("c01",))]
    assert match(names("g", 2), names("c", 3), same) == [(("g00",), ("c00", "c01")), (("g01",), ("c02",))]


def test_thirty_two_cards_for_eight_gpus_are_four_each_in_order() -> None:
    result = match(names("g", 8), names("c", 32), same)
    assert [card for _, held in result for card in held] == names("c", 32)
    assert {len(held) for _, held in result} == {4}


def test_nearness_outranks_order() -> None:
    crossed = {("g00", "c01"), ("g01", "c00")}
    result = match(names("g", 2), names("c", 2), lambda gpu, card: 0 if (gpu, card) in crossed else 1)
    assert result == [(("g00",), ("c01",)), (("g01",), ("c00",))]


def test_even_loads_outrank_nearness() -> None:
    """Both GPUs are nearer to the first card; a minimum for each would give it to both."""
    result = match(names("g", 2), names("c", 2), lambda _gpu, card: 0 if card == "c00" else 1)
    assert result == [(("g00",), ("c00",)), (("g01",), ("c01",))]


def test_the_sum_is_least_and_not_each_gpus_own() -> None:
    cost = {("g00", "c00"): 0, ("g00", "c01"): 1, ("g01", "c00"): 0, ("g01", "c01"): 9}
    result = match(names("g", 2), names("c", 2), lambda gpu, card: cost[gpu, card])
    assert result == [(("g00",), ("c01",)), (("g01",), ("c00",))]


def test_nothing_to_match_is_no_error() -> None:
    assert match([], names("c", 2), same) == []
    assert match(names("g", 2), [], same) == []


def test_parts_of_a_node_are_told_apart() -> None:
    near = {("g00", "c00"), ("g01", "c00"), ("g02", "c01")}
    assert groups(names("g", 4), names("c", 3), lambda gpu, card: (gpu, card) in near) == [
        (["g00", "g01"], ["c00"]),
        (["g02"], ["c01"]),
        (["g03"], []),
        ([], ["c02"]),
    ]
