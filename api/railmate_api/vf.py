"""The objects within the config of a virtual function: see ``railmate_api.config``.

Terms are the kernel's. Sources: rtnetlink(7); kernel Documentation/networking/ip-sysctl.rst and ethtool-netlink.rst;
CNI specification 1.1.0 for IPAM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from railmate_api.fields import Address, Boolean, Choice, Integer, Network, Setting, Table, Text, setting
from railmate_api.rules import AtLeastOne, Rule

_HEX: Final = "[0-9a-fA-F]"
#: A unicast address: the lowest bit of its first byte is clear.
MAC: Final = Text(
    pattern=f"{_HEX}[02468aAcCeE](?::{_HEX}{{2}}){{5}}",
    words="characters of a unicast MAC address, like 02:00:00:00:00:0a",
    minimum=17,
    maximum=17,
    reserved=("00:00:00:00:00:00",),
)
#: ETH_GSTRING_LEN of linux/ethtool.h is 32 with the closing NUL.
FEATURE: Final = Text(
    pattern="[a-z0-9][a-z0-9-]*",
    words="lower-case letters, digits and '-', the kernel's name of a feature, like rx-gro",
    maximum=31,
)
_TABLE: Final = Integer(1, 2**32 - 1)


@dataclass(frozen=True, slots=True)
class Route:
    """A route through the interface, in the pod."""

    destination: str = setting(
        "destination",
        Network(),
        "Where the route leads, 0.0.0.0/0 or ::/0 for a default route.",
        required=True,
    )
    gateway: str | None = setting(
        "gateway",
        Address(),
        "The next hop. One of the interface's addresses, or a route without gateway, must reach it.",
        unset="the destination is on the link",
    )
    source: str | None = setting(
        "source", Address(), "The source address preferred on this route.", unset="the kernel chooses"
    )
    metric: int | None = setting(
        "metric", Integer(0, 2**32 - 1), "Its priority, the lowest wins.", unset="0 for IPv4, 1024 for IPv6"
    )
    table: int | None = setting("table", _TABLE, "The routing table.", unset="254, the main table")


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """A rule that tells for which packets of the pod a routing table is looked at."""

    RULES: ClassVar[tuple[Rule, ...]] = (AtLeastOne(("source", "destination")),)

    table: int = setting("table", _TABLE, "The routing table to look at.", required=True)
    source: str | None = setting("source", Network(), "Packets from here.", unset="any source")
    destination: str | None = setting("destination", Network(), "Packets to there.", unset="any destination")
    priority: int | None = setting(
        "priority", Integer(1, 32765), "Its place among the rules, the lowest is asked first.", unset="1000"
    )


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A permanent neighbour (ARP or NDP) entry."""

    address: str = setting("address", Address(), "The neighbour's address.", required=True)
    mac: str = setting("mac", MAC, "The neighbour's MAC address.", required=True)


@dataclass(frozen=True, slots=True)
class Ipam:
    """Addresses and routes from a CNI IPAM plugin. The object is given to the plugin as its ``ipam`` section, so it has
    the plugin's own fields beside these."""

    type: str = setting(
        "type",
        Text(pattern="[A-Za-z0-9][A-Za-z0-9_.-]*", words="letters, digits, '_', '-', '.'", maximum=64),
        "The plugin, an executable in the node's CNI directory: host-local, whereabouts, static and so on. Whereabouts "
        "must run without its ip-control-loop, which takes addresses from pods that Multus has not annotated.",
        required=True,
    )


#: InfiniBand Architecture Specification, volume 1, 4.1: a GUID is an EUI-64. Written as ip-link(8) does.
GUID: Final = Text(
    pattern=f"keep|stable|{_HEX}{{2}}(?::{_HEX}{{2}}){{7}}",
    words="characters, keep, stable or a GUID like 02:00:00:00:00:00:00:0a",
    minimum=4,
    maximum=23,
    reserved=("00:00:00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff:ff:ff"),
)


