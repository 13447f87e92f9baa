"""What is said of devices: where they sit and what they are. Pure.

All of it is told to the pod that gets the device. Published is what people select and match on, since the API
server, the scheduler and every controller hold each device's attributes for each node of the cluster. GPUs and pairs
say where their place is from; a NIC alone, of which a node has dozens, only where that is not sysfs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from railmate.inventory.model import Gpu, Inventory, Nic, Partition
from railmate.publish.model import AttributeValue
from railmate.topology.model import Pair, Source, Topology
from railmate_api import attributes as names

#: API limit of an attribute's string in bytes (k8s.io/api resource/v1, DeviceAttributeMaxValueLength).
MAX_STRING = 64

Attributes = dict[str, AttributeValue]

_PLACE = frozenset(
    {names.KIND, names.PCI_BUS_ID, names.PCIE_ROOT, names.NUMA_NODE, names.PCIE_SWITCH, names.RAIL}
)
_SOURCE = {names.TOPOLOGY_SOURCE}
_GPU = _PLACE | _SOURCE | {names.VENDOR, names.PRODUCT, names.UUID}
_NIC = {names.LINK_LAYER, names.LINK_SPEED, names.RDMA_NETNS_MODE}
_TOGETHER = (
    _PLACE
    | _SOURCE
    | {names.VENDOR, names.PRODUCT, names.RDMA_NETNS_MODE}
    | {names.DISTANCE, names.GPU_PCI_BUS_ID, names.NIC_PCI_BUS_ID}
)
#: What is published of each kind. Every name counts: a node has a handful of GPUs and pairs, but dozens of VFs.
PUBLISHED: Mapping[str, Collection[str]] = {
    names.KIND_GPU: _GPU,
    names.KIND_GPU_PARTITION: _GPU | {names.PROFILE},
    names.KIND_RDMA_VF: _PLACE | _NIC,
    names.KIND_RDMA_SHARED: _PLACE | _NIC,
    names.KIND_PAIR: _TOGETHER | {names.PAIR_RAIL},
    names.KIND_GROUP: _TOGETHER | {names.GPU_COUNT, names.NIC_COUNT},
    names.KIND_HELD: {names.KIND},
    names.KIND_NODE: {names.KIND, names.VENDOR, names.PRODUCT, names.GPU_COUNT, names.NIC_COUNT}
    | {names.DISTANCE, names.RDMA_NETNS_MODE},
}


def fits(value: AttributeValue) -> bool:
    """Whether the API takes it."""
    return not isinstance(value, str) or len(value.encode()) <= MAX_STRING


def split(attributes: Attributes) -> tuple[Attributes, Attributes]:
    """Those that are published of a device of this kind, and the others, which may be longer than the API allows."""
    kept = set(PUBLISHED[str(attributes[names.KIND])])
    if attributes.get(names.TOPOLOGY_SOURCE) != Source.SYSFS:
        kept.add(names.TOPOLOGY_SOURCE)
    published = {name: value for name, value in attributes.items() if name in kept and fits(value)}
    return published, {name: value for name, value in attributes.items() if name not in published}


class Describer:
    """Everything known of a machine's devices, as attributes. What is not known is left out, never guessed."""

    def __init__(self, inventory: Inventory, topology: Topology) -> None:
        self._functions = inventory.functions
        self._rdma_netns_mode = inventory.rdma_netns_mode
        self._topology = topology

    def place(self, address: str) -> Attributes:
        """Where a function sits."""
        function = self._functions[address]
        place: Attributes = {names.PCI_BUS_ID: address}
        if function.pcie_root:
            place[names.PCIE_ROOT] = function.pcie_root
        numa_node = self._topology.numa_nodes.get(address)
        if numa_node is not None:
            place[names.NUMA_NODE] = numa_node
        switch = self._topology.switches.get(address)
        if switch:
            place[names.PCIE_SWITCH] = switch
        rail = self._topology.rails.get(address)
        if rail is not None:
            place[names.RAIL] = rail
        place[names.MACHINE_CLASS] = str(self._topology.machine_class)
        place[names.TOPOLOGY_SOURCE] = str(self._topology.sources.get(address, Source.NUMA))
        return place

    def nics(self, nics: Sequence[Nic]) -> Attributes:
        """Of one or more VFs, or whole physical functions; what a single value must serve for is the first's."""
        first = nics[0]
        parent = self._functions.get(first.function.physical_function or first.address, first.function)
        found: Attributes = {names.MODE: "vf" if first.is_vf else "pf"}
        if first.vf_index is not None:
            found[names.VF_INDEX] = first.vf_index
            found[names.PF_PCI_BUS_ID] = parent.address
        if parent.netdevs:
            found[names.PF_NAME] = parent.netdevs[0].name
            # a VF's own link speed is unknown while it is down or away; its physical function's is the port's
            if parent.netdevs[0].speed:
                found[names.LINK_SPEED] = parent.netdevs[0].speed
        rdma = [device for nic in nics for device in nic.function.rdma_devices]
        if rdma and rdma[0].link_layer:
            found[names.LINK_LAYER] = rdma[0].link_layer
        if rdma and names.LINK_SPEED not in found and rdma[0].rate:
            found[names.LINK_SPEED] = rdma[0].rate * 1000
        if rdma and self._rdma_netns_mode:
            found[names.RDMA_NETNS_MODE] = str(self._rdma_netns_mode)
        _put_joined(found, names.RDMA_DEVICE, (device.name for device in rdma))
        return found

    def together(self, pair: Pair, gpus: Sequence[Gpu], nics: Sequence[Nic]) -> Attributes:
        """Of GPUs with their NICs: both halves, and how far apart they are."""
        attributes: Attributes = {
            **common([self.place(gpu.address) | gpu_attributes(gpu) for gpu in gpus]),
            names.PCI_BUS_ID: gpus[0].address,
            **self.nics(nics),
            names.DISTANCE: str(pair.distance),
            names.TOPOLOGY_SOURCE: str(pair.source),
        }
        attributes.pop(names.PCIE_SWITCH, None)
        if pair.pcie_switch:
            attributes[names.PCIE_SWITCH] = pair.pcie_switch
        _put_joined(attributes, names.GPU_PCI_BUS_ID, (gpu.address for gpu in gpus))
        _put_joined(attributes, names.NIC_PCI_BUS_ID, (nic.address for nic in nics))
        return attributes


