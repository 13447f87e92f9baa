"""An offer as ResourceSlice objects (resource.k8s.io/v1). Pure and deterministic: the same offer gives
the same slices, byte for byte.

Limits (k8s.io/api resource/v1): counter sets and devices are in separate slices; 8 counter sets a
slice; 128 devices a slice, 64 where one of them consumes counters.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from railmate.errors import UsageError
from railmate.publish.model import AttributeValue, Offer, OfferedDevice
from railmate_api.attributes import DRIVER_NAME

_MAX_NAME = 253  # DNS subdomain
_MAX_DRIVER_NAME = 63  # k8s.io/api resource/v1, DriverNameMaxLength
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
MAX_SETS_PER_SLICE = 8
MAX_DEVICES_PER_SLICE = 128
MAX_COUNTED_DEVICES_PER_SLICE = 64

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


def slice_specs(offer: Offer) -> list[Spec]:
    """The parts of the specs that depend on the offer, in slice order; at least one, so that an empty
    node shows that its driver is up."""
    specs: list[Spec] = [
        {"sharedCounters": chunk} for chunk in _chunks(_counter_sets(offer), MAX_SETS_PER_SLICE)
    ]
    # counted devices first: plain ones then do not halve the room of a slice they share
    counted = [device for device in offer.devices if device.consumes]
    plain = [device for device in offer.devices if not device.consumes]
    if counted and len(offer.devices) <= MAX_COUNTED_DEVICES_PER_SLICE:
        groups: list[Sequence[OfferedDevice]] = [offer.devices]
    else:
        groups = [
            *_chunks(counted, MAX_COUNTED_DEVICES_PER_SLICE),
            *_chunks(plain, MAX_DEVICES_PER_SLICE),
        ]
    specs += [{"devices": [_device(device) for device in group]} for group in groups]
    return specs or [{"devices": []}]


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
    offer: Offer, driver: str, node: str, *, node_uid: str | None = None, generation: int = 1
) -> list[dict[str, Any]]:
    """Whole objects, as ``railmate slices`` prints and the controller writes them."""
    specs = slice_specs(offer)
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


def _metadata(name: str, node: str, node_uid: str | None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if node_uid:
        owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid, "controller": True}
        metadata["ownerReferences"] = [owner]
    return metadata


def _counter_sets(offer: Offer) -> list[dict[str, Any]]:
    return [
        {"name": name, "counters": {counter: {"value": "1"} for counter in counters}}
        for name, counters in offer.counter_sets.items()
    ]


def _device(device: OfferedDevice) -> dict[str, Any]:
    body: dict[str, Any] = {
        "name": device.name,
        "attributes": {name: api_attribute(value) for name, value in sorted(device.attributes.items())},
    }
    if device.capacity:
        body["capacity"] = {
            name: {"value": quantity(value)} for name, value in sorted(device.capacity.items())
        }
    if device.consumes:
        by_set: dict[str, dict[str, Any]] = {}
        for counter_set, counter in device.consumes:
            by_set.setdefault(counter_set, {})[counter] = {"value": "1"}
        body["consumesCounters"] = [{"counterSet": name, "counters": c} for name, c in by_set.items()]
    return body


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
