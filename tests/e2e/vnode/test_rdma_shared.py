"""Pods that share a physical function, on a real kernel: each has the GID of its own address in the one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.vnode import VirtualNode

# The mode can be changed only while nothing else has a network namespace in the node.
pytestmark = pytest.mark.long

_SCRIPT = Path(__file__).with_name("shared_in_guest.py")
_GIDS = {
    "share-1": "0000:0000:0000:0000:0000:ffff:c0a8:4f01",
    "share-2": "0000:0000:0000:0000:0000:ffff:c0a8:4f02",
}


@pytest.fixture(scope="module")
def seen(virtual_node: VirtualNode) -> dict[str, Any]:
    """What one walk through the driver's steps has shown; see the script."""
    path = "PYTHONPATH=/usr/lib/railmate/own:/usr/lib/railmate/packages"
    said = virtual_node.channel.run("env", path, "python3", "-", stdin=_SCRIPT.read_bytes(), timeout=900)
    found: dict[str, Any] = json.loads(said)
    return found


def test_in_exclusive_mode_nothing_is_offered_and_prepare_refuses(seen: dict[str, Any]) -> None:
    assert seen["mode"] == "exclusive"
    assert seen["offered in exclusive mode"] == []
    assert "cannot be shared: the node's RDMA devices are in exclusive mode" in seen["refused"]
    assert "rdma system set netns shared" in seen["refused"]


def test_in_shared_mode_the_port_is_offered(seen: dict[str, Any]) -> None:
    assert len(seen["offered in shared mode"]) == 1


@pytest.mark.parametrize("share", list(_GIDS))
def test_each_pod_has_the_gid_of_its_own_address(seen: dict[str, Any], share: str) -> None:
    """Both interfaces are called net1, and both pods see all of the table."""
    one = seen["pods"][share]
    assert one["seen"][:3] == ["roce-rail3", "Ethernet", "ACTIVE"]
    index, gid, kind, netdev = one["gid"]
    assert (gid, kind, netdev) == (_GIDS[share], "RoCE v2", "net1")
    assert one["in pod"] == gid, "and at that index in the pod's own sysfs"
    assert seen["again"][share]["gid"] == [index, gid, kind, netdev], "also when the other pod is there"


def test_the_pods_entries_are_apart(seen: dict[str, Any]) -> None:
    one, other = (seen["pods"][share]["gid"][0] for share in _GIDS)
    assert one != other


def test_nothing_is_left_and_the_port_is_as_it_was(seen: dict[str, Any]) -> None:
    assert seen["left"] == []
    assert seen["after"] == []
    assert seen["changed"] == []
