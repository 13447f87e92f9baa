"""API objects (resource.k8s.io/v1, as JSON) to the model. Input may be any file: every mistake is a UsageError."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from railmate.errors import UsageError
from railmate.explain.model import (
    ALL,
    EXACT,
    Allocated,
    Attribute,
    Capacity,
    CapacityPolicy,
    Claim,
    Constraint,
    Device,
    DeviceClass,
    Node,
    NodePlace,
    Request,
    RequestSlot,
    Slice,
    Taint,
    Toleration,
)
from railmate.explain.quantity import Number, parse_quantity

Object = Mapping[str, Any]
_T = TypeVar("_T")
#: Devices by what their slices say of them. Nodes are alike but for a few attributes, and reading takes its time.
Seen = dict[tuple[str, bool, bytes], Device]


def parse_slice(item: Object, seen: Seen | None = None) -> Slice:
    """``seen``: one dict for all slices of a cluster makes it a matter of a tenth of the time."""
    return guarded("ResourceSlice", item, partial(_slice, seen={} if seen is None else seen))


def parse_claim(item: Object) -> Claim:
    """A ResourceClaim, or a ResourceClaimTemplate as the claim that is made from it."""
    return guarded(str(item.get("kind") or "ResourceClaim"), item, _claim)


def parse_class(item: Object) -> DeviceClass:
    return guarded("DeviceClass", item, _class)


def parse_node(item: Object) -> Node:
    return guarded("Node", item, _node)


def guarded(kind: str, item: Object, parse: Callable[[Object], _T]) -> _T:
    """What ``parse`` makes of the item; UsageError with the item's name for what it stumbles over."""
    try:
        return parse(item)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        metadata = item.get("metadata") if isinstance(item, Mapping) else None
        name = metadata.get("name", "?") if isinstance(metadata, Mapping) else "?"
        cause = f"no {error.args[0]}" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"{kind} {name}: not as the API has it ({cause}). Save it with kubectl get -o yaml."
        ) from error


# --- slices
def _slice(item: Object, seen: Seen) -> Slice:
    spec = item["spec"]
    pool, driver = spec["pool"], str(spec["driver"])
    per_device = bool(spec.get("perDeviceNodeSelection"))
    devices = spec.get("devices") or ()
    return Slice(
        name=str(item["metadata"]["name"]),
        driver=driver,
        pool=str(pool["name"]),
        generation=int(pool.get("generation") or 0),
        slice_count=int(pool.get("resourceSliceCount") or 0),
        place=None if per_device else _place(spec),
        devices=tuple(_known(one, driver, str(pool["name"]), per_device, seen) for one in devices),
        counters={
            str(one["name"]): {name: parse_quantity(c["value"]) for name, c in one["counters"].items()}
            for one in spec.get("sharedCounters") or ()
        },
        unsupported=any(one.get("compatibilityGroups") for one in devices),
    )


def _place(spec: Object) -> NodePlace:
    return NodePlace(str(spec.get("nodeName") or ""), bool(spec.get("allNodes")), spec.get("nodeSelector"))


def _known(body: Object, driver: str, pool: str, per_device: bool, seen: Seen) -> Device:
    key = (driver, per_device, marshal.dumps(dict(body), 2))  # this version writes equal objects alike
    first = seen.get(key)
    if first is None:
        first = seen[key] = _device(body, driver, pool, per_device)
        return first
    return Device(
        driver,
        pool,
        first.name,
        first.attributes,
        first.capacity,
        first.consumes,
        first.taints,
        first.shareable,
        first.place,
        first.binds_later,
        first,
    )


def _device(body: Object, driver: str, pool: str, per_device: bool) -> Device:
    return Device(
        driver=driver,
        pool=pool,
        name=str(body["name"]),
        attributes={name: _attribute(value) for name, value in (body.get("attributes") or {}).items()},
        capacity={name: _capacity(value) for name, value in (body.get("capacity") or {}).items()},
        consumes=tuple(
            ((str(one["counterSet"]), name), parse_quantity(counter["value"]))
            for one in body.get("consumesCounters") or ()
            for name, counter in one["counters"].items()
        ),
        taints=tuple(_taint(one) for one in body.get("taints") or ()),
        shareable=bool(body.get("allowMultipleAllocations")),
        place=_place(body) if per_device else None,
        binds_later="bindingConditions" in body,
    )


def _attribute(value: Object) -> Attribute:
    ((kind, content),) = value.items()
    attribute = kind, tuple(content) if isinstance(content, list) else content
    hash(attribute)  # an object is no value
    return attribute


