"""Subfunctions, as far as sysfs shows them: auxiliary devices below their PCI function
(kernel Documentation/networking/device_drivers/ethernet/mellanox/mlx5/switchdev.rst)."""

from __future__ import annotations

from dataclasses import replace

from railmate.inventory.model import PciFunction, RdmaDevice, Subfunction
from railmate.inventory.net import read_netdevs
from railmate.inventory.rdma import read_rdma_devices
from railmate.inventory.reader import Reader

_MOST_NUMBERS = 1 << 32


def read_subfunction(directory: str, name: str, reader: Reader) -> Subfunction:
    entries = frozenset(reader.names(directory))
    number = None
    if "sfnum" in entries:
        number = reader.number(f"{directory}/sfnum", among=range(_MOST_NUMBERS))
    return Subfunction(
        name=name,
        number=number,
        netdevs=read_netdevs(directory, entries, reader),
        rdma_devices=read_rdma_devices(directory, entries, reader),
    )


def rdma_devices_of(function: PciFunction) -> tuple[RdmaDevice, ...]:
    """The function's RDMA devices and its subfunctions'."""
    return function.rdma_devices + tuple(d for part in function.subfunctions for d in part.rdma_devices)


def with_device(function: PciFunction, subfunction: str, device: RdmaDevice) -> PciFunction:
    """The function, whose subfunction of that name has one RDMA device more."""
    parts = tuple(
        replace(part, rdma_devices=(*part.rdma_devices, device)) if part.name == subfunction else part
        for part in function.subfunctions
    )
    return replace(function, subfunctions=parts)
