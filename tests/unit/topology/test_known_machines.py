"""Machines of which addresses and right answers are published, but no device tree: trees made from that.

What is compared is what was published or follows from it; see harness.known for what is made up.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness import known
from harness.known import KNOWN
from harness.machines import MACHINES, Machine, load_machine, with_vfs
from harness.synthetic import inventory_of, switch, synthetic
from harness.sysfs import write_tree
from railmate.inventory.scan import scan
from railmate.topology.analyze import analyze
from railmate.topology.model import Distance, MachineClass, NcclDistance, Role, Source, Topology


def topology_of(machine: Machine) -> Topology:
    return analyze(inventory_of(machine))


def buses(topology: Topology) -> dict[str, list[str]]:
    """GPU's bus -> its NICs' buses, each card once."""
    return {
        pair.gpus[0][5:7]: list(dict.fromkeys(nic[5:7] for nic in pair.nics))
        for pair in topology.pairs
        if len(pair.gpus) == 1
    }


def distances(topology: Topology) -> dict[tuple[str, str], Distance]:
    return {(path.gpu[5:7], path.nic[5:7]): path.distance for path in topology.paths}


@pytest.mark.parametrize("name", KNOWN)
def test_a_scan_of_the_written_tree_gives_the_same_topology(name: str, tmp_path: Path) -> None:
    write_tree(KNOWN[name], tmp_path)
    inventory = scan(tmp_path / "sys", tmp_path / "proc")
    assert inventory.warnings == ()
    topology = analyze(inventory)
    assert topology == topology_of(KNOWN[name])
    assert topology.pairs


def test_aws_p5_gives_each_gpu_the_four_efas_of_its_switch() -> None:
    topology = topology_of(known.one_switch_each(known.P5, "gpu", "efa"))
    assert topology.machine_class is MachineClass.SWITCHED
    assert len(topology.paths) == 8 * 32
    assert buses(topology) == {gpus[0]: nics for _, gpus, nics in known.P5}
    for path in topology.paths:
        own = path.nic[5:7] in buses(topology)[path.gpu[5:7]]
        assert (path.distance is Distance.PIX) == own == (path.pcie_switch is not None)
        assert own == (path.nccl_distance is NcclDistance.PIX)


def test_aws_p6_b200_pairs_two_by_two_and_never_with_nvswitch_management() -> None:
    topology = topology_of(known.one_switch_each(known.P6_B200, "gpu", "efa", management=("73", "74")))
    assert len(topology.paths) == 8 * 10
    assert buses(topology) == {
        "51": ["4f"], "52": ["50"], "62": ["60"], "63": ["61"], "75": ["71"], "76": ["72"], "86": ["84"], "87": ["85"]
    }  # fmt: skip
    assert distances(topology)["75", "73"] is Distance.PIX, "nearest is not always right"
    assert [topology.roles[f"0000:{bus}:00.0"] for bus in ("73", "74")] == [Role.MANAGEMENT] * 2
    assert {"0000:73:00.0", "0000:74:00.0"}.isdisjoint(topology.rails)


def test_turin_with_h200_behind_the_nics_own_bridge() -> None:
    machine = known.behind_private_bridges(
        known.TURIN, "gpu", "nic", "cx7bridge", "cx7bridge", extra=["61:00.0 lx", "61:00.1 lx"]
    )
    topology = topology_of(machine)
    assert buses(topology) == {gpu: [nic] for _, gpu, nic in known.TURIN}
    assert {path.distance for path in topology.paths} == {Distance.PXB, Distance.SYS}
    assert sum(path.distance is Distance.PXB for path in topology.paths) == 4
    assert topology.roles["0000:61:00.0"] is topology.roles["0000:61:00.1"] is Role.OTHER


@pytest.mark.parametrize(
    ("pairs", "gpu", "nic"), [(known.MI300X, "mi300x", "nic"), (known.MI350, "mi350", "bnxt")]
)
def test_amd_instinct_behind_a_bridge_of_its_own(
    pairs: list[tuple[int, str, str]], gpu: str, nic: str
) -> None:
    topology = topology_of(known.behind_private_bridges(pairs, gpu, nic, "gen5lower", "amdbridge"))
    assert buses(topology) == {gpu: [nic] for _, gpu, nic in pairs}
    assert len(topology.paths) == 64
    for path in topology.paths:
        own = buses(topology)[path.gpu[5:7]] == [path.nic[5:7]]
        assert (path.distance is Distance.PXB) == own == (path.nccl_distance is NcclDistance.PXB)
        assert (path.pcie_switch is not None) == own, "the private bridge is nobody's switch"
    for pair in topology.pairs:
        assert topology.switches[pair.gpus[0]] == topology.switches[pair.nics[0]] == pair.pcie_switch


def test_oci_h100_is_pxb_to_nvidia_smi_and_pix_to_nccl_and_a_card_is_two_ports() -> None:
    topology = topology_of(known.oci_h100())
    assert buses(topology) == {
        "0f": ["0c"], "2d": ["2a"], "44": ["41"], "5b": ["58"], "89": ["86"], "a8": ["a5"], "c0": ["bd"], "d8": ["d5"]
    }  # fmt: skip
    assert all(len(pair.nics) == 2 for pair in topology.pairs)
    own = [path for path in topology.paths if path.pcie_switch]
    assert len(own) == 16
    assert len(topology.paths) == 8 * 16
    assert {(path.distance, path.nccl_distance) for path in own} == {(Distance.PXB, NcclDistance.PIX)}
    assert {rail for nic, rail in topology.rails.items() if nic[5:7] == "d5"} == {7}


def test_ibm_h100_guest_has_a_made_up_switch_for_each_pair() -> None:
    topology = topology_of(known.ibm_h100_vm())
    assert topology.machine_class is MachineClass.VIRTUAL
    assert buses(topology) == {
        "a4": ["a3"], "ae": ["ad"], "b8": ["b7"], "c2": ["c1"], "cc": ["cb"], "d6": ["d5"], "e0": ["df"], "ea": ["e9"]
    }  # fmt: skip
    assert {pair.distance for pair in topology.pairs} == {Distance.PIX}
    assert "hypervisor" in topology.notes[0]


def test_tioga_gives_two_gpus_one_nic_by_numa_node() -> None:
    topology = topology_of(known.tioga())
    assert topology.machine_class is MachineClass.FLAT
    assert topology.switches == {}
    found = {nic[5:7]: {gpu[5:7] for gpu in pair.gpus} for pair in topology.pairs for nic in pair.nics}
    assert found == {"c5": {"c1", "c6"}, "cd": {"c9", "ce"}, "d5": {"d1", "d6"}, "dd": {"d9", "de"}}
    assert [distances(topology)[gpu, "c5"] for gpu in ("c6", "c1", "ce")] == [
        Distance.PHB,
        Distance.NODE,
        Distance.SYS,
    ]
    assert {pair.source for pair in topology.pairs} == {Source.NUMA}


def test_nec_aurora_shares_a_nic_among_the_four_engines_of_a_switch() -> None:
    topology = topology_of(known.aurora())
    assert [
        ([gpu[5:7] for gpu in pair.gpus], pair.nics[0][5:7], pair.distance) for pair in topology.pairs
    ] == [
        (["1b", "1c", "1d", "1e"], "1a", Distance.PIX),
        (["3d", "3f", "40", "41"], "3e", Distance.PIX),
    ]
    assert {path.distance for path in topology.paths} == {Distance.PIX, Distance.NODE}
    assert len(topology.paths) == 16


def test_hygon_shares_a_two_port_nic_among_four_dcus_and_the_one_beside_it_is_nearest() -> None:
    topology = topology_of(known.hygon())
    assert [(len(pair.gpus), pair.nics, pair.distance) for pair in topology.pairs] == [
        (4, ("0000:42:00.0", "0000:42:00.1"), Distance.PXB),
        (4, ("0000:c0:00.0", "0000:c0:00.1"), Distance.PXB),
    ]
    assert "0000:45:00.0" in topology.pairs[0].gpus
    assert "0000:bf:00.0" in topology.pairs[1].gpus
    assert topology.roles["0000:91:00.0"] is Role.OTHER
    switches = {(path.gpu[5:7], path.nic[5:7]): path.pcie_switch for path in topology.paths}
    assert switches["45", "42"] != switches["31", "42"]
    assert topology.switches["0000:45:00.0"] == topology.switches["0000:42:00.0"] == switches["45", "42"]


@pytest.mark.parametrize("numa", [True, False])
def test_gb200_without_data_direct_is_by_numa_node_two_functions_each(numa: bool) -> None:
    """Synthesised: addresses of GPUs and NICs are Oracle's, the rest is made up. GPU and NIC never meet."""
    topology = topology_of(known.grace("gb200", functions=2, data_direct=False, numa=numa))
    assert topology.machine_class is MachineClass.DATA_DIRECT
    assert [(pair.gpus[0][:4], [nic[:4] + nic[-2:] for nic in pair.nics]) for pair in topology.pairs] == [
        ("0008", ["0000.0", "0000.1"]),
        ("0009", ["0002.0", "0002.1"]),
        ("0018", ["0010.0", "0010.1"]),
        ("0019", ["0012.0", "0012.1"]),
    ]
    assert {pair.source for pair in topology.pairs} == {Source.NUMA}
    assert len(topology.paths) == 32
    assert {path.distance for path in topology.paths} == (
        {Distance.NODE, Distance.SYS} if numa else {Distance.SYS}
    )
    assert "no data-direct function" in topology.notes[0]