@dataclass(frozen=True, slots=True)
class Ipoib:
    """The kind of an IPoIB interface (kernel Documentation/infiniband/ipoib.rst)."""

    RULES: ClassVar[tuple[Rule, ...]] = (AtLeastOne(("mode", "umcast")),)

    mode: str | None = setting(
        "mode",
        Choice(("datagram", "connected")),
        "Transport: datagram (an MTU of 4092 bytes at most), or connected (65520, where the NIC has it).",
        unset="as it is",
    )
    umcast: bool | None = setting(
        "umcast",
        Boolean(),
        "Whether programs of the pod may join multicast groups by themselves.",
        unset="as it is",
    )


@dataclass(frozen=True, slots=True)
class Rings:
    """Sizes of the rings, in descriptors (ethtool -G)."""

    RULES: ClassVar[tuple[Rule, ...]] = (AtLeastOne(("rx", "tx")),)

    rx: int | None = setting("rx", Integer(1, 2**20), "Receive descriptors.", unset="as it is")
    tx: int | None = setting("tx", Integer(1, 2**20), "Transmit descriptors.", unset="as it is")


@dataclass(frozen=True, slots=True)
class Channels:
    """Numbers of queues (ethtool -L)."""

    RULES: ClassVar[tuple[Rule, ...]] = (AtLeastOne(("rx", "tx", "combined")),)

    rx: int | None = setting("rx", Integer(0, 4096), "Receive queues.", unset="as it is")
    tx: int | None = setting("tx", Integer(0, 4096), "Transmit queues.", unset="as it is")
    combined: int | None = setting("combined", Integer(0, 4096), "Queues for both.", unset="as it is")


#: ethtool -K
FEATURES: Final = Table(FEATURE, Boolean(), 32)


def _sysctl(name: str, type_: Boolean | Integer | Choice, kernel: str, meaning: str) -> Any:
    """A field whose kernel name is found again by `kernel_name`."""
    _KERNEL[name] = kernel
    return setting(name, type_, f"{meaning} {kernel}.", unset="the kernel's default for a new interface")


_KERNEL: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Sysctls:
    """Settings of the interface below /proc/sys/net in the pod (kernel Documentation/networking/ip-sysctl.rst)."""

    arp_ignore: int | None = _sysctl(
        "arpIgnore",
        Integer(0, 8),
        "ipv4/arp_ignore",
        "Which ARP requests are answered; 1: for own addresses only.",
    )
    arp_announce: int | None = _sysctl(
        "arpAnnounce",
        Integer(0, 2),
        "ipv4/arp_announce",
        "The source address of ARP requests; 2: the best local one.",
    )
    arp_filter: bool | None = _sysctl(
        "arpFilter", Boolean(), "ipv4/arp_filter", "Answer ARP only where the route back is this interface."
    )
    arp_notify: bool | None = _sysctl(
        "arpNotify", Boolean(), "ipv4/arp_notify", "Announce the address when the interface comes up."
    )
    rp_filter: int | None = _sysctl(
        "rpFilter", Integer(0, 2), "ipv4/rp_filter", "Reverse path check; 0: none, 1: strict, 2: loose."
    )
    accept_local: bool | None = _sysctl(
        "acceptLocal", Boolean(), "ipv4/accept_local", "Take packets whose source is an address of the pod."
    )
    accept_ra: int | None = _sysctl(
        "acceptRA", Integer(0, 2), "ipv6/accept_ra", "Take router advertisements; 0: never."
    )
    disable_ipv6: bool | None = _sysctl(
        "disableIPv6", Boolean(), "ipv6/disable_ipv6", "No IPv6 on the interface."
    )


def kernel_name(one: Setting) -> str:
    """``ipv4/arp_ignore`` for the setting of `Sysctls` that is ``net.ipv4.conf.<interface>.arp_ignore``."""
    return _KERNEL[one.name]
