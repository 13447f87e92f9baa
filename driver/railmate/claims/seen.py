"""What is known of a claim's NICs inside their pod, for its metadata file and its status. Pure."""

from __future__ import annotations

from typing import Any

from railmate.attach.rdmamodel import SeenNic
from railmate.claims.records import Entry, PreparedDevice, PreparedNic


def last_seen(entry: Entry, device: PreparedDevice) -> list[SeenNic]:
    """The device's NICs as the last sandbox that held them saw them; none before the first look."""
    by_key = {(nic.pci_address, nic.share): nic for nic in entry.seen.nics} if entry.seen else {}
    return [by_key[nic.key] for nic in device.nics if nic.key in by_key]


def seen_now(entry: Entry, device: PreparedDevice) -> list[SeenNic]:
    """The same, but only what the sandbox that holds them now has seen."""
    at = entry.attachment
    return last_seen(entry, device) if at and entry.seen and entry.seen.sandbox == at.sandbox else []


def network_data(entry: Entry, device: PreparedDevice) -> dict[str, Any] | None:
    """``networkData``: interface, MAC and addresses. The API has room for one netdev.

    Not from the attachment: the metadata file must not change when a sandbox ends.
    """
    with_netdev = [nic for nic in device.nics if nic.snapshot or nic.sub]
    if len(with_netdev) != 1:
        return None
    (nic,) = with_netdev
    seen = next((one for one in last_seen(entry, device) if one.pci_address == nic.address), None)
    found: dict[str, Any] = {
        "interfaceName": seen.interface if seen else nic.pod_interface,
        "hardwareAddress": (seen.mac if seen else None) or _own_mac(nic),
    }
    if seen and seen.addresses:
        found["ips"] = list(seen.addresses[:16])  # the API's limit
    return found


def vfio_node(nic: PreparedNic) -> str | None:
    """The VFIO node, below /dev, of a NIC that passes through; None of others, and before it is bound."""
    return nic.change.node or None if nic.change is not None and nic.passes_through else None


def interface_of(entry: Entry, nic: PreparedNic) -> str:
    """What the NIC's netdev is called where the pod sees it: on the host network it keeps its own name."""
    if entry.attachment is not None and entry.attachment.netns is None:
        if nic.snapshot is not None:
            return nic.snapshot.name
        if nic.sub is not None:  # none is made there; its port's netdev serves
            return nic.sub.port
    return nic.pod_interface


def _own_mac(nic: PreparedNic) -> str:
    if nic.sub is not None:
        return nic.sub.mac
    return nic.snapshot.mac if nic.snapshot else ""
