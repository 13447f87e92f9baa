"""What is offered to the scheduler, before it becomes API objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

#: An attribute's value; the type picks the API's field (int, bool, string).
AttributeValue = str | int | bool


@dataclass(frozen=True, slots=True)
class OfferedDevice:
    """One device of a slice, and the hardware behind it.

    ``gpus`` and ``nics`` are PCI addresses; a NIC is a VF, or a whole physical function.
    ``consumes`` names counters as (counter set, counter), each taken once.
    """

    name: str
    kind: str
    attributes: Mapping[str, AttributeValue]
    capacity: Mapping[str, int] = field(default_factory=dict)
    consumes: tuple[tuple[str, str], ...] = ()
    gpus: tuple[str, ...] = ()
    nics: tuple[str, ...] = ()


@dataclass(frozen=True)
class Offer:
    """All devices of the node in the order the scheduler should take them, and the counter sets
    (name to counters, each with the value 1) that keep hardware from being handed out twice.

    ``notes`` tell people what of the machine is not offered, and why. They are not published, so offers that
    differ in them alone are equal.
    """

    devices: tuple[OfferedDevice, ...] = ()
    counter_sets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def by_name(self) -> Mapping[str, OfferedDevice]:
        return {device.name: device for device in self.devices}
