"""The character devices of a prepared device's RDMA devices, where those have come anew under other numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from railmate.cdi.spec import DeviceNode
from railmate.claims.records import PreparedDevice
from railmate.errors import RailmateError


class NoNodesError(RailmateError):
    """An RDMA device that has none at this moment."""


def names_now(device: PreparedDevice, look: Callable[..., Sequence[str]]) -> list[str]:
    """The names below /dev/infiniband that the RDMA devices of its NICs have at this moment, whatever namespace those
    are in; a few files are read. ``look`` is `railmate.attach.rdmalook.char_devices` of a sysfs.

    A move into another namespace gives a device new ones: its clients go and come (disable_device() and enable_device()
    in drivers/infiniband/core/device.c), uverbs and umad each take the lowest number that is free, and the former ones
    may be another claim's by now. A driver that is bound anew has new ones, too; a soft device is made anew altogether.

    Raises NoNodesError.
    """
    names: list[str] = []
    for nic in device.nics:
        for rdma in nic.rdma:
            found = look(rdma.name, None if rdma.soft else nic.address)
            if not found:
                raise NoNodesError(
                    f"{rdma} of {nic.address} has no character device below /dev/infiniband at the moment"
                )
            # of a shared port no umad and issm: with those one pod could change the port that all others use
            names += [name for name in found if nic.sub is None or name.startswith("uverbs")]
    return names


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
