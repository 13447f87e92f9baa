"""An offer as ResourceSlice objects (resource.k8s.io/v1). Pure and deterministic: the same offer gives
the same slices, byte for byte.

Limits (k8s.io/api resource/v1): counter sets and devices are in separate slices; 8 counter sets a
slice; 128 devices a slice, 64 where one of them consumes counters or is tainted. A taint may come to any
device at any time and must not move the others from slice to slice, so there are never more than 64.

Names of attributes are written without their domain where that is the driver's: to the API it is the same, and
half of the bytes of a node's slices are such names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from railmate.errors import UsageError
from railmate.publish.model import AttributeValue, Offer, OfferedDevice
from railmate_api.attributes import DOMAIN, DRIVER_NAME, SUB_INTERFACES

_MAX_NAME = 253  # DNS subdomain
_MAX_DRIVER_NAME = 63  # k8s.io/api resource/v1, DriverNameMaxLength
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
MAX_SETS_PER_SLICE = 8
MAX_DEVICES_PER_SLICE = 64
#: Key of the taint of a device that does not work; the value says why (``nic-link-down``).
TAINT_UNHEALTHY: Final = f"{DOMAIN}/unhealthy"
#: Pods that have the device stay: the job decides, from the health in its pod's status, when to give it up.
_TAINT_EFFECT = "NoSchedule"
#: A share is one sub-interface; who wants two of a port asks in two requests (k8s.io/api resource/v1,
#: CapacityRequestPolicy). What asks for another number is refused by the scheduler.
_ONE_EACH = {"default": "1", "validValues": ["1"]}
_NO_TAINTS: Mapping[str, str] = MappingProxyType({})

Spec = dict[str, Any]


def check_names(driver: str, node: str) -> None:
    """Raise UsageError for names that the API server refuses in a slice."""
    if len(driver) > _MAX_DRIVER_NAME or not _SUBDOMAIN.fullmatch(driver):
        raise UsageError(
            f"--driver-name {driver!r} is no DNS subdomain of up to {_MAX_DRIVER_NAME} characters, like {DRIVER_NAME}."
        )
    if len(node) > _MAX_NAME or not _SUBDOMAIN.fullmatch(node):
        raise UsageError(
            f"--node-name {node!r} is no name of a Kubernetes node. See kubectl get nodes; NODE_NAME sets it too."
        )


def slice_specs(
    offer: Offer, taints: Mapping[str, str] = _NO_TAINTS, driver: str = DRIVER_NAME
) -> list[Spec]:
    """The parts of the specs that depend on the offer, in slice order; at least one, so that an empty
    node shows that its driver is up. ``taints``: see ``resource_slices``."""
    specs: list[Spec] = [
        {"sharedCounters": chunk} for chunk in _chunks(_counter_sets(offer), MAX_SETS_PER_SLICE)
    ]
    specs += [
        {"devices": [_device(device, driver, taints.get(device.name)) for device in group]}
        for group in _by_section(offer)
        if group
    ]
    return specs or [{"devices": []}]


def _by_section(offer: Offer) -> list[list[OfferedDevice]]:
    """Devices slice by slice. A section is cut only where it may not fit into one slice, and a slice is filled by
    what its sections may grow to, so that a device that comes or goes changes one slice and moves no other device."""
    held: dict[str, list[OfferedDevice]] = {}
    for device in offer.devices:
        held.setdefault(device.section, []).append(device)
    sizes = {section: max(len(held[section]), offer.sections.get(section, 0)) for section in held}
    order = [*(section for section in held if section not in offer.sections), *offer.sections]
    slices: list[list[OfferedDevice]] = []
    room = 0
    for section in order:
        size = sizes.get(section, offer.sections.get(section, 0))
        chunks = _chunks(held.get(section, []), MAX_DEVICES_PER_SLICE)
        if size > room:
            needed = -(-size // MAX_DEVICES_PER_SLICE)
            slices += [list(chunk) for chunk in chunks] + [[] for _ in range(needed - len(chunks))]
            room = -size % MAX_DEVICES_PER_SLICE
        else:
            room -= size
            for chunk in chunks:
                slices[-1] += chunk
    return slices


def slice_name(index: int, driver: str, node: str) -> str:
    """``00000-railmate.dev-node1``: the scheduler walks a pool's slices by name, so the index leads.

    A name may have 253 characters, as many as a node's; past that a digest stands for the end of the node's.
    """
    name = f"{index:05x}-{driver}-{node}"
    if len(name) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(node.encode()).hexdigest()[:10]
    return f"{name[: _MAX_NAME - len(digest) - 1].rstrip('.-')}-{digest}"


def resource_slices(
    offer: Offer,
    driver: str,
    node: str,
    *,
    node_uid: str | None = None,
    generation: int = 1,
    taints: Mapping[str, str] = _NO_TAINTS,
) -> list[dict[str, Any]]:
    """Whole objects, as ``railmate slices`` prints and the controller writes them.

    ``taints``: names of devices that do not work, and why (a label's value). They are kept from new claims, and
    are all that differs from the slices without them.
    """
    specs = slice_specs(offer, taints, driver)
    return [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": _metadata(slice_name(index, driver, node), node, node_uid),
            "spec": {
                "driver": driver,
                "nodeName": node,
                "pool": {"name": node, "generation": generation, "resourceSliceCount": len(specs)},
                **spec,
            },
        }
        for index, spec in enumerate(specs)
    ]


def gate_probe(driver: str, node: str) -> dict[str, Any]:
    """A slice with every field that a server may drop, to be tried and not kept."""
    counter = {"probe": {"value": "1"}}
    device = {
        "name": "probe",
        "consumesCounters": [{"counterSet": "probe", "counters": counter}],
        "taints": [{"key": TAINT_UNHEALTHY, "effect": _TAINT_EFFECT}],
    }
    shared = {
        "name": "probe-shared",
        "allowMultipleAllocations": True,
        "capacity": {"probe": {"value": "1", "requestPolicy": _ONE_EACH}},
    }
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": slice_name(0xFFFFF, driver, node)},
        "spec": {"driver": driver, "nodeName": node, "pool": pool, "devices": [device, shared]},
    }


def keep_taint_times(wanted: Sequence[dict[str, Any]], stored: Sequence[dict[str, Any]]) -> None:
    """Give taints that are in the API already the time that the server noted when they were added.

    Else every look would find a difference, and a rewritten slice would make old taints new ones.
    """
    times = {
        (device["name"], taint["key"], taint.get("value"), taint["effect"]): taint["timeAdded"]
        for item in stored
        for device in item["spec"].get("devices") or []
        for taint in device.get("taints") or []
        if "timeAdded" in taint
    }
    for item in wanted:
        for device in item["spec"].get("devices") or []:
            for taint in device.get("taints") or []:
                added = times.get((device["name"], taint["key"], taint.get("value"), taint["effect"]))
                if added is not None:
                    taint["timeAdded"] = added


def _metadata(name: str, node: str, node_uid: str | None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if node_uid:
        owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid, "controller": True}
        metadata["ownerReferences"] = [owner]
    return metadata


def _counter_sets(offer: Offer) -> list[dict[str, Any]]:
    return [
        {"name": name, "counters": {counter: {"value": str(units)} for counter, units in counters.items()}}
        for name, counters in offer.counter_sets.items()
    ]


def _device(device: OfferedDevice, driver: str, taint: str | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "name": device.name,
        "attributes": {
            _written(name, driver): api_attribute(value) for name, value in sorted(device.attributes.items())
        },
    }
    if device.capacity:
        body["capacity"] = {
            _written(name, driver): {"value": quantity(value)}
            for name, value in sorted(device.capacity.items())
        }
    if device.sub_interfaces:
        body["allowMultipleAllocations"] = True
        body.setdefault("capacity", {})[_written(SUB_INTERFACES, driver)] = {
            "value": quantity(device.sub_interfaces),
            "requestPolicy": _ONE_EACH,
        }
    if device.consumes:
        by_set: dict[str, dict[str, Any]] = {}
        for counter_set, counter, units in device.consumes:
            by_set.setdefault(counter_set, {})[counter] = {"value": str(units)}
        body["consumesCounters"] = [{"counterSet": name, "counters": c} for name, c in by_set.items()]
    if taint is not None:
        body["taints"] = [{"key": TAINT_UNHEALTHY, "value": taint, "effect": _TAINT_EFFECT}]
    return body


def _written(name: str, driver: str) -> str:
    """A name without domain is in the driver's (k8s.io/api resource/v1, QualifiedName)."""
    return name.removeprefix(f"{driver}/")


def api_attribute(value: AttributeValue) -> dict[str, Any]:
    """The API's one-of: the field's name says the type."""
    if isinstance(value, bool):
        return {"bool": value}
    if isinstance(value, int):
        return {"int": value}
    return {"string": value}


def quantity(value: int) -> str:
    """A resource.Quantity as the API server writes it back: the largest binary suffix that divides it.

    Rule: k8s.io/apimachinery/pkg/api/resource, canonical form of BinarySI.
    """
    suffixes = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
    power = 0
    while value and value % 1024 == 0 and power < len(suffixes) - 1:
        value //= 1024
        power += 1
    return f"{value}{suffixes[power]}"


def _chunks(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
