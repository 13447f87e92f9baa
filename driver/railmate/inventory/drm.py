# Paths are strings here: a scan reads thousands of files, and pathlib takes several times longer.
"""GPUs whose driver is one of the kernel's DRM or accel drivers: AMD, Intel, Habana, Hygon.

Their attributes are amdgpu's (kernel Documentation/gpu/amdgpu/driver-misc.rst) and i915's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace

from railmate.inventory.kfd import KfdNode
from railmate.inventory.model import Gpu, GpuVendor, Partition
from railmate.inventory.pci import Found
from railmate.inventory.reader import Reader

_RENDER, _CARD, _ACCEL = (re.compile(prefix + "[0-9]{1,9}") for prefix in ("renderD", "card", "accel"))
_UNIQUE_ID = re.compile(r"[0-9a-fA-F]{1,32}")
_MODE = re.compile(r"[A-Z]+[0-9]*")  # SPX, DPX, TPX, QPX, CPX; NPS1, NPS2, NPS4, NPS8
_MOST_BYTES = 1 << 60
# amdgpu has the product's name from a board's FRU memory, which not every board has. Names by device id
# from AMD's own list of them (libdrm, data/amdgpu.ids).
_AMD_PRODUCTS = {
    0x738C: "AMD Instinct MI100",
    0x7408: "AMD Instinct MI250X",
    0x740C: "AMD Instinct MI250X / MI250",
    0x740F: "AMD Instinct MI210",
    0x74A0: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
    0x74A2: "AMD Instinct MI308X",
    0x74A5: "AMD Instinct MI325X",
    0x74A9: "AMD Instinct MI300X HF",
    0x74B5: "AMD Instinct MI300X VF",
    0x74B9: "AMD Instinct MI325X VF",
    0x75A0: "AMD Instinct MI350X",
    0x75A3: "AMD Instinct MI355X",
}


def read_gpu(vendor: GpuVendor, entry: Found, version: str | None, reader: Reader) -> Gpu:
    """What the function's own directory says: one card and one render node, and the driver's attributes."""
    directory, entries = entry.directory, entry.entries

    def word(attribute: str, pattern: re.Pattern[str] | None = None) -> str | None:
        return reader.word(f"{directory}/{attribute}", pattern) if attribute in entries else None

    def memory(path: str) -> int | None:
        return reader.number(path, among=range(_MOST_BYTES)) or None

    render, cards = _nodes(f"{directory}/drm", "drm" in entries, reader)
    accels = reader.names(f"{directory}/accel") if "accel" in entries else []
    size = memory(f"{directory}/mem_info_vram_total") if "mem_info_vram_total" in entries else None
    if vendor is GpuVendor.INTEL and cards and os.path.exists(f"{directory}/drm/{cards[0]}/lmem_total_bytes"):
        size = memory(f"{directory}/drm/{cards[0]}/lmem_total_bytes")
    unique, product = word("unique_id", _UNIQUE_ID), word("product_name")
    if product is None and vendor is GpuVendor.AMD:
        product = _AMD_PRODUCTS.get(entry.function.device)
    modes = [word("current_compute_partition", _MODE), word("current_memory_partition", _MODE)]
    return Gpu(
        function=entry.function,
        vendor=vendor,
        device_nodes=(
            *(f"dri/{node}" for node in (*render, *cards)),
            *(f"accel/{node}" for node in accels if _ACCEL.fullmatch(node)),
        ),
        index=int(render[0].removeprefix("renderD")) if render else None,
        uuid=unique if unique and unique.strip("0") else None,
        product=product,
        driver_version=version,
        memory_bytes=size,
        partition_mode="/".join(mode for mode in modes if mode) or None,
    )


def with_nodes(gpu: Gpu, nodes: Sequence[KfdNode], sysfs_root: str, reader: Reader) -> Gpu:
    """The GPU with what its compute nodes add: several are its XCP partitions."""
    if not nodes:
        return gpu
    partitions: list[Partition] = []
    all_nodes = list(gpu.device_nodes)
    for ordinal, node in enumerate(nodes if len(nodes) > 1 else ()):
        own = _partition_nodes(node, gpu.device_nodes, sysfs_root, reader)
        all_nodes += [path for path in own if path not in all_nodes]
        profile = gpu.partition_mode.partition("/")[0] if gpu.partition_mode else None
        partitions.append(Partition(f"xcp{ordinal}", profile, node.unique_id, node.memory_bytes, own))
    sizes = [node.memory_bytes for node in nodes if node.memory_bytes]
    return replace(
        gpu,
        device_nodes=tuple(all_nodes),
        uuid=gpu.uuid or nodes[0].unique_id,
        architecture=gpu.architecture or nodes[0].architecture,
        memory_bytes=gpu.memory_bytes or sum(sizes) or None,
        partitions=tuple(partitions),
    )


def _partition_nodes(node: KfdNode, whole: Sequence[str], sysfs_root: str, reader: Reader) -> tuple[str, ...]:
    """The first partition's DRM device is the GPU's own; others have a platform device (amdgpu_xcp)."""
    if node.render_minor is None:
        return ()
    name = f"renderD{node.render_minor}"
    if f"dri/{name}" in whole:
        return tuple(whole)
    siblings = f"{sysfs_root}/class/drm/{name}/device/drm"
    render, cards = _nodes(siblings, os.path.isdir(siblings), reader)
    return tuple(f"dri/{found}" for found in (*render, *cards)) or (f"dri/{name}",)


def _nodes(directory: str, present: bool, reader: Reader) -> tuple[list[str], list[str]]:
    names = reader.names(directory) if present else []
    return [n for n in names if _RENDER.fullmatch(n)], [n for n in names if _CARD.fullmatch(n)]
