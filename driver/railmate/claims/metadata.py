"""Device metadata files: what a container may read about its devices (KEP-5304).

One file a request, mounted read-only below ``/var/run/kubernetes.io/dra-device-attributes``. The file
holds the same facts once for each version of the format, newest first, as separate JSON objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from railmate.claims.records import Entry, PreparedDevice
from railmate.claims.seen import last_seen, network_data, vfio_node
from railmate.publish.attributes import MAX_STRING
from railmate.publish.slices import api_attribute
from railmate_api import attributes as names

_VERSIONS = ("metadata.resource.k8s.io/v1beta1", "metadata.resource.k8s.io/v1alpha1")
_CONTAINER_DIR = "/var/run/kubernetes.io/dra-device-attributes"


def container_path(entry: Entry, request: str, driver: str) -> str:
    """Where a container finds the file of ``request``; templates are found by the pod's name for the claim."""
    if entry.pod_claim_name:
        owner = f"resourceclaimtemplates/{entry.pod_claim_name}"
    else:
        owner = f"resourceclaims/{entry.claim.name}"
    return f"{_CONTAINER_DIR}/{owner}/{request}/{driver}-metadata.json"


def render(entry: Entry, request: str, driver: str) -> bytes:
    devices = [_device(entry, device, driver) for device in entry.devices if device.request == request]
    body: dict[str, Any] = {
        "kind": "DeviceMetadata",
        "metadata": {
            "name": entry.claim.name,
            "namespace": entry.claim.namespace,
            "uid": entry.claim.uid,
            "generation": 2 if entry.seen else 1,
        },
        "requests": [{"name": request, "devices": devices}],
    }
    if entry.pod_claim_name:
        body["podClaimName"] = entry.pod_claim_name
    return "".join(
        json.dumps({"apiVersion": version, **body}, sort_keys=True) + "\n" for version in _VERSIONS
    ).encode()


def requests(devices: Iterable[PreparedDevice]) -> list[str]:
    """The requests of the devices, each once, in order."""
    return list(dict.fromkeys(device.request for device in devices))


def _device(entry: Entry, device: PreparedDevice, driver: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "driver": driver,
        "pool": device.pool,
        "name": device.device,
        "attributes": {**device.attributes, **_share(device), **_seen_attributes(entry, device)},
    }
    if (found := network_data(entry, device)) is not None:
        body["networkData"] = found
    return body


def _share(device: PreparedDevice) -> dict[str, Any]:
    """The file's format has no field of its own for it (metadata.resource.k8s.io/v1beta1)."""
    return {names.SHARE_ID: api_attribute(device.share_id)} if device.share_id else {}


def _seen_attributes(entry: Entry, device: PreparedDevice) -> dict[str, Any]:
    """The RDMA devices as the pod sees them and the GID to use, where one number serves all of the device's NICs."""
    nics = last_seen(entry, device)
    found: dict[str, Any] = {}
    for name, values in (
        (names.INTERFACE, [nic.interface for nic in nics]),
        (names.RDMA_DEVICE, [nic.rdma_device for nic in nics]),
    ):
        joined = ",".join(value for value in values if value)
        if joined and len(joined) <= MAX_STRING:
            found[name] = api_attribute(joined)
    passed = [f"/dev/{node}" for nic in device.nics if (node := vfio_node(nic)) is not None]
    if passed:
        found[names.VFIO_NODE] = api_attribute(",".join(passed))
    gids = {(nic.gid.index if nic.gid else None) for nic in nics}
    if len(gids) == 1 and (index := gids.pop()) is not None:
        found[names.GID_INDEX] = api_attribute(index)
    if len(nics) == 1 and nics[0].gid:
        found[names.GID] = api_attribute(nics[0].gid.gid)
    return found
