# ruff: noqa: PTH115, PTH208
# Paths are strings here: a look is repeated every few seconds, and pathlib takes several times longer.
"""What sysfs says about a function right now. Reads only; what cannot be read is None, and nothing raises.

Files: kernel Documentation/ABI/testing/sysfs-bus-pci, sysfs-class-net, stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from railmate.inventory.address import is_address
from railmate.inventory.model import Inventory, PciFunction
from railmate.publish.model import Offer

_IFF_UP = 0x1  # linux/if.h
_WIDTHS = {1, 2, 4, 8, 12, 16, 32}  # lanes that a link can have; 0, 63 and 255 mean "not known"
_NOT_UP = {"down", "lowerlayerdown", "notpresent"}  # Documentation/networking/operstates.rst


class Kind(StrEnum):
    GPU = "gpu"
    NIC = "nic"  # a physical function, or a VF in a virtual machine, which looks like one
    VF = "vf"


@dataclass(frozen=True, slots=True)
class Target:
    """A function to look at, and what the inventory knows of where to look.

    ``port``: the bridge right above it. ``netdev`` and ``rdma``: names at the time of the scan.
    ``parent``: of a VF, its physical function. ``has_vfs``: its link is that of its VFs too. ``shared``: and of its
    sub-interfaces.
    """

    address: str
    kind: Kind
    port: str | None = None
    parent: str | None = None
    has_vfs: bool = False
    shared: bool = False
    netdev: str | None = None
    rdma: str | None = None


@dataclass(frozen=True, slots=True)
class PcieLink:
    """Speeds in GT/s, widths in lanes; the limit is what both ends of the link can do."""

    speed: float
    width: int
    speed_limit: float
    width_limit: int


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """Port 1: ``ACTIVE``, ``LinkUp``, ``InfiniBand``."""

    device: str
    state: str | None
    physical_state: str | None
    link_layer: str | None


@dataclass(frozen=True, slots=True)
class NetdevLink:
    """``up``: an administrator's word; ``carrier``: the cable's, None while the netdev is not up."""

    name: str
    up: bool | None
    carrier: bool | None


@dataclass(frozen=True, slots=True)
class Facts:
    """``vendor``: as the configuration space reads at this moment, not as the kernel remembers it.
    ``driver``: empty when none is bound. ``link_downs``: how often the link fell since the driver was loaded.
    ``lost``: the GPU's driver says that it cannot reach it."""

    present: bool | None = None
    vendor: int | None = None
    driver: str | None = None
    pcie: PcieLink | None = None
    rdma: RdmaPort | None = None
    netdev: NetdevLink | None = None
    link_downs: int | None = None
    lost: bool = False


class Sysfs:
    """A sysfs tree that may change, or lose parts, at any moment."""

    def __init__(self, root: Path) -> None:
        self._root = os.fspath(root).rstrip("/")

    def functions(self) -> frozenset[str] | None:
        """Addresses that are on the bus; None when that cannot be told."""
        try:
            return frozenset(os.listdir(f"{self._root}/bus/pci/devices"))
        except OSError:
            return None

    def function(self, address: str) -> str:
        return f"{self._root}/bus/pci/devices/{address}"

    def rdma_class(self, name: str) -> str:
        return f"{self._root}/class/infiniband/{name}"

    def data(self, path: str, limit: int = 256) -> bytes | None:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            return os.read(handle, limit)
        except OSError:  # the driver has no answer right now
            return None
        finally:
            os.close(handle)

    def text(self, path: str) -> str | None:
        data = self.data(path)
        return data.decode(errors="replace").strip() if data else None

    def number(self, path: str, base: int = 10) -> int | None:
        try:
            return int(self.text(path) or "", base)
        except ValueError:
            return None

    def names(self, directory: str) -> list[str]:
        try:
            return sorted(os.listdir(directory))
        except OSError:
            return []

    def link(self, path: str) -> str | None:
        """The last component of a link's target; empty when there is no link."""
        try:
            return os.readlink(path).rstrip("/").rpartition("/")[2]
        except FileNotFoundError:
            return ""
        except OSError:
            return None


def targets(offer: Offer, inventory: Inventory) -> dict[str, Target]:
    """The functions behind the offered devices, with the physical functions of VFs, each once.

    Of a device that a pod holds the machine may know nothing any more: then only whether it is there is looked at.
    """
    found: dict[str, Target] = {}
    shared = {nic for device in offer.devices if device.sub_interfaces for nic in device.nics}
    for device in offer.devices:
        for gpu in device.gpus:
            known = inventory.functions.get(gpu)
            found[gpu] = Target(gpu, Kind.GPU, port=_port(known) if known else None)
        for nic in device.nics:
            function = inventory.functions.get(nic)
            if function is None or function.physical_function is not None:
                parent = inventory.functions.get(function.physical_function or "") if function else None
                found[nic] = Target(nic, Kind.VF, parent=parent.address if parent else None)
                function = parent
            if function is not None:
                found[function.address] = _nic(function, function.address in shared)
    return found


