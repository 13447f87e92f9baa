# Paths are strings here: a scan reads thousands of files, and pathlib takes several times longer.
"""RDMA devices and their character devices (kernel Documentation/ABI/stable/sysfs-class-infiniband)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from railmate.inventory.address import is_address
from railmate.inventory.model import RdmaDevice
from railmate.inventory.reader import Reader

_NO_GUID = "0000:0000:0000:0000"
_GUID = re.compile(r"[0-9a-f]{4}(:[0-9a-f]{4}){3}")
_STATE = re.compile(r"[0-9]+: *([A-Z_]+)")
_RATE = re.compile(r"([0-9]+)(\.[0-9]+)? Gb/sec.*")
_LINK_LAYERS = ("InfiniBand", "Ethernet")
_NO_LINK_LAYER = ("Unknown", "Unspecified")  # what EFA, which is neither, shows
_MOST_GIDS_TRIED = 32
_CHAR_DEVICES = ("uverbs", "umad", "issm")


@dataclass(frozen=True, slots=True)
class ClassDevice:
    """An RDMA device that sysfs does not show directly below a PCI function, and where it belongs."""

    owner: str  # address of the function
    subfunction: str | None  # name of the auxiliary device when it is a subfunction's
    device: RdmaDevice


def read_rdma_devices(directory: str, entries: frozenset[str], reader: Reader) -> tuple[RdmaDevice, ...]:
    """The RDMA devices whose parent is this function, or this subfunction."""
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
    mad = tuple(mad)
    return RdmaDevice(
        name=name,
        link_layer=_link_layer(f"{port}/link_layer", reader),
        state=_part(f"{port}/state", _STATE, reader),
        rate=_rate(f"{port}/rate", reader),
        node_guid=_guid(f"{directory}/node_guid", reader),
        sys_image_guid=_guid(f"{directory}/sys_image_guid", reader, optional=True),
        uverbs=tuple(verbs),
        umad=tuple(node for node in mad if node.startswith("umad")),
        issm=tuple(node for node in mad if node.startswith("issm")),
    )


def class_devices(
    sysfs_root: str,
    known: Iterable[RdmaDevice],
    netdevs: Mapping[str, str],
    addresses: Mapping[str, object],
    ask_kernel: Callable[[], Mapping[str, str]],
    reader: Reader,
) -> list[ClassDevice]:
    """RDMA devices of ``<sysfs>/class/infiniband`` that are not among ``known``, with their functions.

    The way of the class link or of ``device`` tells a function or a subfunction. Soft RoCE and soft
    iWARP name a netdev: in ``parent``, in the GID table, or else over RDMA netlink (``ask_kernel``:
    RDMA device -> netdev; called only when needed). ``netdevs`` maps netdevs to addresses. A device
    that runs over something else, such as ``lo``, belongs to no function and is left out.
    """
    listing = f"{sysfs_root}/class/infiniband"
    if not os.path.isdir(listing):  # absent without any RDMA driver
        return []
    known = tuple(known)
    seen = {device.name for device in known}
    left = [name for name in reader.names(listing) if name not in seen]
    if not left:
        return []
    taken = {node for device in known for node in device.char_devices}
    nodes = {}
    for group in ("infiniband_verbs", "infiniband_mad"):
        directory = f"{sysfs_root}/class/{group}"
        if os.path.isdir(directory):
            free = [node for node in reader.names(directory) if node not in taken]
            nodes[group] = _by_ibdev(directory, free, set(left), reader)
    asked: Mapping[str, str] | None = None
    found = []
    for name in left:
        directory = f"{listing}/{name}"
        if not os.path.isdir(directory):
            reader.warn(directory, "leads nowhere; left out")
            continue
        owner, subfunction = _by_path(directory, addresses)
        soft = _soft_type(directory, reader)
        if owner is None:
            owner = _by_netdev(directory, netdevs, reader)
        if owner is None:
            if asked is None:
                asked = ask_kernel()
            owner = netdevs.get(asked.get(name, ""))
        if owner is not None:
            verbs, mad = (nodes.get(g, {}).get(name, ()) for g in ("infiniband_verbs", "infiniband_mad"))
            device = replace(read_device(directory, name, verbs, mad, reader), soft=soft)
            found.append(ClassDevice(owner, subfunction, device))
    return found


def _by_path(directory: str, addresses: Mapping[str, object]) -> tuple[str | None, str | None]:
    """The function, and the subfunction's auxiliary device, that the links lead through."""
    for link in (directory, f"{directory}/device"):
        try:
            parts = os.readlink(link).split("/")
        except OSError:
            continue  # no link: a soft device has no parent, a copied tree has directories
        places = [position for position, part in enumerate(parts) if is_address(part)]
        if places:  # the last one; those before it are bridges, also when the function itself is left out
            below = parts[places[-1] + 1] if places[-1] + 1 < len(parts) else ""
            owner = parts[places[-1]]
            return (owner if owner in addresses else None), (below if is_subfunction(below) else None)
    return None, None


