"""The partitions that a subnet manager has put an InfiniBand port into: its P_Key table.

Files as kernel Documentation/ABI/stable/sysfs-class-infiniband has them.
"""

from __future__ import annotations

from pathlib import Path

_WITHOUT_MEMBERSHIP = 0x7FFF


def rdma_device(sysfs_root: Path, address: str) -> Path | None:
    """The directory of the function's RDMA device, as this network namespace sees it."""
    found = sorted((sysfs_root / "bus/pci/devices" / address / "infiniband").glob("*"))
    return found[0] if found else None


def pkeys(device: Path) -> tuple[int, ...]:
    """The partition keys of port 1, by index, without empty places; nothing where they cannot be read."""
    found = []
    for path in sorted((device / "ports/1/pkeys").glob("*"), key=_number):
        try:
            found.append(int(path.read_text(), 16))
        except (OSError, ValueError):
            continue
    return tuple(one for one in found if one & _WITHOUT_MEMBERSHIP)


def missing(sysfs_root: Path, address: str, pkey: int) -> str | None:
    """Why the port is no full member of the partition, a sentence; None where it is.

    ``pkey`` has its membership bit set: a limited member (without it) cannot have an interface in the partition.
    """
    device = rdma_device(sysfs_root, address)
    if device is None:
        return f"{address} has no RDMA device on the node, so its partitions cannot be known"
    table = pkeys(device)
    if pkey in table:
        return None
    listed = ", ".join(f"0x{one:04x}" for one in table) or "none"
    return (
        f"port 1 of {device.name} ({address}) is no full member of partition 0x{pkey:04x}; its partitions are "
        f"{listed}. Have the subnet manager put the port's GUID into it"
    )


def _number(path: Path) -> int:
    return int(path.name) if path.name.isdigit() else 0
