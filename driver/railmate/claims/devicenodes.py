"""What opens a claim's devices in a container: device nodes and the GPU vendors' own CDI devices. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from railmate.cdi.spec import DeviceNode
from railmate.claims.allocation import ClaimError, NotYetError
from railmate.claims.nodeview import NodeView
from railmate.claims.rdmanodes import NoNodesError, names_now
from railmate.claims.records import ClaimRef, PreparedDevice
from railmate.inventory.gpus import SHARED_NODES
from railmate.inventory.model import Gpu, GpuVendor, PciFunction
from railmate.publish.model import OfferedDevice

#: Without these no CUDA program starts. The driver's module makes them not by itself, nvidia-modprobe does.
_NEEDED_BY_CUDA = frozenset({"nvidiactl", "nvidia-uvm"})


class DeviceNodes:
    """For the claim ``ref``. ``warnings`` are sentences about devices that were asked for since."""

    def __init__(self, ref: ClaimRef, node: NodeView) -> None:
        self._ref, self._node = ref, node
        self._gpus = {gpu.address: gpu for gpu in node.inventory.gpus}
        self._vendor_cdi = node.vendor_cdi()
        self.warnings: list[str] = []

    def of_rdma(self, function: PciFunction, *, shared: bool) -> list[DeviceNode]:
        """Of a shared port no umad and issm: with those one pod could change the port that all others use."""
        # a driver that was bound anew has new numbers, and the old ones may be another device's by now
        names = [
            name
            for device in function.rdma_devices
            for name in self._node.char_devices(device.name) or device.char_devices
        ]
        return self._rdma(name for name in names if not shared or name.startswith("uverbs"))

    def _rdma(self, names: Iterable[str]) -> list[DeviceNode]:
        nodes = [self._node_of(f"infiniband/{name}") for name in names]
        if nodes:
            connection_manager = self._node_of("infiniband/rdma_cm")
            if self._node.node_exists(Path(connection_manager.host_path)):
                nodes.append(connection_manager)
        return nodes

    def is_there(self, address: str) -> bool:
        """Whether the PCI function is in the machine at this moment."""
        return address in self._node.inventory.functions and self._node.on_bus(address)

    def renewed(self, device: PreparedDevice) -> PreparedDevice:
        """A prepared device with the nodes that it has at this moment. Raises ClaimError when its hardware is gone,
        NotYetError when its nodes are."""
        offered = self._node.offer.by_name.get(device.device)
        looked_at = offered.nics if device.admin_access and offered is not None else ()
        parts = (*device.gpus, *(nic.address for nic in device.nics), *looked_at)
        gone = [address for address in parts if not self.is_there(address)]
        if gone:
            raise ClaimError(
                f"{self._ref}: {', '.join(gone)} of device {device.device} is not on node {self._node.pool} any more. "
                "Delete the pod, so that its successor is given devices that are there."
            )
        nodes, vendor_ids = self.of_gpus(
            OfferedDevice(device.device, "", {}, gpus=device.gpus, partition=device.partition)
        )
        for address in looked_at:
            nodes += self.of_rdma(self._node.inventory.functions[address], shared=device.share_id is not None)
        nodes += self._rdma_renewed(device)
        nodes += [
            node for node in device.nodes if node.path.startswith("/dev/vfio/")
        ]  # the claim's own doing
        if set(nodes) == set(device.nodes) and tuple(vendor_ids) == device.vendor_cdi_ids:
            return device
        return replace(device, nodes=tuple(dict.fromkeys(nodes)), vendor_cdi_ids=tuple(vendor_ids))

    def _rdma_renewed(self, device: PreparedDevice) -> list[DeviceNode]:
        """Of the NICs that the claim holds: their RDMA devices may be in a pod."""
        try:
            return self._rdma(names_now(device, self._node.char_devices))
        except NoNodesError:
            return self._rdma_as_before(device)

    def _rdma_as_before(self, device: PreparedDevice) -> list[DeviceNode]:
        """Of RDMA devices that show no nodes at this moment; raises NotYetError when those are another's by now."""
        before = [node for node in device.nodes if node.path.startswith("/dev/infiniband/")]
        own = {one.name for nic in device.nics for one in nic.rdma}
        others = {
            f"/dev/infiniband/{name}"
            for function in self._node.inventory.functions.values()
            for one in function.rdma_devices
            if one.name not in own
            for name in self._node.char_devices(one.name)
        }
        if any(node.path in others for node in before):
            raise NotYetError(
                f"{self._ref}: the RDMA device {', '.join(sorted(own))} of device {device.device} has no device nodes.",
                f"Is its driver loaded on node {self._node.pool}? Look at the kernel's log there.",
            )
        return before

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
        missing = [node for node in shared if not self._node.node_exists(Path(node.host_path))]
        needed = [node.path for node in missing if node.path.removeprefix("/dev/") in _NEEDED_BY_CUDA]
        if needed and gpu.function.driver == "nvidia":
            raise NotYetError(
                f"{self._ref}: CUDA cannot use GPU {gpu.address}: node {self._node.pool} has no "
                f"{' and no '.join(needed)}.",
                "Run `nvidia-modprobe -u -c 0` on the node, which makes it, and have nvidia-persistenced started at "
                "boot.",
            )
        return nodes + [node for node in shared if node not in missing]

    def _node_of(self, name: str) -> DeviceNode:
        return DeviceNode.of(name, self._node.dev_root)
