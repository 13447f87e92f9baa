"""What opens a claim's devices in a container: device nodes and the GPU vendors' own CDI devices. Pure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from railmate.cdi.spec import DeviceNode
from railmate.claims.allocation import ClaimError
from railmate.claims.nodeview import NodeView
from railmate.claims.records import ClaimRef
from railmate.inventory.gpus import SHARED_NODES
from railmate.inventory.model import Gpu, GpuVendor, PciFunction
from railmate.publish.model import OfferedDevice


class DeviceNodes:
    """For the claim ``ref``. ``warnings`` are sentences about devices that were asked for since."""

    def __init__(self, ref: ClaimRef, node: NodeView) -> None:
        self._ref, self._node = ref, node
        self._gpus = {gpu.address: gpu for gpu in node.inventory.gpus}
        self._vendor_cdi = node.vendor_cdi()
        self.warnings: list[str] = []

    def of_rdma(self, function: PciFunction, *, shared: bool) -> list[DeviceNode]:
        """Of a shared port no umad and issm: with those one pod could change the port that all others use."""
        nodes = []
        for device in function.rdma_devices:
            # a driver that was bound anew has new numbers, and the old ones may be another device's by now
            names = self._node.char_devices(device.name) or device.char_devices
            if shared:
                names = tuple(name for name in names if name.startswith("uverbs"))
            nodes += [self._node_of(f"infiniband/{name}") for name in names]
        if nodes:
            connection_manager = self._node_of("infiniband/rdma_cm")
            if self._node.node_exists(Path(connection_manager.host_path)):
                nodes.append(connection_manager)
        return nodes

    def of_gpus(self, offered: OfferedDevice) -> tuple[list[DeviceNode], list[str]]:
        """Device nodes, and CDI devices of vendors' specs, which come before nodes of our own. Raises ClaimError."""
        nodes: list[DeviceNode] = []
        vendor_ids: list[str] = []
        for address in offered.gpus:
            gpu = self._gpus[address]
            if offered.partition:
                gpu = self._partition(gpu, offered.partition)
            vendor_id = self._vendor_cdi.get(gpu.uuid or "")
            if vendor_id:
                vendor_ids.append(vendor_id)
                continue
            nodes += self._own_gpu_nodes(gpu)
        return nodes, vendor_ids

    def _partition(self, gpu: Gpu, name: str) -> Gpu:
        """The GPU as one of its parts is to be seen: another UUID, and the nodes that open this part only."""
        part = next((one for one in gpu.partitions if one.name == name), None)
        if part is None:
            raise ClaimError(
                f"{self._ref}: GPU {gpu.address} has no partition {name} any more. "
                "Delete the pod, so that its successor is given devices that are there."
            )
        # a MIG instance is opened through its GPU's node and two of its own; an XCP has all of its nodes itself
        whole = gpu.device_nodes if gpu.vendor is GpuVendor.NVIDIA else ()
        return replace(gpu, uuid=part.uuid, device_nodes=(*whole, *part.device_nodes))

    def _own_gpu_nodes(self, gpu: Gpu) -> list[DeviceNode]:
        if not gpu.device_nodes:
            raise ClaimError(
                f"{self._ref}: GPU {gpu.address} has no device node. "
                f"Is the {gpu.vendor} driver loaded on node {self._node.pool}?"
            )
        self.warnings.append(
            f"{self._ref}: no CDI spec of the GPU's vendor names GPU {gpu.address} ({gpu.uuid or 'UUID unknown'}); "
            "the container gets its device nodes only, the user-space libraries must be in the image."
        )
        nodes = [self._node_of(name) for name in gpu.device_nodes]
        shared = [self._node_of(name) for name in SHARED_NODES.get(gpu.vendor, ())]
        return nodes + [node for node in shared if self._node.node_exists(Path(node.host_path))]

    def _node_of(self, name: str) -> DeviceNode:
        return DeviceNode.of(name, self._node.dev_root)