def _nic(function: PciFunction, shared: bool) -> Target:
    return Target(
        function.address,
        Kind.NIC,
        port=_port(function),
        has_vfs=bool(function.virtual_functions),
        shared=shared,
        netdev=function.netdevs[0].name if function.netdevs else None,
        rdma=function.rdma_devices[0].name if function.rdma_devices else None,
    )


def _port(function: PciFunction) -> str | None:
    above = function.path[-2] if len(function.path) > 1 else ""
    return above if is_address(above) else None


def read(sysfs: Sysfs, target: Target, on_bus: frozenset[str] | None, *, pcie_link: bool) -> Facts:
    """One look. ``on_bus`` is ``sysfs.functions()`` of the same round; ``pcie_link``: whether to read it."""
    if on_bus is None:
        return Facts()
    if target.address not in on_bus:
        return Facts(present=False)
    directory = sysfs.function(target.address)
    driver = sysfs.link(f"{directory}/driver")
    if target.kind is Kind.VF:
        # a VF's vendor id reads ffff for ever (PCIe 6.0, 9.3.4.1.1), and its link is the physical function's
        return Facts(present=True, driver=driver)
    netdev = _netdev(sysfs, directory, target.netdev) if target.kind is Kind.NIC else None
    rdma = _rdma(sysfs, directory, target.rdma) if target.kind is Kind.NIC else None
    return Facts(
        present=True,
        vendor=_vendor(sysfs.data(f"{directory}/config", 4)),
        driver=driver,
        pcie=_pcie_link(sysfs, directory, target.port) if pcie_link else None,
        rdma=rdma,
        netdev=netdev,
        link_downs=_link_downs(sysfs, directory, netdev, rdma),
    )


def _vendor(header: bytes | None) -> int | None:
    """The first two bytes of the configuration space (PCI Local Bus 3.0, 6.1)."""
    return int.from_bytes(header[:2], "little") if header is not None and len(header) >= 2 else None


def _pcie_link(sysfs: Sysfs, directory: str, port: str | None) -> PcieLink | None:
    """None where one of the ends is not seen: a card in a narrower slot is no fault, so both must be known."""
    if port is None:
        return None
    above = sysfs.function(port)
    speed = _speed(sysfs.text(f"{directory}/current_link_speed"))
    width = sysfs.number(f"{directory}/current_link_width")
    speeds = [_speed(sysfs.text(f"{end}/max_link_speed")) for end in (directory, above)]
    widths = [sysfs.number(f"{end}/max_link_width") for end in (directory, above)]
    speed_limits = [one for one in speeds if one]
    width_limits = [one for one in widths if one in _WIDTHS]
    if not speed or width not in _WIDTHS or len(speed_limits) < 2 or len(width_limits) < 2:
        return None
    assert width is not None
    return PcieLink(speed, width, min(speed_limits), min(one for one in width_limits if one))


def _speed(text: str | None) -> float | None:
    """``16.0 GT/s PCIe`` -> 16.0; ``Unknown`` and ``Unknown speed`` are that."""
    match = re.match(r"(\d+(?:\.\d+)?) GT/s", text or "")
    return float(match[1]) if match else None


def _netdev(sysfs: Sysfs, directory: str, known: str | None) -> NetdevLink | None:
    """The physical function's own netdev: its VFs' representors lie beside it, so the scan's name comes first."""
    names = sysfs.names(f"{directory}/net")
    if not names:
        return None
    name = known if known in names else names[0]
    place = f"{directory}/net/{name}"
    flags = sysfs.number(f"{place}/flags", 16)
    carrier = {"1": True, "0": False}.get(sysfs.text(f"{place}/carrier") or "")  # EINVAL while it is not up
    if carrier is None:
        state = sysfs.text(f"{place}/operstate")
        carrier = True if state == "up" else False if state in _NOT_UP else None
    return NetdevLink(name, None if flags is None else bool(flags & _IFF_UP), carrier)


def _rdma(sysfs: Sysfs, directory: str, known: str | None) -> RdmaPort | None:
    names = sysfs.names(f"{directory}/infiniband")
    name = known if not names or known in names else names[0]
    if name is None:
        return None
    # a soft device hangs below no function, so it is found by its class only
    port = f"{f'{directory}/infiniband/{name}' if names else sysfs.rdma_class(name)}/ports/1"
    state = _word(sysfs.text(f"{port}/state"))
    if state is None:
        return None
    physical = _word(sysfs.text(f"{port}/phys_state"))
    return RdmaPort(name, state, physical, sysfs.text(f"{port}/link_layer"))


def _word(text: str | None) -> str | None:
    """``4: ACTIVE`` -> ``ACTIVE``."""
    return text.rpartition(":")[2].strip() or None if text else None


def _link_downs(sysfs: Sysfs, directory: str, netdev: NetdevLink | None, rdma: RdmaPort | None) -> int | None:
    """A link may fall and rise between two looks; the kernel counts that."""
    if netdev is not None:
        return sysfs.number(f"{directory}/net/{netdev.name}/carrier_down_count")
    if rdma is not None:
        return sysfs.number(f"{directory}/infiniband/{rdma.device}/ports/1/counters/link_downed")
    return None
