"""The rail of a pair, counted among the pairs of its node: what gangs select by, the same on every node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from railmate.inventory.model import Inventory
from railmate.publish.devices import build_offer
from railmate.publish.model import OfferedDevice
from railmate.publish.pairrails import pair_rails
from railmate.topology.analyze import analyze
from railmate_api import attributes as names
from unit.publish.offered_machines import Case, cases

EXPECTED = {
    "aws-p5en-0vf": range(8),  # two NICs a GPU
    "p5": range(8),  # four
    "p6-b200": range(8),
    "turin-4vf": range(4),
    "four-nics-4vf": [0, 0, 1, 1, 2, 2, 3, 3],  # two GPUs a NIC
    "dgx-a100-4vf": [1, 0, 3, 2, 5, 4, 7, 6],
}


def rail_of(pair: OfferedDevice) -> object:
    """As a claim reads it: its bytes are published only where they say something new."""
    return pair.attributes.get(names.PAIR_RAIL, pair.attributes.get(names.RAIL))


@pytest.mark.parametrize(
    "case", [one for one in cases() if one.name in EXPECTED], ids=lambda one: str(one.name)
)
def test_pairs_are_counted_by_rail(case: Case) -> None:
    pairs = [one for one in case.offer.devices if one.kind == names.KIND_PAIR]
    assert [rail_of(one) for one in pairs] == list(EXPECTED[case.name])


@pytest.mark.parametrize("case", cases(), ids=lambda one: str(one.name))
def test_every_pair_with_a_rail_is_counted_from_zero_and_in_the_order_of_rails(case: Case) -> None:
    pairs = [one for one in case.offer.devices if one.kind == names.KIND_PAIR]
    counted = {one.attributes[names.RAIL]: rail_of(one) for one in pairs if names.RAIL in one.attributes}
    assert [counted[rail] for rail in sorted(counted)] == list(range(len(counted)))


@pytest.mark.parametrize(
    ("rails", "ordinals"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3]),
        ([1, 2, 3], [1, 2, 3]),  # the first GPU is lost
        ([0, 1, 3], [0, 1, 3]),
        ([4, 8, 16], [1, 2, 4]),
        ([1, 3, 5], [0, 1, 2]),
        ([6], [0]),
        ([], []),
    ],
)
def test_lost_gpu_moves_no_other_pair(
    rails: list[int], ordinals: list[int], scanned: Callable[[str, int], Inventory]
) -> None:
    topology = analyze(scanned("dgx-a100", 4))
    pairs = topology.pairs[: len(rails)]
    changed = replace(
        topology, pairs=pairs, rails={pair.gpus[0]: rail for pair, rail in zip(pairs, rails, strict=True)}
    )
    assert pair_rails(changed) == dict(zip(rails, ordinals, strict=True))


def test_gpu_that_is_lost_for_real_moves_no_other_pair(scanned: Callable[[str, int], Inventory]) -> None:
    inventory = scanned("dgx-a100", 4)

    def rails(of: Inventory) -> dict[str, object]:
        offer = build_offer(of, analyze(of))
        return {one.gpus[0]: rail_of(one) for one in offer.devices if one.kind == names.KIND_PAIR}

    whole = rails(inventory)
    gone = inventory.gpus[0].address
    functions = {a: f for a, f in inventory.functions.items() if a != gone}
    fewer = rails(replace(inventory, gpus=inventory.gpus[1:], functions=functions))
    assert fewer == {gpu: rail for gpu, rail in whole.items() if gpu != gone}
