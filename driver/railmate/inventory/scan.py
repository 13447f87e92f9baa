"""The inventory of a machine, from sysfs and proc alone. Reads, never writes; each file at most once."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from railmate.inventory.address import order
from railmate.inventory.gpus import read_gpus
from railmate.inventory.model import Inventory, Nic, PciFunction
from railmate.inventory.net import read_netdevs
from railmate.inventory.pci import Found, find_functions
from railmate.inventory.rdma import names_of, read_rdma_devices, soft_devices
from railmate.inventory.reader import Reader

_NETWORK_CLASS = 0x02


def scan(sysfs_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> Inventory:
    """What the machine holds.

    Raises UsageError when there is no PCI tree at ``sysfs_root``. Anything else that is odd becomes
    a warning that names the file, and what it belongs to is left out or stays unknown.
    """
    reader = Reader()
    sysfs, proc = os.fspath(sysfs_root).rstrip("/"), os.fspath(proc_root).rstrip("/")
    found = sorted(find_functions(sysfs, reader), key=lambda entry: order(entry.function.address))
    found = [_with_class_devices(entry, reader) for entry in found]
    functions = {entry.function.address: entry.function for entry in found}
    _add_soft_devices(functions, sysfs, reader)
    _drop_lost_relations(functions, reader)
    found = [
        replace(e, function=functions[e.function.address]) for e in found if e.function.address in functions
    ]
    gpus = read_gpus(found, sysfs, proc, reader)
    return Inventory(
        functions=functions,
        gpus=gpus,
        nics=tuple(_nic(function, functions) for function in functions.values() if _is_nic(function)),
        warnings=reader.warnings,
    )


def _with_class_devices(entry: Found, reader: Reader) -> Found:
    netdevs = read_netdevs(entry.directory, entry.entries, reader)
    rdma_devices = read_rdma_devices(entry.directory, entry.entries, reader)
    if not netdevs and not rdma_devices:
        return entry
    return replace(entry, function=replace(entry.function, netdevs=netdevs, rdma_devices=rdma_devices))


def _add_soft_devices(functions: dict[str, PciFunction], sysfs: str, reader: Reader) -> None:
    known = [device.name for function in functions.values() for device in function.rdma_devices]
    netdevs = names_of((address, function.netdevs) for address, function in functions.items())
    for address, device in soft_devices(sysfs, known, netdevs, functions, reader):
        function = functions[address]
        functions[address] = replace(function, rdma_devices=(*function.rdma_devices, device))


def _drop_lost_relations(functions: dict[str, PciFunction], reader: Reader) -> None:
    """PF and VF must name each other, else neither is believed: a VF without a PF has no place."""
    for address, function in list(functions.items()):
        pf = function.physical_function
        if pf is not None and (pf not in functions or address not in functions[pf].virtual_functions):
            reader.warn(address, f"is a VF of {pf}, which does not list it; taken out of the inventory")
            del functions[address]
    for address, function in list(functions.items()):
        for vf in function.virtual_functions:
            if vf not in functions or functions[vf].physical_function != address:
                reader.warn(address, f"lists {vf} as its VF, which does not say so; its VFs are left out")
                functions[address] = replace(function, virtual_functions=())
                for other in function.virtual_functions:
                    if other in functions and functions[other].physical_function in (address, None):
                        del functions[other]
                break


def _is_nic(function: PciFunction) -> bool:
    return function.class_code >> 16 == _NETWORK_CLASS or bool(function.netdevs or function.rdma_devices)


def _nic(function: PciFunction, functions: dict[str, PciFunction]) -> Nic:
    if function.physical_function is None:
        return Nic(function)
    siblings = functions[function.physical_function].virtual_functions
    return Nic(function, vf_index=siblings.index(function.address))
