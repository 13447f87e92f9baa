"""What rtnetlink keeps of a netdev beside name, MAC, MTU and state, and what of it survives a change of namespace.

A container with NET_ADMIN can set all of it, and the kernel takes it along when the netdev moves (seen with Linux 6.18:
flags, queue length, alias, group, segmentation limits, link mode, broadcast address, alternative names). It ends qdiscs
and filters, neighbours, multicast groups and further addresses of the hardware by itself. Numbers as in
include/uapi/linux/if_link.h.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from railmate.attach import linkmessages, links
from railmate.attach.linkmessages import (
    ALIAS,
    ALTERNATIVE_NAME,
    BROADCAST,
    DELLINK,
    DELPROPERTY,
    GETLINK,
    INFO_KIND,
    LINK,
    LINK_NETNSID,
    LINKINFO,
    NEWLINK,
    NEWPROPERTY,
    PROPERTIES,
)
from railmate.attach.links import error_of, mac_bytes, mac_text
from railmate.netlink import Attributes, Netlink, attribute, attributes, nested, number, text, u32, words

_OPERSTATE, _OPER_UP, _MODE_DEFAULT = 16, 6, 0  # IF_OPER_UP, IF_LINK_MODE_DEFAULT: include/uapi/linux/if.h
_ETHERNET_ADDRESS = 6
#: Flags that dev_change_flags() of the kernel lets be changed, but for IFF_UP; by the words of ip-link(8).
_FLAGS = {
    "debug": 0x4, "notrailers": 0x20, "noarp": 0x80, "promisc": 0x100, "allmulticast": 0x200, "multicast": 0x1000,
    "portsel": 0x2000, "automedia": 0x4000, "dynamic": 0x8000,
}  # fmt: skip
#: Attribute and its size in bytes. In an order in which a later one does not change an earlier one: the kernel sets the
#: limits for IPv4 together with the general ones.
_NUMBERS = {
    "txqueuelen": (13, 4), "group": (27, 4), "mode": (17, 1), "gso_max_segs": (40, 4), "gso_max_size": (41, 4),
    "gro_max_size": (58, 4), "gso_ipv4_max_size": (63, 4), "gro_ipv4_max_size": (64, 4),
}  # fmt: skip
_SET_WITH = {"gso_max_size": "gso_ipv4_max_size", "gro_max_size": "gro_ipv4_max_size"}


@dataclass(frozen=True, slots=True)
class LinkState:
    """``flags`` and ``numbers`` by ip-link(8)'s words; what an older kernel does not tell is left out. ``other_names``
    are alternative names. ``broadcast`` is empty where the interface is no Ethernet one."""

    flags: Mapping[str, bool] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    alias: str = ""
    other_names: tuple[str, ...] = ()
    broadcast: str = ""


def read(netlink: Netlink, index: int) -> LinkState:
    """Raises OSError."""
    (answer,) = netlink.request(GETLINK, linkmessages.question(index))
    _, flags, found = linkmessages.answer(answer)
    return _state(flags, found)


def _state(flags: int, found: Attributes) -> LinkState:
    return LinkState(
        {name: bool(flags & bit) for name, bit in _FLAGS.items()},
        {name: number(found[kind]) for name, (kind, _) in _NUMBERS.items() if kind in found},
        words(found.get(ALIAS, b"")),
        tuple(sorted(links.other_names(found))),
        _broadcast(found.get(BROADCAST, b"")),
    )


def _broadcast(address: bytes) -> str:
    """None of an IPoIB interface: its driver makes it, of the partition."""
    return mac_text(address) if len(address) == _ETHERNET_ADDRESS else ""


def remove_names(netlink: Netlink, index: int, names: tuple[str, ...]) -> None:
    """Take alternative names from an interface. Raises OSError."""
    if names:
        netlink.request(DELPROPERTY, linkmessages.about(index, _properties(names)))


def _properties(names: Iterable[str]) -> bytes:
    return nested(PROPERTIES, *(attribute(ALTERNATIVE_NAME, text(name)) for name in names))


def end_uppers(netlink: Netlink, lower: int) -> None:
    """End the interfaces over one that is about to leave (VLAN, macvlan, a further partition's), whoever has made them.
    The kernel leaves most of them where they are, and they would reach through it from there. One that the pod has
    moved into a namespace of its own is not seen here: it ends with that namespace, with the pod's last process there.
    Raises OSError."""
    for message in netlink.dump(GETLINK, linkmessages.question()):
        index, _, found = linkmessages.answer(message)
        kind = words(attributes(found.get(LINKINFO, b"")).get(INFO_KIND, b""))
        # one with LINK_NETNSID stands on an interface of another namespace; a veth on none, it names its other end
        if number(found.get(LINK, b"")) == lower and LINK_NETNSID not in found and kind not in ("", "veth"):
            with suppress(FileNotFoundError):
                netlink.request(DELLINK, linkmessages.about(index))


def restore(netlink: Netlink, index: int, before: LinkState | None) -> list[str]:
    """Set what differs from ``before``; a sentence for each thing that is still not so. Raises OSError."""
    if before is None:
        return []
    now = read(netlink, index)
    if now == before:
        return []
    refused = {}
    for what, kind, (parts, flags, mask) in _changes(before, now):
        try:
            netlink.request(kind, linkmessages.about(index, parts, flags, mask))
        except OSError as error:
            refused[what] = f": {error_of(error)[1]}"
    wanted, found = _fields(before), _fields(read(netlink, index))
    return [
        f"its {what} is {found[what]}, not {wanted[what]}{refused.get(what, '')}"
        for what in wanted
        if what in found and found[what] != wanted[what]
    ]


_Body = tuple[bytes, int, int]  # attributes, flags with their mask


def _changes(before: LinkState, now: LinkState) -> Iterator[tuple[str, int, _Body]]:
    """Message by message: what it sets, its type, attributes and flags."""
    for name, on in before.flags.items():
        bit = _FLAGS.get(name, 0)
        if bit and now.flags.get(name) != on:
            yield name, NEWLINK, (b"", bit if on else 0, bit)
    wrong = {name for name, value in before.numbers.items() if now.numbers.get(name) not in (None, value)}
    wrong |= {other for name, other in _SET_WITH.items() if name in wrong and other in before.numbers}
    for name, (kind, size) in _NUMBERS.items():
        if name in wrong:
            value = u32(before.numbers[name]) if size == 4 else bytes([before.numbers[name]])
            setting = attribute(kind, value)
            if name == "mode" and before.numbers[name] == _MODE_DEFAULT:
                # One that is dormant stays so: the kernel does not look at the mode again before the carrier changes.
                # It ignores this where there is no carrier (Documentation/networking/operstates.rst).
                setting += attribute(_OPERSTATE, bytes([_OPER_UP]))
            yield name, NEWLINK, (setting, 0, 0)
    if now.alias != before.alias:
        yield "alias", NEWLINK, (attribute(ALIAS, before.alias.encode()), 0, 0)
    if now.broadcast != before.broadcast:
        value = mac_bytes(before.broadcast)
        yield "broadcast address", NEWLINK, (attribute(BROADCAST, value), 0, 0)
    for kind, names in (
        (DELPROPERTY, set(now.other_names) - set(before.other_names)),
        (NEWPROPERTY, set(before.other_names) - set(now.other_names)),
    ):
        if names:
            yield "other names", kind, (_properties(sorted(names)), 0, 0)


def _fields(state: LinkState) -> dict[str, Any]:
    """By the words that a person reads."""
    on = {name: "on" if value else "off" for name, value in state.flags.items()}
    return {
        **on,
        **state.numbers,
        "alias": state.alias or "none",
        "broadcast address": state.broadcast or "none",
        "other names": " ".join(sorted(state.other_names)) or "none",
    }
