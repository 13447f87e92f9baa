"""Machines that people run, of which layout and purpose of the NICs are known: see harness.layouts for what is made up.

Which NICs are a GPU's follows from the layout; what is said of each below is why it is right.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness import layouts
from harness.layouts import LAYOUTS
from harness.machines import Machine, with_vfs
from harness.synthetic import inventory_of
from harness.sysfs import write_tree
from railmate.cli.main import main
from railmate.inventory.scan import scan
from railmate.topology.analyze import analyze
from railmate.topology.model import Distance, MachineClass, Role, Source, Topology
from railmate_api.override import OverrideSwitch, TopologyOverride

VF_MODELS = {"15b3:1021": {"driver": "mlx5_core", "vf": "15b3:101e"}}


def topology_of(machine: Machine) -> Topology:
    return analyze(inventory_of(machine))


def of_role(topology: Topology, role: Role) -> list[str]:
    return [address for address, held in topology.roles.items() if held is role]


def sizes(topology: Topology) -> list[tuple[int, int]]:
    """GPUs and NICs of each pair."""
    return [(len(pair.gpus), len(pair.nics)) for pair in topology.pairs]


def assert_pairs_by_switch(topology: Topology, gpus: int) -> None:
    """Each GPU with one NIC of its own, on one switch, and their rails in PCI order."""
    assert topology.machine_class is MachineClass.SWITCHED
    assert sizes(topology) == [(1, 1)] * gpus
    for pair in topology.pairs:
        assert pair.pcie_switch is not None
        assert pair.source is Source.SYSFS
        assert topology.switches[pair.gpus[0]] == topology.switches[pair.nics[0]] == pair.pcie_switch
        assert topology.roles[pair.nics[0]] is Role.RAIL
    rails = [topology.rails[nic] for nic in of_role(topology, Role.RAIL)]
    assert rails == list(range(gpus))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_scan_of_the_written_tree_gives_the_same_topology(name: str, tmp_path: Path) -> None:
    machine = LAYOUTS[name]()
    write_tree(machine, tmp_path)
    inventory = scan(tmp_path / "sys", tmp_path / "proc")
    assert inventory.warnings == ()
    assert dict(inventory.functions) == dict(machine.functions)
    assert inventory.bonds == inventory_of(machine).bonds
    assert analyze(inventory) == topology_of(machine)


@pytest.mark.parametrize("name", LAYOUTS)
def test_slices_say_a_switch_only_where_one_is_known(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = LAYOUTS[name]()
    functions = {a: replace(f, driver=f.driver or "some") for a, f in machine.functions.items()}
    write_tree(replace(machine, functions=functions), tmp_path)
    topology = topology_of(machine)
    assert main(["slices", "--sysfs-root", str(tmp_path / "sys"), "-o", "json", "--node-name", "n"]) == 0
    slices = json.loads(capsys.readouterr().out)["items"]
    devices = [device for one in slices for device in one["spec"].get("devices", [])]
    told = [
        device["attributes"]["pcieSwitch"]["string"]
        for device in devices
        if "pcieSwitch" in device["attributes"]
    ]
    assert set(told) <= set(topology.switches.values())
    assert bool(told) == bool(topology.switches)
    kinds = [device["attributes"]["kind"]["string"] for device in devices]
    assert kinds.count("pair") == sum(len(pair.gpus) == 1 for pair in topology.pairs)


def test_hgx_h100_with_two_gpus_and_two_rails_to_a_switch() -> None:
    topology = topology_of(layouts.hgx_h100_four_switches())
    assert_pairs_by_switch(topology, 8)
    assert len(set(topology.switches.values())) == 4
    assert {pair.distance for pair in topology.pairs} == {Distance.PIX}, "each pair on its own lower level"
    assert len(of_role(topology, Role.STORAGE)) == 4
    assert len(of_role(topology, Role.OTHER)) == 2


def test_hgx_h100_whose_storage_cards_are_the_rails_own_make() -> None:
    """Only what is beside them tells: four drives and no GPU, where a rail has two drives."""
    topology = topology_of(layouts.hgx_h100_four_switches(storage="nic"))
    assert_pairs_by_switch(topology, 8)
    assert len(of_role(topology, Role.STORAGE)) == 4


def test_dgx_h200_whose_storage_ports_have_a_root_port_each() -> None:
    topology = topology_of(layouts.dgx_h200())
    assert_pairs_by_switch(topology, 8)
    assert {pair.distance for pair in topology.pairs} == {Distance.PXB}
    assert len(of_role(topology, Role.OTHER)) == 4


def test_gcp_a3_mega_has_switches_and_no_nic_that_does_rdma() -> None:
    topology = topology_of(layouts.gcp_a3_mega())
    assert topology.machine_class is MachineClass.SWITCHED
    assert len(of_role(topology, Role.OTHER)) == 9
    assert topology.pairs == ()
    assert sum(path.pcie_switch is not None for path in topology.paths) == 16
    assert topology.notes == ("No NIC was found that could be a GPU's rail.",)


def test_azure_nd_h100_v5_is_virtual_and_its_own_network_no_rail() -> None:
    topology = topology_of(layouts.azure_nd_h100_v5())
    assert topology.machine_class is MachineClass.VIRTUAL
    assert topology.switches == {}
    assert sizes(topology) == [(1, 1)] * 8
    assert {(pair.distance, pair.source) for pair in topology.pairs} == {(Distance.NODE, Source.NUMA)}
    assert of_role(topology, Role.OTHER) == ["7870:00:00.0"]
    assert "may be wrong" in topology.notes[0]


def test_xe9680_with_mi300x_and_broadcom_rails() -> None:
    topology = topology_of(layouts.xe9680_mi300x())
    assert_pairs_by_switch(topology, 8)
    assert len(set(topology.switches.values())) == 4
    assert {pair.distance for pair in topology.pairs} == {Distance.PXB}
    assert len(of_role(topology, Role.OTHER)) == 3, "the BlueField beside the fifth GPU, the host's two ports"


def test_l40s_without_switches_four_gpus_to_a_nic_by_numa_node() -> None:
    topology = topology_of(layouts.l40s_flat())
    assert topology.machine_class is MachineClass.FLAT
    assert topology.switches == {}
    assert sizes(topology) == [(4, 1), (4, 1)]
    assert {pair.source for pair in topology.pairs} == {Source.NUMA}


def test_l40s_four_to_a_switch_share_a_two_port_card() -> None:
    topology = topology_of(layouts.l40s_switched())
    assert sizes(topology) == [(4, 2), (4, 2)]
    assert [topology.rails[pair.nics[0]] for pair in topology.pairs] == [0, 1]
    assert [topology.rails[pair.nics[1]] for pair in topology.pairs] == [0, 1], (
        "ports of one card are one card"
    )


@pytest.mark.parametrize(("rail", "beside"), [("nic", "dpu"), ("supernic", "dpu")])
def test_bluefields_for_north_south_traffic_are_no_rails_also_beside_bluefield_rails(
    rail: str, beside: str
) -> None:
    """Of BlueFields in both places the cards differ (subsystem), and those for the host come on top."""
    topology = topology_of(layouts.supermicro_bluefield(rail, beside))
    assert_pairs_by_switch(topology, 8)
    assert len(of_role(topology, Role.OTHER)) == 4


def test_a_card_of_another_make_is_a_rail_where_it_stands_in_for_a_usual_one() -> None:
    machine = layouts.hgx_h100_four_switches()
    nic = topology_of(machine).pairs[3].nics[0]
    spare = replace(machine.functions[nic], subsystem_device=0x0999)
    assert_pairs_by_switch(topology_of(replace(machine, functions={**machine.functions, nic: spare})), 8)


def test_grace_hopper_pairs_its_one_gpu_with_its_one_nic() -> None:
    topology = topology_of(layouts.gh200())
    assert topology.machine_class is MachineClass.FLAT
    assert sizes(topology) == [(1, 1)]
    assert (topology.pairs[0].distance, topology.pairs[0].source) == (Distance.NODE, Source.NUMA)


def test_gaudis_share_the_hosts_nic_on_their_switch() -> None:
    topology = topology_of(layouts.gaudi())
    assert topology.machine_class is MachineClass.SWITCHED
    assert sizes(topology) == [(4, 1), (4, 1)]


def test_the_switch_on_an_intel_max_card_is_nobodys_switch() -> None:
    topology = topology_of(layouts.intel_max())
    assert topology.machine_class is MachineClass.FLAT
    assert topology.switches == {}
    assert sizes(topology) == [(2, 1), (2, 1)]


def test_functions_below_one_emulated_root_port_share_no_switch() -> None:
    topology = topology_of(layouts.guest_with_passed_through_pair())
    assert topology.machine_class is MachineClass.VIRTUAL
    assert topology.switches == {}
    assert all(path.pcie_switch is None for path in topology.paths)
    assert [(pair.gpus[0][:-2], pair.source) for pair in topology.pairs] == [
        (pair.nics[0][:-2], Source.NUMA) for pair in topology.pairs
    ]


def test_halves_of_a_socket_direct_card_are_one_rail_and_each_socket_has_its_half() -> None:
    """Both halves lead to one port of the fabric; what a GPU is near is its own socket's half."""
    machine = layouts.socket_direct()
    topology = topology_of(machine)
    assert sizes(topology) == [(2, 1)] * 4
    assert [topology.rails[pair.nics[0]] for pair in topology.pairs] == [0, 0, 1, 1]
    assert all(pair.gpus[0][:4] == pair.nics[0][:4] for pair in topology.pairs)


