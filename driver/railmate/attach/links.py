"""Network interfaces as netlink shows them: reading, changing and telling one from another."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pyroute2.netlink.exceptions import NetlinkError

from railmate.attach.errors import AttachError

_IFF_UP = 1
_SKIP_STATISTICS = 1 << 3  # RTEXT_FILTER_SKIP_STATS: half of the work of reading a link


@dataclass(frozen=True, slots=True)
class Link:
    """A network interface in one namespace. ``mtu`` in bytes.

    ``parent`` is the device it belongs to: a PCI address for a VF, a name like ``virtio2``, None for an
    interface without hardware and before Linux 5.14 (IFLA_PARENT_DEV_NAME).
    """

    index: int
    name: str
    mac: str
    mtu: int
    up: bool
    parent: str | None


def _link(message: Any) -> Link:
    return Link(
        index=message["index"],
        name=message.get_attr("IFLA_IFNAME"),
        mac=(message.get_attr("IFLA_ADDRESS") or "").lower(),
        mtu=message.get_attr("IFLA_MTU"),
        up=bool(message["flags"] & _IFF_UP),
        parent=message.get_attr("IFLA_PARENT_DEV_NAME"),
    )


def _get(netlink: Any, **which: str | int) -> Link | None:
    try:
        return _link(netlink.link("get", ext_mask=_SKIP_STATISTICS, **which)[0])
    except NetlinkError as error:
        if error.code == errno.ENODEV:
            return None
        raise


def get(netlink: Any, name: str) -> Link | None:
    """The interface called ``name``, None if there is none."""
    return _get(netlink, ifname=name)


def get_index(netlink: Any, index: int) -> Link | None:
    """The interface with that ``index``, None if there is none."""
    return _get(netlink, index=index)


def get_all(netlink: Any) -> list[Link]:
    """All interfaces of the socket's namespace."""
    return [_link(message) for message in netlink.link("dump", ext_mask=_SKIP_STATISTICS)]


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """Turn a kernel error inside into an AttachError that says ``what`` could not be done."""
    try:
        yield
    except NetlinkError as error:
        hint = "; railmate needs CAP_NET_ADMIN" if error.code == errno.EPERM else ""
        raise AttachError(f"{what}: {os.strerror(error.code)}{hint}") from None


def find(
    links: Iterable[Link], *, parent: str | None, mac: str, index: int | None = None, name: str | None = None
) -> Link | None:
    """The one of ``links`` that is the wanted device, whatever it is called by now.

    A device with hardware behind it is known by its ``parent`` alone, since a container may have changed
    everything else; the rest only chooses among several interfaces of one function. Without a parent
    (simulated VFs, kernels before 5.14) the MAC decides, then the ``index``, then the name.
    """
    candidates = [link for link in links if link.parent == parent]
    tests: tuple[Callable[[Link], bool], ...] = (
        lambda link: link.mac == mac,
        lambda link: link.index == index,
        lambda link: link.name == name,
    )
    for test in tests:
        for link in candidates:
            if test(link):
                return link
    return candidates[0] if parent is not None and candidates else None
