"""IPoIB interfaces: their kind, and further ones in another partition (kernel Documentation/infiniband/ipoib.rst).

Messages as include/uapi/linux/if_link.h has them (IFLA_IPOIB_*). A partition's interface is a child of the NIC's own
one: it is made in the namespace in which that is, and ends before that leaves.
"""

from __future__ import annotations

import struct

from railmate.attach import linkmessages, links
from railmate.attach.errors import AttachError
from railmate.attach.linkmessages import GETLINK, IFNAME, INFO_DATA, INFO_KIND, LINK, LINKINFO, NEWLINK
from railmate.attach.links import Link, attempt
from railmate.attach.settings import IpoibSettings
from railmate.netlink import CREATE, EXCL, Netlink, attribute, attributes, nested, number, text, u32, words

_PKEY, _MODE, _UMCAST = 1, 2, 3
_MODES = ("datagram", "connected")  # IPOIB_MODE_*
_NAME = "ipoib"


def is_ipoib(link: Link) -> bool:
    """By its hardware address, which has 20 bytes (RFC 4391, 9.1.1)."""
    return link.mac.count(":") == 19


def read(netlink: Netlink, index: int) -> IpoibSettings | None:
    """The interface's kind; None where it is no IPoIB interface. Raises OSError."""
    (answer,) = netlink.request(GETLINK, linkmessages.question(index))
    return _settings(answer)


def _settings(message: bytes) -> IpoibSettings | None:
    info = attributes(linkmessages.answer(message)[2].get(LINKINFO, b""))
    if words(info.get(INFO_KIND, b"")) != _NAME:
        return None
    data = attributes(info.get(INFO_DATA, b""))
    mode = number(data[_MODE]) if _MODE in data else None
    return IpoibSettings(
        number(data[_PKEY]) if _PKEY in data else None,
        _MODES[mode] if mode is not None and mode < len(_MODES) else None,
        bool(number(data[_UMCAST])) if _UMCAST in data else None,
    )


def write(netlink: Netlink, index: int, wanted: IpoibSettings, what: str) -> None:
    """Set mode and umcast, where they are said, of ``what``. Raises AttachError.

    The kernel takes the MTU down with the mode, so this comes before an MTU is set.
    """
    data = _data(IpoibSettings(None, wanted.mode, wanted.umcast))
    if data:
        with attempt(f"{what} does not take the IPoIB settings {_words(wanted)}"):
            netlink.request(NEWLINK, linkmessages.about(index, _link_info(data)))


def make_child(netlink: Netlink, parent: int, name: str, wanted: IpoibSettings) -> Link:
    """The interface ``name`` in the partition ``wanted.pkey`` over the interface with the index ``parent``; one that is
    there stays. Raises AttachError."""
    assert wanted.pkey is not None
    with attempt(f"the interface {name} in partition 0x{wanted.pkey:04x} cannot be made in the pod"):
        try:
            parts = attribute(IFNAME, text(name)) + attribute(LINK, u32(parent)) + _link_info(_data(wanted))
            netlink.request(NEWLINK, linkmessages.about(0, parts), CREATE | EXCL)
        except FileExistsError:
            found = links.get(netlink, name)
            if found is None or (found.index, name) not in children(netlink, parent):
                raise AttachError(
                    f"the pod has an interface {name} already, which is to be that of partition 0x{wanted.pkey:04x}; "
                    "choose a different interfaceName in the claim's config"
                ) from None
        link = links.get(netlink, name)
    if link is None:
        raise AttachError(f"the interface {name} was made in the pod and is not there")
    return link


def children(netlink: Netlink, parent: int) -> list[tuple[int, str]]:
    """Index and name of the IPoIB interfaces over another one. Raises OSError."""
    found = []
    for message in netlink.dump(GETLINK, linkmessages.question()):
        index, _, parts = linkmessages.answer(message)
        is_child = number(parts.get(LINK, b"\0")) == parent and index != parent
        if is_child and _settings(message) is not None:
            found.append((index, words(parts[IFNAME])))
    return found


def restore(netlink: Netlink, index: int, before: IpoibSettings | None, name: str) -> list[str]:
    """Give an interface its kind back; a sentence if it does not take it."""
    if before is None:
        return []
    try:
        now = read(netlink, index)
        if now is not None and (now.mode, now.umcast) != (before.mode, before.umcast):
            write(netlink, index, before, f"netdev {name}")
            now = read(netlink, index)
            if now is None or (now.mode, now.umcast) != (before.mode, before.umcast):
                return [f"its IPoIB settings are {_words(now or IpoibSettings())}, not {_words(before)}"]
    except OSError as error:
        return [f"its IPoIB settings cannot be read: {error.strerror}"]
    except AttachError as error:
        return [str(error)]
    return []


def _data(wanted: IpoibSettings) -> bytes:
    parts = b""
    if wanted.pkey is not None:
        parts += attribute(_PKEY, struct.pack("=H", wanted.pkey))
    if wanted.mode is not None:
        parts += attribute(_MODE, struct.pack("=H", _MODES.index(wanted.mode)))
    if wanted.umcast is not None:
        parts += attribute(_UMCAST, struct.pack("=H", wanted.umcast))
    return parts


def _link_info(data: bytes) -> bytes:
    return nested(LINKINFO, attribute(INFO_KIND, text(_NAME)), nested(INFO_DATA, data))


def _words(settings: IpoibSettings) -> str:
    said = {"mode": settings.mode, "umcast": settings.umcast}
    return ", ".join(f"{name} {value}" for name, value in said.items() if value is not None)
