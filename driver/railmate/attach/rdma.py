"""RDMA devices of PCI functions: into the pod's namespace and back, where the kernel keeps them apart.

In shared mode every namespace sees every RDMA device and nothing moves. In exclusive mode (rdma-system(8)) the
device follows its netdev; the mode is asked each time, so a node whose mode was changed is served as it is now.
A device belongs to its PCI function: it survives the move of its netdev, and the kernel gives it back to the first
namespace when the pod's ends (rdma_dev_exit_net in drivers/infiniband/core/device.c).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from railmate.attach import rdmalink
from railmate.attach.errors import AttachError, NamespaceGoneError
from railmate.attach.namespaces import Sides, open_namespace, with_host, with_namespace
from railmate.attach.rdmalink import RdmaSides, attempt
from railmate.attach.rdmamodel import RdmaDeviceRef, RdmaReturn
from railmate.attach.steps import apply_all
from railmate.inventory.rdmanetlink import NetnsMode


class MoveRdmaDevices:
    """The step that moves RDMA devices into the pod; it goes after the steps of their netdevs."""

    def __init__(self, devices: Sequence[RdmaDeviceRef]) -> None:
        self._devices = [device for device in devices if device.soft is None]
        self._moved: list[RdmaDeviceRef] = []

    def apply(self, sides: Sides) -> None:
        if not self._devices:
            return
        with rdmalink.open_sides(sides) as rdma:
            if rdma is None or rdma.mode is NetnsMode.SHARED:
                return
            for device in self._devices:
                with attempt(f"{device} cannot be moved into the pod"):
                    self._move(device, rdma, sides)

    def _move(self, device: RdmaDeviceRef, rdma: RdmaSides, sides: Sides) -> None:
        assert rdma.pod is not None
        if rdmalink.find(rdma.pod.links(), device) is not None:
            return
        link = rdmalink.find(rdma.host.links(), device)
        if link is None:
            raise AttachError(
                f"{device} is neither on the host nor in this pod; another pod may still hold it, "
                "or its driver was unloaded"
            )
        self._moved.append(device)
        rdmalink.to_pod(link, rdma, sides)

    def undo(self, sides: Sides) -> None:
        problems = [one.problem for one in take_back(self._moved, sides) if one.problem]
        self._moved = []
        if problems:
            raise AttachError("; ".join(problems))


def attach_rdma(devices: Sequence[RdmaDeviceRef], netns_path: Path) -> None:
    """Move the devices of NICs that have no netdev into the namespace at ``netns_path``: all of them or none.

    Raises AttachError that names the device and the cause.
    """
    if not devices:
        return
    with open_namespace(netns_path) as fd:
        with_namespace(fd, lambda sides: apply_all([MoveRdmaDevices(devices)], sides))


def return_rdma(devices: Sequence[RdmaDeviceRef], netns_path: Path) -> list[RdmaReturn]:
    """Bring the devices home from the namespace at ``netns_path``, before their netdevs. Never raises.

    When the namespace has ended the kernel has given them back, or is about to.
    """
    hard = [device for device in devices if device.soft is None]
    if not hard:
        return []
    try:
        with open_namespace(netns_path) as fd:
            return with_namespace(fd, lambda sides: take_back(hard, sides))
    except NamespaceGoneError:
        return with_host(lambda sides: take_back(hard, sides))
    except AttachError as error:
        return [RdmaReturn(device.name, str(error)) for device in hard]


def put_right(devices: Sequence[RdmaDeviceRef]) -> list[RdmaReturn]:
    """Give devices that are on the host their own names again; a problem tells which are not there. Never raises."""
    try:
        return with_host(lambda sides: _put_right([one for one in devices if one.soft is None], sides))
    except AttachError as error:
        return [RdmaReturn(device.name, str(error)) for device in devices]


def _put_right(devices: Sequence[RdmaDeviceRef], sides: Sides) -> list[RdmaReturn]:
    with rdmalink.open_sides(sides) as rdma:
        if rdma is None:
            return [RdmaReturn(one.name) for one in devices]
        first = [_named(one, rdma) for one in devices]  # a name that a later one has is free afterwards
        return [
            RdmaReturn(one.name, problem and _named(one, rdma))
            for one, problem in zip(devices, first, strict=True)
        ]


def _named(device: RdmaDeviceRef, rdma: RdmaSides) -> str | None:
    """Why it is not on the host under its name."""
    try:
        with attempt(f"{device} cannot be put right"):
            link = rdmalink.find(rdma.host.links(), device)
            if link is None:
                return f"{device} is not on the host"
            rdmalink.give_name(link, rdma.host, device.name)
    except AttachError as error:
        return str(error)
    return None


def take_back(devices: Sequence[RdmaDeviceRef], sides: Sides) -> list[RdmaReturn]:
    """The same, in the thread that has both sides."""
    hard = [device for device in devices if device.soft is None]
    if not hard:
        return []
    try:
        with rdmalink.open_sides(sides) as rdma:
            if rdma is None or rdma.mode is NetnsMode.SHARED:
                return [RdmaReturn(device.name) for device in hard]
            first = [_take_back(device, rdma, sides) for device in hard]
            # a name that a later one of them had is free now
            return [
                one if one.problem is None else _take_back(device, rdma, sides)
                for one, device in zip(first, hard, strict=True)
            ]
    except AttachError as error:
        return [RdmaReturn(device.name, str(error)) for device in hard]


def _take_back(device: RdmaDeviceRef, rdma: RdmaSides, sides: Sides) -> RdmaReturn:
    try:
        with attempt(f"{device} cannot be brought home"):
            link = rdmalink.find(rdma.pod.links(), device) if rdma.pod is not None else None
            if link is not None and rdma.pod is not None:
                rdmalink.to_host(link, rdma, sides)
            link = rdmalink.find(rdma.host.links(), device)
            if link is None:
                raise AttachError(f"{device} is neither in the pod nor on the host")
            rdmalink.give_name(link, rdma.host, device.name)  # a container with NET_ADMIN can rename it
    except AttachError as error:
        return RdmaReturn(device.name, str(error))
    return RdmaReturn(device.name)
