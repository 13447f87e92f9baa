"""Machines as facts: tests/machines/*.yaml read into objects, with VFs added where asked for.

The format is described in tests/machines/README.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from harness.facts import (
    ETHERNET_MTU,
    FactsError,
    GpuFacts,
    Machine,
    NetdevFacts,
    digest,
    mac_address,
    make_vpd,
    netdev,
    numbered,
    rdma_device,
)
from harness.machinefile import parse_machine
from railmate.inventory.address import card, order
from railmate.inventory.gpus import SHARED_NODES
from railmate.inventory.model import GpuVendor, PciFunction

__all__ = [
    "DEMO_MACHINE",
    "DEMO_VFS_PER_RAIL",
    "MACHINES",
    "FactsError",
    "GpuFacts",
    "Machine",
    "NetdevFacts",
    "digest",
    "list_char_devices",
    "list_netdevs",
    "load_machine",
    "mac_address",
    "make_vpd",
    "parse_machine",
    "with_vfs",
]

MACHINES = Path(__file__).resolve().parents[2] / "tests" / "machines"
DEMO_MACHINE = MACHINES / "dgx-a100.yaml"
DEMO_VFS_PER_RAIL = 4


def load_machine(path: Path, vfs_per_rail: int = 0) -> Machine:
    """Reads a machine. With ``vfs_per_rail`` every rail gets that many VFs, as its driver would make them.

    Ports that get VFs are put in Ethernet mode and get a netdev: what stands in for a VF's netdev
    is an Ethernet device, whatever the machine's owner had set the port to.
    Raises FactsError for a file that does not follow the format.
    """
    facts = yaml.safe_load(path.read_text())
    try:
        machine = parse_machine(facts)
    except (KeyError, TypeError, ValueError) as error:
        raise FactsError(
            f"{path}: {error!r}. The format is described in {path.parent / 'README.md'}"
        ) from error
    return with_vfs(machine, machine.rails, vfs_per_rail, facts["models"]) if vfs_per_rail else machine


def with_vfs(
    machine: Machine, rails: Iterable[str], count: int, models: Mapping[str, Mapping[str, Any]]
) -> Machine:
    """The machine with ``count`` VFs on each of ``rails`` (addresses of physical functions).

    VFs take the routing ids after the card's last physical function, PF after PF (PCIe 6.0, 9.3.3.8
    and following: First VF Offset, VF Stride 1), and sit on the PF's bus in sysfs.
    """
    functions = dict(machine.functions)
    for address in rails:
        pf = functions[address]
        if count > pf.max_virtual_functions:
            raise FactsError(
                f"{machine.name}: {address} takes {pf.max_virtual_functions} VFs at most, asked for {count}"
            )
        model = models.get(f"{pf.vendor:04x}:{pf.device:04x}", {})
        vendor, device = (int(part, 16) for part in model["vf"].split(":"))
        rate = model.get("rate")
        if not pf.netdevs or any(device.link_layer != "Ethernet" for device in pf.rdma_devices):
            pf = replace(
                pf,
                class_code=0x020000,
                netdevs=(netdev(machine.name, _slot_name(address) + "np0", True, rate),),
                rdma_devices=tuple(replace(device, link_layer="Ethernet") for device in pf.rdma_devices),
            )
        vfs = []
        for index, vf_address in enumerate(_vf_addresses(pf, functions, count)):
            name = f"{re.sub(r'np[0-9]+$', '', pf.netdevs[0].name)}v{index}"
            if len(name) > 15:
                raise FactsError(f"{machine.name}: {name!r} is longer than an interface's name may be")
            vfs.append(vf_address)
            functions[vf_address] = replace(
                pf,
                address=vf_address,
                path=(*pf.path[:-1], vf_address),
                vendor=vendor,
                device=device,
                physical_function=address,
                virtual_functions=(),
                max_virtual_functions=0,
                netdevs=(netdev(machine.name, name, True, rate),),
                rdma_devices=tuple(
                    rdma_device(machine.name, vf_address, f"{held.name}v{index}", "Ethernet", rate)
                    for held in pf.rdma_devices[:1]
                ),
                vpd=None,
            )
        functions[address] = replace(pf, virtual_functions=tuple(vfs))
    functions = dict(sorted(functions.items(), key=lambda item: order(item[0])))
    return replace(machine, functions=numbered(functions, models))


def _slot_name(address: str) -> str:
    """systemd's name for an Ethernet device by its place: ``0000:4b:00.0`` -> ``enp75s0``."""
    domain, bus, device, function = order(address)
    return (f"enP{domain}p" if domain else "enp") + f"{bus}s{device}" + (f"f{function}" if function else "")


def _vf_addresses(pf: PciFunction, functions: Mapping[str, PciFunction], count: int) -> list[str]:
    siblings = [
        a for a in functions if card(a) == card(pf.address) and functions[a].physical_function is None
    ]
    domain, bus, device, _ = order(pf.address)
    last = max(order(a)[3] for a in siblings)
    before = sum(functions[a].max_virtual_functions for a in siblings if order(a) < order(pf.address))
    first = (bus << 8 | device << 3 | last) + 1 + before
    ids = range(first, first + count)
    return [f"{domain:04x}:{i >> 8:02x}:{i >> 3 & 31:02x}.{i & 7}" for i in ids]


def list_char_devices(machine: Machine) -> list[str]:
    """Names below /dev of the device nodes that the machine's drivers make."""
    nodes: list[str] = []
    vendors = {gpu.vendor for gpu in machine.gpus.values()}
    for gpu in machine.gpus.values():
        nodes += (
            [f"nvidia{gpu.minor}"] if gpu.vendor is GpuVendor.NVIDIA else [f"dri/{node}" for node in gpu.drm]
        )
    nodes += [node for vendor in sorted(vendors) for node in SHARED_NODES[vendor]]
    rdma = [n for f in machine.functions.values() for device in f.rdma_devices for n in device.char_devices]
    nodes += [f"infiniband/{node}" for node in rdma]
    return nodes + (["infiniband/rdma_cm"] if rdma else [])


def list_netdevs(machine: Machine) -> list[NetdevFacts]:
    """All netdevs of the machine, in PCI order."""
    return [
        NetdevFacts(
            held.name, held.mac or "", held.mtu or ETHERNET_MTU, function.address, function.physical_function
        )
        for function in machine.functions.values()
        for held in function.netdevs
    ]