def is_subfunction(entry: str) -> bool:
    """Whether an entry of a function's directory is a subfunction's auxiliary device (``mlx5_core.sf.4``)."""
    return re.fullmatch(r"\w+\.sf\.[0-9]+", entry) is not None


def _soft_type(directory: str, reader: Reader) -> str | None:
    """The link type of a device made in software: soft iWARP is an RNIC, soft RoCE a channel adapter."""
    if "/devices/virtual/" not in os.path.realpath(directory):
        return None
    kind = reader.word(f"{directory}/node_type", optional=True) or ""
    return "siw" if kind.startswith("4") else "rxe"


def _by_netdev(directory: str, netdevs: Mapping[str, str], reader: Reader) -> str | None:
    parent = f"{directory}/parent"
    if os.path.isfile(parent):
        name = reader.word(parent)
        if name is not None and name in netdevs:
            return netdevs[name]
    table = f"{directory}/ports/1/gid_attrs/ndevs"
    if os.path.isdir(table):
        for index in sorted(reader.names(table), key=_natural)[:_MOST_GIDS_TRIED]:
            name = reader.word(f"{table}/{index}")  # an empty slot is no error
            if name is not None and name in netdevs:
                return netdevs[name]
    return None


def _char_devices(
    directory: str, present: bool, devices: list[str], reader: Reader
) -> Mapping[str, tuple[str, ...]]:
    if not present:
        return {}
    nodes = [node for node in reader.names(directory) if node.startswith(_CHAR_DEVICES)]
    if len(devices) == 1:  # the usual case; spares a file a node
        return {devices[0]: tuple(sorted(nodes, key=_natural))}
    return _by_ibdev(directory, nodes, set(devices), reader)


def _by_ibdev(
    directory: str, nodes: Iterable[str], wanted: set[str], reader: Reader
) -> Mapping[str, tuple[str, ...]]:
    result: dict[str, tuple[str, ...]] = {}
    for node in sorted(nodes, key=_natural):
        if not node.startswith(_CHAR_DEVICES):
            continue
        device = reader.word(f"{directory}/{node}/ibdev")
        if device is not None and device in wanted:
            result[device] = (*result.get(device, ()), node)
    return result


def _natural(name: str) -> tuple[str, int]:
    match = re.fullmatch(r"(\D*)(\d+)", name)
    return (match[1], int(match[2])) if match else (name, 0)


def _guid(path: str, reader: Reader, optional: bool = False) -> str | None:
    """All zeros is no GUID."""
    value = reader.word(path, _GUID, optional)
    return None if value == _NO_GUID else value


def _link_layer(path: str, reader: Reader) -> str | None:
    """Port attributes are optional: a device may have no port, and drivers differ in what they show."""
    text = reader.word(path, optional=True)
    if text is None or text in _LINK_LAYERS:
        return text
    if text not in _NO_LINK_LAYER:
        reader.warn(path, f"holds {text[:40]!r}, which is no link layer")
    return None


def _part(path: str, pattern: re.Pattern[str], reader: Reader) -> str | None:
    """The first group of what a file holds: ``4: ACTIVE`` -> ``ACTIVE``."""
    text = reader.word(path, pattern, optional=True)
    match = pattern.fullmatch(text) if text else None
    return match[1] if match else None


def _rate(path: str, reader: Reader) -> int | None:
    """``200 Gb/sec (4X HDR)`` -> 200."""
    number = _part(path, _RATE, reader)
    return int(number[:9]) if number else None
