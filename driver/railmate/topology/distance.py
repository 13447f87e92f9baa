"""Distance classes as ``nvidia-smi topo -m`` prints them.

NVIDIA does not publish the rule. This one reproduces the published tables of DGX A100 and B200 cell
by cell: under a common bridge the bridges between the two decide, else the host bridge, else NUMA.
"""

from __future__ import annotations

from collections.abc import Iterable

from railmate.topology.model import Distance
from railmate.topology.tree import Place, common_prefix

ORDER: dict[Distance, int] = {distance: rank for rank, distance in enumerate(Distance)}
# One switch: a downstream port on either side of the shared upstream port.
_BRIDGES_OF_ONE_SWITCH = 2


def distance(first: Place, second: Place, first_numa: int | None, second_numa: int | None) -> Distance:
    if first.host_bridge is not None and first.host_bridge == second.host_bridge:
        common = common_prefix(first.bridges, second.bridges)
        if common == 0:
            return Distance.PHB
        between = bridges_between(first, second)
        return Distance.PIX if between <= _BRIDGES_OF_ONE_SWITCH else Distance.PXB
    if first_numa is not None and first_numa == second_numa:
        return Distance.NODE
    return Distance.SYS  # also where a NUMA node is unknown, as nvidia-smi does


def bridges_between(first: Place, second: Place) -> int:
    """How many bridges are below the nearest that both have above them."""
    common = common_prefix(first.bridges, second.bridges)
    return len(first.bridges) + len(second.bridges) - 2 * common


def worst(distances: Iterable[Distance]) -> Distance:
    return max(distances, key=ORDER.__getitem__)
