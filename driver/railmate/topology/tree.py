"""Where a function sits: its host bridge and the bridges above it, from its sysfs path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from railmate.inventory.address import is_address, is_host_bridge, order
from railmate.inventory.model import PciFunction


@dataclass(frozen=True, slots=True)
class Place:
    """``host_bridge`` is the nearest above (a VMD makes a second one below a function)."""

    host_bridge: str | None
    bridges: tuple[str, ...]  # addresses from the host bridge down, without the function itself


def place(function: PciFunction) -> Place:
    host_bridge: str | None = None
    bridges: list[str] = []
    for part in function.path[:-1]:
        if is_host_bridge(part):
            host_bridge, bridges = part, []
        elif is_address(part):
            bridges.append(part)
    return Place(host_bridge, tuple(bridges))


def common_prefix(first: tuple[str, ...], second: tuple[str, ...]) -> int:
    """How many bridges two places have in common, counted from the host bridge."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length


def fan_outs(functions: Iterable[PciFunction], places: Mapping[str, Place]) -> frozenset[str]:
    """Bridges with several devices directly below.

    A PCIe link has one device at its end, number 0. Several therefore mean the inner bus of a
    switch (or a conventional bus), whatever the bridge's depth says. VFs do not count: alternative
    routing ids give them other bus and device numbers.
    """
    devices: dict[str, set[tuple[int, int]]] = {}
    for function in functions:
        bridges = places[function.address].bridges
        if bridges and function.physical_function is None:
            _, bus, device, _ = order(function.address)
            devices.setdefault(bridges[-1], set()).add((bus, device))
    return frozenset(bridge for bridge, found in devices.items() if len(found) > 1)
