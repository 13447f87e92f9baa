# Paths are strings here: a scan reads thousands of files, and pathlib takes several times longer.
"""RDMA devices and their character devices (kernel Documentation/ABI/stable/sysfs-class-infiniband)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from railmate.inventory.address import is_address
from railmate.inventory.model import Netdev, RdmaDevice
from railmate.inventory.reader import Reader

_NO_GUID = "0000:0000:0000:0000"


def read_rdma_devices(directory: str, entries: frozenset[str], reader: Reader) -> tuple[RdmaDevice, ...]:
    """The RDMA devices whose parent is this function."""
    if "infiniband" not in entries:
        return ()
    names = reader.names(f"{directory}/infiniband")
    verbs = _char_devices(f"{directory}/infiniband_verbs", "infiniband_verbs" in entries, names, reader)
    mad = _char_devices(f"{directory}/infiniband_mad", "infiniband_mad" in entries, names, reader)
    return tuple(
        read_device(f"{directory}/infiniband/{name}", name, verbs.get(name, ()), mad.get(name, ()), reader)
        for name in names
    )


def read_device(
    directory: str, name: str, verbs: Iterable[str], mad: Iterable[str], reader: Reader
) -> RdmaDevice:
    port = f"{directory}/ports/1"
    held = frozenset(reader.names(port)) if os.path.isdir(port) else frozenset()
    guid = reader.text(f"{directory}/node_guid")
    mad = tuple(mad)
    return RdmaDevice(
        name=name,
        link_layer=(reader.text(f"{port}/link_layer") or None) if "link_layer" in held else None,
        state=_state(reader.text(f"{port}/state")) if "state" in held else None,
        rate=_rate(f"{port}/rate", reader) if "rate" in held else None,
        node_guid=None if guid in (None, "", _NO_GUID) else guid,
        uverbs=tuple(verbs),
        umad=tuple(node for node in mad if node.startswith("umad")),
        issm=tuple(node for node in mad if node.startswith("issm")),
    )


def soft_devices(
    sysfs_root: str,
    known: Iterable[str],
    netdevs: Mapping[str, str],
    addresses: Mapping[str, object],
    reader: Reader,
) -> list[tuple[str, RdmaDevice]]:
    """RDMA devices that sysfs does not show below a PCI function, with the function they belong to.

    Soft RoCE and subfunctions: the class link tells the function, else ``parent`` or the GID table
    name the netdev. ``netdevs`` maps interface names to addresses.
    """
    listing = f"{sysfs_root}/class/infiniband"
    if not os.path.isdir(listing):  # absent without any RDMA driver
        return []
    left = [name for name in reader.names(listing) if name not in set(known)]
    if not left:
        return []
    verbs_class = f"{sysfs_root}/class/infiniband_verbs"
    has_verbs = os.path.isdir(verbs_class)
    verbs = _by_ibdev(verbs_class, reader.names(verbs_class) if has_verbs else [], set(left), reader)
    found = []
    for name in left:
        directory = f"{listing}/{name}"
        if not os.path.isdir(directory):
            reader.warn(directory, "leads nowhere; left out")
            continue
        owner = _owner(directory, netdevs, addresses, reader)
        if owner is not None:
            found.append((owner, read_device(directory, name, verbs.get(name, ()), (), reader)))
    return found


def _owner(
    directory: str, netdevs: Mapping[str, str], addresses: Mapping[str, object], reader: Reader
) -> str | None:
    try:
        target = os.readlink(directory).split("/")
    except OSError:
        target = []
    for part in reversed(target):
        if is_address(part) and part in addresses:
            return part
    for attribute in ("parent", "ports/1/gid_attrs/ndevs/0"):
        path = f"{directory}/{attribute}"
        if os.path.isfile(path):
            netdev = reader.text(path)
            if netdev is not None and netdev in netdevs:
                return netdevs[netdev]
    return None


def _char_devices(
    directory: str, present: bool, devices: list[str], reader: Reader
) -> Mapping[str, tuple[str, ...]]:
    if not present:
        return {}
    nodes = sorted(reader.names(directory), key=_natural)
    if len(devices) == 1:  # the usual case; spares a file a node
        return {devices[0]: tuple(nodes)}
    return _by_ibdev(directory, nodes, set(devices), reader)


def _by_ibdev(
    directory: str, nodes: Iterable[str], wanted: set[str], reader: Reader
) -> Mapping[str, tuple[str, ...]]:
    result: dict[str, tuple[str, ...]] = {}
    for node in sorted(nodes, key=_natural):
        if not node.startswith(("uverbs", "umad", "issm")):
            continue
        device = reader.text(f"{directory}/{node}/ibdev")
        if device in wanted:
            result[device] = (*result.get(device, ()), node)
    return result


def _natural(name: str) -> tuple[str, int]:
    match = re.fullmatch(r"(\D*)(\d+)", name)
    return (match[1], int(match[2])) if match else (name, 0)


def _state(text: str | None) -> str | None:
    """``4: ACTIVE`` -> ``ACTIVE``."""
    return text.rpartition(":")[2].strip() or None if text else None


def _rate(path: str, reader: Reader) -> int | None:
    """``200 Gb/sec (4X HDR)`` -> 200."""
    text = reader.text(path)
    if text is None:
        return None
    match = re.match(r"(\d+)(\.\d+)? Gb/sec", text)
    if match is None:
        reader.warn(path, f"should hold a rate in Gb/sec, holds {text[:40]!r}")
        return None
    return int(match[1])


def names_of(netdevs: Iterable[tuple[str, tuple[Netdev, ...]]]) -> dict[str, str]:
    """Interface name -> address of its function."""
    return {netdev.name: address for address, held in netdevs for netdev in held}