def test_gb300_in_a_guest_is_by_numa_node() -> None:
    """Synthesised from the published table: NODE on the same NUMA node, else SYS; GPUs 0, 1 with NICs 0, 1."""
    topology = topology_of(known.grace("gb300", functions=1, data_direct=False))
    assert [(pair.gpus[0][:4], pair.nics[0][:4], pair.distance) for pair in topology.pairs] == [
        ("0008", "0000", Distance.NODE),
        ("0009", "0002", Distance.NODE),
        ("0018", "0010", Distance.NODE),
        ("0019", "0012", Distance.NODE),
    ]
    assert {path.nccl_distance for path in topology.paths} == {NcclDistance.P2C, NcclDistance.SYS}


@pytest.mark.parametrize("gpu", ["gb200", "gb300"])
def test_data_direct_functions_decide_over_numa_node_and_order(gpu: str, tmp_path: Path) -> None:
    """Synthesised: nobody published such a tree. Each GPU's host bridge has the DMA function of the other's NIC."""
    write_tree(known.grace(gpu, functions=1, data_direct=True), tmp_path)
    topology = analyze(scan(tmp_path / "sys", tmp_path / "proc"))
    assert topology.machine_class is MachineClass.DATA_DIRECT
    assert [(pair.gpus[0][:4], pair.nics[0][:4], pair.source) for pair in topology.pairs] == [
        ("0008", "0002", Source.DATA_DIRECT),
        ("0009", "0000", Source.DATA_DIRECT),
        ("0018", "0012", Source.DATA_DIRECT),
        ("0019", "0010", Source.DATA_DIRECT),
    ]
    assert set(topology.sources.values()) == {Source.DATA_DIRECT}
    assert "DMA function" in topology.notes[0]


