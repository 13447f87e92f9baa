"""Kinds of machines that nobody published a tree of, made from what is known of them."""

from __future__ import annotations

import pytest

from harness.machines import with_vfs
from harness.synthetic import inventory_of, on_root_port, switch, synthetic
from railmate.topology.analyze import analyze
from railmate.topology.model import Distance, MachineClass, Role, Source, Topology


def topology_of(tree: str) -> Topology:
    return analyze(inventory_of(synthetic(tree)))


def pairs(topology: Topology) -> list[tuple[list[str], list[str]]]:
    return [([gpu[5:] for gpu in pair.gpus], [nic[5:] for nic in pair.nics]) for pair in topology.pairs]


# Four GPUs and two NICs, each on a root port of its own.
FLAT = """
    pci0000:00 numa={0}
      00:01.0 port
        01:00.0 gpu
      00:02.0 port
        02:00.0 gpu
      00:03.0 port
        03:00.0 nic rdma=mlx5_0
    pci0000:80 numa={1}
      80:01.0 port
        81:00.0 gpu
      80:02.0 port
        82:00.0 gpu
    pci0000:c0 numa={1}
      c0:03.0 port
        c1:00.0 nic rdma=mlx5_1
"""


def test_a_flat_box_pairs_by_numa_node_and_says_so() -> None:
    topology = topology_of(FLAT.format(0, 1))
    assert topology.machine_class is MachineClass.FLAT
    assert topology.switches == {}
    assert pairs(topology) == [(["01:00.0", "02:00.0"], ["03:00.0"]), (["81:00.0", "82:00.0"], ["c1:00.0"])]
    assert [pair.distance for pair in topology.pairs] == [Distance.PHB, Distance.NODE]
    assert {pair.source for pair in topology.pairs} == {Source.NUMA}
    assert "by NUMA node" in topology.notes[0]


def test_numa_ids_need_not_be_consecutive() -> None:
    assert pairs(topology_of(FLAT.format(0, 8))) == pairs(topology_of(FLAT.format(0, 1)))


def test_an_unknown_numa_node_is_no_numa_node_and_the_host_bridge_still_counts() -> None:
    topology = topology_of(FLAT.format(-1, -1))
    distances = {(path.gpu[5:], path.nic[5:]): path.distance for path in topology.paths}
    assert distances["01:00.0", "03:00.0"] is Distance.PHB
    assert distances["81:00.0", "c1:00.0"] is Distance.SYS
    assert pairs(topology) == [(["01:00.0", "02:00.0"], ["03:00.0"]), (["81:00.0", "82:00.0"], ["c1:00.0"])]
    assert [pair.distance for pair in topology.pairs] == [Distance.PHB, Distance.SYS]
    assert any("NUMA node of any GPU" in note for note in topology.notes)


def test_a_gpu_without_a_nic_on_its_numa_node_shares_one_and_is_named() -> None:
    topology = topology_of(
        "\n".join([on_root_port(0, "gpu"), on_root_port(0x20, "nic"), on_root_port(0x80, "gpu", numa=1)])
    )
    assert pairs(topology) == [(["01:00.0", "81:00.0"], ["21:00.0"])]
    assert topology.pairs[0].distance is Distance.SYS
    assert any("0000:81:00.0" in note for note in topology.notes)


def nps(nodes: tuple[int, int, int, int]) -> str:
    """Four switches, one below each quarter of a socket."""
    return "\n".join(switch(0x20 * quarter, "gpu", "nic", numa=node) for quarter, node in enumerate(nodes))


def test_numa_nodes_per_socket_change_no_pair() -> None:
    whole, split = topology_of(nps((0, 0, 0, 0))), topology_of(nps((0, 1, 2, 3)))
    assert whole.pairs == split.pairs
    assert len(whole.pairs) == 4
    assert whole.switches == split.switches
    assert {str(path.distance) for path in whole.paths} == {"PIX", "NODE"}
    assert {str(path.distance) for path in split.paths} == {"PIX", "SYS"}


AZURE = "\n".join(
    [
        f"LNXSYSTM:00 numa=-1\n  VMBUS:00\n    pci{domain:04x}:00 numa={node}\n      00:00.0 {what}"
        for node in (0, 1)
        for domain, what in [
            *((0x0010 * (4 * node + i + 1) + 1, "mi300x") for i in range(4)),
            *((0x0010 * (4 * node + i + 1), f"nic rdma=mlx5_{4 * node + i}") for i in range(4)),
        ]
    ]
)


