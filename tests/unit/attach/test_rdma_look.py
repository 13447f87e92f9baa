"""Which entry of a GID table a pod should use, and what sysfs says of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from railmate.attach.rdmalook import (
    ROCE_V2,
    char_devices,
    gid_of,
    link_local,
    own_gids,
    pick_gid,
    read_gids,
)
from railmate.attach.rdmamodel import Gid

V1 = "IB/RoCE v1"
LOCAL = "fe80:0000:0000:0000:0000:00ff:fe00:0102"
V4 = "0000:0000:0000:0000:0000:ffff:0a09:0001"
V6 = "fd00:0000:0000:0000:0000:0000:0000:0009"
TABLE = [
    Gid(0, LOCAL, V1, "net1"),
    Gid(1, LOCAL, ROCE_V2, "net1"),
    Gid(2, V4, V1, "net1"),
    Gid(3, V4, ROCE_V2, "net1"),
    Gid(4, V6, V1, "net1"),
    Gid(5, V6, ROCE_V2, "net1"),
]


@pytest.mark.parametrize(
    ("addresses", "index"),
    [
        (("10.9.0.1/24", "fd00::9/64", "fe80::ff:fe00:102/64"), 3),
        (("fd00::9/64", "fe80::ff:fe00:102/64"), 5),
        (("fe80::ff:fe00:102/64",), 1),
        ((), 1),
        (("10.9.0.77/24",), 1),
    ],
)
def test_the_gid_is_roce_v2_and_of_the_pods_own_address(addresses: tuple[str, ...], index: int) -> None:
    picked = pick_gid(TABLE, addresses, "net1", "Ethernet")
    assert picked is not None
    assert picked.index == index


def test_an_entry_of_another_interface_is_not_the_pods() -> None:
    """In shared mode the table holds entries of every namespace's interfaces over the device."""
    others = [Gid(3, V4, ROCE_V2, "eth7"), Gid(9, V4, ROCE_V2, "net1")]
    picked = pick_gid(others, ("10.9.0.1/24",), "net1", "Ethernet")
    assert picked == others[1]
    assert pick_gid(others[:1], ("10.9.0.1/24",), "net1", "Ethernet") is None


def test_of_a_shared_ports_table_a_pod_uses_its_own_entries_though_all_interfaces_are_called_alike() -> None:
    other = "0000:0000:0000:0000:0000:ffff:0a09:0002"
    table = [
        Gid(1, "fe80:0000:0000:0000:0000:00ff:fe00:0999", ROCE_V2, "net1"),
        Gid(2, other, ROCE_V2, "net1"),
        *TABLE[1:4],
    ]
    own = own_gids(table, ("10.9.0.1/24",), "02:00:00:00:01:02")
    assert [gid.gid for gid in own] == [LOCAL, V4, V4]
    assert pick_gid(own, ("10.9.0.1/24",), "net1", "Ethernet") == TABLE[3]
    without_address = own_gids(table, (), "02:00:00:00:01:02")
    assert pick_gid(without_address, (), "net1", "Ethernet") == TABLE[1], "not the first pod's"
    assert own_gids(table, (), None) == []


def test_the_link_local_address_of_a_mac() -> None:
    assert gid_of(link_local("02:00:00:00:01:02")) == LOCAL
    assert link_local("a0:36:9f:00:01:02") == "fe80::a236:9fff:fe00:102/64"


def test_without_roce_v2_there_is_nothing_to_use() -> None:
    assert pick_gid([gid for gid in TABLE if gid.kind == V1], ("10.9.0.1/24",), "net1", "Ethernet") is None


def test_on_infiniband_the_ports_own_gid_is_used() -> None:
    table = [Gid(0, LOCAL, "IB/RoCE v1")]
    assert pick_gid(table, (), "", "InfiniBand") == table[0]


@pytest.mark.parametrize(
    ("address", "gid"), [("10.9.0.1/24", V4), ("fd00::9/64", V6), ("fe80::ff:fe00:102/64", LOCAL)]
)
def test_addresses_are_gids_as_sysfs_writes_them(address: str, gid: str) -> None:
    assert gid_of(address) == gid


@pytest.fixture
def sysfs(tmp_path: Path) -> Iterator[int]:
    port = tmp_path / "class/infiniband/rxe0/ports/1"
    for directory in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / directory).mkdir(parents=True)
    for index in range(4):
        (port / f"gids/{index}").write_text("0000:" * 7 + "0000\n")
    (port / "gids/1").write_text(f"{V4}\n")
    (port / "gid_attrs/types/1").write_text(f"{ROCE_V2}\n")
    (port / "gid_attrs/ndevs/1").write_text("net1\n")
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_the_table_is_read_without_its_empty_slots(sysfs: int) -> None:
    assert read_gids(sysfs, "class/infiniband/rxe0/ports/1") == [Gid(1, V4, ROCE_V2, "net1")]


def test_a_gap_is_no_end_of_the_table(sysfs: int, tmp_path: Path) -> None:
    port = tmp_path / "class/infiniband/rxe0/ports/1"
    for index in range(4, 1024):
        (port / f"gids/{index}").write_text("0000:" * 7 + "0000\n")
    (port / "gids/20").write_text(f"{V6}\n")
    (port / "gid_attrs/types/20").write_text(f"{ROCE_V2}\n")
    found = read_gids(sysfs, "class/infiniband/rxe0/ports/1")
    assert [gid.index for gid in found] == [1, 20]


def test_no_device_and_no_sysfs_have_no_gids(sysfs: int) -> None:
    assert read_gids(sysfs, "class/infiniband/rxe7/ports/1") == []
    assert read_gids(None, "class/infiniband/rxe0/ports/1") == []


def test_char_devices_are_those_of_the_device(tmp_path: Path) -> None:
    for group, node, device in (
        ("infiniband_verbs", "uverbs0", "rxe1"),
        ("infiniband_verbs", "uverbs4", "rxe0"),
        ("infiniband_mad", "umad4", "rxe0"),
        ("infiniband_mad", "issm4", "rxe0"),
    ):
        place = tmp_path / "class" / group / node
        place.mkdir(parents=True)
        (place / "ibdev").write_text(f"{device}\n")
    (tmp_path / "class/infiniband_verbs/abi_version").write_text("6\n")
    assert char_devices(tmp_path, "rxe0") == ("uverbs4", "issm4", "umad4")


def test_char_devices_of_a_function_are_found_without_reading_those_of_others(tmp_path: Path) -> None:
    """A node may have hundreds of VFs, and prepare asks under the ledger's lock."""
    function = tmp_path / "devices/0000:0c:00.1"
    place = tmp_path / "class/infiniband/mlx5_1"
    place.mkdir(parents=True)
    (place / "device").symlink_to(function)
    for directory, device in ((function, "mlx5_1"), (tmp_path / "class", "another's")):
        node = directory / "infiniband_verbs/uverbs1"
        node.mkdir(parents=True)
        (node / "ibdev").write_text(f"{device}\n")
    assert char_devices(tmp_path, "mlx5_1") == ("uverbs1",)
