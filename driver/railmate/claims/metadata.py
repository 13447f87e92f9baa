"""Device metadata files: what a container may read about its devices (KEP-5304).

One file a request, mounted read-only below ``/var/run/kubernetes.io/dra-device-attributes``. The file
holds the same facts once for each version of the format, newest first, as separate JSON objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from railmate.claims.records import Entry, PreparedDevice

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
    devices = [_device(device, driver) for device in entry.devices if device.request == request]
    body: dict[str, Any] = {
        "kind": "DeviceMetadata",
        "metadata": {
            "name": entry.claim.name,
            "namespace": entry.claim.namespace,
            "uid": entry.claim.uid,
            "generation": 1,
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


def _device(device: PreparedDevice, driver: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "driver": driver,
        "pool": device.pool,
        "name": device.device,
        "attributes": dict(device.attributes),
    }
    with_netdev = [nic for nic in device.nics if nic.snapshot]
    if len(with_netdev) == 1:  # the format has room for one
        nic = with_netdev[0]
        assert nic.snapshot is not None
        body["networkData"] = {"interfaceName": nic.interface, "hardwareAddress": nic.snapshot.mac}
    return body
