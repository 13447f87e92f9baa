"""Soft RDMA devices (soft RoCE, soft iWARP): made anew over their netdev wherever it goes.

A soft device ends when its netdev leaves the namespace (NETDEV_UNREGISTER). So it is removed before, and after the
netdev's move one of the same name and type is made in the pod's namespace; in exclusive mode the kernel puts it into
the first namespace and it is moved from there. When the netdev is home again the host gets its device back. Hardware
needs none of this (:mod:`railmate.attach.rdma`). Kernels before 7.0 cannot move soft RoCE: EOPNOTSUPP.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress

from railmate.attach import rdmalink
from railmate.attach.errors import AttachError
from railmate.attach.namespaces import Sides
from railmate.attach.rdmalink import RdmaSides, attempt
from railmate.attach.rdmamodel import RdmaDeviceRef
from railmate.inventory.rdmanetlink import NetnsMode, RdmaLink, RdmaNetlink


def end(devices: Sequence[RdmaDeviceRef], netdev: str, sides: Sides) -> None:
    """End the soft devices over the host's ``netdev``, which is about to leave. Raises AttachError.

    They would end by themselves, but in the background, and their names must be free.
    """
    soft = [device for device in devices if device.soft is not None]
    if not soft:
        return
    with rdmalink.open_sides(sides) as rdma:
        if rdma is None:
            return
        for device in soft:
            with attempt(f"{device} over {netdev} cannot be removed from the host"):
                link = _over(device, netdev, rdma.host)
                if link is not None:
                    rdmalink.delete_soft(link, rdma.host)


def give(devices: Sequence[RdmaDeviceRef], interface: str, sides: Sides) -> None:
    """Make the soft devices over the pod's ``interface``; those that are there stay. Raises AttachError."""
    soft = [device for device in devices if device.soft is not None]
    if not soft:
        return
    with rdmalink.open_sides(sides) as rdma:
        if rdma is None:
            return
        for device in soft:
            with attempt(f"{device} cannot be made over {interface} in the pod"):
                _give(device, interface, rdma, sides)


def _give(device: RdmaDeviceRef, interface: str, rdma: RdmaSides, sides: Sides) -> None:
    assert rdma.pod is not None
    if _over(device, interface, rdma.pod) is not None:
        return
    exclusive = rdma.mode is NetnsMode.EXCLUSIVE
    cut_short = exclusive and _left_on_host(device, rdma) is not None
    if not cut_short:
        rdmalink.make_soft(device, interface, rdma.pod)
    if exclusive and _over(device, interface, rdma.pod) is None:
        link = rdmalink.find(rdma.host.links(), device)
        if link is None:
            raise AttachError(f"{device} was made over {interface} and is not to be found")
        rdmalink.to_pod(link, rdma, sides)


def _left_on_host(device: RdmaDeviceRef, rdma: RdmaSides) -> RdmaLink | None:
    """A device that an attempt which was cut short made over the pod's interface and did not move: the host does not
    know its netdev."""
    link = rdmalink.find(rdma.host.links(), device)
    return link if link is not None and rdma.host.netdev(link.index) is None else None


def _over(device: RdmaDeviceRef, interface: str, where: RdmaNetlink) -> RdmaLink | None:
    link = rdmalink.find(where.links(), device)
    return link if link is not None and where.netdev(link.index) == interface else None


def take_back(devices: Sequence[RdmaDeviceRef], sides: Sides) -> None:
    """End the pod's soft devices before their netdev leaves: it would do so itself, but some time later.

    Never raises: what is still there ends with its netdev.
    """
    soft = [device for device in devices if device.soft is not None]
    if not soft or sides.pod is None:
        return
    with suppress(AttachError), rdmalink.open_sides(sides) as rdma:
        if rdma is None or rdma.pod is None:
            return
        for device in soft:
            with suppress(OSError):
                link = rdmalink.find(rdma.pod.links(), device)
                if link is not None and rdma.pod.netdev(link.index) is not None:
                    rdmalink.delete_soft(link, rdma.pod)
                elif rdma.mode is NetnsMode.EXCLUSIVE and (left := _left_on_host(device, rdma)) is not None:
                    rdmalink.delete_soft(left, rdma.host)


def restore(devices: Sequence[RdmaDeviceRef], netdev: str, sides: Sides) -> list[str]:
    """The netdev is on the host under the name ``netdev``: give it its soft devices back.

    A sentence for each that could not be made.
    """
    soft = [device for device in devices if device.soft is not None]
    problems: list[str] = []
    if not soft:
        return problems
    try:
        with rdmalink.open_sides(sides) as rdma:
            if rdma is None:
                return problems
            for device in soft:
                try:
                    with attempt(f"{device} cannot be made over {netdev}"):
                        _restore(device, netdev, rdma)
                except AttachError as error:
                    problems.append(str(error))
    except AttachError as error:
        problems.append(str(error))
    return problems


def _restore(device: RdmaDeviceRef, netdev: str, rdma: RdmaSides) -> None:
    if _over(device, netdev, rdma.host) is not None:
        return
    try:
        rdmalink.make_soft(device, netdev, rdma.host)
    except OSError as error:
        # The one of the pod ends in the background after its netdev has left; its name is free then. Or a service of
        # the node that makes soft devices was faster.
        if error.errno != errno.EEXIST:
            raise
        if _over(device, netdev, rdma.host) is not None:
            return
        raise AttachError(f"{device} still exists elsewhere; it is tried again") from None
