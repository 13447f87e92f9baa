"""Writes the sysfs and proc trees that a machine shows, from its facts.

Everything lies below one directory and all links are relative, so a tree can be moved or mounted
anywhere. Device numbers are those of the kernel's drivers.
"""

from __future__ import annotations

import os
from pathlib import Path

from harness.machines import (
    DEMO_MACHINE,
    DEMO_VFS_PER_RAIL,
    MACHINES,
    FactsError,
    GpuFacts,
    Machine,
    NetdevFacts,
    list_char_devices,
    list_netdevs,
    load_machine,
)
from railmate.inventory.model import GpuVendor, Netdev, PciFunction, RdmaDevice

__all__ = [
    "DEMO_MACHINE",
    "DEMO_VFS_PER_RAIL",
    "MACHINES",
    "FactsError",
    "GpuFacts",
    "Machine",
    "NetdevFacts",
    "list_char_devices",
    "list_netdevs",
    "load_machine",
    "write_tree",
]

_RDMA_MAJOR = 231  # include/uapi: IB_USER_VERBS; minors of umad from 0, of issm from 64, of uverbs from 192
_LINK_TYPES = {"ether": 1, "infiniband": 32}
_STATES = ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")  # include/rdma/ib_verbs.h, ib_port_state


def write_tree(machine: Machine, root: Path) -> None:
    """Writes ``<root>/sys`` and ``<root>/proc``; both must not exist yet."""
    sysfs = root / "sys"
    for below in ("bus/pci/devices", "bus/pci/drivers", "class/net", "class/infiniband", "devices"):
        (sysfs / below).mkdir(parents=True)
    for function in machine.functions.values():
        _write_function(sysfs, function, machine)
    for address, gpu in machine.gpus.items():
        if gpu.vendor is not GpuVendor.NVIDIA:
            _write_drm(_directory(sysfs, machine.functions[address]), gpu)
    (root / "proc").mkdir()
    if machine.nvidia_driver is not None:
        _write_nvidia(root / "proc/driver/nvidia", machine, machine.nvidia_driver)


def _directory(sysfs: Path, function: PciFunction) -> Path:
    return sysfs.joinpath("devices", *function.path)


def _write_function(sysfs: Path, function: PciFunction, machine: Machine) -> None:
    directory = _directory(sysfs, function)
    directory.mkdir(parents=True, exist_ok=True)
    attributes = {
        "class": f"0x{function.class_code:06x}",
        "vendor": f"0x{function.vendor:04x}",
        "device": f"0x{function.device:04x}",
        "numa_node": str(-1 if function.numa_node is None else function.numa_node),
    }
    if function.subsystem_known:
        attributes["subsystem_vendor"] = f"0x{function.subsystem_vendor:04x}"
        attributes["subsystem_device"] = f"0x{function.subsystem_device:04x}"
    if function.max_virtual_functions:
        attributes["sriov_totalvfs"] = str(function.max_virtual_functions)
        attributes["sriov_numvfs"] = str(len(function.virtual_functions))
    for name, value in attributes.items():
        _write(directory / name, value)
    # the header's ids: a function that does not answer reads all ones
    ids = function.vendor.to_bytes(2, "little") + function.device.to_bytes(2, "little")
    (directory / "config").write_bytes(ids + bytes(60))
    if function.vpd is not None:
        (directory / "vpd").write_bytes(function.vpd)
    _link(sysfs / "bus/pci/devices" / function.address, directory)
    if function.driver is not None:
        driver = sysfs / "bus/pci/drivers" / function.driver
        driver.mkdir(exist_ok=True)
        _link(directory / "driver", driver)
        _link(driver / function.address, directory)
    if function.physical_function is not None:
        _link(directory / "physfn", _directory(sysfs, machine.functions[function.physical_function]))
    for index, address in enumerate(function.virtual_functions):
        _link(directory / f"virtfn{index}", _directory(sysfs, machine.functions[address]))
    for name in function.auxiliary:
        (directory / name).mkdir()
    for netdev in function.netdevs:
        _write_netdev(sysfs, directory, netdev)
    for device in function.rdma_devices:
        _write_rdma(sysfs, directory, device, function)


