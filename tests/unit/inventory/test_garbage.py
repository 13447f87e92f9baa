"""A broken tree: warnings that name the file, what is broken left out, never a traceback."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace as replace_facts
from pathlib import Path

import pytest

from harness.machines import with_vfs
from harness.synthetic import synthetic
from harness.sysfs import write_tree
from railmate.inventory.model import Inventory
from railmate.inventory.scan import scan
from railmate.topology.analyze import analyze
from railmate.topology.model import Source

GPU, OTHER_GPU = "0000:07:00.0", "0000:0f:00.0"
RAIL = "0000:0c:00.0"
# The first switch of a DGX A100 without the bridges that do not matter, and a second machine half.
_TREE = "\n".join(
    f"""
pci0000:{root} numa={numa}
  {root}:01.1 gen4
    {up}:00.0 gen4
      {down}:00.0 gen4
        {gpus[0]}:00.0 gpu
      {down}:04.0 gen4
        {nics[0]}:00.0 nic rdma=mlx5_{numa}0 net=enp{numa}0np0
      {down}:05.0 gen4
        {gpus[1]}:00.0 gpu
      {down}:08.0 gen4
        {nics[1]}:00.0 nic rdma=mlx5_{numa}1 net=enp{numa}1np0
"""
    for root, numa, up, down, gpus, nics in (
        ("00", 3, "01", "02", ("07", "0f"), ("0c", "12")),
        ("40", 1, "41", "42", ("47", "4e"), ("4b", "54")),
    )
)
GPUS = 4


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    machine = synthetic(_TREE)
    rails = [address for address, function in machine.functions.items() if function.rdma_devices]
    models = {"15b3:1021": {"driver": "mlx5_core", "vf": "15b3:101e"}}
    write_tree(replace_facts(with_vfs(machine, rails, 2, models), nvidia_driver="535.183.01"), tmp_path)
    return tmp_path


def rescan(tree: Path) -> Inventory:
    return scan(tree / "sys", tree / "proc")


def directory(tree: Path, address: str) -> Path:
    return (tree / "sys/bus/pci/devices" / address).resolve()


def replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def relink(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


@pytest.mark.parametrize(
    "content", [b"", b"rubbish\n", b"0xzz\n", b"\xff\xfe\x00", b"-5\n", b"0x123456789\n", b"9" * 9000]
)
@pytest.mark.parametrize("attribute", ["class", "vendor", "device", "numa_node", "subsystem_vendor"])
def test_an_attribute_that_makes_no_sense_is_named(attribute: str, content: bytes, tree: Path) -> None:
    path = directory(tree, GPU) / attribute
    replace(path, content)
    inventory = rescan(tree)
    assert any(str(path) in warning for warning in inventory.warnings)
    topology = analyze(inventory)
    assert all(pair.pcie_switch and pair.source is Source.SYSFS for pair in topology.pairs)


@pytest.mark.parametrize("attribute", ["subsystem_vendor", "subsystem_device"])
@pytest.mark.parametrize("content", [b"rubbish\n", b"", None])
def test_a_subsystem_that_cannot_be_read_is_unknown_and_not_zero(
    attribute: str, content: bytes | None, tree: Path
) -> None:
    path = directory(tree, RAIL) / attribute
    if content is None:
        path.unlink()
    else:
        replace(path, content)
    known = {address: function.subsystem_known for address, function in rescan(tree).functions.items()}
    assert not known.pop(RAIL)
    assert all(known.values())


def test_a_gpu_without_a_class_is_no_gpu_and_the_others_keep_their_nics(tree: Path) -> None:
    before = {pair.gpus: pair.nics for pair in analyze(rescan(tree)).pairs}
    replace(directory(tree, GPU) / "class", b"what\n")
    inventory = rescan(tree)
    assert len(inventory.gpus) == GPUS - 1
    after = {pair.gpus: pair.nics for pair in analyze(inventory).pairs}
    untouched = [gpus for gpus in before if gpus[0] not in (GPU, OTHER_GPU)]
    assert len(untouched) == 2
    assert all(after[gpus] == before[gpus] for gpus in untouched)


DEVICE_LINKS: dict[str, Callable[[Path], None]] = {
    "dangling": lambda link: relink(link, "../../../devices/pci0000:00/gone/0000:07:00.0"),
    "to itself": lambda link: relink(link, link.name),
    "to another device": lambda link: relink(link, str((link.parent / OTHER_GPU).readlink())),
    "out of the tree": lambda link: relink(link, "/etc"),
    "a directory": make_directory,
    "a file": lambda link: replace(link, b"x"),
    "through a loop": lambda link: relink(
        link, "../../../devices/pci0000:00/0000:00:01.1/../0000:00:01.1/0000:07:00.0"
    ),
}


@pytest.mark.parametrize("kind", DEVICE_LINKS)
def test_a_device_link_that_leads_nowhere_takes_only_that_device_out(kind: str, tree: Path) -> None:
    link = tree / "sys/bus/pci/devices" / GPU
    DEVICE_LINKS[kind](link)
    inventory = rescan(tree)
    assert inventory.gpus[0].address == OTHER_GPU
    assert len(inventory.gpus) == GPUS - 1
    assert any(str(link) in warning for warning in inventory.warnings)


@pytest.mark.parametrize("kind", DEVICE_LINKS)
def test_what_a_nic_leaves_behind_is_not_taken_for_its_bridges(kind: str, tree: Path) -> None:
    """The class directories still show its RDMA device."""
    DEVICE_LINKS[kind](tree / "sys/bus/pci/devices" / RAIL)
    inventory = rescan(tree)
    assert RAIL not in inventory.functions
    assert (tree / "sys/class/infiniband/mlx5_30").exists()
    assert [
        f.address for f in inventory.functions.values() if f.class_code == 0x060400 and f.rdma_devices
    ] == []
    assert all(nic.function.class_code >> 16 == 0x02 for nic in inventory.nics)


def test_links_that_loop_through_each_other(tree: Path) -> None:
    devices = tree / "sys/bus/pci/devices"
    relink(devices / GPU, OTHER_GPU)
    relink(devices / OTHER_GPU, GPU)
    assert len(rescan(tree).gpus) == GPUS - 2


def test_a_name_that_is_no_address(tree: Path) -> None:
    odd = tree / "sys/bus/pci/devices/not-an-address"
    odd.symlink_to("../../../devices/pci0000:00")
    inventory = rescan(tree)
    assert len(inventory.gpus) == GPUS
    assert any(str(odd) in warning for warning in inventory.warnings)


def test_a_vf_whose_physical_function_does_not_list_it_is_left_out(tree: Path) -> None:
    relink(directory(tree, RAIL) / "virtfn1", "../0000:12:00.1")
    inventory = rescan(tree)
    assert "0000:0c:00.2" not in inventory.functions
    assert all(nic.vf_index is not None for nic in inventory.nics if nic.is_vf)
    assert any("0000:0c:00" in warning for warning in inventory.warnings)
    analyze(inventory)


@pytest.mark.parametrize("target", ["nowhere", "../../..", "../0000:ff:1f.7"])
def test_a_physfn_link_that_makes_no_sense(target: str, tree: Path) -> None:
    relink(directory(tree, "0000:0c:00.1") / "physfn", target)
    inventory = rescan(tree)
    assert inventory.warnings
    analyze(inventory)


def test_a_vf_never_becomes_a_physical_function_by_a_broken_link(tree: Path) -> None:
    relink(directory(tree, "0000:0c:00.1") / "physfn", "rubbish")
    inventory = rescan(tree)
    assert "0000:0c:00.1" not in {nic.address for nic in inventory.nics if not nic.is_vf}


@pytest.mark.parametrize(
    "path",
    [
        "infiniband/mlx5_30/ports/1/link_layer",
        "infiniband/mlx5_30/node_guid",
        "net/enp30np0/mtu",
        "net/enp30np0/address",
    ],
)
def test_class_device_files_that_are_directories(path: str, tree: Path) -> None:
    file = directory(tree, RAIL) / path
    file.unlink()
    file.mkdir()
    inventory = rescan(tree)
    assert any(str(file) in warning for warning in inventory.warnings)
    assert len(analyze(inventory).pairs) == GPUS


def test_a_file_that_would_block_is_not_waited_for(tree: Path) -> None:
    file = directory(tree, GPU) / "numa_node"
    file.unlink()
    os.mkfifo(file)
    assert len(rescan(tree).gpus) == GPUS


def test_nvidias_file_without_a_minor_number(tree: Path) -> None:
    file = tree / "proc/driver/nvidia/gpus" / GPU / "information"
    file.write_text("nonsense\n: :\n")
    inventory = rescan(tree)
    assert inventory.gpus[0].device_nodes == ()
    assert any(str(file) in warning for warning in inventory.warnings)


def test_ten_thousand_broken_functions_are_counted_not_listed(tree: Path) -> None:
    devices = tree / "sys/bus/pci/devices"
    for number in range(10_000):
        (devices / f"{0x1000 + (number >> 8):04x}:{number & 255:02x}:00.0").symlink_to("nowhere")
    inventory = rescan(tree)
    assert len(inventory.gpus) == GPUS
    assert len(inventory.warnings) < 300
    assert "left out" in inventory.warnings[-1]


def test_ten_thousand_functions(tmp_path: Path) -> None:
    devices = tmp_path / "bus/pci/devices"
    devices.mkdir(parents=True)
    for number in range(10_000):
        address = f"{number >> 8:04x}:{number & 255:02x}:00.0"
        place = tmp_path / f"devices/pci{number >> 8:04x}:00/{address}"
        place.mkdir(parents=True)
        for attribute, value in (("class", "0x088000"), ("vendor", "0x8086"), ("device", "0x0001")):
            (place / attribute).write_text(value)
        (devices / address).symlink_to(f"../../../devices/pci{number >> 8:04x}:00/{address}")
    begin = time.process_time()
    inventory = scan(tmp_path, tmp_path / "proc")
    assert time.process_time() - begin < 5  # half a second where nothing else runs
    assert len(inventory.functions) == 10_000
    assert analyze(inventory).paths == ()


def test_one_bad_link_loses_one_vf_and_the_others_keep_their_indices(tree: Path) -> None:
    vfs = rescan(tree).functions[RAIL].virtual_functions
    assert len(vfs) == 2
    bad = directory(tree, RAIL) / "virtfn0"
    relink(bad, "../rubbish")
    inventory = rescan(tree)
    assert inventory.functions[RAIL].virtual_functions == vfs[1:]
    assert [nic.vf_index for nic in inventory.nics if nic.function.physical_function == RAIL] == [1]
    assert vfs[0] not in inventory.functions
    assert any(str(bad) in warning for warning in inventory.warnings)


def test_two_links_to_one_vf_tell_no_index(tree: Path) -> None:
    first, second = (directory(tree, RAIL) / f"virtfn{index}" for index in (0, 1))
    relink(second, str(first.readlink()))
    inventory = rescan(tree)
    assert inventory.functions[RAIL].virtual_functions == ()
    assert all(any(str(link) in warning for warning in inventory.warnings) for link in (first, second))
    assert len(analyze(inventory).pairs) == GPUS


@pytest.mark.parametrize("target", [GPU, "0000:12:00.0"])
def test_a_bad_link_to_another_device_does_not_take_that_device_out(target: str, tree: Path) -> None:
    relink(directory(tree, RAIL) / "virtfn0", f"../../02:08.0/{target}")
    inventory = rescan(tree)
    assert target in inventory.functions
    assert len(inventory.gpus) == GPUS
    assert any(target in warning for warning in inventory.warnings)


def test_a_vf_that_lost_its_physfn_link_is_no_physical_function(tree: Path) -> None:
    vf = rescan(tree).functions[RAIL].virtual_functions[0]
    (directory(tree, vf) / "physfn").unlink()
    inventory = rescan(tree)
    assert vf not in inventory.functions
    assert [nic.vf_index for nic in inventory.nics if nic.function.physical_function == RAIL] == [1]


@pytest.mark.parametrize("content", [b"\xff\xfe", b"two\nlines\n", b"\x1b[2J\n", b"x" * 300, b"!!\n"])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("net/enp30np0/address", "mac"),
        ("net/enp30np0/operstate", "operstate"),
        ("net/enp30np0/mtu", "mtu"),
        ("net/enp30np0/speed", "speed"),
        ("net/enp30np0/type", "link_type"),
        ("infiniband/mlx5_30/node_guid", "node_guid"),
        ("infiniband/mlx5_30/ports/1/state", "state"),
        ("infiniband/mlx5_30/ports/1/link_layer", "link_layer"),
        ("infiniband/mlx5_30/ports/1/rate", "rate"),
    ],
)
def test_what_makes_no_sense_is_unknown_and_named(path: str, field: str, content: bytes, tree: Path) -> None:
    file = directory(tree, RAIL) / path
    if not file.exists():
        file.write_text("")
    replace(file, content)
    inventory = rescan(tree)
    function = inventory.functions[RAIL]
    (device,) = function.netdevs if path.startswith("net/") else function.rdma_devices
    assert getattr(device, field) is None
    assert any(str(file) in warning for warning in inventory.warnings)
    assert len(analyze(inventory).pairs) == GPUS


@pytest.mark.parametrize("number", ["1_0", "\u0661", "1 0", "0b1", "1e3", "--1"])
def test_only_plain_numbers_are_numbers(number: str, tree: Path) -> None:
    replace(directory(tree, GPU) / "numa_node", number.encode())
    assert rescan(tree).functions[GPU].numa_node is None


@pytest.mark.parametrize("target", ["../../../../kernel/iommu_groups/rubbish", "..", "iommu_group"])
def test_an_iommu_group_that_is_none(target: str, tree: Path) -> None:
    link = directory(tree, GPU) / "iommu_group"
    link.symlink_to(target)
    inventory = rescan(tree)
    assert inventory.functions[GPU].iommu_group is None
    assert any(str(link) in warning for warning in inventory.warnings)


@pytest.mark.parametrize("attribute", ["numa_node", "vendor", "net/enp30np0/mtu"])
def test_a_file_that_cannot_be_read_is_named(attribute: str, tree: Path) -> None:
    """Reading a process's memory at address 0 fails for root too."""
    file = directory(tree, RAIL) / attribute
    relink(file, "/proc/self/mem")
    inventory = rescan(tree)
    assert any(str(file) in warning and "cannot be read" in warning for warning in inventory.warnings)
    assert RAIL in inventory.functions


@pytest.mark.parametrize("seed", range(20))
def test_random_damage_never_raises_and_never_pairs_across_switches(seed: int, tree: Path) -> None:
    """Bytes, links and directories are broken at random; what is still paired is paired rightly."""
    right = {pair.gpus[0]: pair.pcie_switch for pair in analyze(rescan(tree)).pairs}
    chance = random.Random(seed)
    everything = sorted(path for path in (tree / "sys").rglob("*") if path.is_symlink() or path.is_file())
    for path in chance.sample(everything, 25):
        if not (path.is_symlink() or path.exists()):
            continue
        path.unlink()
        kind = chance.choice(["gone", "bytes", "dangling", "loop", "directory"])
        if kind == "bytes":
            path.write_bytes(chance.randbytes(chance.randrange(64)))
        elif kind == "dangling":
            path.symlink_to("../nowhere")
        elif kind == "loop":
            path.symlink_to(path.name)
        elif kind == "directory":
            path.mkdir()
    inventory = rescan(tree)
    for pair in analyze(inventory).pairs:
        assert pair.pcie_switch is not None
        assert pair.pcie_switch[5:6] == (right[pair.gpus[0]] or "")[5:6]
