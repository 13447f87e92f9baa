"""GPUs that a device plugin on this node hands out: they must not be offered here as well.

The two do not know of each other: a pod would get a GPU from the plugin, and another the same one from a claim. The
kubelet says in the Node's status what plugins hand out. The scheduler looks there too: where the number is above zero
a pod that asks for the extended resource gets it from the plugin, elsewhere through the DeviceClass that has its name
(KEP-5004).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from railmate.inventory.model import GpuVendor
from railmate.kube.errors import ApiError
from railmate.publish import notes

log = logging.getLogger(__name__)

#: The vendors' device plugins, by the names of their resources: whole GPUs, parts of them (MIG, compute and memory
#: partitions) and GPUs for virtual machines. Two of the domains have NICs too (nvidia.com/hostdev, amd.com/nic).
_RESOURCES = {
    GpuVendor.NVIDIA: re.compile(r"nvidia\.com/(p?gpu(\..*)?|mig-.*)"),
    GpuVendor.AMD: re.compile(r"amd\.com/(gpu([._].*)?|[sdtqc]px(_nps\d+)?)"),
    GpuVendor.INTEL: re.compile(r"gpu\.intel\.com/.*"),
}
#: Seconds for which an answer is good: every event of the kernel causes a look at the machine.
_GOOD_FOR = 45.0
#: Seconds for which a resource must be gone before its GPUs are offered again. After the kubelet's restart it says 0
#: until the plugin has registered again, while pods go on with what they have.
_GONE_FOR = 180.0


class NodeApi(Protocol):
    def get_node(self, name: str) -> dict[str, Any]: ...


class DevicePlugins:
    """Asked with each look at the machine. ``on_found`` is told, in a sentence for people, when a plugin is there."""

    def __init__(self, api: NodeApi, node: str, on_found: Callable[[str], None]) -> None:
        self._api, self._node, self._on_found = api, node, on_found
        self._known: Mapping[GpuVendor, str] = {}
        self._gone: dict[GpuVendor, float] = {}  # when a known one was first not there
        self._asked: float | None = None

    def handed_out(self) -> Mapping[GpuVendor, str]:
        """Vendor to the name of its resource. What was last known stays while the API server is away."""
        now = time.monotonic()
        if self._asked is not None and now - self._asked < _GOOD_FOR:
            return self._known
        try:
            found = handed_out(self._api.get_node(self._node))
        except ApiError as error:
            log.warning("whether a device plugin hands out GPUs of this node cannot be found out: %s", error)
            return self._known
        self._asked = now
        for vendor, resource in found.items():
            if vendor not in self._known:
                message = f"GPUs of {vendor} are not offered: {notes.handed_out(resource)}."
                log.warning("%s", message)
                self._on_found(message)
        for vendor in found:
            self._gone.pop(vendor, None)
        for vendor, resource in self._known.items():
            if vendor not in found and now - self._gone.setdefault(vendor, now) < _GONE_FOR:
                found[vendor] = resource
        self._known = found
        self._gone = {vendor: since for vendor, since in self._gone.items() if vendor in found}
        return found


def handed_out(node: Mapping[str, Any]) -> dict[GpuVendor, str]:
    """From a Node object: whose GPUs a device plugin hands out at the moment. Pure."""
    allocatable = node.get("status", {}).get("allocatable") or {}
    return {
        vendor: resource
        for resource in sorted(allocatable, reverse=True)  # the first name of a vendor stays
        for vendor, pattern in _RESOURCES.items()
        if pattern.fullmatch(resource) and str(allocatable[resource]) != "0"
    }
