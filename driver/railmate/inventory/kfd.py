# Paths are strings here: a scan reads thousands of files, and pathlib takes several times longer.
"""AMD's compute nodes, from ``/sys/class/kfd`` (drivers/gpu/drm/amd/amdkfd/kfd_topology.c).

One node a GPU, or one an XCP partition; all partitions of a GPU have its PCI address. In a container
the kernel refuses the nodes that its device cgroup does not allow: they are left out with a warning.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from railmate.inventory.reader import Reader

_PROPERTY = re.compile(r"([a-z0-9_]+) ([0-9]+)")
_FRAME_BUFFERS = (1, 2)  # heap types HSA_MEM_HEAP_TYPE_FB_PUBLIC and _FB_PRIVATE
_PROPERTIES_LIMIT = 16384


@dataclass(frozen=True, slots=True)
class KfdNode:
    number: int
    domain: int
    location: int  # bus << 8 | device << 3 | function; some kernels add the partition, see ``address``
    render_minor: int | None = None
    unique_id: str | None = None  # 16 hexadecimal digits, as amdgpu's ``unique_id`` has them
    architecture: str | None = None  # "gfx942"
    memory_bytes: int | None = None

    def address(self, known: Iterable[str]) -> str | None:
        """The PCI function among ``known``.

        Kernels put the number of an XCP partition into the top four bits of the location, or (6.6 to 6.8)
        into those of the function, which for AMD's GPUs is always 0.
        """
        bus, device, function = self.location >> 8 & 0xFF, self.location >> 3 & 0x1F, self.location & 7
        for number in (function, 0):
            address = f"{self.domain:04x}:{bus:02x}:{device:02x}.{number}"
            if address in known:
                return address
        return None


def read_nodes(sysfs_root: str, reader: Reader) -> list[KfdNode]:
    """The GPU nodes, by number. None without amdgpu's kernel part for compute."""
    listing = f"{sysfs_root}/class/kfd/kfd/topology/nodes"
    if not os.path.isdir(listing):
        return []
    nodes = [
        _read(listing, int(name), reader)
        for name in reader.names(listing)
        if re.fullmatch("[0-9]{1,6}", name)
    ]
    return sorted((node for node in nodes if node is not None), key=lambda node: node.number)


def _read(listing: str, number: int, reader: Reader) -> KfdNode | None:
    path = f"{listing}/{number}/properties"
    facts = _properties(path, reader)
    if not facts.get("simd_count"):  # a processor
        return None
    if "domain" not in facts or "location_id" not in facts:
        reader.warn(path, "names no domain and location_id; left out")
        return None
    unique, minor = facts.get("unique_id", 0), facts.get("drm_render_minor", 0)
    return KfdNode(
        number=number,
        domain=facts["domain"],
        location=facts["location_id"],
        render_minor=minor if minor >= 128 else None,  # minors of render nodes begin there
        unique_id=f"{unique:016x}" if unique else None,
        architecture=_architecture(facts.get("gfx_target_version", 0)),
        memory_bytes=_memory(f"{listing}/{number}/mem_banks", reader),
    )


def _properties(path: str, reader: Reader) -> Mapping[str, int]:
    """Lines of ``name number``; what is no such line is named once a file."""
    facts, odd = {}, []
    for line in (reader.text(path, _PROPERTIES_LIMIT) or "").splitlines():
        match = _PROPERTY.fullmatch(line.strip())
        if match is None:
            odd.append(line)
        else:
            facts[match[1]] = int(match[2][:20])
    if odd:
        reader.warn(path, f"has lines that are no property, such as {odd[0][:40]!r}")
    return facts


def _architecture(version: int) -> str | None:
    """``gfx_target_version`` is major * 10000 + minor * 100 + stepping: 90402 -> ``gfx942``."""
    major, minor, stepping = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{stepping:x}" if version else None


def _memory(directory: str, reader: Reader) -> int | None:
    if not os.path.isdir(directory):
        return None
    total = 0
    for bank in reader.names(directory):
        facts = _properties(f"{directory}/{bank}/properties", reader)
        if facts.get("heap_type") in _FRAME_BUFFERS:
            total += facts.get("size_in_bytes", 0)
    return total or None
