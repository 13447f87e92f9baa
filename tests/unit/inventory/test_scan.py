"""What a scan finds in a healthy tree."""

from __future__ import annotations

import collections
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from harness.machines import MACHINES, load_machine, with_vfs
from harness.synthetic import synthetic
from harness.sysfs import list_char_devices, list_netdevs, write_tree
from railmate.errors import UsageError
from railmate.inventory.gpus import SHARED_NODES, nvidia_architecture
from railmate.inventory.model import GpuVendor, Inventory
from railmate.inventory.scan import scan
from unit.inventory.trees import (
    add_bond,
    add_kfd_node,
    add_netdev,
    add_rdma_device,
    function_directory,
    write,
)

DGX = MACHINES / "dgx-a100.yaml"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("demo")
    write_tree(load_machine(DGX, vfs_per_rail=4), root)
    return root


@pytest.fixture(scope="module")
def inventory(demo: Path) -> Inventory:
    return scan(demo / "sys", demo / "proc")


def written(tmp_path: Path, tree: str) -> Inventory:
    write_tree(synthetic(tree), tmp_path)
    return scan(tmp_path / "sys", tmp_path / "proc")


def test_nvidia_gpus_carry_what_their_driver_says(inventory: Inventory) -> None:
    assert len(inventory.gpus) == 8
    first = inventory.gpus[0]
    assert first.address == "0000:07:00.0"
    assert first.vendor is GpuVendor.NVIDIA
    assert first.device_nodes == ("nvidia0",)
    assert first.product == "NVIDIA A100-SXM4-40GB"
    assert first.architecture == "Ampere"
    assert first.driver_version == "535.183.01"
    assert first.uuid is not None
    assert first.uuid.startswith("GPU-")
    assert [gpu.index for gpu in inventory.gpus] == list(range(8))
    assert len({gpu.uuid for gpu in inventory.gpus}) == 8


def test_vfs_know_their_physical_function_and_index(inventory: Inventory) -> None:
    vfs = [nic for nic in inventory.nics if nic.is_vf]
    assert len(vfs) == 32
    pf = inventory.functions["0000:0c:00.0"]
    assert pf.virtual_functions == ("0000:0c:00.1", "0000:0c:00.2", "0000:0c:00.3", "0000:0c:00.4")
    assert pf.max_virtual_functions == 16
    ours = [nic for nic in vfs if nic.function.physical_function == pf.address]
    assert [nic.vf_index for nic in ours] == [0, 1, 2, 3]
    assert [nic.function.netdevs[0].name for nic in ours] == [f"enp12s0v{index}" for index in range(4)]
    assert all(nic.function.driver == "mlx5_core" for nic in ours)


def test_netdevs_and_rdma_devices_are_read_with_their_attributes(inventory: Inventory) -> None:
    function = inventory.functions["0000:0c:00.0"]
    (netdev,) = function.netdevs
    assert (netdev.name, netdev.mtu, netdev.speed, netdev.operstate, netdev.link_type) == (
        "enp12s0np0",
        9000,
        200000,
        "up",
        "ether",
    )
    (device,) = function.rdma_devices
    assert (device.name, device.link_layer, device.state, device.rate) == (
        "mlx5_0",
        "Ethernet",
        "ACTIVE",
        200,
    )
    assert device.char_devices == ("uverbs0", "umad0", "issm0")


def test_rdma_char_devices_are_nobodys_twice(inventory: Inventory) -> None:
    nodes = [n for f in inventory.functions.values() for d in f.rdma_devices for n in d.char_devices]
    assert len(nodes) == len(set(nodes)) == 3 * (10 + 32)


def test_a_bmcs_vga_and_a_hypervisors_console_are_no_gpus(tmp_path: Path) -> None:
    inventory = written(
        tmp_path,
        """
        pci0000:00
          00:01.0 030000 1a03:2000 -
          00:02.0 030000 8086:3e98 -
          00:03.0 030000 1d0f:1111 -
          00:04.0 030000 102b:0538 -
          00:05.0 030000 1234:1111 -
          00:06.0 038000 8086:0bda -
          00:07.0 038000 1002:740f -
          00:08.0 120000 1002:74a1 -
          00:09.0 030000 10de:2231 -
        """,
    )
    assert [(gpu.address, gpu.vendor) for gpu in inventory.gpus] == [
        ("0000:00:06.0", GpuVendor.INTEL),
        ("0000:00:07.0", GpuVendor.AMD),
        ("0000:00:08.0", GpuVendor.AMD),
        ("0000:00:09.0", GpuVendor.NVIDIA),
    ]