def test_a_hypervisor_without_bridges_is_virtual_and_has_no_rails_to_tell() -> None:
    topology = topology_of(AZURE)
    assert topology.machine_class is MachineClass.VIRTUAL
    assert topology.switches == {}
    assert len(topology.paths) == 64
    assert {str(path.distance) for path in topology.paths} == {"NODE", "SYS"}
    assert [pair.gpus[0][:4] for pair in topology.pairs] == [
        "0011",
        "0021",
        "0031",
        "0041",
        "0051",
        "0061",
        "0071",
        "0081",
    ]
    assert [pair.nics[0][:4] for pair in topology.pairs] == [
        "0010",
        "0020",
        "0030",
        "0040",
        "0050",
        "0060",
        "0070",
        "0080",
    ]
    assert {pair.source for pair in topology.pairs} == {Source.NUMA}
    assert "may be wrong" in topology.notes[0]


def test_everything_on_one_bus_of_a_virtual_machine_is_virtual_not_integrated() -> None:
    topology = topology_of("""
        pci0000:00 numa=-1
          00:1b.0 gpu
          00:1c.0 gpu
          00:1d.0 nic rdma=rdmap0s29
    """)
    assert topology.machine_class is MachineClass.VIRTUAL


def test_root_ports_of_qemu_say_virtual() -> None:
    topology = topology_of("""
        pci0000:00 numa=0
          00:01.0 qemuport
            01:00.0 gpu
          00:02.0 qemuport
            02:00.0 nic rdma=mlx5_0
    """)
    assert topology.machine_class is MachineClass.VIRTUAL
    assert topology.pairs[0].source is Source.NUMA


def test_switches_that_a_hypervisor_invents_are_used_and_called_virtual() -> None:
    topology = topology_of("""
        pci0000:a0
          a0:01.0 qemuport
            a1:00.0 x3130
              a2:00.0 x3130
                a3:00.0 nic rdma=mlx5_0
              a2:01.0 x3130
                a4:00.0 gpu
    """)
    assert topology.machine_class is MachineClass.VIRTUAL
    assert topology.pairs[0].pcie_switch == "0000:a1:00.0"
    assert topology.pairs[0].distance is Distance.PIX
    assert "hypervisor" in topology.notes[0]


@pytest.mark.parametrize("root_port", ["qemuport", "060400 8086:3420 -"])
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_one_made_up_switch_for_everything_tells_nothing(root_port: str, gpus: int) -> None:
    lines = ["pci0000:00 numa=0", f"  00:01.0 {root_port}", "    01:00.0 x3130"]
    for port in range(gpus):
        lines += [f"      02:{2 * port:02x}.0 x3130", f"        {0x10 + 2 * port:02x}:00.0 gpu"]
        lines += [f"      02:{2 * port + 1:02x}.0 x3130"]
        lines += [f"        {0x11 + 2 * port:02x}:00.0 nic rdma=mlx5_{port}"]
    topology = topology_of("\n".join(lines))
    assert topology.machine_class is MachineClass.VIRTUAL
    assert len(topology.pairs) == gpus
    knows = gpus == 1  # nothing to tell apart
    assert bool(topology.switches) == knows
    assert {path.pcie_switch is not None for path in topology.paths} == {knows}
    assert {pair.source for pair in topology.pairs} == {Source.SYSFS if knows else Source.NUMA}


def gb300(identifiers: tuple[str, str]) -> str:
    """Two of GB300's GPUs. Made from facts: the NIC at the processor, its DMA function (15b3:2100) on the
    GPU's host bridge, tied by the VPD's V3. Nobody published such a tree."""
    first, second = identifiers
    return f"""
        pci0000:00 numa=0
          00:00.0 port
            03:00.0 nic rdma=mlx5_0 vpd.V3={first}
        pci0002:00 numa=0
          00:00.0 port
            03:00.0 nic rdma=mlx5_1 vpd.V3={second}
        pci0008:00 numa=0
          00:00.0 port
            01:00.0 port
              02:00.0 port
                06:00.0 gb300
              02:01.0 port
                07:00.0 dma vpd.V3=BBBB
        pci0009:00 numa=0
          00:00.0 port
            06:00.0 gb300
          00:01.0 port
            07:00.0 dma vpd.V3=AAAA
    """


def test_data_direct_functions_tie_a_nic_to_the_gpu_they_sit_beside() -> None:
    topology = topology_of(gb300(("AAAA", "BBBB")))
    assert topology.machine_class is MachineClass.DATA_DIRECT
    assert [(pair.gpus[0], pair.nics, pair.distance, pair.source) for pair in topology.pairs] == [
        ("0008:06:00.0", ("0002:03:00.0",), Distance.PIX, Source.DATA_DIRECT),
        ("0009:06:00.0", ("0000:03:00.0",), Distance.PHB, Source.DATA_DIRECT),
    ]
    assert {path.distance for path in topology.paths} == {Distance.NODE}, "as nvidia-smi prints it"
    assert topology.pairs[0].pcie_switch == "0008:01:00.0"
    assert set(topology.roles) == {"0000:03:00.0", "0002:03:00.0"}, "a DMA function is no NIC"


