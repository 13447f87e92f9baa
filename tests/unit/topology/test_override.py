"""What an override changes on a machine: it wins over sysfs, and its answers say that they are its."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.machines import MACHINES, load_machine
from harness.synthetic import inventory_of, synthetic
from railmate.inventory.model import Inventory
from railmate.topology.analyze import analyze
from railmate.topology.model import Distance, MachineClass, Role, Source, Topology
from railmate.topology.ncclfile import parse_nccl_topology
from railmate_api.override import OverridePair, OverrideSwitch, RoleRule, TopologyOverride


def inventory(name: str, vfs: int = 0) -> Inventory:
    return inventory_of(load_machine(MACHINES / f"{name}.yaml", vfs))


def cells(topology: Topology) -> dict[str, int]:
    count: dict[str, int] = {}
    for path in topology.paths:
        count[path.distance] = count.get(path.distance, 0) + 1
    return count


ROOTS = ("10", "20", "90", "a0")
# The shape of AWS' file for p4d: two GPUs and an EFA below each of four invented switches.
P4D_XML = (
    '<system version="1">'
    + "".join(
        f'<cpu numaid="{numa}">'
        + "".join(
            f'<pci busid="ffff:ff:0{4 * numa + index + 1}.0" class="0x060400">'
            f'<pci busid="0000:{root}:1b.0" class="0x020000"><nic><net name="rdmap{root}"/></nic></pci>'
            f'<pci busid="0000:{root}:1c.0" class="0x030200"><gpu dev="0"/></pci>'
            f'<pci busid="0000:{root}:1d.0" class="0x030200"><gpu dev="1"/></pci></pci>'
            for index, root in enumerate(ROOTS[2 * numa : 2 * numa + 2])
        )
        + "</cpu>"
        for numa in (0, 1)
    )
    + "</system>"
).encode()


def test_an_nccl_file_gives_p4d_its_switches() -> None:
    machine = inventory("aws-p4d")
    topology = analyze(machine, parse_nccl_topology(P4D_XML))
    rails = [path for path in topology.paths if path.nic.endswith("1b.0")]
    assert len(rails) == 32
    assert sum(path.distance is Distance.PIX for path in rails) == 8
    assert {path.source for path in rails} == {Source.OVERRIDE}
    assert [
        (pair.gpus, pair.nics, pair.distance, pair.pcie_switch, pair.source) for pair in topology.pairs
    ] == [
        (
            (f"0000:{root}:1c.0", f"0000:{root}:1d.0"),
            (f"0000:{root}:1b.0",),
            Distance.PIX,
            f"ffff:ff:0{number}.0",
            Source.OVERRIDE,
        )
        for root, number in zip(ROOTS, (1, 2, 5, 6), strict=True)
    ]
    assert topology.switches["0000:10:1c.0"] == topology.switches["0000:10:1b.0"] == "ffff:ff:01.0"
    assert topology.sources["0000:10:1c.0"] is Source.OVERRIDE
    assert topology.machine_class is MachineClass.INTEGRATED, "what the machine is has not changed"
    assert "The override tells the PCIe switches of this machine (4)" in topology.notes[0]
    assert len(topology.notes) == 1


def test_nccls_own_class_stays_what_it_sees_without_the_file() -> None:
    machine = inventory("aws-p4d")
    before, after = analyze(machine), analyze(machine, parse_nccl_topology(P4D_XML))
    assert [path.nccl_distance for path in before.paths] == [path.nccl_distance for path in after.paths]


def azure(count: int, numa: int = -1) -> Inventory:
    lines = []
    for index in range(1, count + 1):
        lines += [f"pci{index:04x}:00 numa={numa}", "  00:00.0 gpu"]
        lines += [f"pci{0x100 + index:04x}:00 numa={numa}", f"  00:00.0 nic rdma=mlx5_{index - 1}"]
    return inventory_of(synthetic("\n".join(lines)))


@pytest.mark.parametrize("each", [1, 2])  # as in the files for ND H100 v5 and for ND A100 v4
def test_azures_files_say_switch_and_numa_node_where_the_guest_sees_neither(each: int) -> None:
    switches = "".join(
        f'<pci busid="ffff:ff:0{number + 1}.0" class="0x060400">'
        + "".join(
            f'<pci busid="000{i}:00:00.0" class="0x030200"/><pci busid="010{i}:00:00.0" class="0x020700"/>'
            for i in range(each * number + 1, each * number + each + 1)
        )
        + "</pci>"
        for number in range(8 // each)
    )
    xml = f'<system version="1"><cpu numaid="2">{switches}</cpu></system>'
    machine = azure(8)
    assert analyze(machine).switches == {}
    topology = analyze(machine, parse_nccl_topology(xml.encode()))
    assert len(topology.switches) == 16
    assert set(topology.numa_nodes.values()) == {2}
    assert len(topology.numa_nodes) == 16
    assert len(topology.pairs) == 8
    for pair in topology.pairs:
        assert pair.nics[0] == f"01{pair.gpus[0][2:]}"
        assert (pair.distance, pair.source) == (Distance.PIX, Source.OVERRIDE)
    assert cells(topology) == {"PIX": 8 * each, "NODE": 64 - 8 * each}


def test_an_override_wins_over_what_sysfs_says() -> None:
    """Crossed on purpose: the GPUs of the first switch are said to be with the NICs of the second."""
    machine = inventory("dgx-a100", vfs=2)
    override = TopologyOverride(
        switches=(
            OverrideSwitch("a", ("0000:07:00.0", "0000:0f:00.0", "0000:4b:00.0", "0000:54:00.0")),
            OverrideSwitch("b", ("0000:47:00.0", "0000:4e:00.0", "0000:0c:00.0", "0000:12:00.0")),
        )
    )
    plain, topology = analyze(machine), analyze(machine, override)
    assert [(p.gpus[0][5:7], p.nics[0][5:7], p.pcie_switch, str(p.source)) for p in topology.pairs] == [
        ("07", "4b", "a", "override"),
        ("0f", "54", "a", "override"),
        ("47", "0c", "b", "override"),
        ("4e", "12", "b", "override"),
        ("87", "94", "0000:81:00.0", "sysfs"),
        ("90", "8d", "0000:81:00.0", "sysfs"),
        ("b7", "cc", "0000:b1:00.0", "sysfs"),
        ("bd", "ba", "0000:b1:00.0", "sysfs"),
    ]
    paths = {(path.gpu, path.nic): path for path in topology.paths}
    assert paths["0000:07:00.0", "0000:0c:00.0"].distance is Distance.PHB, (
        "one host bridge, no switch in common"
    )
    vf = next(nic for nic in machine.nics if nic.function.physical_function == "0000:0c:00.0")
    assert topology.switches[vf.address] == "b"
    assert topology.sources[vf.address] is Source.OVERRIDE
    untouched = [
        path for path in topology.paths if path.gpu[5:7] in ("87", "90", "b7", "bd") and path.nic[5] > "5"
    ]
    assert untouched
    assert set(untouched) <= set(plain.paths)


def test_cascaded_switches_read_pxb_and_the_nearest_is_the_pairs() -> None:
    tree = "\n".join(f"pci000{i}:00\n  00:00.0 gpu\n  00:01.0 nic rdma=mlx5_{i}" for i in range(2))
    override = TopologyOverride(
        switches=(
            OverrideSwitch("top"),
            OverrideSwitch("left", ("0000:00:00.0", "0000:00:01.0"), "top"),
            OverrideSwitch("right", ("0001:00:00.0", "0001:00:01.0"), "top"),
        )
    )
    topology = analyze(inventory_of(synthetic(tree)), override)
    assert [(str(path.distance), path.pcie_switch) for path in topology.paths] == [
        ("PIX", "left"),
        ("PXB", "top"),
        ("PXB", "top"),
        ("PIX", "right"),
    ]


def test_function_0_of_a_card_speaks_for_all_its_ports() -> None:
    tree = "pci0000:00\n  00:00.0 gpu\npci0001:00\n  00:00.0 nic rdma=mlx5_0\n  00:00.1 nic rdma=mlx5_1"
    override = TopologyOverride(switches=(OverrideSwitch("a", ("0000:00:00.0", "0001:00:00.0")),))
    topology = analyze(inventory_of(synthetic(tree)), override)
    assert topology.pairs[0].nics == ("0001:00:00.0", "0001:00:00.1")
    assert topology.pairs[0].pcie_switch == "a"


def test_numa_nodes_of_an_override_decide_where_no_switch_does() -> None:
    override = TopologyOverride(
        numa_nodes={"0001:00:00.0": 0, "0102:00:00.0": 0, "0002:00:00.0": 1, "0101:00:00.0": 1}
    )
    topology = analyze(azure(2), override)
    assert [(pair.gpus[0][:4], pair.nics[0][:4], pair.distance, pair.source) for pair in topology.pairs] == [
        ("0001", "0102", Distance.NODE, Source.OVERRIDE),
        ("0002", "0101", Distance.NODE, Source.OVERRIDE),
    ]
    assert topology.switches == {}


def test_pairs_of_an_override_are_taken_and_the_rest_is_matched() -> None:
    override = TopologyOverride(
        pairs=(
            OverridePair(("0000:07:00.0",), ("0000:12:00.0",)),
            OverridePair(("0000:47:00.0",), ("0000:e1:00.0",)),
        )
    )
    topology = analyze(inventory("dgx-a100"), override)
    found = {pair.gpus[0][5:7]: (pair.nics[0][5:7], pair.source) for pair in topology.pairs}
    assert found["07"] == ("12", Source.OVERRIDE)
    assert found["0f"] == ("0c", Source.SYSFS)
    assert found["47"] == ("e1", Source.OVERRIDE)
    assert topology.roles["0000:e1:00.0"] is Role.RAIL
    assert topology.pairs[2].pcie_switch is None
    nics = [nic for pair in topology.pairs for nic in pair.nics]
    assert len(nics) == len(set(nics))


def test_rails_of_an_override_count_as_it_says() -> None:
    override = TopologyOverride(rails={"0000:12:00.0": 7, "0000:ba:00.0": 0, "0000:b7:00.0": 5})
    topology = analyze(inventory("dgx-a100", vfs=1), override)
    assert (
        topology.rails["0000:12:00.0"]
        == topology.rails["0000:07:00.0"]
        == topology.rails["0000:12:00.1"]
        == 7
    )
    assert topology.rails["0000:ba:00.0"] == topology.rails["0000:bd:00.0"] == 0
    assert topology.rails["0000:b7:00.0"] == 5
    assert topology.rails["0000:cc:00.0"] == 7


def test_a_rail_ordinal_for_what_is_no_rail_is_told() -> None:
    topology = analyze(inventory("dgx-a100"), TopologyOverride(rails={"0000:e1:00.0": 3}))
    assert "0000:e1:00.0" not in topology.rails
    assert any("0000:e1:00.0 rail 3" in note for note in topology.notes)


def roles(name: str, *rules: RoleRule) -> Topology:
    return analyze(inventory(name), TopologyOverride(roles=rules))


def test_a_role_rule_takes_a_nic_out_of_its_pair() -> None:
    topology = roles("dgx-a100", RoleRule("storage", address="0000:12:00.0"))
    assert topology.roles["0000:12:00.0"] is Role.STORAGE
    assert [pair.gpus for pair in topology.pairs if "0000:0c:00.0" in pair.nics] == [
        ("0000:07:00.0", "0000:0f:00.0")
    ]


def test_the_first_rule_that_fits_counts_and_names_and_models_fit_many() -> None:
    topology = roles(
        "b200-8gpu",
        RoleRule("rail", address="0000:18:00.0"),
        RoleRule("other", model="15b3:1021"),
    )
    assert [nic for nic, role in topology.roles.items() if role is Role.RAIL] == ["0000:18:00.0"]
    topology = roles(
        "dgx-a100", RoleRule("management", name="mlx5_[01]"), RoleRule("storage", name="enp225*")
    )
    assert {a: str(r) for a, r in topology.roles.items() if r in (Role.MANAGEMENT, Role.STORAGE)} == {
        "0000:0c:00.0": "management",
        "0000:12:00.0": "management",
        "0000:e1:00.0": "storage",
        "0000:e1:00.1": "storage",
    }


MANAGEMENT = [f"0000:05:00.{function}" for function in range(4)]


def test_no_rule_makes_a_rail_of_a_management_function_unless_it_names_it_and_then_it_is_said() -> None:
    topology = roles("b200-8gpu", RoleRule("rail", model="15b3:1021"), RoleRule("rail", name="mlx5_*"))
    assert [topology.roles[nic] for nic in MANAGEMENT] == [Role.MANAGEMENT] * 4
    assert not {nic for pair in topology.pairs for nic in pair.nics} & set(MANAGEMENT)
    assert sum("stays management" in note for note in topology.notes) == 4
    topology = roles("b200-8gpu", RoleRule("rail", address=MANAGEMENT[0]))
    assert topology.roles[MANAGEMENT[0]] is Role.RAIL
    assert any(MANAGEMENT[0] in note and "makes it a rail" in note for note in topology.notes)


def test_a_pair_with_a_management_function_is_left_out_and_named() -> None:
    override = TopologyOverride(pairs=(OverridePair(("0000:1b:00.0",), (MANAGEMENT[1],)),))
    topology = analyze(inventory("b200-8gpu"), override)
    assert topology.pairs == analyze(inventory("b200-8gpu")).pairs
    assert any(MANAGEMENT[1] in note and "left out" in note for note in topology.notes)


def test_what_the_machine_has_not_is_named_and_changes_nothing() -> None:
    override = TopologyOverride(
        switches=(OverrideSwitch("a", ("0000:fe:00.0", "0000:fe:01.0")),),
        numa_nodes={"0000:fd:00.0": 1},
        roles=(RoleRule("rail", name="nothing*"), RoleRule("rail", address="0000:fc:00.0")),
        rails={"0000:fb:00.0": 1},
        pairs=(OverridePair(("0000:07:00.0",), ("0000:fa:00.0",)),),
    )
    machine = inventory("dgx-a100")
    plain, topology = analyze(machine), analyze(machine, override)
    assert topology.pairs == plain.pairs
    assert topology.roles == plain.roles
    notes = "\n".join(topology.notes)
    for address in ("fe:00.0", "fe:01.0", "fd:00.0", "fc:00.0", "fb:00.0", "fa:00.0", "nothing*"):
        assert address in notes
    assert "07:00.0, " not in notes


def test_a_function_that_is_no_gpu_and_no_nic_is_passed_over_without_a_word() -> None:
    """NCCL files name NVSwitches and drives too."""
    machine = inventory("dgx-a100")
    drive = next(a for a, function in machine.functions.items() if function.class_code >> 8 == 0x0108)
    topology = analyze(machine, TopologyOverride(numa_nodes={drive: 0}))
    assert topology.notes == ()


def test_a_vf_in_an_override_is_sent_to_its_physical_function() -> None:
    override = TopologyOverride(numa_nodes={"0000:0c:00.1": 0})
    topology = analyze(inventory("dgx-a100", vfs=1), override)
    assert any("0000:0c:00.1" in note and "0000:0c:00.0" in note for note in topology.notes)
    assert topology.numa_nodes["0000:0c:00.1"] == topology.numa_nodes["0000:0c:00.0"] == 3


def test_an_empty_override_changes_nothing(tmp_path: Path) -> None:
    for name in ("dgx-a100", "aws-p4d", "b200-8gpu", "lassen-p9"):
        assert analyze(inventory(name), TopologyOverride()) == analyze(inventory(name))
