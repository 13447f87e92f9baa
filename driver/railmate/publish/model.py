"""What is offered to the scheduler, before it becomes API objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

#: An attribute's value; the type picks the API's field (int, bool, string).
AttributeValue = str | int | bool


@dataclass(frozen=True, slots=True)
class OfferedDevice:
    """One device of a slice, and the hardware behind it.

    ``gpus`` and ``nics`` are PCI addresses; a NIC is a VF, or a whole physical function. With ``partition``
    (its name on the GPU) the device is that part of its one GPU. ``consumes`` names counters as (counter
    set, counter, how many of its units). With ``sub_interfaces`` its one NIC stays on the node, and so many claims have
    a share of it.

    ``attributes`` are published: the scheduler and every client read them for each device of the cluster, so
    they are what people select and match on. ``facts`` are told to the pod that has the device, in its
    metadata file. ``section`` names the part of the pool that the device is published in; see ``Offer``.
    """

    name: str
    kind: str
    attributes: Mapping[str, AttributeValue]
    capacity: Mapping[str, int] = field(default_factory=dict)
    consumes: tuple[tuple[str, str, int], ...] = ()
    gpus: tuple[str, ...] = ()
    nics: tuple[str, ...] = ()
    partition: str | None = None
    facts: Mapping[str, AttributeValue] = field(default_factory=dict)
    section: str = ""
    sub_interfaces: int = 0

    @property
    def told(self) -> Mapping[str, AttributeValue]:
        """All that a pod is told of the device."""
        return {**self.attributes, **self.facts}

    @property
    def parts(self) -> frozenset[str]:
        """The hardware that nobody else may have meanwhile; see ``overlap``."""
        gpus = (part_of(gpu, self.partition) for gpu in self.gpus)
        return frozenset((*gpus, *self.nics))

    def parts_with(self, share: str | None) -> frozenset[str]:
        """The same of an allocation, which has but a share of a shared device."""
        return frozenset(part_of(one, share) for one in self.nics) if self.sub_interfaces else self.parts


def part_of(whole: str, part: str | None) -> str:
    """``0000:07:00.0``, or for a part of a GPU ``0000:07:00.0/gi3ci0``, for a share of a NIC ``0000:0c:00.0/<id>``."""
    return f"{whole}/{part}" if part else whole


def overlap(one: Iterable[str], other: Iterable[str]) -> frozenset[str]:
    """What of ``one`` is in ``other`` too; a whole and a part of it are both in each other."""
    others = frozenset(other)
    wholes = {part.split("/", 1)[0] for part in others}
    return frozenset(
        part for part in one if part in others or part.split("/", 1)[0] in others or part in wholes
    )


@dataclass(frozen=True)
class Offer:
    """All devices of the node in the order the scheduler should take them, and the counter sets
    (name to counters and their units) that keep hardware from being handed out twice.

    ``sections``, in order: into how many devices each part of the pool may grow while the machine's functions
    stay what they are. Slices are cut by that, so that a device that goes or comes moves no other from slice to
    slice. Devices of a section that is not named come first.

    ``notes`` tell people what of the machine is not offered, and why. They are not published, so offers that
    differ in them alone are equal.
    """

    devices: tuple[OfferedDevice, ...] = ()
    counter_sets: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    sections: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def by_name(self) -> Mapping[str, OfferedDevice]:
        return {device.name: device for device in self.devices}
