"""RDMA devices in a pod's namespace and in the host's: finding them, moving them, making soft ones."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from railmate.attach.errors import AttachError
from railmate.attach.namespaces import Sides
from railmate.attach.rdmamodel import RdmaDeviceRef
from railmate.inventory import rdmanetlink as nldev
from railmate.inventory.rdmanetlink import NetnsMode, RdmaLink, RdmaNetlink
from railmate.netlink import attribute, text, u32


@dataclass(frozen=True, slots=True)
class RdmaSides:
    """RDMA netlink of the host's namespace and, where there is one, of the pod's."""

    mode: NetnsMode
    host: RdmaNetlink
    pod: RdmaNetlink | None = None


@contextmanager
def open_sides(sides: Sides) -> Iterator[RdmaSides | None]:
    """Sockets on both sides, for the thread that ``with_host`` or ``with_namespace`` made; None without RDMA."""
    with ExitStack() as stack:
        try:
            if sides.pod is None:
                host = stack.enter_context(RdmaNetlink())
                mode = host.mode()
                pod = None
            else:
                pod = stack.enter_context(RdmaNetlink())
                mode = pod.mode()
                with sides.on_host():
                    host = stack.enter_context(RdmaNetlink())
        except OSError as error:
            if error.errno != errno.EPROTONOSUPPORT:
                raise AttachError(f"RDMA netlink cannot be used: {error.strerror}") from None
            yield None
            return
        yield RdmaSides(mode, host, pod)


def find(links: Iterable[RdmaLink], wanted: RdmaDeviceRef) -> RdmaLink | None:
    """The device by its node GUID where that tells, else by its name.

    Whoever has NET_ADMIN in its namespace can rename a device, and give another one its name: so a device of a PCI
    function that has the name but another GUID is not the one. A soft one gets its GUID from its netdev's MAC, which
    is another one in the pod, and is looked for by its name first.
    """
    links = list(links)
    named = next((link for link in links if link.name == wanted.name), None)
    same = [link for link in links if wanted.node_guid and link.node_guid == wanted.node_guid]
    known = same[0] if len(same) == 1 else None
    if wanted.soft is not None:
        return named or known
    if known is None and named is not None and (same or not (wanted.node_guid and named.node_guid)):
        return named  # GUIDs tell nothing: none is known, or several devices have this one
    return known


def to_pod(link: RdmaLink, rdma: RdmaSides, sides: Sides) -> None:
    """Raises OSError.

    The device is looked for in the namespace of the *thread* that asks, not only in the socket's: ENODEV else
    (rdma_dev_change_netns in drivers/infiniband/core/device.c).
    """
    with sides.on_host():
        _move(link, rdma.host, sides.pod_fd)


def to_host(link: RdmaLink, rdma: RdmaSides, sides: Sides) -> None:
    """Raises OSError."""
    assert rdma.pod is not None
    _move(link, rdma.pod, sides.host_fd)


def _move(link: RdmaLink, where: RdmaNetlink, namespace_fd: int) -> None:
    where.request(nldev.SET, _index(link) + attribute(nldev.NET_NS_FD, u32(namespace_fd)))


def rename(link: RdmaLink, where: RdmaNetlink, name: str) -> None:
    """Raises OSError."""
    where.request(nldev.SET, _index(link) + attribute(nldev.DEV_NAME, text(name)))


def give_name(link: RdmaLink, where: RdmaNetlink, name: str) -> None:
    """Give a device its own name again. One that another device has cannot be given (no two have the same, in whatever
    namespaces they are); then it goes out of the way of others, which may be waiting for the name that it has.

    Raises OSError.
    """
    if link.name == name:
        return
    try:
        rename(link, where, name)
    except OSError as error:
        if error.errno == errno.EEXIST:
            with suppress(OSError):
                rename(link, where, f"railmate{link.index}")
        raise


def make_soft(wanted: RdmaDeviceRef, netdev: str, where: RdmaNetlink) -> None:
    """Make a soft device over a netdev of the socket's namespace. Raises OSError."""
    assert wanted.soft is not None
    parts = ((nldev.DEV_NAME, wanted.name), (nldev.LINK_TYPE, wanted.soft), (nldev.NDEV_NAME, netdev))
    where.request(nldev.NEWLINK, b"".join(attribute(kind, text(value)) for kind, value in parts))


def delete_soft(link: RdmaLink, where: RdmaNetlink) -> None:
    """Raises OSError."""
    where.request(nldev.DELLINK, _index(link))


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """Turn a kernel error inside into an AttachError that says ``what`` could not be done."""
    try:
        yield
    except OSError as error:
        hint = {
            errno.EPERM: "; railmate needs CAP_NET_ADMIN",
            errno.EOPNOTSUPP: "; its driver, or this kernel, cannot move it between network namespaces",
        }.get(error.errno or 0, "")
        raise AttachError(f"{what}: {error.strerror}{hint}") from None


def _index(link: RdmaLink) -> bytes:
    return attribute(nldev.DEV_INDEX, u32(link.index))
