"""Parts of a sysfs tree that only the inventory looks at, written beside what harness.sysfs writes."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def link(place: Path, target: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(os.path.relpath(target, place.parent))


def function_directory(root: Path, address: str) -> Path:
    return (root / "sys/bus/pci/devices" / address).resolve()


def add_netdev(root: Path, parent: Path, name: str, **attributes: str) -> Path:
    """A netdev below any device; ``address``, ``mtu`` and so on over usual ones."""
    place = parent / "net" / name
    usual = {"address": "02:00:00:00:00:01", "mtu": "1500", "operstate": "up", "type": "1", "speed": "1000"}
    for attribute, value in (usual | attributes).items():
        write(place / attribute, value)
    link(root / "sys/class/net" / name, place)
    return place


def add_rdma_device(root: Path, parent: Path, name: str, **attributes: str) -> Path:
    place = parent / "infiniband" / name
    write(place / "node_guid", "0200:00ff:fe00:0001")
    for attribute, value in attributes.items():
        write(place / attribute, value)
    for attribute, value in {
        "state": "4: ACTIVE",
        "link_layer": "Ethernet",
        "rate": "25 Gb/sec (1X EDR)",
    }.items():
        write(place / "ports/1" / attribute, value)
    link(root / "sys/class/infiniband" / name, place)
    return place


def add_bond(root: Path, name: str, *members: str, kind: str = "bonding") -> None:
    master = root / "sys/devices/virtual/net" / name
    (master / kind).mkdir(parents=True)
    link(root / "sys/class/net" / name, master)
    for member in members:
        place = (root / "sys/class/net" / member).resolve()
        link(place / "master", master)


def add_kfd_node(
    root: Path,
    number: int,
    address: str,
    render_minor: int,
    partition: int = 0,
    memory: int = 0,
    unique_id: int = 0,
) -> Path:
    """A compute node as amdkfd shows it; processors are nodes without SIMD units."""
    place = root / "sys/class/kfd/kfd/topology/nodes" / str(number)
    domain, bus, rest = address.split(":")
    device, function = rest.split(".")
    location = int(bus, 16) << 8 | int(device, 16) << 3 | int(function) | partition << 28
    facts = {
        "cpu_cores_count": 0 if address else 64,
        "simd_count": 304,
        "location_id": location,
        "domain": int(domain, 16),
        "drm_render_minor": render_minor,
        "gfx_target_version": 90402,
        "unique_id": unique_id,
    }
    write(place / "gpu_id", str(1000 + number))
    write(place / "properties", "\n".join(f"{name} {value}" for name, value in facts.items()))
    if memory:
        write(place / "mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {memory}\nflags 0\nwidth 8192")
        write(place / "mem_banks/1/properties", "heap_type 0\nsize_in_bytes 1000000000000")  # host memory
    return place


def add_processor_node(root: Path, number: int) -> None:
    place = root / "sys/class/kfd/kfd/topology/nodes" / str(number)
    write(place / "properties", "cpu_cores_count 96\nsimd_count 0\nlocation_id 0\ndomain 0")
    write(place / "mem_banks/0/properties", "heap_type 0\nsize_in_bytes 1000000000000")


def add_xcp_device(root: Path, ordinal: int, render_minor: int, card: int) -> None:
    """The DRM device of a partition after the first one: a platform device."""
    place = root / "sys/devices/platform" / f"amdgpu_xcp_{ordinal}"
    for node in (f"renderD{render_minor}", f"card{card}"):
        link(place / "drm" / node / "device", place)
        link(root / "sys/class/drm" / node, place / "drm" / node)