def _put_joined(attributes: Attributes, name: str, values: Iterable[str]) -> None:
    """Several values in one string, which may be longer than the API allows; see ``split``."""
    joined = ",".join(values)
    if joined:
        attributes[name] = joined


def gpu_attributes(gpu: Gpu) -> Attributes:
    known = {
        names.VENDOR: str(gpu.vendor),
        names.PRODUCT: gpu.product,
        names.UUID: gpu.uuid,
        names.ARCHITECTURE: gpu.architecture,
        # a plain string: "535.104.05" is no semantic version, and the API refuses it as one
        names.DRIVER_VERSION: gpu.driver_version,
    }
    return {name: _cut(value) for name, value in known.items() if value}


def partition_attributes(gpu: Gpu, partition: Partition) -> Attributes:
    """As of a GPU, but the UUID and the profile are the partition's."""
    attributes = gpu_attributes(gpu)
    attributes.pop(names.UUID, None)
    own = {names.UUID: partition.uuid, names.PROFILE: partition.profile}
    return attributes | {name: _cut(value) for name, value in own.items() if value}


def memory(size: int | None) -> dict[str, int]:
    """The capacity of a device with ``size`` bytes of memory."""
    return {names.MEMORY: size} if size else {}


def common(descriptions: Sequence[Attributes]) -> Attributes:
    """What all of them say alike."""
    first, *others = descriptions
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def _cut(value: str) -> str:
    """One attribute that is too long would keep all of the node's devices from being published."""
    return value.encode()[:MAX_STRING].decode(errors="ignore")
