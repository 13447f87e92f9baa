"""Real machines: railmate says of each tree what the published tables and their owners say."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.machines import MACHINES, Machine, load_machine
from harness.synthetic import inventory_of
from harness.sysfs import write_tree
from railmate.inventory.model import Inventory
from railmate.inventory.scan import scan
from railmate.topology.analyze import analyze
from railmate.topology.model import GpuNicPath, Pair, Role, Source, Topology

FILES = sorted(MACHINES.glob("*.yaml"))
# GPUs, NICs in the published answers. A machine that lost its answers must not pass.
SIZES = {
    "aws-p4d": (8, 4),
    "aws-p5en": (8, 16),
    "b200-8gpu": (8, 18),
    "dgx-a100": (8, 10),
    "lassen-p9": (4, 4),
    "tuolumne-mi300a": (4, 4),
}


@pytest.fixture(scope="module", params=FILES, ids=lambda path: path.stem)
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Machine, Inventory, Topology]:
    machine = load_machine(request.param)
    root = tmp_path_factory.mktemp(machine.name)
    write_tree(machine, root)
    inventory = scan(root / "sys", root / "proc")
    return machine, inventory, analyze(inventory)


def test_all_six_machines_are_there() -> None:
    assert [path.stem for path in FILES] == sorted(SIZES)


def test_a_scan_of_the_tree_finds_the_facts_again(real: tuple[Machine, Inventory, Topology]) -> None:
    machine, inventory, _ = real
    assert inventory.warnings == ()
    assert dict(inventory.functions) == dict(machine.functions)
    assert [gpu.address for gpu in inventory.gpus] == machine.expected["gpus"]


def test_distances_are_those_of_nvidia_smi(real: tuple[Machine, Inventory, Topology]) -> None:
    machine, _, topology = real
    gpus, nics = machine.expected["gpus"], machine.expected["nics"]
    paths = {(path.gpu, path.nic): path for path in topology.paths}
    found = [[str(paths[gpu, nic].distance) for nic in nics] for gpu in gpus]
    assert found == machine.expected["smi"]
    assert (len(found), len(found[0])) == SIZES[machine.name]


def test_distances_are_those_of_nccl(real: tuple[Machine, Inventory, Topology]) -> None:
    machine, _, topology = real
    gpus, nics = machine.expected["gpus"], machine.expected["nics"]
    paths = {(path.gpu, path.nic): path for path in topology.paths}
    found = [[str(paths[gpu, nic].nccl_distance) for nic in nics] for gpu in gpus]
    assert found == machine.expected["nccl"]
    assert (len(found), len(found[0])) == SIZES[machine.name]


def test_the_shared_switch_of_every_gpu_and_nic(real: tuple[Machine, Inventory, Topology]) -> None:
    machine, _, topology = real
    gpus, nics = machine.expected["gpus"], machine.expected["nics"]
    paths = {(path.gpu, path.nic): path for path in topology.paths}
    found = [[paths[gpu, nic].pcie_switch for nic in nics] for gpu in gpus]
    assert found == machine.expected["sameSwitch"]
    assert (len(found), len(found[0])) == SIZES[machine.name]


def test_the_source_of_an_answer_is_sysfs_only_where_a_switch_is_shared(
    real: tuple[Machine, Inventory, Topology],
) -> None:
    _, inventory, topology = real
    physical = [nic for nic in inventory.nics if not nic.is_vf]
    assert len(topology.paths) == len(inventory.gpus) * len(physical)
    answers: list[GpuNicPath | Pair] = [*topology.paths, *topology.pairs]
    for answer in answers:
        assert answer.source is (Source.NUMA if answer.pcie_switch is None else Source.SYSFS)


def test_roles(real: tuple[Machine, Inventory, Topology]) -> None:
    machine, inventory, topology = real
    roles = {address: str(role) for address, role in topology.roles.items()}
    assert [roles[nic] for nic in machine.expected["nics"]] == machine.expected["roles"]
    assert sorted(roles) == sorted(nic.address for nic in inventory.nics)
    assert len(machine.expected["roles"]) == SIZES[machine.name][1]
    assert all(roles[nic] != "rail" for nic in roles if nic not in machine.expected["nics"])


def test_pairs(real: tuple[Machine, Inventory, Topology]) -> None:
    machine, _, topology = real
    found = [{"gpus": list(pair.gpus), "nics": list(pair.nics)} for pair in topology.pairs]
    assert found == machine.expected["pairs"]
    assert sum(len(pair["gpus"]) for pair in found) == SIZES[machine.name][0]


def test_of_two_nics_on_a_gpus_switch_the_one_with_fewer_bridges_between_is_its_own() -> None:
    """DGX A100: of each chip's two levels one GPU and one NIC have the lower one in common."""
    topology = analyze(inventory_of(load_machine(MACHINES / "dgx-a100.yaml")))
    found = {pair.gpus[0][5:7]: pair.nics[0][5:7] for pair in topology.pairs}
    assert [found[gpu] for gpu in ("0f", "4e", "90", "bd")] == ["0c", "4b", "8d", "ba"]
    assert len(found) == len(set(found.values())) == 8