def test_one_guid_on_all_nics_joins_nothing() -> None:
    machine = layouts.socket_direct()
    functions = {
        address: replace(
            function,
            rdma_devices=tuple(
                replace(d, sys_image_guid="0200:0000:0000:0001") for d in function.rdma_devices
            ),
        )
        for address, function in machine.functions.items()
    }
    topology = topology_of(replace(machine, functions=functions))
    assert [topology.rails[pair.nics[0]] for pair in topology.pairs] == [0, 1, 2, 3]


def test_representors_are_not_a_ports_own_netdev(tmp_path: Path) -> None:
    write_tree(layouts.switchdev(), tmp_path)
    inventory = scan(tmp_path / "sys", tmp_path / "proc")
    assert [nic.function.netdevs[0].name for nic in inventory.nics] == ["uplink0", "uplink1"]
    assert_pairs_by_switch(analyze(inventory), 2)


def test_ports_of_a_card_under_roce_lag_are_one_rail_by_the_first() -> None:
    topology = topology_of(layouts.rdma_lag())
    assert_pairs_by_switch(topology, 8)
    assert len(of_role(topology, Role.OTHER)) == 8, "the second ports, which have no RDMA device"


def test_vfs_of_the_second_port_under_roce_lag_make_a_rail_of_it() -> None:
    """VFs of both ports have RDMA devices of their own, and one bond carries them: one rail of two ports."""
    machine = layouts.rdma_lag()
    ports = [address for address, function in machine.functions.items() if function.netdevs]
    assert len(ports) == 16
    machine = with_vfs(machine, ports, 2, VF_MODELS)
    functions = dict(machine.functions)
    for address, function in machine.functions.items():
        if function.physical_function is not None and not function.rdma_devices:
            first = functions[function.physical_function[:-1] + "0"].virtual_functions[0]
            device = replace(functions[first].rdma_devices[0], name=f"mlx5_{address}")
            functions[address] = replace(function, rdma_devices=(device,))
    topology = topology_of(replace(machine, functions=functions))
    assert sizes(topology) == [(1, 2)] * 8
    assert [topology.rails[pair.nics[0]] for pair in topology.pairs] == list(range(8))
    assert [topology.rails[pair.nics[1]] for pair in topology.pairs] == list(range(8))


