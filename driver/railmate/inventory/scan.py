"""The inventory of a machine, from sysfs and proc. Reads, never writes; each file at most once.

Vendor libraries only add to it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from railmate.errors import UsageError
from railmate.inventory.address import order
from railmate.inventory.gpus import read_gpus
from railmate.inventory.model import Gpu, GpuVendor, Inventory, Nic, PciFunction
from railmate.inventory.net import find_bonds, names_of, read_netdevs
from railmate.inventory.pci import Found, find_functions
from railmate.inventory.rdma import class_devices, is_subfunction, read_rdma_devices
from railmate.inventory.reader import Reader
from railmate.inventory.subfunctions import rdma_devices_of, read_subfunction, with_device

if TYPE_CHECKING:
    from railmate.inventory.nvml import Nvml

LIVE_SYSFS = "/sys"
_NETWORK_CLASS = 0x02


def scan(
    sysfs_root: Path = Path("/sys"), proc_root: Path = Path("/proc"), nvml: Nvml | None = None
) -> Inventory:
    """What the machine holds.

    ``nvml`` says how to reach NVIDIA's library. Left out, it is asked where ``sysfs_root`` is the live
    /sys; under any other root it would speak of another machine.
    Raises UsageError when there is no PCI tree at ``sysfs_root``, or nothing of it can be read. Anything
    else that is odd becomes a warning that names the file, and what it belongs to is left out or stays unknown.
    """
    reader = Reader()
    sysfs, proc = os.fspath(sysfs_root).rstrip("/"), os.fspath(proc_root).rstrip("/")
    found = sorted(find_functions(sysfs, reader), key=lambda entry: order(entry.function.address))
    found = [_with_class_devices(entry, reader) for entry in found]
    functions = {entry.function.address: entry.function for entry in found}
    _add_class_devices(functions, sysfs, reader)
    _drop_lost_relations(functions, sysfs, reader)
    found = [
        replace(e, function=functions[e.function.address]) for e in found if e.function.address in functions
    ]
    gpus = read_gpus(found, sysfs, proc, reader)
    if nvml is not None or sysfs == LIVE_SYSFS:
        gpus = _with_nvml(gpus, nvml, proc, reader)
    if not functions and reader.warnings:
        raise UsageError(f"{sysfs}/bus/pci/devices: not one PCI function can be read. {reader.warnings[0]}")
    indices = {vf: index for entry in found for vf, index in entry.vf_indices.items()}
    return Inventory(
        functions=functions,
        gpus=gpus,
        nics=tuple(
            Nic(function, None if function.physical_function is None else indices[function.address])
            for function in functions.values()
            if _is_nic(function)
        ),
        bonds=find_bonds(functions, sysfs),
        rdma_netns_mode=_rdma_netns_mode(sysfs, functions),
        warnings=reader.warnings,
    )


def _with_nvml(gpus: tuple[Gpu, ...], nvml: Nvml | None, proc: str, reader: Reader) -> tuple[Gpu, ...]:
    if all(gpu.vendor is not GpuVendor.NVIDIA for gpu in gpus):
        return gpus
    from railmate.inventory.nvml import Nvml, find_library, with_nvml  # starts processes: 15 ms of imports

    return with_nvml(gpus, nvml or Nvml(find_library()), proc, reader)


def _with_class_devices(entry: Found, reader: Reader) -> Found:
    netdevs = read_netdevs(entry.directory, entry.entries, reader)
    rdma_devices = read_rdma_devices(entry.directory, entry.entries, reader)
    parts = tuple(
        read_subfunction(f"{entry.directory}/{name}", name, reader)
        for name in entry.function.auxiliary
        if is_subfunction(name)
    )
    if not netdevs and not rdma_devices and not parts:
        return entry
    function = replace(entry.function, netdevs=netdevs, rdma_devices=rdma_devices, subfunctions=parts)
    return replace(entry, function=function)


def _add_class_devices(functions: dict[str, PciFunction], sysfs: str, reader: Reader) -> None:
    known = [device for function in functions.values() for device in rdma_devices_of(function)]
    netdevs = names_of(functions.values())
    for found in class_devices(sysfs, known, netdevs, functions, lambda: _ask_kernel(sysfs, reader), reader):
        function = functions[found.owner]
        if found.subfunction is None:
            devices = (*function.rdma_devices, found.device)
            functions[found.owner] = replace(function, rdma_devices=devices)
        else:
            functions[found.owner] = with_device(function, found.subfunction, found.device)


def _ask_kernel(sysfs: str, reader: Reader) -> dict[str, str]:
    """Only the live /sys and netlink speak of the same machine."""
    if sysfs != LIVE_SYSFS:
        return {}
    from railmate.inventory import rdmanetlink  # sockets: 5 ms of imports, and rarely needed

    try:
        return rdmanetlink.netdevs_by_rdma_device()
    except OSError as error:
        reader.warn("RDMA netlink", f"cannot be asked which netdevs RDMA devices run over ({error.strerror})")
        return {}


def _rdma_netns_mode(sysfs: str, functions: dict[str, PciFunction]) -> str | None:
    """Asked only where it matters: without RDMA devices here the question itself could load a kernel module."""
    if sysfs != LIVE_SYSFS or not any(function.has_rdma for function in functions.values()):
        return None
    from railmate.inventory import rdmanetlink

    return rdmanetlink.netns_mode()


def _drop_lost_relations(functions: dict[str, PciFunction], sysfs: str, reader: Reader) -> None:
    """PF and VF must name each other, else that VF is not believed: it has no index, or no place."""
    listed = {address: frozenset(function.virtual_functions) for address, function in functions.items()}
    for address, function in list(functions.items()):
        pf = function.physical_function
        if pf is not None and address not in listed.get(pf, ()):
            path = f"{sysfs}/bus/pci/devices/{address}/physfn"
            reader.warn(path, f"leads to {pf}, which does not list this VF; the VF is left out")
            del functions[address]
    for address, function in list(functions.items()):
        lost = [vf for vf in function.virtual_functions if _owner(functions.get(vf)) != address]
        for vf in lost:
            path = f"{sysfs}/bus/pci/devices/{address}/virtfn*"
            reader.warn(
                path, f"one leads to {vf}, which is no VF of this function or could not be read; left out"
            )
            if vf in functions and _may_be_vf(functions[vf], function):
                del functions[vf]  # must not pass for a physical function
        if lost and address in functions:
            kept = tuple(vf for vf in function.virtual_functions if vf not in lost)
            functions[address] = replace(function, virtual_functions=kept)


def _may_be_vf(function: PciFunction, pf: PciFunction) -> bool:
    """A VF has its PF's class and never has VFs itself (PCIe 6.0, 9.3.3)."""
    return (
        function.physical_function is None
        and function.max_virtual_functions == 0
        and function.class_code == pf.class_code
    )


def _owner(function: PciFunction | None) -> str | None:
    return function.physical_function if function is not None else None


def _is_nic(function: PciFunction) -> bool:
    return function.class_code >> 16 == _NETWORK_CLASS or bool(function.netdevs or function.rdma_devices)