def test_every_pair_is_among_the_right_ones(real: tuple[Machine, Inventory, Topology]) -> None:
    machine, _, topology = real
    best = machine.expected["best"]
    assert len(best) == SIZES[machine.name][0]
    for pair in topology.pairs:
        for gpu in pair.gpus:
            assert set(pair.nics) <= set(best[gpu])


def test_no_nic_is_in_two_pairs_and_only_rails_are(real: tuple[Machine, Inventory, Topology]) -> None:
    _, _, topology = real
    nics = [nic for pair in topology.pairs for nic in pair.nics]
    assert len(nics) == len(set(nics))
    assert set(nics) == {a for a, role in topology.roles.items() if role is Role.RAIL}


def test_machine_class(real: tuple[Machine, Inventory, Topology]) -> None:
    machine, _, topology = real
    assert str(topology.machine_class) == machine.expected["machineClass"]
    assert bool(topology.notes) == (topology.machine_class != "switched")


def test_rails_count_from_zero_and_a_gpu_has_its_nics(real: tuple[Machine, Inventory, Topology]) -> None:
    machine, _, topology = real
    ordinals = [topology.rails[nic] for nic in machine.rails]
    assert ordinals == sorted(ordinals)
    assert sorted(set(ordinals)) == list(range(len(set(ordinals))))
    for pair in topology.pairs:
        assert all(topology.rails[gpu] == topology.rails[pair.nics[0]] for gpu in pair.gpus)


def test_vfs_have_the_place_of_their_physical_function(tmp_path: Path) -> None:
    write_tree(load_machine(MACHINES / "dgx-a100.yaml", vfs_per_rail=4), tmp_path)
    inventory = scan(tmp_path / "sys", tmp_path / "proc")
    topology = analyze(inventory)
    vfs = [nic for nic in inventory.nics if nic.is_vf]
    assert len(vfs) == 32
    for vf in vfs:
        pf = vf.function.physical_function
        assert pf is not None
        assert topology.roles[vf.address] is topology.roles[pf] is Role.RAIL
        assert topology.switches[vf.address] == topology.switches[pf]
        assert topology.rails[vf.address] == topology.rails[pf]
    assert not {vf.address for vf in vfs} & {path.nic for path in topology.paths}


@pytest.mark.parametrize("vfs", [1, 4, 16])
def test_vfs_change_no_answer(vfs: int, tmp_path: Path) -> None:
    machine = MACHINES / "dgx-a100.yaml"
    write_tree(load_machine(machine), tmp_path / "without")
    write_tree(load_machine(machine, vfs), tmp_path / "with")
    without, with_vfs = (
        analyze(scan(tmp_path / name / "sys", tmp_path / name / "proc")) for name in ("without", "with")
    )
    assert without.paths == with_vfs.paths
    assert without.pairs == with_vfs.pairs
    assert len(without.paths) == 88
    assert without.switches.items() <= with_vfs.switches.items()
