"""The JSON document of ``railmate topology -o json``. Fields are only ever added; unknown is null."""

from __future__ import annotations

from typing import Any

from railmate.inventory.model import Gpu, Inventory, Nic, PciFunction
from railmate.topology.model import Source, Topology


def document(inventory: Inventory, topology: Topology) -> dict[str, Any]:
    return {
        "machineClass": str(topology.machine_class),
        "gpus": [_gpu(gpu, topology) for gpu in inventory.gpus],
        "nics": [_nic(nic, topology) for nic in inventory.nics],
        "paths": [
            {
                "gpu": path.gpu,
                "nic": path.nic,
                "distance": str(path.distance),
                "pcieSwitch": path.pcie_switch,
                "source": str(path.source),
                "ncclDistance": str(path.nccl_distance),
            }
            for path in topology.paths
        ],
        "pairs": [
            {
                "gpu": gpu,
                "nics": list(pair.nics),
                "distance": str(pair.distance),
                "pcieSwitch": pair.pcie_switch,
                "source": str(pair.source),
                "sharedWith": [other for other in pair.gpus if other != gpu],
            }
            for pair in topology.pairs
            for gpu in pair.gpus
        ],
        "notes": list(topology.notes),
        "warnings": list(inventory.warnings),
    }


def _function(function: PciFunction, topology: Topology) -> dict[str, Any]:
    return {
        "pciBusID": function.address,
        "pcieRoot": function.pcie_root,
        "pcieSwitch": topology.switches.get(function.address),
        "numaNode": topology.numa_nodes.get(function.address),
        "vendorID": f"{function.vendor:04x}",
        "deviceID": f"{function.device:04x}",
        "driver": function.driver,
        "rail": topology.rails.get(function.address),
        "source": str(topology.sources.get(function.address, Source.NUMA)),
    }


def _gpu(gpu: Gpu, topology: Topology) -> dict[str, Any]:
    return {
        **_function(gpu.function, topology),
        "vendor": str(gpu.vendor),
        "product": gpu.product,
        "uuid": gpu.uuid,
        "index": gpu.index,
    }


def _nic(nic: Nic, topology: Topology) -> dict[str, Any]:
    function = nic.function
    link_layers = {device.link_layer for device in function.rdma_devices}
    return {
        **_function(function, topology),
        "rdmaDevices": [device.name for device in function.rdma_devices],
        "netdevs": [netdev.name for netdev in function.netdevs],
        "role": str(topology.roles[nic.address]),
        "physicalFunction": function.physical_function,
        "vfIndex": nic.vf_index,
        "virtualFunctions": list(function.virtual_functions),
        "linkLayer": link_layers.pop() if len(link_layers) == 1 else None,
    }