@pytest.mark.parametrize(("name", "vfs", "expected"), [("dgx-a100", 4, 32), ("aws-p5en", 2, 32)])
def test_vfs_on_every_rail_change_nothing(name: str, vfs: int, expected: int, tmp_path: Path) -> None:
    """Synthesised: no public dump has GPUs and VFs. EFA has no SR-IOV; p5en lends its layout, 16 NICs for 8 GPUs."""
    plain = load_machine(MACHINES / f"{name}.yaml")
    if name == "dgx-a100":
        machine = load_machine(MACHINES / f"{name}.yaml", vfs)
    else:
        able = {
            a: replace(f, max_virtual_functions=vfs) if a in plain.rails else f
            for a, f in plain.functions.items()
        }
        models = {"1d0f:efa2": {"driver": "efa", "vf": "1d0f:efa3", "rate": 200}}
        machine = with_vfs(replace(plain, functions=able), plain.rails, vfs, models)
    write_tree(machine, tmp_path)
    inventory = scan(tmp_path / "sys", tmp_path / "proc")
    before, after = topology_of(plain), analyze(inventory)
    held = [nic for nic in inventory.nics if nic.is_vf]
    assert len(held) == expected
    assert (after.paths, after.pairs, after.machine_class) == (
        before.paths,
        before.pairs,
        before.machine_class,
    )
    for vf in held:
        pf = vf.function.physical_function or ""
        for by_address in (after.switches, after.rails, after.roles, after.sources, after.numa_nodes):
            assert by_address[vf.address] == by_address[pf]


def test_a_guests_ethernet_function_is_no_rail_beside_its_infiniband_ones() -> None:
    """Azure gives a guest one function more for its ordinary network, which does RDMA too."""
    lines = []
    for index in range(4):
        lines += [f"pci{0x11 * (index + 1):04x}:00 numa=0", "  00:00.0 mi300x"]
        lines += [
            f"pci{0x101 + index:04x}:00 numa=0",
            f"  00:00.0 020700 15b3:101e 15b3:0041 rdma=mlx5_{index}",
        ]
    lines += ["pci8f23:00 numa=0", "  00:02.0 020000 15b3:101a 15b3:0180 rdma=mlx5_4 net=enP36643s1"]
    topology = topology_of(synthetic("\n".join(lines)))
    assert topology.roles["8f23:00:02.0"] is Role.OTHER
    assert [pair.nics[0][:4] for pair in topology.pairs] == ["0101", "0102", "0103", "0104"]
    assert topology.machine_class is MachineClass.VIRTUAL


BOND = f"""{switch(0, "gpu", "nic rdma=mlx5_0 net=ens1")}
  00:02.0 port
    05:00.0 nic rdma=mlx5_bond_0 net=enp5s0f0
    05:00.1 nic net=enp5s0f1
{switch(0x80, "gpu", "nic rdma=mlx5_1 net=ens2", numa=1)}
"""


