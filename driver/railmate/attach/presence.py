"""Which of a claim's devices are in their pod no more, though nobody has taken them back.

A driver that is bound anew (an upgrade, a reset) ends its netdev wherever that is, and makes another on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from railmate.attach import links, rdmalink
from railmate.attach.errors import NamespaceGoneError
from railmate.attach.home import in_pod
from railmate.attach.links import attempt
from railmate.attach.macvlan import KIND
from railmate.attach.model import ReturnRequest, SubInterfaceRequest
from railmate.attach.namespaces import Sides, open_namespace, with_namespace
from railmate.attach.rdmamodel import RdmaDeviceRef
from railmate.inventory.rdmanetlink import NetnsMode


@dataclass(frozen=True, slots=True)
class Expected:
    """A NIC of ``pci_address`` that should be in a pod: its netdev or sub-interface as it was attached, and its RDMA
    devices, where namespaces do not share them."""

    pci_address: str
    netdev: ReturnRequest | SubInterfaceRequest | None = None
    rdma: tuple[RdmaDeviceRef, ...] = ()


def absent(expected: Sequence[Expected], netns_path: Path) -> list[bool]:
    """For each NIC whether the namespace at ``netns_path`` lacks something of it. About a millisecond, reads only.

    Raises AttachError when the namespace cannot be entered; of one that has ended all is absent.
    """

    def look(sides: Sides) -> list[bool]:
        with attempt(f"network namespace {netns_path} cannot be looked at"):
            lacking = [not _netdev_is_there(one.netdev, sides) for one in expected]
            away = _rdma_away([one.rdma for one in expected], sides)
        return [first or second for first, second in zip(lacking, away, strict=True)]

    try:
        with open_namespace(netns_path) as fd:
            return with_namespace(fd, look)
    except NamespaceGoneError:
        return [True] * len(expected)


def _netdev_is_there(netdev: ReturnRequest | SubInterfaceRequest | None, sides: Sides) -> bool:
    if netdev is None or sides.pod is None:
        return True
    if isinstance(netdev, ReturnRequest):
        return in_pod(netdev, sides) is not None
    # it ends with the netdev below, and a container can change all of it but its index
    link = links.get_index(sides.pod, netdev.attached.ifindex) if netdev.attached else None
    return link is not None and link.kind == KIND


def _rdma_away(devices: Sequence[Sequence[RdmaDeviceRef]], sides: Sides) -> list[bool]:
    hard = [[one for one in of_nic if one.soft is None] for of_nic in devices]
    if not any(hard):
        return [False] * len(devices)
    with rdmalink.open_sides(sides) as rdma:
        if rdma is None or rdma.pod is None or rdma.mode is NetnsMode.SHARED:
            return [False] * len(devices)
        there = rdma.pod.links()
        return [any(rdmalink.find(there, one) is None for one in of_nic) for of_nic in hard]