def test_amd_gpus_have_render_and_card_nodes_and_kfd_is_shared(tmp_path: Path) -> None:
    write_tree(load_machine(MACHINES / "tuolumne-mi300a.yaml"), tmp_path)
    inventory = scan(tmp_path / "sys", tmp_path / "proc")
    assert [gpu.device_nodes for gpu in inventory.gpus] == [
        (f"dri/renderD{128 + index}", f"dri/card{index}") for index in range(4)
    ]
    assert inventory.gpus[0].product == "AMD Instinct MI300A"
    assert SHARED_NODES[GpuVendor.AMD] == ("kfd",)


def test_a_gpu_without_its_vendors_driver_is_found_all_the_same(tmp_path: Path) -> None:
    write_tree(load_machine(DGX), tmp_path)
    shutil.rmtree(tmp_path / "proc/driver")
    inventory = scan(tmp_path / "sys", tmp_path / "proc")
    assert len(inventory.gpus) == 8
    assert inventory.gpus[0].uuid is inventory.gpus[0].index is inventory.gpus[0].driver_version is None
    assert inventory.gpus[0].device_nodes == ()
    assert inventory.warnings == ()


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (0x1DB1, "Volta"),
        (0x20B0, "Ampere"),
        (0x2330, "Hopper"),
        (0x2901, "Blackwell"),
        (0x27B8, "Ada Lovelace"),
        (0x0001, None),
    ],
)
def test_architecture_by_device_id(device: int, name: str | None) -> None:
    assert nvidia_architecture(device) == name


def test_a_function_whose_rdma_device_is_in_another_namespace_still_does_rdma(tmp_path: Path) -> None:
    write_tree(load_machine(DGX, vfs_per_rail=1), tmp_path)
    directory = (tmp_path / "sys/bus/pci/devices/0000:0c:00.1").resolve()
    for gone in ("net", "infiniband", "infiniband_verbs", "infiniband_mad"):
        shutil.rmtree(directory / gone)
    function = scan(tmp_path / "sys", tmp_path / "proc").functions["0000:0c:00.1"]
    assert function.rdma_devices == ()
    assert function.has_rdma


def test_a_soft_rdma_device_belongs_to_the_netdev_it_names(tmp_path: Path) -> None:
    write_tree(synthetic("pci0000:00\n  00:01.0 ethernet net=eno1"), tmp_path)
    device = tmp_path / "sys/devices/virtual/infiniband/rxe0"
    (device / "ports/1").mkdir(parents=True)
    (device / "parent").write_text("eno1\n")
    (device / "node_guid").write_text("0000:0000:0000:0000\n")
    (device / "ports/1/link_layer").write_text("Ethernet\n")
    (tmp_path / "sys/class/infiniband/rxe0").symlink_to("../../devices/virtual/infiniband/rxe0")
    verbs = tmp_path / "sys/class/infiniband_verbs/uverbs3"
    verbs.mkdir(parents=True)
    (verbs / "ibdev").write_text("rxe0\n")
    inventory = scan(tmp_path / "sys", tmp_path / "proc")
    (found,) = inventory.functions["0000:00:01.0"].rdma_devices
    assert (found.name, found.link_layer, found.node_guid, found.uverbs) == (
        "rxe0",
        "Ethernet",
        None,
        ("uverbs3",),
    )
    assert inventory.warnings == ()


def test_order_is_by_number_also_where_domains_have_more_digits(tmp_path: Path) -> None:
    inventory = written(
        tmp_path,
        "pci10000:00\n  01:00.0 nic net=a\npcia000:00\n  01:00.0 nic net=b\npci0002:00\n  01:00.0 nic net=c",
    )
    assert [nic.address for nic in inventory.nics] == ["0002:01:00.0", "a000:01:00.0", "10000:01:00.0"]


def test_a_tree_can_be_moved(demo: Path, tmp_path: Path, inventory: Inventory) -> None:
    shutil.copytree(demo, tmp_path / "elsewhere", symlinks=True)
    assert scan(tmp_path / "elsewhere/sys", tmp_path / "elsewhere/proc") == inventory


