"""Netdevs and RDMA devices that do not sit straight below their PCI function; bonds, cards, subfunctions."""

from __future__ import annotations

import errno
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.synthetic import synthetic
from harness.sysfs import write_tree
from railmate.inventory import rdmanetlink
from railmate.inventory import scan as scan_module
from railmate.inventory.cards import cards
from railmate.inventory.model import Inventory
from railmate.inventory.net import netdev_of
from railmate.inventory.scan import scan
from unit.inventory.trees import add_bond, add_netdev, add_rdma_device, function_directory, link, write

TREE = """
pci0000:00 numa=0
  00:01.0 ethernet net=eno1
  00:02.0 nic rdma=mlx5_0 net=enp0s2f0np0
  00:02.1 nic net=enp0s2f1np1
"""
PLAIN, PORT0, PORT1 = "0000:00:01.0", "0000:00:02.0", "0000:00:02.1"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_tree(synthetic(TREE), tmp_path)
    return tmp_path


def inventory_of(root: Path) -> Inventory:
    return scan(root / "sys", root / "proc")


def names(inventory: Inventory, address: str) -> list[str]:
    return [device.name for device in inventory.functions[address].rdma_devices]


# --- netdevs
def test_a_netdev_below_a_virtio_device_is_its_functions(root: Path) -> None:
    directory = function_directory(root, PLAIN)
    shutil.rmtree(directory / "net")
    add_netdev(root, directory / "virtio3", "eth0", mtu="1460")
    inventory = inventory_of(root)
    (netdev,) = inventory.functions[PLAIN].netdevs
    assert (netdev.name, netdev.mtu) == ("eth0", 1460)
    assert PLAIN in [nic.address for nic in inventory.nics]


def test_a_ports_own_netdev_comes_before_the_representors_of_its_vfs(root: Path) -> None:
    directory = function_directory(root, PORT0)
    write(directory / "net/enp0s2f0np0/phys_port_name", "p0")
    add_netdev(root, directory, "aaa0", phys_port_name="pf0vf0")
    add_netdev(root, directory, "aaa1", phys_port_name="c1pf0sf88")
    netdevs = inventory_of(root).functions[PORT0].netdevs
    assert [(netdev.name, netdev.is_representor) for netdev in netdevs] == [
        ("enp0s2f0np0", False),
        ("aaa0", True),
        ("aaa1", True),
    ]


def test_the_netdev_of_a_port_is_never_the_representor_of_a_vf(root: Path) -> None:
    directory = function_directory(root, PORT0)
    assert netdev_of(root / "sys", PORT0) == "enp0s2f0np0"
    add_netdev(root, directory, "aaa0", phys_port_name="pf0vf0")
    assert netdev_of(root / "sys", PORT0) == "enp0s2f0np0"
    shutil.rmtree(directory / "net/enp0s2f0np0")
    add_netdev(root, directory, "aaa1", phys_port_name="pf0vf1")
    assert netdev_of(root / "sys", PORT0) is None
    shutil.rmtree(directory / "net")
    assert netdev_of(root / "sys", PORT0) is None


@pytest.mark.parametrize("speed", ["-1", "4294967295", "0"])
def test_a_link_that_is_down_has_no_speed(speed: str, root: Path) -> None:
    write(function_directory(root, PLAIN) / "net/eno1/speed", speed)
    inventory = inventory_of(root)
    assert inventory.functions[PLAIN].netdevs[0].speed is None
    assert inventory.warnings == ()


# --- bonds and cards
def test_a_bond_names_its_ports_and_the_rdma_device_that_serves_them(root: Path) -> None:
    shutil.rmtree(function_directory(root, PORT0) / "infiniband")
    (root / "sys/class/infiniband/mlx5_0").unlink()
    add_rdma_device(root, function_directory(root, PORT0), "mlx5_bond_0")
    add_bond(root, "bond0", "enp0s2f0np0", "enp0s2f1np1")
    add_bond(root, "br0", "eno1", kind="bridge")
    inventory = inventory_of(root)
    (bond,) = inventory.bonds
    assert bond.name == "bond0"
    assert bond.netdevs == ("enp0s2f0np0", "enp0s2f1np1")
    assert bond.functions == (PORT0, PORT1)
    assert bond.rdma_devices == ("mlx5_bond_0",)
    assert inventory.functions[PLAIN].netdevs[0].master == "br0"


