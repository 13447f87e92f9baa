"""What VFIO needs of the machine before a function is given to a program in user space, and its device nodes.

Rules: kernel Documentation/driver-api/vfio.rst. The unit of ownership is the IOMMU group: the kernel gives a group to a
program only while no function of it is bound to a driver that does DMA for the host.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from railmate.attach.errors import AttachError, UnfitError

DRIVER = "vfio-pci"
CONTROL = "vfio/vfio"  # below the dev root
#: Drivers that leave DMA to others (``driver_managed_dma`` in the kernel), so they may share a group with a program.
_HARMLESS = frozenset({DRIVER, "pci-stub", "pcieport", "shpchp"})
_BRIDGE_CLASS = "0x06"
_NOIOMMU_GROUP = "vfio-noiommu"  # the name of a group that vfio makes where there is no IOMMU


def refuse_unfit(sysfs_root: Path, dev_root: Path, address: str, ours: Container[str]) -> str | None:
    """Raises UnfitError that says why the function cannot be used through VFIO; else a warning, or None.

    ``ours``: functions of its claim that are bound to vfio-pci with it.
    """
    if not (sysfs_root / "bus/pci/drivers" / DRIVER).exists():
        raise UnfitError(
            f"{address} is asked for with driver {DRIVER}, which is not loaded. "
            f"The administrator loads it on the node (modprobe {DRIVER})"
        )
    if not (dev_root / CONTROL).exists():
        raise UnfitError(
            f"{address} is asked for with driver {DRIVER}, and {dev_root / CONTROL} is not there. "
            "The node's kernel needs CONFIG_VFIO_CONTAINER, and its module vfio"
        )
    group = _group(sysfs_root, address)
    if group is None:
        return _without_iommu(sysfs_root, address)
    strangers = _strangers(sysfs_root, group, address, ours)
    if strangers:
        raise UnfitError(
            f"{address} cannot be given to a program in user space: its IOMMU group {group} has also "
            f"{', '.join(strangers)}. Use a slot whose PCIe ports have ACS, or switch ACS on in the firmware"
        )
    return None


def device_node(sysfs_root: Path, address: str) -> str:
    """The node, below the dev root, of a function that is bound to vfio-pci. Raises AttachError."""
    group = _group(sysfs_root, address)
    if group is None:
        raise AttachError(f"{address} is bound to {DRIVER} and has no IOMMU group; see the kernel's log")
    return f"vfio/{'noiommu-' if _is_noiommu(sysfs_root, group) else ''}{group}"


def _without_iommu(sysfs_root: Path, address: str) -> str:
    switch = sysfs_root / "module/vfio/parameters/enable_unsafe_noiommu_mode"
    if _text(switch) not in ("Y", "1"):
        raise UnfitError(
            f"{address} has no IOMMU group, so nothing would keep a program from the node's memory. Switch the IOMMU "
            "on in the firmware and on the kernel's command line (intel_iommu=on, amd_iommu=on)"
        )
    return (
        f"{address} is given away without an IOMMU (enable_unsafe_noiommu_mode): a program that uses it can read and "
        "write all of the node's memory, and needs CAP_SYS_RAWIO."
    )


def _strangers(sysfs_root: Path, group: str, address: str, ours: Container[str]) -> list[str]:
    """Functions for which the kernel would refuse the group, or that another claim would lose it to."""
    found = []
    for path in sorted((sysfs_root / "kernel/iommu_groups" / group / "devices").glob("*")):
        other, driver = path.name, _driver(path)
        if other == address or other in ours or _text(path / "class").startswith(_BRIDGE_CLASS):
            continue
        if driver is not None and (driver not in _HARMLESS or driver == DRIVER):
            found.append(f"{other} (driver {driver})")
    return found


def _group(sysfs_root: Path, address: str) -> str | None:
    try:
        return (sysfs_root / "bus/pci/devices" / address / "iommu_group").readlink().name
    except OSError:
        return None


def _is_noiommu(sysfs_root: Path, group: str) -> bool:
    return _text(sysfs_root / "kernel/iommu_groups" / group / "name") == _NOIOMMU_GROUP


def _driver(device: Path) -> str | None:
    try:
        return (device / "driver").readlink().name
    except OSError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