def test_cards_that_one_bond_holds_are_one_rail() -> None:
    topology = topology_of(layouts.bond_across_cards())
    assert sizes(topology) == [(1, 2), (1, 2)]
    assert [topology.rails[nic] for pair in topology.pairs for nic in pair.nics] == [0, 0, 1, 1]


@pytest.mark.parametrize("tied", [(), (3,), tuple(range(8))])
def test_data_direct_functions_change_nothing_where_gpus_meet_their_nics_on_switches(
    tied: tuple[int, ...],
) -> None:
    topology = topology_of(layouts.hgx_b300(tied))
    assert_pairs_by_switch(topology, 8)
    assert len(of_role(topology, Role.STORAGE)) == 1
    assert len(of_role(topology, Role.OTHER)) == 2
    assert Source.DATA_DIRECT not in topology.sources.values()


def test_functions_that_a_virtual_machine_holds_stay_where_they_are(tmp_path: Path) -> None:
    """Some VFs and a GPU are vfio-pci's: no netdev, no RDMA device, no name from the driver."""
    plain = layouts.hgx_h100_four_switches()
    rails = of_role(topology_of(plain), Role.RAIL)
    machine = with_vfs(plain, rails, 2, VF_MODELS)
    functions = dict(machine.functions)
    held = [f for f in functions.values() if f.physical_function is not None][:4]
    held.append(functions[topology_of(plain).pairs[7].gpus[0]])
    for function in held:
        functions[function.address] = replace(
            function, driver="vfio-pci", netdevs=(), rdma_devices=(), auxiliary=()
        )
    write_tree(replace(machine, functions=functions), tmp_path)
    topology = analyze(scan(tmp_path / "sys", tmp_path / "proc"))
    before = topology_of(plain)
    assert (topology.paths, topology.pairs) == (before.paths, before.pairs)
    for function in held[:4]:
        assert topology.roles[function.address] is Role.RAIL
        assert topology.rails[function.address] == before.rails[function.physical_function or ""]


def test_an_override_tells_the_switches_of_a_guest() -> None:
    inventory = inventory_of(layouts.azure_nd_h100_v5())
    gpus, nics = [gpu.address for gpu in inventory.gpus], [nic.address for nic in inventory.nics][:8]
    switches = [OverrideSwitch(f"s{i}", (gpus[i], nics[7 - i])) for i in range(8)]
    topology = analyze(inventory, TopologyOverride(switches=tuple(switches)))
    assert [pair.nics[0] for pair in topology.pairs] == nics[::-1]
    assert {pair.source for pair in topology.pairs} == {Source.OVERRIDE}
    assert len(set(topology.switches.values())) == 8
