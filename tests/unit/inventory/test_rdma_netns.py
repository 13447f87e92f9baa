"""What decides how an RDMA device comes into a pod: whether it is made in software, and what namespaces share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.synthetic import synthetic
from harness.sysfs import write_tree
from railmate.inventory import rdmanetlink, seen
from railmate.inventory import scan as scan_module
from railmate.inventory.merge import keep_facts
from railmate.inventory.rdmanetlink import NetnsMode
from railmate.inventory.scan import scan
from railmate.publish.devices import build_offer
from railmate.topology.analyze import analyze
from unit.inventory.trees import add_rdma_device, write

NIC, PORT = "0000:00:01.0", "0000:00:02.0"
MODE = "railmate.dev/rdmaNetnsMode"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tree = "pci0000:00 numa=0\n  00:01.0 ethernet net=eno1\n  00:02.0 nic rdma=mlx5_0 net=enp0s2\n"
    write_tree(synthetic(tree), tmp_path)
    return tmp_path


@pytest.fixture
def live(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(scan_module, "LIVE_SYSFS", str(root / "sys"))
    monkeypatch.setattr(rdmanetlink, "netns_mode", lambda: NetnsMode.EXCLUSIVE)
    return root


@pytest.mark.parametrize(("node_type", "soft"), [("1: CA", "rxe"), ("4: RNIC", "siw")])
def test_a_soft_device_is_known_and_of_which_kind_it_is(root: Path, node_type: str, soft: str) -> None:
    place = add_rdma_device(root, root / "sys/devices/virtual", "soft0")
    write(place / "parent", "eno1")
    write(place / "node_type", node_type)
    inventory = scan(root / "sys", root / "proc")
    (device,) = inventory.functions[NIC].rdma_devices
    assert (device.name, device.soft) == ("soft0", soft)
    assert seen.from_json(seen.to_json(inventory)).functions[NIC].rdma_devices == (device,)


def test_the_device_of_a_function_is_not_soft(root: Path) -> None:
    (device,) = scan(root / "sys", root / "proc").functions[PORT].rdma_devices
    assert device.soft is None


def test_the_mode_is_the_live_machines(live: Path) -> None:
    assert scan(live / "sys", live / "proc").rdma_netns_mode == "exclusive"


def test_another_machines_tree_has_no_mode(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdmanetlink, "netns_mode", lambda: pytest.fail("asked"))
    assert scan(root / "sys", root / "proc").rdma_netns_mode is None


def test_a_machine_without_rdma_devices_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(synthetic("pci0000:00\n  00:01.0 ethernet net=eno1\n"), tmp_path)
    monkeypatch.setattr(scan_module, "LIVE_SYSFS", str(tmp_path / "sys"))
    monkeypatch.setattr(rdmanetlink, "netns_mode", lambda: pytest.fail("asked"))
    assert scan(tmp_path / "sys", tmp_path / "proc").rdma_netns_mode is None


def test_a_mode_that_was_changed_is_what_the_next_look_says(
    live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = scan(live / "sys", live / "proc")
    monkeypatch.setattr(rdmanetlink, "netns_mode", lambda: NetnsMode.SHARED)
    after = keep_facts(before, scan(live / "sys", live / "proc"))
    assert after.rdma_netns_mode == "shared"
    assert build_offer(after, analyze(after)) != build_offer(before, analyze(before)), "so it is published"


def test_the_mode_is_published_of_what_has_rdma_and_only_where_it_is_known(live: Path) -> None:
    inventory = scan(live / "sys", live / "proc")
    published = [device.attributes.get(MODE) for device in build_offer(inventory, analyze(inventory)).devices]
    assert published
    assert set(published) == {"exclusive"}
    unknown = replace(inventory, rdma_netns_mode=None)
    assert all(MODE not in device.attributes for device in build_offer(unknown, analyze(unknown)).devices)
