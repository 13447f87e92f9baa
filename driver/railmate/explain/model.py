"""Slices, claims and what is taken, in the shape in which the allocator looks at them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from railmate.explain.quantity import Number

#: Driver, pool and device name: how the API identifies a device.
DeviceId = tuple[str, str, str]
#: An attribute's type (the name of the API's field: "string", "ints", …) and its value.
Attribute = tuple[str, Any]
#: A counter of a pool: the counter set's name and the counter's.
CounterId = tuple[str, str]

ALL = "All"
EXACT = "ExactCount"
#: Devices in one claim's allocation (k8s.io/api resource/v1, AllocationResultsMaxSize).
MAX_RESULTS = 32
#: Taint effects that keep a device from new claims; others are ignored.
BLOCKING_EFFECTS = frozenset({"NoSchedule", "NoExecute"})


@dataclass(frozen=True, slots=True)
class CapacityPolicy:
    """requestPolicy of a capacity: to what a request is rounded up. At most one of range and values."""

    default: Number | None = None
    minimum: Number | None = None
    maximum: Number | None = None
    step: Number | None = None
    has_range: bool = False
    values: tuple[Number, ...] = ()


@dataclass(frozen=True, slots=True)
class Capacity:
    value: Number
    policy: CapacityPolicy | None = None


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str
    effect: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"


@dataclass(frozen=True, slots=True)
class Toleration:
    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""

    def tolerates(self, taint: Taint) -> bool:
        """Rule: k8s.io/dynamic-resource-allocation/resourceclaim, ToleratesTaint."""
        if self.effect and self.effect != taint.effect:
            return False
        if self.key and self.key != taint.key:
            return False
        if self.operator in ("", "Equal"):
            return self.value == taint.value
        return self.operator == "Exists"


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Where a slice or a device is: one of a node's name, every node, or a node selector."""

    node: str = ""
    every_node: bool = False
    selector: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Device:
    driver: str
    pool: str
    name: str
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    capacity: Mapping[str, Capacity] = field(default_factory=dict)
    consumes: tuple[tuple[CounterId, Number], ...] = ()
    taints: tuple[Taint, ...] = ()
    shareable: bool = False  # allowMultipleAllocations
    place: NodePlace | None = None  # of a slice with perDeviceNodeSelection
    binds_later: bool = False  # has binding conditions
    twin: Device | None = None  # what was read first of those that differ in their pool alone

    @property
    def original(self) -> Device:
        """The same for all devices that a selector cannot tell apart by what their slices say."""
        return self.twin or self

    @property
    def id(self) -> DeviceId:
        return (self.driver, self.pool, self.name)

    def attribute(self, name: str) -> Attribute | None:
        """By its full name; an attribute without a domain is its driver's."""
        found = self.attributes.get(name)
        if found is None:
            domain, _, bare = name.partition("/")
            found = self.attributes.get(bare) if bare and domain == self.driver else None
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    name: str
    driver: str
    pool: str
    generation: int
    slice_count: int
    place: NodePlace | None  # None: each device says
    devices: tuple[Device, ...] = ()
    counters: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    unsupported: bool = False  # uses compatibility groups, which an allocator without that gate ignores


@dataclass(frozen=True, slots=True)
class DeviceClass:
    name: str
    selectors: tuple[str, ...] = ()
    extended_resource: str = ""
    created: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """A request, or one alternative of a prioritised list; ``name`` is then ``request/alternative``."""

    name: str
    class_name: str
    mode: str = EXACT
    count: int = 1
    selectors: tuple[str, ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    admin_access: bool = False
    capacity: Mapping[str, Number] | None = None


@dataclass(frozen=True, slots=True)
class RequestSlot:
    """One entry of a claim's requests. ``prioritized``: firstAvailable, the first alternative that works counts."""

    name: str
    alternatives: tuple[Request, ...]
    prioritized: bool = False


@dataclass(frozen=True, slots=True)
class Constraint:
    attribute: str
    requests: frozenset[str]  # empty: all of them
    distinct: bool = False

    def covers(self, slot: RequestSlot, request: Request) -> bool:
        return not self.requests or slot.name in self.requests or request.name in self.requests

    def __str__(self) -> str:
        return f"{'distinctAttribute' if self.distinct else 'matchAttribute'} {self.attribute}"


@dataclass(frozen=True, slots=True)
class Allocated:
    """One device of a claim's status.allocation."""

    request: str
    device: DeviceId
    admin_access: bool = False
    share: str | None = None
    consumed: Mapping[str, Number] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Claim:
    namespace: str
    name: str
    slots: tuple[RequestSlot, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    allocation: tuple[Allocated, ...] | None = None  # None: not allocated
    node_selector: Mapping[str, Any] | None = None  # of the allocation
    users: tuple[str, ...] = ()  # pods for which it is reserved

    @property
    def title(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()
    plugin_resources: Mapping[str, Number] = field(default_factory=dict)  # allocatable, of device plugins


@dataclass(frozen=True)
class Taken:
    """What claims hold in the cluster, as the scheduler counts it: admin access counts as nothing."""

    devices: frozenset[DeviceId] = frozenset()
    shared: frozenset[DeviceId] = frozenset()
    consumed: Mapping[DeviceId, Mapping[str, Number]] = field(default_factory=dict)

    @classmethod
    def by(cls, claims: tuple[Claim, ...]) -> Taken:
        devices, shared = set(), set()
        consumed: dict[DeviceId, dict[str, Number]] = {}
        for claim in claims:
            for one in claim.allocation or ():
                if one.admin_access:
                    continue
                if one.share is None:
                    devices.add(one.device)
                    continue
                shared.add(one.device)
                if one.consumed:
                    held = consumed.setdefault(one.device, {})
                    for name, value in one.consumed.items():
                        held[name] = held.get(name, 0) + value
        return cls(frozenset(devices), frozenset(shared), consumed)
