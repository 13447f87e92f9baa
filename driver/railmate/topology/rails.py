"""Rail ordinals: which NICs of a node lead to the same network, counted in PCI order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def rail_ordinals(rails: Sequence[str], joined: Iterable[Sequence[str]]) -> dict[str, int]:
    """Address of a rail -> its ordinal. ``rails`` in PCI order; those of one group in ``joined`` count once.

    Groups are the ports of a card, the halves of a socket-direct card and the members of a bond:
    each is one way out of the node. Groups that share a member are one.
    """
    leader = {rail: rail for rail in rails}

    def find(rail: str) -> str:
        while leader[rail] != rail:
            rail = leader[rail]
        return rail

    place = {rail: index for index, rail in enumerate(rails)}
    for group in joined:
        held = sorted({find(rail) for rail in group if rail in leader}, key=place.__getitem__)
        for rail in held[1:]:
            leader[rail] = held[0]
    ordinals: dict[str, int] = {}
    for rail in rails:
        ordinals.setdefault(find(rail), len(ordinals))
    return {rail: ordinals[find(rail)] for rail in rails}