class Opened:
    """Counts how often each file below a directory is opened."""

    def __init__(self) -> None:
        self.files: collections.Counter[str] = collections.Counter()
        self._below: str | None = None
        sys.addaudithook(self._watch)  # stays for the life of the process

    def _watch(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._below is not None and event == "open" and str(arguments[0]).startswith(self._below):
            self.files[os.path.realpath(str(arguments[0]))] += 1

    def by_scan(self, root: Path) -> Inventory:
        self._below = str(root)
        try:
            return scan(root / "sys", root / "proc")
        finally:
            self._below = None


def test_no_file_is_read_twice(demo: Path) -> None:
    opened = Opened()
    inventory = opened.by_scan(demo)
    assert len(inventory.functions) == 313
    assert opened.files
    assert opened.files.most_common(1)[0][1] == 1


def test_no_file_is_read_twice_where_devices_are_found_by_their_class(tmp_path: Path) -> None:
    """Partitions, soft RDMA devices, several RDMA devices of one function, bonds, subfunctions."""
    tree = "pci0000:00\n  00:01.0 nic rdma=mlx5_0,mlx5_1 net=a,b\n  00:02.0 mi300x driver=amdgpu"
    write_tree(synthetic(tree), tmp_path)
    nic = function_directory(tmp_path, "0000:00:01.0")
    for number in range(3):
        add_kfd_node(tmp_path, number, "0000:00:02.0", 128 + number, number, 1 << 30)
    soft = add_rdma_device(tmp_path, tmp_path / "sys/devices/virtual", "rxe0")
    write(soft / "parent", "a")
    write(tmp_path / "sys/class/infiniband_verbs/uverbs9/ibdev", "rxe0")
    add_rdma_device(tmp_path, nic / "mlx5_core.sf.4", "mlx5_5")
    add_netdev(tmp_path, nic / "mlx5_core.sf.4", "s")
    add_bond(tmp_path, "bond0", "a", "b")
    opened = Opened()
    inventory = opened.by_scan(tmp_path)
    function = inventory.functions["0000:00:01.0"]
    assert [device.name for device in function.rdma_devices] == ["mlx5_0", "mlx5_1", "rxe0"]
    assert function.rdma_devices[2].uverbs == ("uverbs9",)
    assert len(inventory.gpus[0].partitions) == 3
    assert len(inventory.bonds) == len(function.subfunctions) == 1
    assert opened.files
    assert opened.files.most_common(1)[0][1] == 1


GROUP = """
pci{n:04x}:00 numa={numa}
  00:01.0 port
    01:00.0 port
      02:00.0 port
        03:00.0 gpu
      02:01.0 port
        04:00.0 nic rdma=mlx5_{n}0 net=enP{n}p4s0np0
      02:02.0 port
        05:00.0 nic rdma=mlx5_{n}1 net=enP{n}p5s0np0
      02:03.0 port
        06:00.0 nic rdma=mlx5_{n}2 net=enP{n}p6s0np0
      02:04.0 port
        07:00.0 nic rdma=mlx5_{n}3 net=enP{n}p7s0np0
"""


def test_a_full_machine_is_scanned_in_little_time(tmp_path: Path) -> None:
    """8 GPUs, 32 NICs, 512 VFs."""
    machine = synthetic("".join(GROUP.format(n=n, numa=n // 4) for n in range(8)))
    rails = [address for address, function in machine.functions.items() if function.rdma_devices]
    models = {"15b3:1021": {"driver": "mlx5_core", "vf": "15b3:101e"}}
    write_tree(with_vfs(machine, rails, 16, models), tmp_path)
    times: list[float] = []
    while len(times) < 20 and not any(taken < 0.3 for taken in times):  # others may have the processor
        begin = time.process_time()
        inventory = scan(tmp_path / "sys", tmp_path / "proc")
        times.append(time.process_time() - begin)
    assert len(inventory.gpus) == 8
    assert len(inventory.nics) == 32 + 512
    assert inventory.warnings == ()
    print(f"scan of 8 GPUs, 32 NICs, 512 VFs: {min(times) * 1000:.0f} ms of CPU")
    assert min(times) < 0.3  # of discovery, topology and slices together (hack/bench topology)


@pytest.mark.parametrize("root", ["nowhere", "empty", "file"])
def test_a_root_that_is_no_sysfs_gives_one_line(root: str, tmp_path: Path) -> None:
    (tmp_path / "empty/bus/pci/devices").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as raised:
        scan(tmp_path / root, tmp_path)
    message = str(raised.value)
    assert message.startswith(str(tmp_path / root))
    assert "--sysfs-root" in message
    assert "\n" not in message


def test_the_harness_lists_what_must_stand_in_for_the_machine() -> None:
    machine = load_machine(DGX, vfs_per_rail=4)
    nodes = list_char_devices(machine)
    assert len(nodes) == len(set(nodes)) == 8 + 3 + 3 * 42 + 1
    assert {
        "nvidia0",
        "nvidia7",
        "nvidiactl",
        "nvidia-uvm",
        "infiniband/uverbs0",
        "infiniband/rdma_cm",
    } <= set(nodes)
    netdevs = list_netdevs(machine)
    vfs = [netdev for netdev in netdevs if netdev.physical_function is not None]
    assert len(vfs) == 32
    assert len({netdev.name for netdev in netdevs}) == len({netdev.mac for netdev in netdevs}) == len(netdevs)
    assert all(netdev.mac.startswith("02:") and len(netdev.name) <= 15 for netdev in netdevs)
