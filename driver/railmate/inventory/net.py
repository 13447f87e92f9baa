# Paths are strings here: a scan reads thousands of files, and pathlib takes several times longer.
"""Network interfaces of a PCI function (kernel Documentation/ABI/testing/sysfs-class-net)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from railmate.inventory.model import Bond, Netdev, PciFunction
from railmate.inventory.reader import Reader

_LINK_TYPES = {1: "ether", 32: "infiniband"}  # ARPHRD_ETHER, ARPHRD_INFINIBAND (linux/if_arp.h)
_MAC = re.compile(r"[0-9a-fA-F]{2}(:[0-9a-fA-F]{2})*")
_OPERSTATE = re.compile(r"unknown|notpresent|down|lowerlayerdown|testing|dormant|up")
_MTUS, _SPEEDS, _TYPES = range(1 << 31), range(-1, 1 << 32), range(1 << 16)
_UNKNOWN_SPEED = (-1, 0, 0xFFFFFFFF)  # SPEED_UNKNOWN, which some kernels print without its sign


def read_netdevs(directory: str, entries: frozenset[str], reader: Reader) -> tuple[Netdev, ...]:
    """The function's netdevs, its own before the representors of its VFs.

    virtio-net's are children of the virtio device, which is a child of the function.
    """
    parents = [directory] if "net" in entries else []
    for entry in sorted(entry for entry in entries if entry.startswith("virtio")):
        if os.path.isdir(f"{directory}/{entry}/net"):
            parents.append(f"{directory}/{entry}")
    found = [(f"{parent}/net", name) for parent in parents for name in reader.names(f"{parent}/net")]
    netdevs = [_read(f"{place}/{name}", name, len(found) > 1, reader) for place, name in found]
    if len(netdevs) > 1:
        netdevs.sort(key=lambda netdev: netdev.is_representor)
    return tuple(netdevs)


def _read(directory: str, name: str, has_siblings: bool, reader: Reader) -> Netdev:
    """``mtu`` is always there; the others depend on driver and kernel."""
    speed = reader.number(f"{directory}/speed", among=_SPEEDS, optional=True)
    link_type = reader.number(f"{directory}/type", among=_TYPES, optional=True)
    return Netdev(
        name=name,
        mac=reader.word(f"{directory}/address", _MAC, optional=True),
        mtu=reader.number(f"{directory}/mtu", among=_MTUS),
        speed=None if speed in _UNKNOWN_SPEED else speed,
        operstate=reader.word(f"{directory}/operstate", _OPERSTATE, optional=True),
        link_type=_LINK_TYPES.get(link_type or 0),
        master=reader.link(f"{directory}/master", optional=True),
        port_name=reader.word(f"{directory}/phys_port_name", optional=True) if has_siblings else None,
    )


def find_bonds(functions: Mapping[str, PciFunction], sysfs_root: str) -> tuple[Bond, ...]:
    """Bonds over the functions' netdevs, by name; other masters (bridges, VRFs) are not bonds."""
    members: dict[str, list[tuple[str, str]]] = {}
    for address, function in functions.items():
        for netdev in function.netdevs:
            if netdev.master is not None:
                members.setdefault(netdev.master, []).append((netdev.name, address))
    return tuple(
        Bond(
            name=name,
            netdevs=tuple(netdev for netdev, _ in ports),
            functions=(addresses := tuple(dict.fromkeys(address for _, address in ports))),
            rdma_devices=tuple(d.name for address in addresses for d in functions[address].rdma_devices),
        )
        for name, ports in sorted(members.items())
        if os.path.isdir(f"{sysfs_root}/class/net/{name}/bonding")
    )


def names_of(functions: Iterable[PciFunction]) -> dict[str, str]:
    """Interface name -> address of its function."""
    return {netdev.name: function.address for function in functions for netdev in function.netdevs}


def netdev_of(sysfs_root: Path, address: str) -> str | None:
    """The name of the function's netdev in this network namespace at this moment, None when it has none here.

    Representors of its VFs are not its own.
    """
    directory = f"{sysfs_root}/bus/pci/devices/{address}/net"
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return None  # the directory goes with the last netdev
    if len(names) < 2:
        return names[0] if names else None
    return next((name for name in names if not _is_representor(f"{directory}/{name}")), None)


def _is_representor(directory: str) -> bool:
    name = Reader().word(f"{directory}/phys_port_name", optional=True)
    return Netdev("", port_name=name).is_representor