def test_a_data_direct_identifier_that_nothing_carries_falls_back_to_numa() -> None:
    topology = topology_of(gb300(("CCCC", "DDDD")))
    assert topology.machine_class is MachineClass.DATA_DIRECT
    assert [pair.source for pair in topology.pairs] == [Source.NUMA, Source.NUMA]
    assert [pair.distance for pair in topology.pairs] == [Distance.NODE, Distance.NODE]
    assert "no data-direct function" in topology.notes[0]


SWITCH = """
    pci0000:00 numa=0
      00:01.0 port
        01:00.0 port
          02:00.0 port
            03:00.0 gpu
          02:01.0 port
            04:00.0 nic rdma=mlx5_0
          02:02.0 port
            05:00.0 {0}
      00:02.0 port
        06:00.0 {1}
"""


@pytest.mark.parametrize(
    ("beside", "role"),
    [
        ("management rdma=mlx5_1", Role.MANAGEMENT),
        ("nic rdma=mlx5_1 vpd.VU=SMDL=SW_MNG", Role.MANAGEMENT),
        ("dpu rdma=mlx5_1", Role.OTHER),
        ("lx rdma=mlx5_1", Role.OTHER),
        ("ethernet net=eno1", Role.OTHER),
        ("nic net=enp5s0", Role.OTHER),
        ("nic rdma=mlx5_1", Role.RAIL),
    ],
)
def test_what_sits_beside_a_rail_is_not_always_one(beside: str, role: Role) -> None:
    topology = topology_of(SWITCH.format(beside, "nic rdma=mlx5_2"))
    assert topology.roles["0000:05:00.0"] is role
    assert topology.roles["0000:06:00.0"] is Role.OTHER, "shares no switch with a GPU"
    expected = ["0000:04:00.0"] + (["0000:05:00.0"] if role is Role.RAIL else [])
    assert [nic for pair in topology.pairs for nic in pair.nics] == expected


@pytest.mark.parametrize(("first", "second"), [("nic", "bnxt"), ("bnxt", "nic")])
def test_another_model_is_a_rail_where_it_is_the_only_one_of_its_gpu(first: str, second: str) -> None:
    topology = topology_of("\n".join([switch(0, "gpu", first), switch(0x20, "gpu", second)]))
    assert pairs(topology) == [(["03:00.0"], ["04:00.0"]), (["23:00.0"], ["24:00.0"])]


def test_a_nic_beside_drives_and_no_gpu_is_for_storage() -> None:
    topology = topology_of(
        SWITCH.format("nvme", "ethernet net=eno1")
        + """
    pci0000:80 numa=1
      80:01.0 port
        81:00.0 port
          82:00.0 port
            83:00.0 dpu rdma=mlx5_5
          82:01.0 port
            84:00.0 nvme
"""
    )
    assert topology.roles["0000:83:00.0"] is Role.STORAGE
    assert topology.roles["0000:04:00.0"] is Role.RAIL


def test_without_switches_the_hosts_own_network_cards_are_no_rails() -> None:
    topology = topology_of("""
        pci0000:00 numa=0
          00:01.0 port
            01:00.0 gpu
          00:02.0 port
            02:00.0 nic rdma=mlx5_0
          00:03.0 port
            03:00.0 lx rdma=mlx5_1
          00:04.0 port
            04:00.0 dpu rdma=mlx5_2
          00:05.0 port
            05:00.0 ethernet net=eno1
    """)
    assert [address for address, role in topology.roles.items() if role is Role.RAIL] == ["0000:02:00.0"]


def test_vfs_on_every_nic_of_a_dual_port_card() -> None:
    machine = synthetic("""
        pci0000:00
          00:01.0 port
            01:00.0 port
              02:00.0 port
                03:00.0 gpu
              02:01.0 port
                04:00.0 nic rdma=mlx5_0 net=enp4s0f0np0
                04:00.1 nic rdma=mlx5_1 net=enp4s0f1np1
    """)
    models = {"15b3:1021": {"driver": "mlx5_core", "vf": "15b3:101e"}}
    machine = with_vfs(machine, ["0000:04:00.0", "0000:04:00.1"], 64, models)
    inventory = inventory_of(machine)
    topology = analyze(inventory)
    assert sum(nic.is_vf for nic in inventory.nics) == 128
    assert len({topology.switches[nic.address] for nic in inventory.nics}) == 1
    assert pairs(topology) == [(["03:00.0"], ["04:00.0", "04:00.1"])]


def test_a_machine_without_gpus_or_without_nics_has_an_empty_answer() -> None:
    for tree, note in (("nic rdma=mlx5_0", "No GPU"), ("gpu", "No NIC")):
        topology = topology_of(f"pci0000:00\n  00:01.0 port\n    01:00.0 {tree}")
        assert topology.paths == ()
        assert topology.pairs == ()
        assert note in topology.notes[0]
