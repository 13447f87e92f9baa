"""Which NICs belong to which GPUs: a balanced matching over the whole node, by minimum-cost flow.

Not a minimum for each GPU: that hands one NIC to several GPUs and leaves others idle. Cards are
matched, not ports: a card with two ports is one way out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import networkx as nx

Closeness = Callable[[str, str], int]  # GPU, card -> cost; the smaller, the nearer


def groups(
    gpus: Sequence[str], cards: Sequence[str], near: Callable[[str, str], bool]
) -> list[tuple[list[str], list[str]]]:
    """Splits a node into parts that are matched on their own: GPUs and cards joined by ``near``.

    Order within a part and of the parts is that of the arguments. GPUs without a near card come as
    parts without cards, and the other way round.
    """
    graph: nx.Graph = nx.Graph()
    graph.add_nodes_from(("gpu", gpu) for gpu in gpus)
    graph.add_nodes_from(("card", card) for card in cards)
    graph.add_edges_from((("gpu", gpu), ("card", card)) for gpu in gpus for card in cards if near(gpu, card))
    parts = []
    for component in nx.connected_components(graph):
        parts.append(
            (
                [gpu for gpu in gpus if ("gpu", gpu) in component],
                [card for card in cards if ("card", card) in component],
            )
        )
    return parts


def match(
    gpus: Sequence[str], cards: Sequence[str], closeness: Closeness
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Matches all GPUs with all cards, as evenly as the numbers allow.

    Fewer cards than GPUs: every card with its GPUs. Otherwise every GPU with its cards. Even loads
    come first, then nearness in sum, then PCI order (the arguments' order).
    """
    if not gpus or not cards:
        return []
    if len(cards) < len(gpus):
        chosen = _assign(len(gpus), len(cards), lambda i, j: closeness(gpus[i], cards[j]))
        return [(tuple(gpus[i] for i in held), (cards[j],)) for j, held in enumerate(chosen)]
    chosen = _assign(len(cards), len(gpus), lambda j, i: closeness(gpus[i], cards[j]))
    return [((gpus[i],), tuple(cards[j] for j in held)) for i, held in enumerate(chosen)]


def _assign(many: int, few: int, closeness: Callable[[int, int], int]) -> list[list[int]]:
    """Gives each of ``many`` to one of ``few``; each of ``few`` gets many/few, rounded down or up."""
    base, extra = divmod(many, few)
    near, position = _scales(many, few)
    costs = {
        (m, f): near * closeness(m, f) + position * ((2 * m + 1) * few - (2 * f + 1) * many) ** 2 + f
        for m in range(many)
        for f in range(few)
    }
    uneven = sum(costs.values()) + 1  # dearer than anything nearness could save
    flow: nx.DiGraph = nx.DiGraph()
    flow.add_node("source", demand=-many)
    flow.add_node("sink", demand=many)
    for m in range(many):
        flow.add_edge("source", ("many", m), capacity=1, weight=0)
    for (m, f), cost in costs.items():
        flow.add_edge(("many", m), ("few", f), capacity=1, weight=cost)
    for f in range(few):
        flow.add_edge(("few", f), "sink", capacity=base, weight=0)
        if extra:
            flow.add_edge(("few", f), ("extra", f), capacity=1, weight=uneven)
            flow.add_edge(("extra", f), "sink", capacity=1, weight=0)
    result = nx.min_cost_flow(flow)
    return [[m for m in range(many) if result[("many", m)].get(("few", f))] for f in range(few)]


def _scales(many: int, few: int) -> tuple[int, int]:
    """Weights that make nearness outrank position in the order, and that outrank the index."""
    position = many * few + 1
    near = (many * (2 * many * few) ** 2 + 1) * position
    return near, position