def test_a_bond_beside_the_rails_is_in_no_pair() -> None:
    """The bond's RDMA device belongs to its first port; the second has none."""
    topology = topology_of(synthetic(BOND))
    assert buses(topology) == {"03": ["04"], "83": ["84"]}
    assert topology.roles["0000:05:00.0"] is topology.roles["0000:05:00.1"] is Role.OTHER


def test_a_rail_whose_two_ports_are_bonded_is_one_rail_by_its_first_port() -> None:
    tree = BOND.replace(
        "04:00.0 nic rdma=mlx5_0 net=ens1", "04:00.0 nic rdma=mlx5_bond_1 net=ens1f0"
    ).replace("  00:02.0 port", "        04:00.1 nic net=ens1f1\n  00:02.0 port")
    topology = topology_of(synthetic(tree))
    assert topology.pairs[0].nics == ("0000:04:00.0",)
    assert topology.roles["0000:04:00.1"] is Role.OTHER


def test_sr680a_has_eight_rails_of_eleven_nics() -> None:
    """From its published table: NIC4 and 5 are CX-6 Lx, NIC10 is another's; GPU4 to 7 have NIC6 to 9."""
    lines = []
    for index in range(8):
        bus = 0x10 * index + (0x10 if index > 3 else 0)
        rail = f"nic rdma=mlx5_{index + (2 if index > 3 else 0)}"
        lines.append(switch(bus, rail, "gpu", numa=index // 4))
    lines += [
        "pci0000:40 numa=0",
        "  40:01.0 port",
        "    41:00.0 lx rdma=mlx5_4",
        "    41:00.1 lx rdma=mlx5_5",
    ]
    lines += ["pci0000:a0 numa=1", "  a0:01.0 port", "    a1:00.0 dpu rdma=mlx5_10"]
    topology = topology_of(synthetic("\n".join(lines)))
    nics = list(dict.fromkeys(path.nic for path in topology.paths))
    assert len(nics) == 11
    assert [nics.index(pair.nics[0]) for pair in topology.pairs] == [0, 1, 2, 3, 6, 7, 8, 9]
    assert {pair.distance for pair in topology.pairs} == {Distance.PIX}


def test_xe9680s_north_south_dpu_beside_gpu_4_is_in_no_pair() -> None:
    """A BlueField reads PIX to GPU4, as that GPU's rail does."""
    groups = [
        (index // 4, [f"{0x13 + 0x10 * index:02x}"], [f"{0x12 + 0x10 * index:02x}"]) for index in range(8)
    ]
    machine = known.one_switch_each(groups, "gpu", "nic")
    pf = next(f for a, f in machine.functions.items() if a == "0000:52:00.0")
    dpu = synthetic("pci0000:08\n  08:01.1 port\n    54:00.0 dpu rdma=mlx5_9").functions["0000:54:00.0"]
    beside = replace(dpu, path=(*pf.path[:-2], "0000:e9:05.0", dpu.address))
    topology = topology_of(replace(machine, functions={**machine.functions, dpu.address: beside}))
    assert distances(topology)["53", "54"] is Distance.PIX
    assert topology.roles["0000:54:00.0"] is Role.OTHER
    assert buses(topology)["53"] == ["52"]


def test_of_a_data_direct_machine_only_the_tied_cards_are_rails() -> None:
    """Synthesised: a ConnectX-7 for storage and a BlueField beside GB300's tied NICs; neither has a way to a GPU."""
    machine = known.grace("gb300", functions=1, data_direct=True)
    others = synthetic("""
        pci0006:00 numa=0
          00:00.0 port
            01:00.0 cx6 rdma=mlx5_8
          00:01.0 port
            02:00.0 dpu rdma=mlx5_9
    """)
    topology = topology_of(replace(machine, functions={**machine.functions, **others.functions}))
    assert topology.machine_class is MachineClass.DATA_DIRECT
    assert [topology.roles[a] for a in ("0006:01:00.0", "0006:02:00.0")] == [Role.OTHER, Role.OTHER]
    assert [pair.source for pair in topology.pairs] == [Source.DATA_DIRECT] * 4


@pytest.mark.parametrize("bus", ["VMBUS:00", "MSFT1000:00"])
def test_a_guest_of_hyper_v_is_virtual_whatever_its_bus_is_called(bus: str) -> None:
    tree = f"""
        {bus} numa=0
          pci0001:00
            00:01.0 port
              01:00.0 gpu
          pci0002:00
            00:01.0 port
              01:00.0 nic rdma=mlx5_0
    """
    assert topology_of(synthetic(tree)).machine_class is MachineClass.VIRTUAL
