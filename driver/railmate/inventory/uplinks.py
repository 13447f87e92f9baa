"""Which netdevs carry the node's own traffic: they are never offered to pods.

Read from the kernel's route tables as text (``/proc/net/route``, ``/proc/net/ipv6_route``) and from
the ``lower_*`` links under ``/sys/class/net``, which name what a bond, bridge or VLAN stands on
(kernel Documentation/ABI/testing/sysfs-class-net).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Set
from pathlib import Path

from railmate.inventory.model import Inventory

log = logging.getLogger(__name__)

_RTF_UP = 0x1  # kernel include/uapi/linux/route.h
_RTF_REJECT = 0x200


def uplink_functions(inventory: Inventory, uplinks: Iterable[str]) -> frozenset[str]:
    """Addresses of the functions behind ``uplinks``; a physical function brings its VFs along.

    A VF of the node's uplink is refused too: taking it from the PF that the node lives on is for the
    administrator to decide, not for a default.
    """
    names = set(uplinks)
    hit = {
        nic.address for nic in inventory.nics if any(netdev.name in names for netdev in nic.function.netdevs)
    }
    vfs = {nic.address for nic in inventory.nics if nic.function.physical_function in hit}
    return frozenset(hit | vfs)


def uplink_names(
    proc_net: Path = Path("/proc/net"), class_net: Path = Path("/sys/class/net")
) -> frozenset[str]:
    """Netdevs with a default route, and all netdevs they stand on."""
    return with_lower(_ipv4_defaults(proc_net / "route") | _ipv6_defaults(proc_net / "ipv6_route"), class_net)


def with_lower(names: Set[str], class_net: Path) -> frozenset[str]:
    """``names``, and all netdevs that they stand on."""
    waiting, seen = list(names), set(names)
    while waiting:
        upper = class_net / waiting.pop()
        for link in upper.glob("lower_*"):
            lower = link.name.removeprefix("lower_")
            if lower not in seen:
                seen.add(lower)
                waiting.append(lower)
    return frozenset(seen)


def _rows(table: Path) -> list[list[str]]:
    try:
        return [line.split() for line in table.read_text().splitlines()]
    except FileNotFoundError:
        return []  # a kernel without this address family
    except OSError as error:
        log.warning("%s: cannot be read (%s); the node's uplink may be taken for a free NIC", table, error)
        return []


def _flags(text: str) -> int:
    """A field that is no number counts as a route that is up: to keep an uplink too many is the safe mistake."""
    try:
        return int(text, 16)
    except ValueError:
        return _RTF_UP


def _ipv4_defaults(table: Path) -> set[str]:
    """Columns: Iface Destination Gateway Flags RefCnt Use Metric Mask …"""
    return {
        row[0]
        for row in _rows(table)[1:]
        if len(row) >= 8 and row[1] == "00000000" and row[7] == "00000000" and _flags(row[3]) & _RTF_UP
    }


def _ipv6_defaults(table: Path) -> set[str]:
    """Columns: destination prefix-length source prefix-length next-hop metric refcnt use flags name."""
    found = set()
    for row in _rows(table):
        if len(row) < 10 or row[0] != "0" * 32 or row[1] != "00":
            continue
        flags = _flags(row[8])
        if flags & _RTF_UP and not flags & _RTF_REJECT and row[9] != "lo":
            found.add(row[9])
    return found