def _capacity(body: Object) -> Capacity:
    value, policy = parse_quantity(body["value"]), body.get("requestPolicy")
    if not policy:
        return Capacity(value)
    limits = policy.get("validRange") or {}

    def number(source: Object, name: str) -> Number | None:
        return parse_quantity(source[name]) if source.get(name) is not None else None

    step = number(limits, "step")
    if step is not None and step <= 0:
        raise ValueError("a requestPolicy's step must be above zero")
    return Capacity(
        value,
        CapacityPolicy(
            default=number(policy, "default"),
            minimum=number(limits, "min"),
            maximum=number(limits, "max"),
            step=step,
            has_range="validRange" in policy,
            values=tuple(parse_quantity(one) for one in policy.get("validValues") or ()),
        ),
    )


def _taint(body: Object) -> Taint:
    return Taint(str(body["key"]), str(body.get("value") or ""), str(body.get("effect") or ""))


# --- claims
def _claim(item: Object) -> Claim:
    metadata, spec = item["metadata"], item["spec"]
    if item.get("kind") == "ResourceClaimTemplate":
        spec = spec["spec"]
    devices, status = spec.get("devices") or {}, item.get("status") or {}
    allocation = status.get("allocation")
    results = None if allocation is None else (allocation.get("devices") or {}).get("results") or ()
    return Claim(
        namespace=str(metadata.get("namespace") or "default"),
        name=str(metadata.get("name") or metadata.get("generateName") or "?"),
        slots=tuple(_slot(one) for one in devices.get("requests") or ()),
        constraints=tuple(_constraint(one) for one in devices.get("constraints") or ()),
        allocation=None if results is None else tuple(_allocated(one) for one in results),
        node_selector=allocation.get("nodeSelector") if allocation else None,
        users=tuple(
            str(one["name"]) for one in status.get("reservedFor") or () if one.get("resource") == "pods"
        ),
    )


def _slot(body: Object) -> RequestSlot:
    name = str(body["name"])
    if alternatives := body.get("firstAvailable"):
        return RequestSlot(
            name, tuple(_request(one, f"{name}/{one['name']}") for one in alternatives), prioritized=True
        )
    return RequestSlot(name, (_request(body["exactly"], name),))


def _request(body: Object, name: str) -> Request:
    mode = str(body.get("allocationMode") or EXACT)
    if mode not in (EXACT, ALL):
        raise ValueError(f"request {name}: allocationMode {mode!r} is neither {EXACT} nor {ALL}")
    asked = (body.get("capacity") or {}).get("requests")
    return Request(
        name=name,
        class_name=str(body["deviceClassName"]),
        mode=mode,
        count=int(body.get("count") or 1),
        selectors=_selectors(body),
        tolerations=tuple(
            Toleration(*(str(one.get(key) or "") for key in ("key", "operator", "value", "effect")))
            for one in body.get("tolerations") or ()
        ),
        admin_access=bool(body.get("adminAccess")),
        capacity=None if asked is None else {name: parse_quantity(value) for name, value in asked.items()},
    )


def _selectors(body: Object) -> tuple[str, ...]:
    return tuple(str(one["cel"]["expression"]) for one in body.get("selectors") or ())


def _constraint(body: Object) -> Constraint:
    distinct = body.get("distinctAttribute")
    return Constraint(
        str(distinct or body["matchAttribute"]), frozenset(body.get("requests") or ()), distinct is not None
    )


def _allocated(body: Object) -> Allocated:
    return Allocated(
        request=str(body["request"]),
        device=(str(body["driver"]), str(body["pool"]), str(body["device"])),
        admin_access=bool(body.get("adminAccess")),
        share=body.get("shareID"),
        consumed={
            name: parse_quantity(value) for name, value in (body.get("consumedCapacity") or {}).items()
        },
    )


# --- classes and nodes
def _class(item: Object) -> DeviceClass:
    spec, metadata = item.get("spec") or {}, item["metadata"]
    return DeviceClass(
        str(metadata["name"]),
        _selectors(spec),
        str(spec.get("extendedResourceName") or ""),
        str(metadata.get("creationTimestamp") or ""),
    )


def _node(item: Object) -> Node:
    metadata, spec = item["metadata"], item.get("spec") or {}
    return Node(
        str(metadata["name"]),
        dict(metadata.get("labels") or {}),
        bool(spec.get("unschedulable")),
        tuple(_taint(one) for one in spec.get("taints") or ()),
        {
            name: parse_quantity(value)
            for name, value in ((item.get("status") or {}).get("allocatable") or {}).items()
            if "/" in name
        },
    )
