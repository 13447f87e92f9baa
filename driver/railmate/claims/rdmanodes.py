"""The character devices of a prepared device's RDMA devices, where those have come anew under other numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from railmate.cdi.spec import DeviceNode
from railmate.claims.records import PreparedDevice


def with_rdma_nodes(
    device: PreparedDevice, names: Sequence[str], dev_root: Path, *, beside: bool = False
) -> PreparedDevice:
    """With the nodes ``names`` (uverbs3, umad3) below /dev/infiniband in place of those it had of RDMA devices, or
    ``beside`` them; as it is where there are none. rdma_cm is no device's own and stays."""
    if not names:
        return device
    kept = [node for node in device.nodes if beside or not _is_of_one_device(node)]
    new = [DeviceNode.of(f"infiniband/{name}", dev_root) for name in names]
    return replace(device, nodes=tuple(dict.fromkeys((*kept, *new))))


def _is_of_one_device(node: DeviceNode) -> bool:
    directory, _, name = node.path.rpartition("/")
    return directory == "/dev/infiniband" and name.rstrip("0123456789") in ("uverbs", "umad", "issm")
