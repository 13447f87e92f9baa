"""The inventory's data: plain, immutable, comparable, free of any I/O.

Addresses are ``dddd:bb:dd.f`` in lower case (the domain may have more than four digits: a VMD
domain is ``10000``). Unknown is ``None``, never a made-up value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Netdev:
    """A network interface of a PCI function, as the host's namespace shows it."""

    name: str
    mac: str | None = None
    mtu: int | None = None  # bytes
    speed: int | None = None  # Mbit/s, None while the link is down
    operstate: str | None = None  # kernel Documentation/ABI/testing/sysfs-class-net
    link_type: str | None = None  # "ether" or "infiniband" (ARPHRD 1 or 32), None for others
    master: str | None = None  # the bond, bridge or VRF that it is enslaved to
    port_name: str | None = None  # phys_port_name; read only where a function has several netdevs

    @property
    def is_representor(self) -> bool:
        """Whether it stands for a VF or subfunction inside the PF's switch (``pf0vf3``, ``c1pf0sf88``)."""
        return self.port_name is not None and ("vf" in self.port_name or "sf" in self.port_name)


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """An RDMA device and its character devices (names below ``<dev root>/infiniband``)."""

    name: str
    link_layer: str | None = None  # "Ethernet" or "InfiniBand", port 1
    state: str | None = None  # "ACTIVE", "DOWN", …, port 1
    rate: int | None = None  # Gbit/s, port 1
    node_guid: str | None = None
    sys_image_guid: str | None = None  # the same for all functions of one card
    uverbs: tuple[str, ...] = ()
    umad: tuple[str, ...] = ()
    issm: tuple[str, ...] = ()
    soft: str | None = None  # link type ("rxe", "siw") of a device made in software over a netdev

    @property
    def char_devices(self) -> tuple[str, ...]:
        return self.uverbs + self.umad + self.issm


@dataclass(frozen=True, slots=True)
class Subfunction:
    """A part of a PCI function that has a netdev and an RDMA device of its own, but no PCI address
    (kernel Documentation/networking/devlink/devlink-port.rst). Its place is its function's."""

    name: str  # auxiliary device: "mlx5_core.sf.4"
    number: int | None = None  # the number the administrator gave it (sfnum)
    netdevs: tuple[Netdev, ...] = ()
    rdma_devices: tuple[RdmaDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class PciFunction:
    """One PCI function.

    ``path`` holds the components below ``<sysfs>/devices``, root first, the function itself last:
    ``("pci0000:00", "0000:00:01.1", "0000:01:00.0")``. A VMBus or platform parent is kept as it is.
    """

    address: str
    path: tuple[str, ...]
    class_code: int  # 24 bits: base class, sub-class, programming interface
    vendor: int
    device: int
    subsystem_vendor: int = 0
    subsystem_device: int = 0
    subsystem_known: bool = True  # False: its files could not be read, or made no sense; the ids are 0 then
    numa_node: int | None = None
    iommu_group: int | None = None
    driver: str | None = None
    physical_function: str | None = None  # address of the PF when this is a VF
    virtual_functions: tuple[str, ...] = ()  # addresses in the order of VF indices, when this is a PF
    max_virtual_functions: int = 0  # sriov_totalvfs
    netdevs: tuple[Netdev, ...] = ()
    rdma_devices: tuple[RdmaDevice, ...] = ()
    vpd: bytes | None = None
    auxiliary: tuple[str, ...] = ()  # auxiliary bus devices: ("mlx5_core.rdma.0", "mlx5_core.sf.4")
    subfunctions: tuple[Subfunction, ...] = ()

    @property
    def has_rdma(self) -> bool:
        """Whether the function does RDMA, also while its RDMA device is in another network namespace.

        ``infiniband/`` shows only what this namespace may see; the driver's auxiliary device stays
        (``mlx5_core.rdma``, ``bnxt_en.rdma``, ``mana.rdma``, ``ice.roce``, ``ice.iwarp``).
        """
        kinds = {name.split(".")[1] for name in self.auxiliary if name.count(".") == 2}
        return bool(self.rdma_devices) or not kinds.isdisjoint({"rdma", "roce", "iwarp"})

    @property
    def pcie_root(self) -> str | None:
        """The host bridge, as ``resource.kubernetes.io/pcieRoot`` names it (``pci0000:00``)."""
        return next((part for part in self.path if part.startswith("pci")), None)


class GpuVendor(StrEnum):
    NVIDIA = "nvidia"
    AMD = "amd"
    INTEL = "intel"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Partition:
    """A part of a GPU that stands alone: NVIDIA's MIG instance, AMD's XCP. All share the GPU's address."""

    name: str  # unique on the GPU and as stable as the partitioning: "gi3ci0", "xcp2"
    profile: str | None = None  # "1g.10gb", "CPX"
    uuid: str | None = None
    memory_bytes: int | None = None
    device_nodes: tuple[str, ...] = ()  # beside the GPU's own and the vendor's shared ones


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU; what only a vendor's driver knows is ``None`` without that driver.

    Where an AMD GPU is partitioned ``device_nodes`` has the nodes of all partitions: they are the GPU.
    """

    function: PciFunction
    vendor: GpuVendor
    device_nodes: tuple[str, ...] = ()  # paths below the dev root: ("nvidia0",), ("dri/renderD128",)
    index: int | None = None  # the vendor driver's minor number
    uuid: str | None = None
    product: str | None = None
    architecture: str | None = None
    driver_version: str | None = None
    memory_bytes: int | None = None
    compute_capability: str | None = None  # NVIDIA: "9.0"
    partition_mode: str | None = None  # "MIG", "CPX/NPS4"; None: whole, or unknown
    partitions: tuple[Partition, ...] = ()
    nvlinks: int | None = None  # links that are up; None: unknown
    nvlink_peers: tuple[str, ...] = ()  # addresses at their other ends (GPUs or NVSwitches), sorted

    @property
    def address(self) -> str:
        return self.function.address


@dataclass(frozen=True, slots=True)
class Nic:
    """A network or RDMA function: a physical function or a VF."""

    function: PciFunction
    vf_index: int | None = None  # None on a physical function

    @property
    def address(self) -> str:
        return self.function.address

    @property
    def is_vf(self) -> bool:
        return self.function.physical_function is not None


@dataclass(frozen=True, slots=True)
class Bond:
    """A bond over ports of this machine. Under RoCE LAG one RDMA device serves all of them
    (``mlx5_bond_0``, a child of one of the functions)."""

    name: str
    netdevs: tuple[str, ...]  # the enslaved ones that are PCI functions', in PCI order
    functions: tuple[str, ...]  # their addresses
    rdma_devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Inventory:
    """All that was found. ``functions`` is keyed by address; ``gpus`` and ``nics`` are in PCI order
    (VFs are in ``nics`` too). ``warnings`` name files that could not be read or made no sense."""

    functions: Mapping[str, PciFunction] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    bonds: tuple[Bond, ...] = ()
    rdma_netns_mode: str | None = None  # "shared" or "exclusive"; None: no RDMA, or unknown
    warnings: tuple[str, ...] = ()
