"""A machine as objects, and what stands in for what is unique to a device.

A machine is held as the inventory's own ``PciFunction`` objects: what a scan of its sysfs tree should
find again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from railmate.inventory.address import order
from railmate.inventory.model import GpuVendor, Netdev, PciFunction, RdmaDevice

_RDMA_MTU, ETHERNET_MTU = 9000, 1500
_AUXILIARY = {
    "mlx5_core": "mlx5_core.rdma",
    "bnxt_en": "bnxt_en.rdma",
    "ionic": "ionic.rdma",
    "mana": "mana.rdma",
    "ice": "ice.roce",
}


class FactsError(Exception):
    """A machine's file does not follow its format; the message names file and line."""


@dataclass(frozen=True)
class GpuFacts:
    """What the vendor's driver says of a GPU."""

    vendor: GpuVendor
    product: str | None = None
    minor: int | None = None  # NVIDIA
    uuid: str | None = None
    drm: tuple[str, ...] = ()  # ("renderD128", "card0") of other vendors


@dataclass(frozen=True)
class Machine:
    name: str
    functions: Mapping[str, PciFunction]  # by address, in PCI order
    gpus: Mapping[str, GpuFacts] = field(default_factory=dict)  # also those that no driver of theirs holds
    nvidia_driver: str | None = None
    expected: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rails(self) -> list[str]:
        """Addresses of the NICs that the facts call rails."""
        roles = zip(self.expected.get("nics", ()), self.expected.get("roles", ()), strict=True)
        return [address for address, role in roles if role == "rail"]


@dataclass(frozen=True)
class NetdevFacts:
    """A netdev that something must stand in for: its name, and the function it belongs to."""

    name: str
    mac: str
    mtu: int
    owner: str  # address of the function
    physical_function: str | None  # address of the PF when the owner is a VF


def digest(*parts: str) -> str:
    """Hexadecimal digits that stand in for what is unique to a device; the same in every run."""
    return hashlib.sha256("/".join(parts).encode()).hexdigest()


def mac_address(machine: str, name: str) -> str:
    """A locally administered unicast address."""
    digits = digest(machine, name, "mac")
    return ":".join(["02", *(digits[i : i + 2] for i in range(0, 10, 2))])


def rdma_device(machine: str, owner: str, name: str, link_layer: str, rate: int | None) -> RdmaDevice:
    guid = guid_of(machine, owner)
    return RdmaDevice(name=name, link_layer=link_layer, state="ACTIVE", rate=rate, node_guid=guid)


def guid_of(*parts: str) -> str:
    """A locally administered EUI-64, as sysfs writes it."""
    digits = "02" + digest(*parts, "guid")[:14]
    return ":".join(digits[i : i + 4] for i in range(0, 16, 4))


def netdev(
    machine: str, name: str, rdma: bool, rate: int | None, mac: str | None = None, ethernet: bool = True
) -> Netdev:
    return Netdev(
        name=name,
        mac=mac or mac_address(machine, name),
        mtu=_RDMA_MTU if rdma else ETHERNET_MTU,
        speed=rate * 1000 if rate else None,
        operstate="up",
        link_type="ether" if ethernet else "infiniband",
    )


def make_vpd(keywords: Mapping[str, str]) -> bytes:
    """Vital product data with one read-only part (PCI Local Bus 3.0, appendix I)."""
    body = b"".join(key.encode() + bytes([len(value)]) + value.encode() for key, value in keywords.items())
    body += b"RV\x01" + b"\0"
    return b"\x90" + len(body).to_bytes(2, "little") + body + b"\x78"


def numbered(
    functions: Mapping[str, PciFunction], models: Mapping[str, Mapping[str, Any]]
) -> dict[str, PciFunction]:
    """RDMA devices with their character devices, numbered as drivers come up: PFs, then VFs."""
    result = dict(functions)
    verbs = mads = auxiliary = 0
    for address in sorted(functions, key=lambda a: (functions[a].physical_function is not None, order(a))):
        function = functions[address]
        mad = models.get(f"{function.vendor:04x}:{function.device:04x}", {}).get("mad", True)
        devices = []
        for device in function.rdma_devices:
            nodes = {"uverbs": (f"uverbs{verbs}",)}
            verbs += 1
            if mad:
                nodes.update(umad=(f"umad{mads}",), issm=(f"issm{mads}",))
                mads += 1
            devices.append(replace(device, **nodes))  # type: ignore[arg-type]
        extra: tuple[str, ...] = ()
        if devices and function.driver in _AUXILIARY:
            extra = (f"{_AUXILIARY[function.driver]}.{auxiliary}",)
            auxiliary += 1
        result[address] = replace(function, rdma_devices=tuple(devices), auxiliary=extra)
    return result
