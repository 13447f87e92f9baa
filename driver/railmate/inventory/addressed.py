"""On which netdevs the node has IP addresses (rtnetlink(7), RTM_GETADDR)."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Iterable, Set
from pathlib import Path

from railmate.inventory.model import Inventory
from railmate.inventory.uplinks import with_lower
from railmate.netlink import Netlink, attributes

log = logging.getLogger(__name__)

_GETADDR = 22
_ADDRESS = struct.Struct("=BBBBI")  # struct ifaddrmsg: family, prefix length, flags, scope, index
_SCOPE_LINK = 253  # RT_SCOPE_LINK
_IFA_PROTO, _OF_ADVERTISEMENTS = 11, 2  # IFAPROT_KERNEL_RA, since Linux 5.18


def addressed_names(class_net: Path = Path("/sys/class/net")) -> frozenset[str]:
    """Netdevs with an IP address that somebody gave them, and all netdevs they stand on.

    Left out are what the kernel gives to any interface that is up: link-local addresses of IPv6, and those made of a
    router's advertisements where the kernel says so.
    """
    try:
        with Netlink() as netlink:
            answers = netlink.dump(_GETADDR, _ADDRESS.pack(0, 0, 0, 0, 0))
    except OSError as error:
        log.warning(
            "the node's IP addresses cannot be read (%s); a VF that has one may be taken for idle", error
        )
        return frozenset()
    return with_lower(_names(_given(answers)), class_net)


def addressed_functions(inventory: Inventory, names: Set[str]) -> frozenset[str]:
    """Addresses of the functions whose own netdevs are among ``names``."""
    return frozenset(
        nic.address for nic in inventory.nics if any(netdev.name in names for netdev in nic.function.netdevs)
    )


def _given(answers: Iterable[bytes]) -> set[int]:
    """Indices of interfaces."""
    found = set()
    for message in answers:
        family, _, _, scope, index = _ADDRESS.unpack_from(message)
        origin = attributes(message, _ADDRESS.size).get(_IFA_PROTO, b"\0")[0]
        kernels = family == socket.AF_INET6 and (scope == _SCOPE_LINK or origin == _OF_ADVERTISEMENTS)
        if not kernels:
            found.add(index)
    return found


def _names(indices: Iterable[int]) -> set[str]:
    found = set()
    for index in indices:
        try:
            found.add(socket.if_indextoname(index))
        except OSError:
            continue  # it has gone meanwhile
    return found
