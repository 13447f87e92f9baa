# Paths are strings here: a scan reads thousands of files, and pathlib takes several times longer.
"""Which PCI functions are GPUs, and what the vendor's kernel driver says about them without any library."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from railmate.inventory.drm import read_gpu, with_nodes
from railmate.inventory.kfd import KfdNode, read_nodes
from railmate.inventory.model import Gpu, GpuVendor, PciFunction
from railmate.inventory.pci import Found
from railmate.inventory.reader import Reader

# Device nodes below the dev root that every GPU of a vendor needs beside its own.
SHARED_NODES: Mapping[GpuVendor, tuple[str, ...]] = {
    GpuVendor.NVIDIA: ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"),
    GpuVendor.AMD: ("kfd",),
    GpuVendor.INTEL: (),
    GpuVendor.OTHER: (),
}

_VGA, _3D, _DISPLAY, _ACCELERATOR, _COPROCESSOR = 0x0300, 0x0302, 0x0380, 0x1200, 0x0B40
# Vendors of the GPUs that sit in GPU servers; everything else with a display class (a BMC's VGA, a
# hypervisor's console) is no GPU. Values: our name, and the classes their GPUs come with. Intel's accelerators
# are processors' NPUs and FPGAs: its GPUs for servers are display controllers.
_VENDORS: Mapping[int, tuple[GpuVendor, frozenset[int]]] = {
    0x10DE: (GpuVendor.NVIDIA, frozenset({_VGA, _3D})),
    0x1002: (GpuVendor.AMD, frozenset({_VGA, _3D, _DISPLAY, _ACCELERATOR})),
    0x8086: (GpuVendor.INTEL, frozenset({_VGA, _DISPLAY})),
    0x1D94: (GpuVendor.OTHER, frozenset({_3D, _DISPLAY, _ACCELERATOR, _COPROCESSOR})),  # Hygon
    0x1DA3: (GpuVendor.OTHER, frozenset({_ACCELERATOR})),  # Habana
    0x1BCF: (GpuVendor.OTHER, frozenset({_COPROCESSOR})),  # NEC Vector Engine
}
# AMD's graphics in a processor have device ids from here, cards none (libdrm, data/amdgpu.ids). MI300A, which is
# a processor too, has its ids among the accelerators'.
_AMD_IN_PROCESSORS = range(0x1100, 0x2000)
# NVIDIA's device ids are handed out a chip at a time (pci.ids); the first and last id of each range.
_NVIDIA_ARCHITECTURES = (
    (0x15F0, 0x15FF, "Pascal"),
    (0x1B00, 0x1D7F, "Pascal"),
    (0x1D80, 0x1DFF, "Volta"),
    (0x1E00, 0x1FFF, "Turing"),
    (0x2080, 0x20FF, "Ampere"),
    (0x2180, 0x21FF, "Turing"),
    (0x2200, 0x22FF, "Ampere"),
    (0x2300, 0x23FF, "Hopper"),
    (0x2400, 0x25FF, "Ampere"),
    (0x2600, 0x28FF, "Ada Lovelace"),
    (0x2900, 0x2DFF, "Blackwell"),
    (0x3180, 0x31FF, "Blackwell"),
)
_VERSION = re.compile(r"\b\d+\.\d+(?:\.\d+)?\b")


def vendor_of(function: PciFunction) -> GpuVendor | None:
    """The GPU's vendor, or None when the function is no GPU. VFs of a GPU are not GPUs of the node."""
    vendor, classes = _VENDORS.get(function.vendor, (None, frozenset[int]()))
    if vendor is None or function.class_code >> 8 not in classes or function.physical_function is not None:
        return None
    if vendor is GpuVendor.INTEL and function.address.endswith(":00:02.0"):
        return None  # the processor's own graphics has that place on every Intel platform
    if vendor is GpuVendor.AMD and function.device in _AMD_IN_PROCESSORS:
        return None
    return vendor


def read_gpus(found: list[Found], sysfs_root: str, proc_root: str, reader: Reader) -> tuple[Gpu, ...]:
    """GPUs in the order of ``found``."""
    gpus = []
    versions: dict[GpuVendor, str | None] = {}
    for entry in found:
        vendor = vendor_of(entry.function)
        if vendor is None:
            continue
        if vendor not in versions:
            versions[vendor] = _driver_version(vendor, entry.function, sysfs_root, proc_root, reader)
        if vendor is GpuVendor.NVIDIA:
            gpus.append(_nvidia(entry.function, versions[vendor], proc_root, reader))
        else:
            gpus.append(read_gpu(vendor, entry, versions[vendor], reader))
    if any(gpu.vendor is GpuVendor.AMD for gpu in gpus):
        gpus = _with_compute_nodes(gpus, sysfs_root, reader)
    return tuple(gpus)


def _with_compute_nodes(gpus: list[Gpu], sysfs_root: str, reader: Reader) -> list[Gpu]:
    addresses = frozenset(gpu.address for gpu in gpus if gpu.vendor is GpuVendor.AMD)
    nodes: dict[str, list[KfdNode]] = {}
    for node in read_nodes(sysfs_root, reader):
        address = node.address(addresses)
        if address is None:
            place = f"{sysfs_root}/class/kfd/kfd/topology/nodes/{node.number}/properties"
            reader.warn(place, "names a PCI address that is no AMD GPU's; left out")
        else:
            nodes.setdefault(address, []).append(node)
    return [with_nodes(gpu, nodes.get(gpu.address, ()), sysfs_root, reader) for gpu in gpus]


def _driver_version(
    vendor: GpuVendor, function: PciFunction, sysfs_root: str, proc_root: str, reader: Reader
) -> str | None:
    if vendor is GpuVendor.NVIDIA:
        path = f"{proc_root}/driver/nvidia/version"
    elif function.driver is not None:
        path = f"{sysfs_root}/module/{function.driver}/version"
    else:
        return None
    if not os.path.exists(path):  # a driver in the kernel's tree has no version
        return None
    match = _VERSION.search(reader.text(path) or "")
    if match is None:
        reader.warn(path, "holds no version number")
        return None
    return match[0]


def _nvidia(function: PciFunction, version: str | None, proc_root: str, reader: Reader) -> Gpu:
    """What NVIDIA's kernel driver writes: lines of ``Key: value``, padded with blanks and tabs."""
    path = f"{proc_root}/driver/nvidia/gpus/{function.address}/information"
    facts: dict[str, str] = {}
    if os.path.exists(path):  # absent while another driver, such as vfio-pci, holds it
        for line in (reader.text(path) or "").splitlines():
            key, _, value = line.partition(":")
            facts[key.strip()] = value.strip()
        if "Device Minor" not in facts:
            reader.warn(path, "names no Device Minor")
    minor = facts.get("Device Minor", "")
    index = int(minor) if minor.isdecimal() else None
    uuid = facts.get("GPU UUID", "")
    return Gpu(
        function=function,
        vendor=GpuVendor.NVIDIA,
        device_nodes=() if index is None else (f"nvidia{index}",),
        index=index,
        uuid=uuid if uuid.startswith("GPU-") and "?" not in uuid else None,  # question marks: not initialised
        product=facts.get("Model") or None,
        architecture=nvidia_architecture(function.device),
        driver_version=version,
    )


def nvidia_architecture(device: int) -> str | None:
    return next((name for first, last, name in _NVIDIA_ARCHITECTURES if first <= device <= last), None)