def test_functions_of_one_device_and_sockets_of_one_card_are_one_card(tmp_path: Path) -> None:
    tree = """
    pci0000:00
      00:01.0 nic rdma=mlx5_0
      00:01.1 nic rdma=mlx5_1
      00:02.0 nic rdma=mlx5_2
    pci0033:00
      00:01.0 nic rdma=mlx5_3
    """
    write_tree(synthetic(tree), tmp_path)
    for address, name, guid in (
        ("0000:00:01.0", "mlx5_0", "a"),
        ("0000:00:01.1", "mlx5_1", "a"),
        ("0000:00:02.0", "mlx5_2", "b"),
        ("0033:00:01.0", "mlx5_3", "a"),
    ):
        place = function_directory(tmp_path, address) / "infiniband" / name
        write(place / "sys_image_guid", f"000{guid}:0000:0000:0001")
    assert cards(inventory_of(tmp_path).nics) == (
        ("0000:00:01.0", "0000:00:01.1", "0033:00:01.0"),
        ("0000:00:02.0",),
    )


def test_vfs_are_no_ports(scanned: Callable[[str, int], Inventory]) -> None:
    inventory = scanned("dgx-a100", 4)
    assert len([nic for nic in inventory.nics if nic.is_vf]) == 32
    found = cards(inventory.nics)
    assert ("0000:0c:00.0",) in found
    assert ("0000:e1:00.0", "0000:e1:00.1") in found  # the storage card's ports


def test_cards_without_guids_are_told_by_address(root: Path) -> None:
    assert cards(inventory_of(root).nics) == ((PLAIN,), (PORT0, PORT1))


# --- subfunctions
def test_a_subfunction_has_its_own_netdev_and_rdma_device(root: Path) -> None:
    part = function_directory(root, PORT0) / "mlx5_core.sf.4"
    write(part / "sfnum", "88")
    add_netdev(root, part, "enp0s2f0s88")
    add_rdma_device(root, part, "mlx5_2")
    write(part / "infiniband_verbs/uverbs7/ibdev", "mlx5_2")
    inventory = inventory_of(root)
    function = inventory.functions[PORT0]
    (found,) = function.subfunctions
    assert (found.name, found.number) == ("mlx5_core.sf.4", 88)
    assert [netdev.name for netdev in found.netdevs] == ["enp0s2f0s88"]
    assert [(device.name, device.uverbs) for device in found.rdma_devices] == [("mlx5_2", ("uverbs7",))]
    assert [netdev.name for netdev in function.netdevs] == ["enp0s2f0np0"]
    assert names(inventory, PORT0) == ["mlx5_0"]
    assert inventory.warnings == ()


def test_a_subfunctions_rdma_device_that_only_the_class_link_shows_is_not_the_functions(root: Path) -> None:
    part = function_directory(root, PORT0) / "mlx5_core.sf.4"
    place = add_rdma_device(root, part / "elsewhere", "mlx5_2")
    assert place.is_dir()
    inventory = inventory_of(root)
    assert names(inventory, PORT0) == ["mlx5_0"]
    (found,) = inventory.functions[PORT0].subfunctions
    assert [device.name for device in found.rdma_devices] == ["mlx5_2"]


# --- soft and moved RDMA devices
def soft(root: Path, name: str) -> Path:
    return add_rdma_device(root, root / "sys/devices/virtual", name)


def test_a_device_link_tells_the_function_where_the_class_entry_is_a_directory(root: Path) -> None:
    place = root / "sys/class/infiniband/mlx5_9"
    write(place / "node_guid", "0200:00ff:fe00:0009")
    link(place / "device", function_directory(root, PORT1))
    assert names(inventory_of(root), PORT1) == ["mlx5_9"]


def test_a_soft_device_names_its_netdev_in_the_gid_table(root: Path) -> None:
    table = soft(root, "siw0") / "ports/1/gid_attrs/ndevs"
    write(table / "0", "bond7")
    write(table / "1", "")
    write(table / "2", "eno1")
    assert names(inventory_of(root), PLAIN) == ["siw0"]


def test_a_soft_device_over_no_nic_belongs_to_nobody(root: Path) -> None:
    write(soft(root, "rxe0") / "parent", "lo")
    inventory = inventory_of(root)
    assert all("rxe0" not in names(inventory, address) for address in inventory.functions)
    assert inventory.warnings == ()


def test_the_kernel_is_asked_for_the_live_tree_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soft(root, "siw0")
    monkeypatch.setattr(rdmanetlink, "netdevs_by_rdma_device", lambda: {"siw0": "eno1"})
    assert names(inventory_of(root), PLAIN) == []
    monkeypatch.setattr(scan_module, "LIVE_SYSFS", str(root / "sys"))
    assert names(inventory_of(root), PLAIN) == ["siw0"]


