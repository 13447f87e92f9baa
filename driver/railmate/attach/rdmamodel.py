"""What is remembered of RDMA devices, and said about their way home."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RdmaDeviceRef:
    """An RDMA device of a NIC. ``node_guid`` (as sysfs writes it) also finds a device that was renamed.

    ``soft`` is the link type (``rxe``, ``siw``) of a device that software makes over a netdev; None for the
    device of a PCI function.
    """

    name: str
    node_guid: str | None = None
    soft: str | None = None

    def __str__(self) -> str:
        return f"RDMA device {self.name}"


@dataclass(frozen=True, slots=True)
class RdmaReturn:
    """Whether an RDMA device is in the host's namespace under its own name; ``problem`` tells why not."""

    name: str
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a port's GID table. ``gid`` and ``kind`` ("RoCE v2", "IB/RoCE v1") are as sysfs writes them."""

    index: int
    gid: str
    kind: str
    netdev: str | None = None


@dataclass(frozen=True, slots=True)
class SeenNic:
    """A NIC as its pod sees it. ``addresses`` are in CIDR notation, ``gid`` is the entry to use.

    ``rdma_device`` is None where the pod sees none of the NIC's. ``has_subsystem``: the kernel has RDMA at all.
    ``readable``: ports and GID table could be read. ``share`` is that of a sub-interface.
    """

    pci_address: str
    interface: str
    addresses: tuple[str, ...] = ()
    rdma_device: str | None = None
    link_layer: str | None = None  # "Ethernet", "InfiniBand"
    port_state: str | None = None  # "ACTIVE", "DOWN", …
    gid: Gid | None = None
    has_subsystem: bool = True
    readable: bool = True
    mac: str | None = None
    share: str | None = None
