"""Whether a claim can ever be met by the nodes of given slices, with nothing taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from railmate.explain.cel import Selectors
from railmate.explain.model import Claim, Device, DeviceClass
from railmate.explain.verdict import Verdict, Wish, World, judge


def classes_without_devices(
    names: Sequence[str], world: World, selectors: Selectors
) -> tuple[list[str], list[str]]:
    """Of these classes those that the slices have nothing of, and all classes that they have something of."""
    devices = [device for one in world.slices for device in one.devices]
    found = [name for name, body in world.classes.items() if _has(body, devices, selectors)]
    return [name for name in names if name not in found], found


def on_empty_nodes(claim: Claim, world: World, seconds: float, selectors: Selectors) -> Verdict:
    """The verdict if no claim held anything."""
    return judge(replace(world, claims=()), Wish(f"claim {claim.title}", (claim,)), seconds, selectors)


def _has(device_class: DeviceClass, devices: Sequence[Device], selectors: Selectors) -> bool:
    return any(
        all(selectors.matches(expression, device) is True for expression in device_class.selectors)
        for device in devices
    )
