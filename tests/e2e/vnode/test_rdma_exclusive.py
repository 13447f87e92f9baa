"""RDMA devices and a real kernel in exclusive mode: into a namespace, back, and back by themselves when it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.vnode import VirtualNode

_SCRIPT = Path(__file__).with_name("rdma_in_guest.py")


@pytest.fixture(scope="module")
def seen(virtual_node: VirtualNode) -> dict[str, Any]:
    """What one walk through the driver's steps has shown; see the script."""
    path = "PYTHONPATH=/usr/lib/railmate/own:/usr/lib/railmate/packages"
    said = virtual_node.channel.run("env", path, "python3", "-", stdin=_SCRIPT.read_bytes(), timeout=900)
    found: dict[str, Any] = json.loads(said)
    print(f"attach {found['attach_seconds']:.2f} s, look {found['look_seconds']:.2f} s, emulated")
    return found


def test_the_mode_is_known(seen: dict[str, Any]) -> None:
    assert seen["mode"] == "exclusive"


def test_a_soft_device_follows_its_netdev_and_the_host_no_longer_sees_it(seen: dict[str, Any]) -> None:
    assert seen["pod"] == [seen["device"]]
    assert seen["host_sees_it"] is False
    assert any(node.startswith("uverbs") for node in seen["char_devices"])


def test_the_gid_of_the_pods_address_is_found_from_outside_the_pod(seen: dict[str, Any]) -> None:
    assert seen["seen"] == [seen["device"], "Ethernet", "ACTIVE", ["192.168.78.1/24"]]
    assert seen["gid"] == ["0000:0000:0000:0000:0000:ffff:c0a8:4e01", "RoCE v2", "net1"]
    assert seen["gid_in_pod"] == seen["gid"][0], "and at that index in the pod's own sysfs"


def test_after_the_return_the_node_is_as_it_was(seen: dict[str, Any]) -> None:
    assert seen["returned"] == ["returned"]
    assert seen["after_return"] == []


def test_after_the_namespaces_end_the_node_is_as_it_was(seen: dict[str, Any]) -> None:
    assert seen["after_the_end"] == []


def test_a_device_that_survives_moves_alone_and_comes_back(seen: dict[str, Any]) -> None:
    assert seen["alone_pod"] == [seen["device"]]
    assert seen["alone_host_sees_it"] is False
    assert seen["alone_returned"] == [None]
    assert seen["alone_after_return"] == []


def test_a_device_that_survives_comes_back_when_the_namespace_ends(seen: dict[str, Any]) -> None:
    assert seen["alone_after_the_end"] == []


def test_a_claim_has_the_character_devices_that_its_device_has_after_its_move(seen: dict[str, Any]) -> None:
    """The move frees its numbers, and the lowest that are free are taken."""
    numbers = seen["numbers"]
    assert numbers["now"] != numbers["before"], "a lower number was free"
    wanted = [f"/dev/infiniband/{name}" for name in numbers["now"]]
    assert [path for path in numbers["spec"] if "uverbs" in path] == wanted
    assert numbers["spec"] == numbers["entry"]
    assert all(numbers["there"])
    assert seen["numbers_after"] == []
