"""What a NIC function is, by its ids and vital product data: whether it can be a rail at all, and of which sort."""

from __future__ import annotations

from collections.abc import Iterable

from railmate.inventory.model import PciFunction
from railmate.inventory.vpd import keyword

_NVIDIA_NETWORKING = 0x15B3
_UNREAD = 0
_NVSWITCH_MANAGEMENT_SUBSYSTEM = (0x15B3, 0x0087)
_MANAGEMENT_VPD = b"SW_MNG"
DATA_DIRECT = (0x15B3, 0x2100)
_CRAY = 0x17DB  # Slingshot: fabric NICs whose driver makes no RDMA device
ETHERNET_ONLY = {  # at most 50 Gbit/s, for the host's own network
    (_NVIDIA_NETWORKING, 0x1015),  # ConnectX-4 Lx
    (_NVIDIA_NETWORKING, 0x1016),  # its VF, in a guest
    (_NVIDIA_NETWORKING, 0x101F),  # ConnectX-6 Lx
    (0x8086, 0x1599),  # Intel E810-XXV: backplane, QSFP, SFP
    (0x8086, 0x159A),
    (0x8086, 0x159B),
    *((0x8086, device) for device in (0x37D0, 0x37D1, 0x37D2, 0x37D3)),  # Intel X722
    # Broadcom BCM57412, 57414, 57416 and 57417
    *((0x14E4, device) for device in (0x16D6, 0x16D7, 0x16D8, 0x16D9, 0x16E2, 0x16E3)),
}
_NETWORK_CLASS = 0x02
#: Drivers that hold a function for a virtual machine or a user-space driver.
PASS_THROUGH = frozenset({"vfio-pci", "pci-stub", "uio_pci_generic", "igb_uio", "xen-pciback"})
DPUS = {(_NVIDIA_NETWORKING, device) for device in (0xA2D2, 0xA2D6, 0xA2DC)}  # BlueField 1 to 3

Model = tuple[int, int]
Make = tuple[int, int, int, int]


def model(function: PciFunction) -> Model:
    return function.vendor, function.device


def is_management(function: PciFunction) -> bool:
    """NVSwitch management: a NIC in looks, in fact the way to the switches of NVLink."""
    subsystem = (function.subsystem_vendor, function.subsystem_device)
    return subsystem == _NVSWITCH_MANAGEMENT_SUBSYSTEM or _MANAGEMENT_VPD in (function.vpd or b"")


def may_be_management(function: PciFunction) -> bool:
    """Whether it cannot be told from NVSwitch management: no subsystem ids, no vital product data instead.

    A vendor that could not be read is 0, which is nobody's, and may be NVIDIA's.
    """
    if (
        function.subsystem_known
        or function.vendor not in (_UNREAD, _NVIDIA_NETWORKING)
        or is_management(function)
    ):
        return False
    return all(keyword(function.vpd or b"", name) is None for name in ("PN", "SN"))


def is_rdma_nic(function: PciFunction, vfs: Iterable[PciFunction] = ()) -> bool:
    """Whether it does RDMA itself or by its VFs, or is Slingshot; a data-direct function is a part of a NIC.

    Of two ports under RoCE LAG only the first has an RDMA device; the VFs of both have theirs.
    """
    does = function.has_rdma or function.vendor == _CRAY or any(vf.has_rdma for vf in vfs)
    return does and model(function) != DATA_DIRECT


def can_be_rail(function: PciFunction, vfs: Iterable[PciFunction] = ()) -> bool:
    return is_rdma_nic(function, vfs) and not is_management(function) and not may_be_management(function)


def is_silent(function: PciFunction) -> bool:
    """Whether it is a NIC without its driver, which alone would say whether it does RDMA."""
    is_free = function.driver is None or function.driver in PASS_THROUGH
    is_nic = function.class_code >> 16 == _NETWORK_CLASS and model(function) != DATA_DIRECT
    return (
        is_nic
        and is_free
        and not function.has_rdma
        and not function.netdevs
        and not is_management(function)
        and not may_be_management(function)
    )


def kind(function: PciFunction) -> str:
    """For people: what sort of NIC this is."""
    if model(function) in DPUS:
        return "BlueField"
    return "Ethernet only" if model(function) in ETHERNET_ONLY else "another model"


def make(nic: PciFunction) -> Make:
    """Model and subsystem: a machine's storage and north-south cards may be of the rails' chip."""
    return nic.vendor, nic.device, nic.subsystem_vendor, nic.subsystem_device


def tier(one: Model) -> int:
    """What serves as a rail only where there is nothing better comes last."""
    return 0 if one in ETHERNET_ONLY else 1 if one in DPUS else 2
