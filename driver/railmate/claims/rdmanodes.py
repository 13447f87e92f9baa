"""The character devices of a prepared device's RDMA devices, where those have come anew under other numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from railmate.cdi.spec import DeviceNode
from railmate.claims.records import PreparedDevice


def has_rdma_nodes(device: PreparedDevice) -> bool:
    """Whether it has nodes of RDMA devices. A kernel without ib_uverbs has none to give."""
    return any(_is_of_one_device(node) for node in device.nodes)


def with_rdma_nodes(device: PreparedDevice, names: Sequence[str], dev_root: Path) -> PreparedDevice:
    """With the nodes ``names`` (uverbs3, umad3) below /dev/infiniband in place of those it had of RDMA devices; as it
    is where there are none. rdma_cm is no device's own and stays."""
    if not names:
        return device
    new = [DeviceNode.of(f"infiniband/{name}", dev_root) for name in names]
    kept = [node for node in device.nodes if not _is_of_one_device(node)]
    if {*kept, *new} == set(device.nodes):
        return device  # in the order that they had
    return replace(device, nodes=tuple(dict.fromkeys((*kept, *new))))


def _is_of_one_device(node: DeviceNode) -> bool:
    directory, _, name = node.path.rpartition("/")
    return directory == "/dev/infiniband" and name.rstrip("0123456789") in ("uverbs", "umad", "issm")
