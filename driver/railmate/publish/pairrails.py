"""Rails counted among those of pairs: 0, 1, 2, … also where a GPU has several NICs, each on a rail of its own. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import gcd

from railmate.publish.model import AttributeValue
from railmate.topology.model import Topology


def pair_rails(topology: Topology) -> Mapping[AttributeValue, int]:
    """A pair's rail (the first of its NICs') to its ordinal.

    Rails of pairs come in equal steps (0, 4, 8, … with four NICs a GPU), and the ordinal is the number of steps, not
    the place in the list: where a GPU is lost, the other pairs stay aligned with those of other nodes.
    """
    found = {topology.rails[gpu] for pair in topology.pairs for gpu in pair.gpus if gpu in topology.rails}
    rails = sorted(found)
    step = gcd(*(after - before for before, after in pairwise(rails))) or 1
    return {rail: (rail - rails[0] % step) // step if len(rails) > 1 else 0 for rail in rails}
