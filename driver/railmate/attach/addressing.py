"""Addresses, routes, routing rules and neighbours of an interface (rtnetlink(7)). All of it may be done twice."""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from railmate.attach.settings import Neighbour, Route, RoutingRule
from railmate.netlink import CREATE, EXCL, REPLACE, Netlink, attribute, attributes, number, u32

_NEWADDR, _GETADDR = 20, 22
_NEWROUTE, _GETROUTE, _NEWNEIGH, _NEWRULE, _DELRULE = 24, 26, 28, 32, 33
_ADDRESS = struct.Struct("=BBBBI")  # struct ifaddrmsg: family, prefix length, flags, scope, index
_ROUTE = struct.Struct(
    "=BBBBBBBBI"
)  # struct rtmsg: family, lengths, tos, table, protocol, scope, type, flags
_NEIGHBOUR = struct.Struct("=BxxxiHBB")  # struct ndmsg: family, index, state, flags, type
_LOCAL, _IFA_ADDRESS, _BROADCAST, _IFA_FLAGS = 2, 1, 4, 8
_DST, _OIF, _GATEWAY, _PRIORITY, _PREFSRC, _TABLE = 1, 4, 5, 6, 7, 15
_RULE_DST, _RULE_SRC, _RULE_PRIORITY, _RULE_TABLE = 1, 2, 6, 15
_NEIGHBOUR_DST, _NEIGHBOUR_MAC = 1, 2
_NODAD, _PERMANENT = 0x02, 0x80  # IFA_F_*, NUD_PERMANENT is the same number
_PROTOCOL_STATIC, _SCOPE_LINK, _UNICAST, _TO_TABLE = 4, 253, 1, 1
_MAIN = 254
_LINK_SCOPE_ADDRESS = 253

Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface


def addresses(netlink: Netlink, index: int) -> tuple[str, ...]:
    """The interface's permanent addresses with prefix, without the ones that the kernel makes itself."""
    found = []
    for message in netlink.dump(_GETADDR, _ADDRESS.pack(0, 0, 0, 0, 0)):
        _, bits, flags, scope, at = _ADDRESS.unpack_from(message)
        if at != index:
            continue
        parts = attributes(message, _ADDRESS.size)
        flags |= number(parts.get(_IFA_FLAGS, b"\0"))
        address = ipaddress.ip_address(parts.get(_LOCAL) or parts[_IFA_ADDRESS])
        own = address.version == 6 and scope == _LINK_SCOPE_ADDRESS
        if flags & _PERMANENT and not own:
            found.append(f"{address}/{bits}")
    return tuple(found)


def add_address(netlink: Netlink, index: int, address: str) -> None:
    """An IPv6 address is usable at once: who gave it has seen to it that nobody else has it."""
    one = ipaddress.ip_interface(address)
    parts = attribute(_LOCAL, one.ip.packed) + attribute(_IFA_ADDRESS, one.ip.packed)
    if isinstance(one, ipaddress.IPv4Interface):
        if one.network.prefixlen < 31:
            parts += attribute(_BROADCAST, one.network.broadcast_address.packed)
    else:
        parts += attribute(_IFA_FLAGS, u32(_NODAD))
    body = _ADDRESS.pack(_family(one), one.network.prefixlen, 0, 0, index) + parts
    netlink.request(_NEWADDR, body, CREATE | REPLACE)


def add_route(netlink: Netlink, index: int, route: Route) -> None:
    to = ipaddress.ip_network(route.destination, strict=False)
    table = route.table or _MAIN
    parts = attribute(_OIF, u32(index)) + attribute(_TABLE, u32(table))
    if to.prefixlen:
        parts += attribute(_DST, to.network_address.packed)
    if route.gateway is not None:
        parts += attribute(_GATEWAY, ipaddress.ip_address(route.gateway).packed)
    if route.source is not None:
        parts += attribute(_PREFSRC, ipaddress.ip_address(route.source).packed)
    if route.metric is not None:
        parts += attribute(_PRIORITY, u32(route.metric))
    scope = _SCOPE_LINK if route.gateway is None and to.version == 4 else 0
    family = socket.AF_INET if to.version == 4 else socket.AF_INET6
    small = table if table < 256 else 0
    body = _ROUTE.pack(family, to.prefixlen, 0, 0, small, _PROTOCOL_STATIC, scope, _UNICAST, 0) + parts
    # never in place of another one: the pod's own default route is easily hit
    with _already(errno.EEXIST):
        netlink.request(_NEWROUTE, body, CREATE | EXCL)
        return
    if not _has_route(netlink, index, family, table, to.prefixlen, to.network_address.packed):
        raise OSError(
            errno.EEXIST, "the pod has another route there; give this one a metric or a table of its own"
        )


def _has_route(netlink: Netlink, index: int, family: int, table: int, bits: int, address: bytes) -> bool:
    for message in netlink.dump(_GETROUTE, _ROUTE.pack(family, 0, 0, 0, 0, 0, 0, 0, 0)):
        parts = attributes(message, _ROUTE.size)
        where = (number(parts.get(_OIF, b"")), number(parts.get(_TABLE, b"")))
        if where == (index, table) and message[1] == bits and parts.get(_DST, b"") in (address, b""):
            return True
    return False


def add_neighbour(netlink: Netlink, index: int, neighbour: Neighbour) -> None:
    address = ipaddress.ip_address(neighbour.address)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    body = _NEIGHBOUR.pack(family, index, _PERMANENT, 0, 0)
    body += attribute(_NEIGHBOUR_DST, address.packed)
    body += attribute(_NEIGHBOUR_MAC, bytes.fromhex(neighbour.mac.replace(":", "")))
    netlink.request(_NEWNEIGH, body, CREATE | REPLACE)


def add_rule(netlink: Netlink, rule: RoutingRule) -> None:
    """Rules belong to the namespace, not to the interface: they do not go when it does."""
    with _already(errno.EEXIST):
        netlink.request(_NEWRULE, _rule(rule), CREATE | EXCL)


def remove_rule(netlink: Netlink, rule: RoutingRule) -> None:
    with _already(errno.ENOENT):
        netlink.request(_DELRULE, _rule(rule))


def _rule(rule: RoutingRule) -> bytes:
    sides = [
        ipaddress.ip_network(one, strict=False) if one else None for one in (rule.source, rule.destination)
    ]
    source, destination = sides
    version = next(one.version for one in sides if one is not None)
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    lengths = [one.prefixlen if one else 0 for one in (destination, source)]
    small = rule.table if rule.table < 256 else 0
    body = _ROUTE.pack(family, *lengths, 0, small, 0, 0, _TO_TABLE, 0)
    for kind, one in ((_RULE_DST, destination), (_RULE_SRC, source)):
        if one is not None and one.prefixlen:
            body += attribute(kind, one.network_address.packed)
    return body + attribute(_RULE_PRIORITY, u32(rule.priority)) + attribute(_RULE_TABLE, u32(rule.table))


def _family(one: Interface) -> int:
    return socket.AF_INET if one.version == 4 else socket.AF_INET6


@contextmanager
def _already(code: int) -> Iterator[None]:
    """That it is done already is no error."""
    try:
        yield
    except OSError as error:
        if error.errno != code:
            raise
