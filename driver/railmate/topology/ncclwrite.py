"""The node's topology as an NCCL topology file (NCCL_TOPO_FILE), for machines where sysfs does not show it. Pure.

NCCL lays what it finds on the machine over the file, and leaves out what the container does not have. So one file, with
all GPUs and NICs of the node, serves every container. Only what differs from sysfs has to be there: which devices share
a switch and which NUMA node they are on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from railmate.inventory.model import Inventory
from railmate.topology.model import Role, Source, Topology

_BRIDGE = "0x060400"
#: A switch that sysfs does not show has no speed; NCCL wants one, and this one limits nothing.
_SPEED = {"link_speed": "64.0 GT/s PCIe", "link_width": "16"}


def nccl_topology(inventory: Inventory, topology: Topology) -> str | None:
    """The file's text; None where an override changes nothing of what sysfs tells."""
    if Source.OVERRIDE not in topology.sources.values():
        return None
    gpus = [gpu.address for gpu in inventory.gpus]
    nics = [nic.address for nic in inventory.nics if topology.roles.get(nic.address) == Role.RAIL]
    root = Element("system", version="1")
    by_node: defaultdict[int, list[str]] = defaultdict(list)
    for address in (*gpus, *nics):
        by_node[topology.numa_nodes.get(address, -1)].append(address)
    for node, addresses in sorted(by_node.items()):
        cpu = SubElement(root, "cpu", numaid=str(node))
        _add(cpu, addresses, inventory, topology)
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


def _add(cpu: Element, addresses: Iterable[str], inventory: Inventory, topology: Topology) -> None:
    switches: dict[str, Element] = {}
    for address in addresses:
        above = cpu
        switch = topology.switches.get(address)
        if switch is not None:
            if switch not in switches:
                switches[switch] = SubElement(cpu, "pci", {"busid": switch, "class": _BRIDGE, **_SPEED})
            above = switches[switch]
        code = inventory.functions[address].class_code
        SubElement(above, "pci", {"busid": address, "class": f"0x{code:06x}", **_SPEED})
