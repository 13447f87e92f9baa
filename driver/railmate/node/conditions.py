"""What ``status.devices`` of a claim says of one device (KEP-4817): pure, from the ledger's entry.

Conditions: ``NetworkReady`` (the netdev is in the pod), ``RDMAReady`` (the pod sees the RDMA device, and it has a GID
to use) and ``Ready``, which is both. Reason and message are for people.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from railmate.attach.rdmamodel import SeenNic
from railmate.claims.records import Entry, PreparedDevice
from railmate.claims.seen import interface_of, network_data, seen_now, vfio_node
from railmate_api import attributes as names

Condition = dict[str, str]
_TRUE, _FALSE, _UNKNOWN = "True", "False", "Unknown"


def device_status(driver: str, entry: Entry, device: PreparedDevice) -> dict[str, Any]:
    """Without transition times; the caller adds those."""
    seen = seen_now(entry, device)
    network = _network(entry, device)
    # what passes through is driven by the pod's own program, RDMA included
    rdma = [] if all(nic.passes_through for nic in device.nics) else [_rdma(device, seen)]
    body: dict[str, Any] = {
        "driver": driver,
        "pool": device.pool,
        "device": device.device,
        "conditions": [_ready(network, *rdma), network, *rdma],
        "data": _data(device, seen),
    }
    if (found := network_data(entry, device)) is not None:
        body["networkData"] = found
    if device.share_id is not None:
        body["shareID"] = device.share_id
    return body


def _condition(kind: str, status: str, reason: str, message: str) -> Condition:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def _ready(*parts: Condition) -> Condition:
    wrong = [one["message"] for one in parts if one["status"] == _FALSE]
    if wrong:
        return _condition("Ready", _FALSE, "NotReady", " ".join(wrong))
    return _condition("Ready", _TRUE, "Attached", "The pod has the device.")


def _network(entry: Entry, device: PreparedDevice) -> Condition:
    with_netdev = [nic for nic in device.nics if nic.snapshot or nic.sub]
    passed = [f"{nic.address} as /dev/{node}" for nic in device.nics if (node := vfio_node(nic)) is not None]
    bare = any("noiommu" in one for one in passed)
    if passed:
        return _condition(
            "NetworkReady", _TRUE, "PassedThrough",
            f"For a program in the pod to drive, bound to vfio-pci: {', '.join(passed)}. There is no interface."
            + (" It is used without an IOMMU: it can reach all of the node's memory." if bare else ""),
        )  # fmt: skip
    if not with_netdev:
        return _condition("NetworkReady", _TRUE, "NoNetdev", "The NIC has no netdev; there is none to give.")
    listed = ", ".join(interface_of(entry, nic) for nic in with_netdev)
    if entry.attachment is not None and entry.attachment.netns is None:
        return _condition(
            "NetworkReady", _TRUE, "HostNetwork", f"The pod is on the host network and sees {listed} there."
        )
    return _condition(
        "NetworkReady", _TRUE, "Attached", f"In the pod's network namespace and up, as {listed}."
    )


def _rdma(device: PreparedDevice, seen: Sequence[SeenNic]) -> Condition:
    def unknown(reason: str, message: str) -> Condition:
        return _condition("RDMAReady", _UNKNOWN, reason, message)

    if not seen:
        return unknown(
            "NotLookedAt", "The pod's RDMA devices could not be looked at; see the railmate pod's log."
        )
    if not seen[0].has_subsystem:
        return unknown("NoRDMASubsystem", "This node's kernel has no RDMA; its modules are not loaded.")
    verdicts = [_rdma_of(nic, device) for nic in seen]
    for status in (_FALSE, _UNKNOWN):
        if (of_status := [one for one in verdicts if one["status"] == status]) != []:
            return of_status[0]
    return verdicts[0] | {"message": " ".join(one["message"] for one in verdicts)}


def _rdma_of(nic: SeenNic, device: PreparedDevice) -> Condition:
    if nic.rdma_device is None:
        wanted = next((one for one in device.nics if one.address == nic.pci_address), None)
        named = ", ".join(rdma.name for rdma in wanted.rdma) if wanted and wanted.rdma else "no RDMA device"
        return _condition(
            "RDMAReady", _FALSE, "DeviceNotInPod",
            f"The pod does not see the RDMA device of {nic.pci_address} ({named}). Was its driver reloaded?",
        )  # fmt: skip
    if not nic.readable:
        return _condition(
            "RDMAReady", _UNKNOWN, "NotReadable",
            f"The pod sees {nic.rdma_device}; its port and GIDs cannot be read (Linux before 5.2?).",
        )  # fmt: skip
    if nic.port_state not in (None, "ACTIVE"):
        return _condition(
            "RDMAReady", _FALSE, "PortNotActive",
            f"The port of {nic.rdma_device} is {nic.port_state}. Look at cable, switch port and, with InfiniBand, "
            "the subnet manager.",
        )  # fmt: skip
    if nic.link_layer == "InfiniBand":
        return _condition("RDMAReady", _TRUE, "PortActive", f"{nic.rdma_device} is active (InfiniBand).")
    if nic.gid is None:
        return _condition(
            "RDMAReady", _FALSE, "NoGID",
            f"{nic.rdma_device} has no RoCE v2 GID for {nic.interface}: the interface has no address, or IPv6 is off. "
            "Give it addresses in the claim's config.",
        )  # fmt: skip
    usable = f"{nic.rdma_device} uses GID index {nic.gid.index} ({nic.gid.gid})"
    if not nic.addresses:
        return _condition(
            "RDMAReady", _TRUE, "LinkLocalGID",
            f"{usable}. {nic.interface} has no address of its own, so this GID reaches its own subnet only.",
        )  # fmt: skip
    return _condition("RDMAReady", _TRUE, "GIDReady", f"{usable}.")


def _data(device: PreparedDevice, seen: Sequence[SeenNic]) -> dict[str, Any]:
    """Facts for programs, one object a NIC."""
    body: dict[str, Any] = {"nics": [_nic_data(nic) for nic in seen]}
    body["nics"] += [
        {"pciBusID": nic.address, "driver": nic.change.driver, "deviceNode": f"/dev/{node}"}
        for nic in device.nics
        if nic.change is not None and (node := vfio_node(nic)) is not None
    ]
    distance = device.attributes.get(names.DISTANCE, {}).get("string")
    if distance:
        body["distance"] = distance
    return body


def _nic_data(nic: SeenNic) -> dict[str, Any]:
    known = {
        "pciBusID": nic.pci_address,
        "interface": nic.interface or None,
        "rdmaDevice": nic.rdma_device,
        "linkLayer": nic.link_layer,
        "portState": nic.port_state,
        "gidIndex": nic.gid.index if nic.gid else None,
        "gid": nic.gid.gid if nic.gid else None,
        "gidType": nic.gid.kind if nic.gid else None,
    }
    return {name: value for name, value in known.items() if value is not None}