def _write_netdev(sysfs: Path, directory: Path, netdev: Netdev) -> None:
    place = directory / "net" / netdev.name
    place.mkdir(parents=True)
    _write(place / "address", netdev.mac or "")
    _write(place / "mtu", str(netdev.mtu))
    _write(place / "operstate", netdev.operstate or "unknown")
    _write(place / "speed", str(netdev.speed or -1))
    _write(place / "type", str(_LINK_TYPES[netdev.link_type or "ether"]))
    if netdev.port_name is not None:
        _write(place / "phys_port_name", netdev.port_name)
    if netdev.master is not None:
        bond = sysfs / "devices/virtual/net" / netdev.master
        (bond / "bonding").mkdir(parents=True, exist_ok=True)
        if not (sysfs / "class/net" / netdev.master).is_symlink():
            _link(sysfs / "class/net" / netdev.master, bond)
        _link(place / "master", bond)
    _link(place / "device", directory)
    _link(sysfs / "class/net" / netdev.name, place)


def _write_rdma(sysfs: Path, directory: Path, device: RdmaDevice, function: PciFunction) -> None:
    place = directory / "infiniband" / device.name
    port = place / "ports/1"
    for below in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / below).mkdir(parents=True)
    _link(place / "device", directory)
    _link(sysfs / "class/infiniband" / device.name, place)
    _write(place / "node_guid", device.node_guid or "0000:0000:0000:0000")
    if device.sys_image_guid is not None:
        _write(place / "sys_image_guid", device.sys_image_guid)
    if device.state is not None:
        _write(port / "state", f"{_STATES.index(device.state)}: {device.state}")
    _write(port / "link_layer", device.link_layer or "Unspecified")  # as EFA has it
    if device.rate is not None:
        _write(port / "rate", f"{device.rate} Gb/sec (4X)")
    _write(port / "gids/0", f"fe80:0000:0000:0000:{device.node_guid or '0000:0000:0000:0000'}")
    _write(port / "gid_attrs/types/0", "RoCE v2" if device.link_layer == "Ethernet" else "IB/RoCE v1")
    if function.netdevs:
        _write(port / "gid_attrs/ndevs/0", function.netdevs[0].name)
    for group, prefix, base in (
        ("infiniband_verbs", "uverbs", 192),
        ("infiniband_mad", "umad", 0),
        ("infiniband_mad", "issm", 64),
    ):
        for node in getattr(device, prefix):
            entry = directory / group / node
            entry.mkdir(parents=True)
            _write(entry / "ibdev", device.name)
            _write(entry / "dev", f"{_RDMA_MAJOR}:{base + int(node.removeprefix(prefix))}")
            _link(entry / "device", directory)
            (sysfs / "class" / group).mkdir(exist_ok=True)
            _link(sysfs / "class" / group / node, entry)


def _write_drm(directory: Path, gpu: GpuFacts) -> None:
    for node in gpu.drm:
        (directory / "drm" / node).mkdir(parents=True)
    if gpu.uuid is not None:
        _write(directory / "unique_id", gpu.uuid)
    if gpu.product is not None:
        _write(directory / "product_name", gpu.product)


def _write_nvidia(proc: Path, machine: Machine, version: str) -> None:
    """``/proc/driver/nvidia`` as the driver writes it: the version, and one ``information`` a GPU."""
    proc.mkdir(parents=True)
    _write(proc / "version", f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}")
    for address, gpu in machine.gpus.items():
        if gpu.vendor is not GpuVendor.NVIDIA or gpu.minor is None:
            continue
        place = proc / "gpus" / address
        place.mkdir(parents=True)
        lines = {
            "Model": gpu.product or "Unknown",
            "GPU UUID": gpu.uuid or "GPU-????????-????-????-????-????????????",
            "Bus Type": "PCIe",
            "Bus Location": address,
            "Device Minor": str(gpu.minor),
            "GPU Excluded": "No",
        }
        _write(place / "information", "\n".join(f"{key}: \t {value}" for key, value in lines.items()))


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n")


def _link(link: Path, target: Path) -> None:
    link.symlink_to(os.path.relpath(target, link.parent))
