"""The JSON document of ``railmate topology -o json``. Fields are only ever added; unknown is null."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from railmate.inventory.model import Gpu, Inventory, Nic, PciFunction
from railmate.topology.model import Source, Topology


def document_text(inventory: Inventory, topology: Topology) -> str:
    """The document with a line for each device, path and pair: a node with many VFs has thousands."""
    fields = []
    for name, value in document(inventory, topology).items():
        if isinstance(value, list) and value:
            lines = ",\n".join(f"    {json.dumps(one)}" for one in value)
            fields.append(f"  {json.dumps(name)}: [\n{lines}\n  ]")
        else:
            fields.append(f"  {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def document(inventory: Inventory, topology: Topology) -> dict[str, Any]:
    """``paths`` has every GPU with every entry of ``nics``, VFs too: these are where their PF is."""
    return {
        "machineClass": str(topology.machine_class),
        "gpus": [_gpu(gpu, topology) for gpu in inventory.gpus],
        "nics": [_nic(nic, topology) for nic in inventory.nics],
        "paths": list(_paths(inventory, topology)),
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


def _paths(inventory: Inventory, topology: Topology) -> Iterator[dict[str, Any]]:
    paths = {(path.gpu, path.nic): path for path in topology.paths}
    for gpu in inventory.gpus:
        for nic in inventory.nics:
            path = paths[gpu.address, nic.function.physical_function or nic.address]
            yield {
                "gpu": gpu.address,
                "nic": nic.address,
                "distance": str(path.distance),
                "pcieSwitch": path.pcie_switch,
                "source": str(path.source),
                "ncclDistance": str(path.nccl_distance),
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
