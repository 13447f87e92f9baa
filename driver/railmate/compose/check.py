"""Whether a claim can ever be met by the nodes of given slices, with nothing taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from railmate.explain.cel import Selectors
from railmate.explain.model import Claim, Device, DeviceClass
from railmate.explain.verdict import Verdict, Wish, World, judge
from railmate_api import attributes as names


def classes_without_devices(
    names: Sequence[str], world: World, selectors: Selectors
) -> tuple[list[str], list[str]]:
    """Of these classes those that the slices have nothing of, and all classes that they have something of."""
    devices = [device for one in world.slices for device in one.devices]
    found = [name for name, body in world.classes.items() if _has(body, devices, selectors)]
    return [name for name in names if name not in found], found


def is_whole_node(pairs: int, world: World, selectors: Selectors) -> bool:
    """Whether so many pairs are all that a node has, wherever it has as many, and can be had as one device there."""
    pair, node = world.classes.get(names.CLASS_PAIR), world.classes.get(names.CLASS_NODE)
    if pair is None or node is None:
        return False
    pools: dict[tuple[str, str], list[Device]] = {}
    for one in world.slices:
        pools.setdefault((one.driver, one.pool), []).extend(one.devices)
    found = False
    for devices in pools.values():
        if sum(_is_of(pair, device, selectors) for device in devices) >= pairs:
            wholes = [device for device in devices if _is_of(node, device, selectors)]
            if not any(device.attribute(names.GPU_COUNT) == ("int", pairs) for device in wholes):
                return False
            found = True
    return found


def pair_rails(world: World, selectors: Selectors) -> list[int]:
    """The rails that pairs of any class are on, sorted."""
    pair = world.classes.get(names.CLASS_PAIR_ANY)
    found = set()
    for one in world.slices:
        for device in one.devices:
            rail = device.attribute(names.PAIR_RAIL) or device.attribute(names.RAIL)
            if rail is not None and pair is not None and _is_of(pair, device, selectors):
                found.add(int(rail[1]))
    return sorted(found)


def on_empty_nodes(claim: Claim, world: World, seconds: float, selectors: Selectors) -> Verdict:
    """The verdict if no claim held anything."""
    return judge(replace(world, claims=()), Wish(f"claim {claim.title}", (claim,)), seconds, selectors)


def _has(device_class: DeviceClass, devices: Sequence[Device], selectors: Selectors) -> bool:
    return any(_is_of(device_class, device, selectors) for device in devices)


def _is_of(device_class: DeviceClass, device: Device, selectors: Selectors) -> bool:
    return all(selectors.matches(expression, device) is True for expression in device_class.selectors)
