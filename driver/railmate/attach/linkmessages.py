"""Messages of rtnetlink about links: their numbers and their frame, for all that reads or sets something of a link.

Numbers are those of the kernel's include/uapi/linux/rtnetlink.h (RTM_*, RTEXT_FILTER_*) and if_link.h (IFLA_*).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from railmate.netlink import Attributes, attribute, attributes, messages, u32

GROUP = 1  # RTMGRP_LINK: who is bound to it hears of all links of the namespace
NEWLINK, DELLINK, GETLINK, SETLINK, NEWPROPERTY, DELPROPERTY = 16, 17, 18, 19, 108, 109

ADDRESS, BROADCAST, IFNAME, MTU, LINK, LINKINFO, ALIAS, VFINFO_LIST = 1, 2, 3, 4, 5, 18, 20, 22
NET_NS_FD, EXT_MASK, LINK_NETNSID, XDP = 28, 29, 37, 43
PROPERTIES, ALTERNATIVE_NAME, PARENT_DEV_NAME = 52, 53, 56
#: Within LINKINFO.
INFO_KIND, INFO_DATA = 1, 2

_WITH_VFS, _SKIP_STATISTICS = 1 << 0, 1 << 3  # statistics are half of the work of reading a link
_INFO = struct.Struct("=BxHiII")  # struct ifinfomsg: family, type, index, flags, change mask


def about(index: int, parts: bytes = b"", flags: int = 0, mask: int = 0) -> bytes:
    """The body of a message about the link ``index``, with attributes; 0: a new one, or one that they name. Of its
    ``flags`` those in ``mask`` are set."""
    return _INFO.pack(0, 0, index, flags, mask) + parts


def question(index: int = 0, parts: bytes = b"", *, vfs: bool = False) -> bytes:
    """The body that asks about a link, or in a dump about all; with ``vfs`` also what it keeps of its VFs."""
    wanted = _SKIP_STATISTICS | (_WITH_VFS if vfs else 0)
    return about(index, parts + attribute(EXT_MASK, u32(wanted)))


def heard(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Of what was read from ``GROUP``: NEWLINK or DELLINK, index and flags of each link that is spoken of."""
    for kind, _, _, message in messages(data):
        if kind in (NEWLINK, DELLINK) and len(message) >= _INFO.size:
            _, _, index, flags, _ = _INFO.unpack_from(message)
            yield kind, index, flags


def answer(message: bytes) -> tuple[int, int, Attributes]:
    """Index, flags and attributes of a link."""
    _, _, index, flags, _ = _INFO.unpack_from(message)
    return index, flags, attributes(message, _INFO.size)