def test_a_kernel_that_does_not_answer_is_a_warning(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> dict[str, str]:
        raise OSError(errno.EPROTONOSUPPORT, "Protocol not supported")

    soft(root, "siw0")
    monkeypatch.setattr(rdmanetlink, "netdevs_by_rdma_device", refuse)
    monkeypatch.setattr(scan_module, "LIVE_SYSFS", str(root / "sys"))
    inventory = inventory_of(root)
    assert any("RDMA netlink" in warning for warning in inventory.warnings)


def test_the_kernel_is_not_asked_when_sysfs_tells_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdmanetlink, "netdevs_by_rdma_device", lambda: pytest.fail("asked"))
    monkeypatch.setattr(scan_module, "LIVE_SYSFS", str(root / "sys"))
    assert inventory_of(root).warnings == ()


# --- RDMA netlink; numbers from include/uapi/rdma/rdma_netlink.h and linux/netlink.h
GET, PORT_GET, DONE, ERROR = 0x1401, 0x1405, 3, 2


def message(kind: int, *attributes: tuple[int, bytes], sequence: int = 1) -> bytes:
    body = b""
    for number, value in attributes:
        body += struct.pack("=HH", 4 + len(value), number) + value + bytes(-len(value) % 4)
    return struct.pack("=IHHII", 16 + len(body), kind, 2, sequence, 0) + body


class Kernel:
    """Answers dumps of devices and of a device's ports."""

    def __init__(self, devices: dict[int, tuple[str, list[str | None]]]) -> None:
        self.devices, self.answers = devices, [b""]
        self.answers.clear()

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...

    def setsockopt(self, *_: int) -> None: ...

    def settimeout(self, _: float) -> None: ...

    def bind(self, _: object) -> None: ...

    def send(self, request: bytes) -> None:
        length, kind, flags, sequence, _ = struct.unpack_from("=IHHII", request)
        assert (length, flags) == (len(request), 0x301)
        if kind == GET:
            for index, (name, _) in self.devices.items():
                self.answers.append(
                    message(
                        GET,
                        (1, struct.pack("=I", index)),
                        (2, name.encode() + b"\0"),
                        sequence=sequence,
                    )
                )
        elif kind == PORT_GET:
            size, attribute, index = struct.unpack_from("=HHI", request, 16)
            assert (size, attribute) == (8, 1)
            ports = b""
            for number, netdev in enumerate(self.devices[index][1], 1):
                known = () if netdev is None else ((51, netdev.encode() + b"\0"),)
                ports += message(
                    PORT_GET,
                    (1, struct.pack("=I", index)),
                    (3, struct.pack("=I", number)),
                    *known,
                    sequence=sequence,
                )
            self.answers.append(ports)
        self.answers.append(struct.pack("=IHHIIi", 20, DONE, 2, sequence, 0, 0))

    def recv(self, _: int) -> bytes:
        return self.answers.pop(0)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kernel], None]:
    return lambda kernel: monkeypatch.setattr(socket, "socket", lambda *_: kernel)


def test_rdma_netlink_names_the_netdev_of_each_device(kernel: Callable[[Kernel], None]) -> None:
    kernel(Kernel({0: ("siw0", ["eno1"]), 4: ("ibp3s0", [None]), 5: ("rocep1s0", [None, "enp1s0d1"])}))
    assert rdmanetlink.netdevs_by_rdma_device() == {"siw0": "eno1", "rocep1s0": "enp1s0d1"}


def test_rdma_netlink_raises_what_the_kernel_answers(kernel: Callable[[Kernel], None]) -> None:
    refusing = Kernel({})
    refusing.send = lambda _: refusing.answers.append(  # type: ignore[method-assign]
        struct.pack("=IHHIIi", 20, ERROR, 0, 1, 0, -errno.EPERM)
    )
    kernel(refusing)
    with pytest.raises(PermissionError):
        rdmanetlink.netdevs_by_rdma_device()


def has_rdma_netlink() -> bool:
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 20).close()
    except OSError:
        return False
    return True


def test_rdma_netlink_of_this_kernel() -> None:
    if has_rdma_netlink():
        found = rdmanetlink.netdevs_by_rdma_device()
        assert set(found.values()) <= {name for _, name in socket.if_nameindex()}
    else:
        with pytest.raises(OSError, match="not supported"):
            rdmanetlink.netdevs_by_rdma_device()
