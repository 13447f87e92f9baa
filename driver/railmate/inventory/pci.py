# Paths are strings here: a scan reads thousands of files, and pathlib takes several times longer.
"""PCI functions, from ``<sysfs>/bus/pci/devices`` (kernel Documentation/ABI/testing/sysfs-bus-pci)."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from railmate.errors import UsageError
from railmate.inventory.address import is_address
from railmate.inventory.model import PciFunction
from railmate.inventory.reader import Reader

_VIRTFN = re.compile(r"virtfn([0-9]{1,5})")
_MAX_VFS = 65536
_NEXT_STEP = "Give --sysfs-root a directory that is laid out as /sys is."
_NVIDIA_NETWORKING = 0x15B3
# Reading VPD is slow on hardware (milliseconds a word), so only where it decides something: from
# ConnectX-7 on it marks NVSwitch management functions, and ties a data-direct function to its NIC.
_DEVICES_WITH_TELLING_VPD = {0x1021, 0x1023, 0x1025, 0x2100}


@dataclass(frozen=True, slots=True)
class Found:
    """A function with its directory and what the directory holds, for those who read on."""

    function: PciFunction
    directory: str
    entries: frozenset[str]
    vf_indices: Mapping[str, int] = field(default_factory=dict)  # by address of the VF, on a PF


def find_functions(sysfs_root: str, reader: Reader) -> list[Found]:
    """All functions, unordered. Raises UsageError when the tree has no PCI devices at all."""
    listing = os.path.join(sysfs_root, "bus/pci/devices")
    try:
        names = sorted(os.listdir(listing))
    except OSError as error:
        raise UsageError(f"{listing}: cannot be listed ({error.strerror}). {_NEXT_STEP}") from None
    if not names:
        raise UsageError(f"{listing}: is empty, so no PCI device is known. {_NEXT_STEP}")
    found = []
    for name in names:
        entry = _find(sysfs_root, listing, name, reader)
        if entry is not None:
            found.append(entry)
    return found


def _find(sysfs_root: str, listing: str, name: str, reader: Reader) -> Found | None:
    link = f"{listing}/{name}"
    if not is_address(name):
        reader.warn(link, "is not named after a PCI address; left out")
        return None
    path = _device_path(link, name, reader)
    if path is None:
        return None
    directory = "/".join((sysfs_root, "devices", *path))
    try:
        entries = frozenset(os.listdir(directory))
    except OSError as error:
        reader.warn(link, f"leads nowhere ({error.strerror}: {directory}); left out")
        return None
    indices = _vf_indices(directory, entries, reader)
    function = _read(name, path, directory, entries, tuple(indices), reader)
    if "physfn" in entries and function.physical_function is None:
        reader.warn(link, "is a VF of an unknown function; left out")
        return None
    return Found(function, directory, entries, indices)


def _device_path(link: str, name: str, reader: Reader) -> tuple[str, ...] | None:
    """The components below ``devices``. The link's text is enough: sysfs never nests links there."""
    try:
        target = os.readlink(link)
    except OSError as error:
        reader.warn(link, f"should be a link into the devices directory ({error.strerror}); left out")
        return None
    _, found, below = target.partition("devices/")
    path = tuple(below.split("/"))
    if not found or path[-1] != name:
        reader.warn(link, f"leads to {target!r}, not to a device of that address; left out")
        return None
    if len(set(path)) != len(path) or not {"", ".", ".."}.isdisjoint(path):
        reader.warn(link, f"leads through {target!r}, which is a loop; left out")
        return None
    return path


def _read(
    name: str,
    path: tuple[str, ...],
    directory: str,
    entries: frozenset[str],
    virtual_functions: tuple[str, ...],
    reader: Reader,
) -> PciFunction:
    def hexadecimal(attribute: str, bits: int) -> int | None:
        return reader.number(f"{directory}/{attribute}", 16, range(1 << bits))

    class_code = hexadecimal("class", 24) or 0
    vendor = hexadecimal("vendor", 16) or 0
    device = hexadecimal("device", 16) or 0
    subsystem = [
        hexadecimal(attribute, 16) if attribute in entries else None
        for attribute in ("subsystem_vendor", "subsystem_device")
    ]
    subsystem_ids = [0 if None in subsystem else one or 0 for one in subsystem]  # half of it is no id
    numa_node = None
    if "numa_node" in entries:
        numa_node = reader.number(f"{directory}/numa_node", among=range(-1, 1 << 16))
        numa_node = None if numa_node == -1 else numa_node
    vpd = None
    if "vpd" in entries and vendor == _NVIDIA_NETWORKING and device in _DEVICES_WITH_TELLING_VPD:
        vpd = reader.data(f"{directory}/vpd", 32768)
    return PciFunction(
        address=name,
        path=path,
        class_code=class_code,
        vendor=vendor,
        device=device,
        subsystem_vendor=subsystem_ids[0],
        subsystem_device=subsystem_ids[1],
        subsystem_known=None not in subsystem,
        numa_node=numa_node,
        iommu_group=_iommu_group(directory, entries, reader),
        driver=reader.link(f"{directory}/driver") if "driver" in entries else None,
        physical_function=_address(f"{directory}/physfn", reader) if "physfn" in entries else None,
        virtual_functions=virtual_functions,
        max_virtual_functions=(
            reader.number(f"{directory}/sriov_totalvfs", among=range(_MAX_VFS)) or 0
            if "sriov_totalvfs" in entries
            else 0
        ),
        vpd=vpd,
        auxiliary=tuple(sorted(entry for entry in entries if entry.count(".") == 2)),
    )


def _iommu_group(directory: str, entries: frozenset[str], reader: Reader) -> int | None:
    if "iommu_group" not in entries:
        return None
    group = reader.link(f"{directory}/iommu_group")
    if group is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", group):
        reader.warn(f"{directory}/iommu_group", f"leads to {group[:40]!r}, which is no group's number")
        return None
    return int(group)


def _address(link: str, reader: Reader) -> str | None:
    target = reader.link(link)
    if target is not None and not is_address(target):
        reader.warn(link, f"leads to {target!r}, which is no PCI function")
        return None
    return target


def _vf_indices(directory: str, entries: frozenset[str], reader: Reader) -> dict[str, int]:
    """VF index by address, in the order of indices. A link that makes no sense loses its own VF only."""
    names = [entry for entry in entries if entry.startswith("virtfn")]
    if not names:  # nearly all functions
        return {}
    links = sorted((int(match[1]), name) for name in names if (match := _VIRTFN.fullmatch(name)))
    targets = {index: _address(f"{directory}/{entry}", reader) for index, entry in links}
    times = Counter(targets.values())
    for index, entry in links:
        target = targets[index]
        if target is not None and times[target] > 1:
            reader.warn(f"{directory}/{entry}", f"leads to {target}, and so does another; both left out")
    return {target: index for index, target in targets.items() if target is not None and times[target] == 1}
