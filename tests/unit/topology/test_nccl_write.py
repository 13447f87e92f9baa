"""The NCCL topology file that pods get: it says what the override says, and NCCL's own reading of it agrees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness.synthetic import synthetic
from harness.sysfs import write_tree
from railmate.inventory.model import Inventory
from railmate.inventory.scan import scan
from railmate.topology.analyze import analyze
from railmate.topology.ncclfile import parse_nccl_topology
from railmate.topology.ncclwrite import nccl_topology

#: Two GPUs and two NICs side by side, as a hypervisor shows them, and what they really are.
FLAT = """
pci0000:00 numa=0
  00:01.0 gpu
  00:02.0 gpu
  00:03.0 nic rdma=mlx5_0 net=e0
  00:04.0 nic rdma=mlx5_1 net=e1
"""
TRUTH = b"""<system version="1">
 <cpu numaid="0">
  <pci busid="ffff:ff:01.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
   <pci busid="0000:00:01.0" class="0x030200"/> <pci busid="0000:00:04.0" class="0x020000"/>
  </pci>
 </cpu>
 <cpu numaid="1">
  <pci busid="ffff:ff:02.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
   <pci busid="0000:00:02.0" class="0x030200"/> <pci busid="0000:00:03.0" class="0x020000"/>
  </pci>
 </cpu>
</system>"""


@pytest.fixture
def inventory(tmp_path: Path) -> Inventory:
    write_tree(synthetic(FLAT), tmp_path)
    return scan(tmp_path / "sys", tmp_path / "proc")


def test_what_was_written_reads_as_the_override_it_came_from(inventory: Inventory) -> None:
    topology = analyze(inventory, parse_nccl_topology(TRUTH))
    text = nccl_topology(inventory, topology)
    assert text is not None
    again = analyze(inventory, parse_nccl_topology(text.encode()))
    assert again.pairs == topology.pairs
    assert {(pair.gpus, pair.nics) for pair in again.pairs} == {
        (("0000:00:01.0",), ("0000:00:04.0",)),
        (("0000:00:02.0",), ("0000:00:03.0",)),
    }
    assert (again.switches, again.numa_nodes) == (topology.switches, topology.numa_nodes)


def test_devices_are_below_their_switches_and_processors(inventory: Inventory) -> None:
    text = nccl_topology(inventory, analyze(inventory, parse_nccl_topology(TRUTH)))
    root = ElementTree.fromstring(text or "")
    tree = {
        cpu.get("numaid"): {above.get("busid"): [pci.get("busid") for pci in above] for above in cpu}
        for cpu in root
    }
    assert tree == {
        "0": {"ffff:ff:01.0": ["0000:00:01.0", "0000:00:04.0"]},
        "1": {"ffff:ff:02.0": ["0000:00:02.0", "0000:00:03.0"]},
    }


def test_where_sysfs_is_right_there_is_no_file(inventory: Inventory) -> None:
    assert nccl_topology(inventory, analyze(inventory)) is None


def test_device_of_unknown_place_is_not_given_one(inventory: Inventory) -> None:
    topology = analyze(inventory, parse_nccl_topology(TRUTH))
    topology = replace(
        topology,
        switches={key: value for key, value in topology.switches.items() if key != "0000:00:01.0"},
        numa_nodes={key: value for key, value in topology.numa_nodes.items() if key != "0000:00:01.0"},
    )
    root = ElementTree.fromstring(nccl_topology(inventory, topology) or "")
    (alone,) = root.findall("./cpu[@numaid='-1']/pci")
    assert alone.get("busid") == "0000:00:01.0"
