"""The class that NCCL gives a GPU and a NIC, which is not always nvidia-smi's.

NCCL (2.30, src/graph) walks a sysfs path upwards two components at a time: a switch is one node, its
ports are none. That goes wrong below a lone bridge, where the root port comes out as a switch, and in
domains of more than four digits, where it sees no PCI address at all; both are reproduced here, since
what NCCL does is the question. It then folds two-level Broadcom switches, once for each upper level.
"""

from __future__ import annotations

from collections.abc import Mapping

from railmate.inventory.address import is_address
from railmate.inventory.model import PciFunction
from railmate.topology.model import NcclDistance
from railmate.topology.switches import common, fold

_ADDRESS_LENGTH = len("0000:00:00.0")
# GPUs of Grace boards: 10de:2342 and 2348 GH200, 2941 GB200, 31c2 GB300
_C2C_GPUS = {(0x10DE, 0x2342), (0x10DE, 0x2348), (0x10DE, 0x2941), (0x10DE, 0x31C2)}
_UNKNOWN_NODE = -1  # NCCL's processor for whatever has no NUMA node


class NcclTree:
    """The PCI nodes and the processor above each function, as NCCL sees them."""

    def __init__(self, functions: Mapping[str, PciFunction]) -> None:
        self._functions = functions
        self._places: dict[str, tuple[tuple[str, ...], int]] = {}

    def distance(self, gpu: str, nic: str) -> NcclDistance:
        gpu_chain, gpu_node = self._place(gpu)
        nic_chain, nic_node = self._place(nic)
        shared = common((gpu_chain, nic_chain))
        if shared:
            same = len(shared) == len(gpu_chain) == len(nic_chain)
            return NcclDistance.PIX if same else NcclDistance.PXB
        if gpu_node != nic_node:
            return NcclDistance.SYS
        function = self._functions[gpu]
        has_c2c = (function.vendor, function.device) in _C2C_GPUS
        return NcclDistance.P2C if has_c2c else NcclDistance.PHB

    def _place(self, address: str) -> tuple[tuple[str, ...], int]:
        place = self._places.get(address)
        if place is None:
            place = self._places[address] = self._walk(address)
        return place

    def _walk(self, address: str) -> tuple[tuple[str, ...], int]:
        path = self._functions[address].path
        nodes = []
        at = len(path) - 1
        while at >= 2 and _is_node(path[at - 1]) and _is_node(path[at - 2]):
            at -= 2
            nodes.append(path[at])
        top = self._functions.get(nodes[-1] if nodes else address)
        node = top.numa_node if top is not None else None
        return fold(reversed(nodes), self._functions), _UNKNOWN_NODE if node is None else node


def _is_node(part: str) -> bool:
    return len(part) == _ADDRESS_LENGTH and is_address(part)
