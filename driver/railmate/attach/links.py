"""Network interfaces as netlink shows them: reading, changing and telling one from another (rtnetlink(7))."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from railmate.attach import linkmessages
from railmate.attach.errors import AttachError
from railmate.attach.linkmessages import (
    ADDRESS,
    ALTERNATIVE_NAME,
    GETLINK,
    IFNAME,
    INFO_KIND,
    LINK,
    LINKINFO,
    MTU,
    NET_NS_FD,
    NEWLINK,
    PARENT_DEV_NAME,
    PROPERTIES,
)
from railmate.netlink import (
    Attributes,
    Netlink,
    attribute,
    attribute_list,
    attributes,
    number,
    text,
    u32,
    words,
)

_IFF_UP = 1


@dataclass(frozen=True, slots=True)
class Link:
    """A network interface in one namespace. ``mtu`` in bytes.

    ``parent`` is the device it belongs to: a PCI address for a VF, a name like ``virtio2``, None for an
    interface without hardware and before Linux 5.14 (IFLA_PARENT_DEV_NAME). ``kind`` is what rtnetlink calls a link
    that software makes (``macvlan``), ``lower`` the index of the one that it stands on, in that one's namespace.
    ``other_names`` are found like its name, and no other interface of the namespace can have them.
    """

    index: int
    name: str
    mac: str
    mtu: int
    up: bool
    parent: str | None
    kind: str | None = None
    lower: int | None = None
    other_names: tuple[str, ...] = ()


def _link(message: bytes) -> Link:
    index, flags, found = linkmessages.answer(message)
    kind = attributes(found[LINKINFO]).get(INFO_KIND) if LINKINFO in found else None
    return Link(
        index=index,
        name=words(found[IFNAME]),
        mac=mac_text(found.get(ADDRESS, b"")),
        mtu=number(found[MTU]),
        up=bool(flags & _IFF_UP),
        parent=words(found[PARENT_DEV_NAME]) if PARENT_DEV_NAME in found else None,
        kind=words(kind) if kind is not None else None,
        lower=number(found[LINK]) if LINK in found else None,
        other_names=other_names(found),
    )


def other_names(link: Attributes) -> tuple[str, ...]:
    """Alternative names (IFLA_ALT_IFNAME) in a link's attributes."""
    properties = attribute_list(link.get(PROPERTIES, b""))
    return tuple(words(value) for kind, value in properties if kind == ALTERNATIVE_NAME)


def mac_text(value: bytes) -> str:
    return ":".join(f"{byte:02x}" for byte in value)


def mac_bytes(value: str) -> bytes:
    return bytes.fromhex(value.replace(":", ""))


def get(netlink: Netlink, name: str) -> Link | None:
    """The interface called ``name``, None if there is none."""
    return _get(netlink, 0, attribute(IFNAME, text(name)))


def get_index(netlink: Netlink, index: int) -> Link | None:
    """The interface with that ``index``, None if there is none."""
    return _get(netlink, index, b"")


def _get(netlink: Netlink, index: int, which: bytes) -> Link | None:
    try:
        (answer,) = netlink.request(GETLINK, linkmessages.question(index, which))
    except OSError as error:
        if error.errno == errno.ENODEV:
            return None
        raise
    return _link(answer)


def get_all(netlink: Netlink) -> list[Link]:
    """All interfaces of the socket's namespace."""
    return [_link(message) for message in netlink.dump(GETLINK, linkmessages.question())]


def change(
    netlink: Netlink,
    index: int,
    *,
    name: str | None = None,
    mac: str | None = None,
    mtu: int | None = None,
    up: bool | None = None,
    namespace_fd: int | None = None,
) -> None:
    """Change what is given, in one message. Raises OSError.

    The kernel first moves the interface, which takes it down, and gives it its name on the way; then come MAC, MTU
    and state (do_setlink in net/core/rtnetlink.c). What came before a part that fails stays.
    """
    parts = b""
    if namespace_fd is not None:
        parts += attribute(NET_NS_FD, u32(namespace_fd))
    if name is not None:
        parts += attribute(IFNAME, text(name))
    if mac is not None:
        parts += attribute(ADDRESS, mac_bytes(mac))
    if mtu is not None:
        parts += attribute(MTU, u32(mtu))
    flags, mask = (_IFF_UP if up else 0), (_IFF_UP if up is not None else 0)
    netlink.request(NEWLINK, linkmessages.about(index, parts, flags, mask))


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """Turn a kernel error inside into an AttachError that says ``what`` could not be done."""
    try:
        yield
    except OSError as error:
        code, reason = error_of(error)
        hint = "; railmate needs CAP_NET_ADMIN" if code == errno.EPERM else ""
        failed = AttachError(f"{what}: {reason}{hint}")
        failed.code = code
        raise failed from None


def error_of(error: OSError) -> tuple[int, str]:
    """Number and words of a kernel error."""
    return error.errno or 0, error.strerror or str(error)


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
