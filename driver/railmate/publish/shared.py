"""Physical functions that pods share through sub-interfaces: which ones, by what an administrator says. Pure.

A shared port is one device that many claims may have a share of (KEP-5075, consumable capacity): its netdev stays on
the node, and each share is a macvlan sub-interface over it. Its VFs are offered beside it as ever. A port without VFs
is offered shared or whole, never both: whole, it would leave the node from under the sub-interfaces.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from railmate.errors import UsageError
from railmate.inventory.model import Inventory, PciFunction
from railmate.inventory.rdmanetlink import NetnsMode
from railmate.publish import notes
from railmate.publish.model import Offer
from railmate.topology.model import Role
from railmate.topology.nickinds import PASS_THROUGH

#: Sub-interfaces of one port; each has a MAC address that the NIC filters for, and NICs have room for some hundred.
MOST_SUB_INTERFACES = 1024
_ETHERNET = "ether"


@dataclass(frozen=True, slots=True)
class SharedPfs:
    """``nic`` is an address, a vendor:device or a pattern of netdev or RDMA device names. ``sub_interfaces``: how many
    each port that fits may have."""

    nic: str
    sub_interfaces: int

    def fits(self, function: PciFunction) -> bool:
        """By address, by model, or by one of its names."""
        if self.nic.lower() in (function.address, f"{function.vendor:04x}:{function.device:04x}"):
            return True
        return any(fnmatchcase(name, self.nic) for name in _names(function))

    def names(self, function: PciFunction) -> bool:
        """Whether it means this very port: by its address, or by a name that is no pattern."""
        return self.nic.lower() == function.address or self.nic in _names(function)


def parse_shared_pfs(text: str) -> SharedPfs:
    """``enp*=16``, ``15b3:101e=16``, ``0000:0c:00.0=4``. Raises UsageError."""
    nic, equals, number = text.rpartition("=")
    if not equals or not re.fullmatch(r"[A-Za-z0-9_.:*?\[\]!@-]+", nic):
        raise UsageError(
            f"--shared-pfs {text!r}: write NIC=N, NIC an address (0000:0c:00.0), a vendor:device (15b3:101e) or a "
            "pattern of netdev or RDMA device names ('enp*'), N the number of sub-interfaces."
        )
    if not re.fullmatch("[0-9]{1,4}", number) or not 1 <= int(number) <= MOST_SUB_INTERFACES:
        raise UsageError(
            f"--shared-pfs {text!r}: the number of sub-interfaces must be from 1 to {MOST_SUB_INTERFACES}."
        )
    return SharedPfs(nic, int(number))


@dataclass(frozen=True, slots=True)
class SharedPorts:
    """``offered``: address to the number of sub-interfaces, in PCI order. ``refused``: what a rule selects and cannot
    be shared, and why. ``unused``: rules that fit no port of the machine."""

    offered: Mapping[str, int]
    refused: Mapping[str, str]
    unused: tuple[str, ...] = ()

    def notes(self, inventory: Inventory) -> Iterator[str]:
        for nic in self.unused:
            yield f"the rule to share {nic} fits no physical function of this machine"
        yield from notes.not_shared(self.refused)
        yield from notes.shared_only(
            [one for one in self.offered if not inventory.functions[one].virtual_functions]
        )


NOT_SHARED = SharedPorts({}, {})


def shared_ports(
    rules: Sequence[SharedPfs], inventory: Inventory, roles: Mapping[str, Role], uplinks: Collection[str]
) -> SharedPorts:
    """What the rules select; the first that fits a physical function counts.

    A pattern takes rails only. A port with another role, or one that carries the node's own traffic (``uplinks``), is
    shared when a rule names it, by its address or full name: taking part of the node's uplink is the administrator's
    word to say.
    """
    if not rules:
        return NOT_SHARED
    offered: dict[str, int] = {}
    refused: dict[str, str] = {}
    used: set[str] = set()
    for nic in inventory.nics:
        rule = None if nic.is_vf else next((one for one in rules if one.fits(nic.function)), None)
        if rule is None:
            continue
        used.add(rule.nic)
        named = rule.names(nic.function)
        if not named and roles.get(nic.address) != Role.RAIL:
            continue
        if not named and nic.address in uplinks:
            refused[nic.address] = "the node's uplink, which only a rule by its address or full name takes"
        elif (why := _obstacle(nic.function, inventory.rdma_netns_mode)) is not None:
            refused[nic.address] = why
        else:
            offered[nic.address] = rule.sub_interfaces
    return SharedPorts(offered, refused, tuple(one.nic for one in rules if one.nic not in used))


def _obstacle(function: PciFunction, netns_mode: str | None) -> str | None:
    """Why a physical function can have no sub-interfaces with RDMA; None where it can."""
    if function.driver in PASS_THROUGH:
        return f"held by driver {function.driver} for a virtual machine or a program in user space"
    if not function.netdevs:
        return "no netdev on the node"
    netdev = function.netdevs[0]
    if netdev.link_type not in (_ETHERNET, None):
        return "no Ethernet, and macvlan sub-interfaces need that"
    if netdev.master is not None:
        # one rx handler a netdev: netdev_rx_handler_register in the kernel's net/core/dev.c
        return f"{netdev.name} is part of {netdev.master}, and the kernel gives such a port no sub-interfaces"
    if not function.rdma_devices:
        return "no RDMA device"
    if netns_mode == NetnsMode.EXCLUSIVE:
        return EXCLUSIVE_MODE
    return None


EXCLUSIVE_MODE = (
    "the node's RDMA devices are in exclusive mode, in which a device is in one pod only; set `rdma system set netns "
    "shared`, for good by the option netns_mode=1 of module ib_core"
)


def without_shared(offer: Offer) -> Offer:
    """For a server that does not let several claims have one device: it would give the whole port to the first."""
    devices = tuple(device for device in offer.devices if not device.sub_interfaces)
    return replace(offer, devices=devices)


def _names(function: PciFunction) -> list[str]:
    return [one.name for one in function.netdevs] + [one.name for one in function.rdma_devices]
