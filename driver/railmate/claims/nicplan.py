"""From a NIC's config to what is to be set on it. Pure: what only the device itself can tell is asked in prepare.

Everything that can be known to go wrong in the pod is refused here, before anything is touched.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import replace

from railmate.attach.macvlan import stable_mac
from railmate.attach.model import PhysicalPort, SubInterface
from railmate.attach.settings import (
    EthtoolSettings,
    IpoibSettings,
    Neighbour,
    NetdevSettings,
    Route,
    RoutingRule,
    VfSettings,
)
from railmate.errors import RailmateError
from railmate.inventory.model import Inventory, PciFunction
from railmate.inventory.rdmanetlink import NetnsMode
from railmate_api import fields, vf
from railmate_api.config import NetdevConfig, RdmaSharedConfig, RdmaVfConfig

#: RFC 8200, 5: a link that carries IPv6 carries this much.
_IPV6_MTU = 1280
_FIRST_PRIORITY = 1000
#: The bit that makes a full member of a partition (InfiniBand Architecture Specification, volume 1, 10.9.1.1). The
#: kernel makes IPoIB interfaces of full members only.
_FULL_MEMBER = 0x8000
_LINK_LOCAL = ipaddress.ip_network("fe80::/10")


class SettingsError(RailmateError):
    """The config cannot be applied to this NIC; a sentence without the claim's name."""


def expects_netdev(function: PciFunction) -> bool:
    """Whether the NIC has a netdev, wherever that is at the moment.

    A RoCE port always has one. It must not be judged by what sysfs shows alone: there a netdev that is in
    another namespace is absent.
    """
    return bool(function.netdevs) or any(device.link_layer == "Ethernet" for device in function.rdma_devices)


def physical_port(function: PciFunction, inventory: Inventory) -> PhysicalPort | None:
    """Through which netdev the VF is set; None for a physical function, and where the PF's netdev is not known."""
    physical = inventory.functions.get(function.physical_function or "")
    if physical is None or function.address not in physical.virtual_functions or not physical.netdevs:
        return None
    return PhysicalPort(physical.netdevs[0].name, physical.virtual_functions.index(function.address))


def settings_of(
    config: RdmaVfConfig, function: PciFunction, inventory: Inventory, alone: bool
) -> NetdevSettings:
    """What is to be set on the function's netdev. ``alone``: the request has no other NIC.

    Raises SettingsError.
    """
    broken = fields.rule_problems(RdmaVfConfig, fields.said(config))
    if broken:
        raise SettingsError(f"class and claim together: {'; '.join(str(one) for one in broken)}")
    ipoib = ipoib_of(config, function)
    in_partition = ipoib is not None and ipoib.pkey is not None
    physical = inventory.functions.get(function.physical_function or "")
    most = physical.netdevs[0].mtu if physical is not None and physical.netdevs else None
    mtu = _mtu(config, function.physical_function, most)
    settings = replace(
        _in_pod(config, alone),
        # the physical function's says nothing of an interface in a partition of its own
        mtu=mtu if mtu is not None or in_partition else most,
        mac=config.mac.lower() if config.mac else None,
        ethtool=EthtoolSettings(
            dict(config.features or {}),
            fields.said(config.rings or vf.Rings()),
            fields.said(config.channels or vf.Channels()),
        ),
        vf=vf_settings(config, function, inventory),
        ipoib=ipoib,
    )
    if is_infiniband(function) and (settings.mac or config.vlan):
        raise SettingsError(f"{function.address} is an InfiniBand port: it has no mac and no vlan of its own")
    return _sound(settings, config)


def sub_interface_of(
    config: RdmaSharedConfig, function: PciFunction, share: str, alone: bool
) -> tuple[SubInterface, NetdevSettings]:
    """The sub-interface that a share of the function is, and what is to be set on it. Raises SettingsError."""
    if not function.netdevs:
        raise SettingsError(f"{function.address} has no netdev that a sub-interface could stand on")
    port = function.netdevs[0]
    settings = replace(_in_pod(config, alone), mtu=_mtu(config, function.address, port.mtu))
    sub = SubInterface(
        share,
        port=port.name,
        port_mac=port.mac or "",
        mac=config.mac.lower() if config.mac else stable_mac(share),
        mode=config.macvlan_mode or "bridge",
    )
    return sub, _sound(settings, config)


def _in_pod(config: NetdevConfig, alone: bool) -> NetdevSettings:
    """What is set up in the pod's namespace, whatever the interface is. ``alone``: the request has no other NIC."""
    if not alone:
        _refuse_unique(config)
    return NetdevSettings(
        addresses=config.addresses or (),
        routes=tuple(
            Route(one.destination, one.gateway, one.source, one.metric, one.table)
            for one in config.routes or ()
        ),
        rules=tuple(
            RoutingRule(one.table, one.priority or _FIRST_PRIORITY, one.source, one.destination)
            for one in config.rules or ()
        ),
        neighbours=tuple(Neighbour(one.address, one.mac.lower()) for one in config.neighbours or ()),
        sysctls=_sysctls(config.sysctls),
    )


def _sound(settings: NetdevSettings, config: NetdevConfig) -> NetdevSettings:
    refuse_families(settings)
    if config.ipam is None:
        refuse_unreachable(settings)
    return settings


def loses_netdev(function: PciFunction, inventory: Inventory) -> bool:
    """Whether the function's netdev ends with the move of its RDMA device: IPoIB is a client of that one
    (drivers/infiniband/ulp/ipoib), which in exclusive mode leaves its namespace. The kernel makes another one then,
    with a name and an address of its own choice, and in the node's namespace where it is an older one."""
    return is_infiniband(function) and inventory.rdma_netns_mode == NetnsMode.EXCLUSIVE


def refuse_lost_netdev(config: RdmaVfConfig, function: PciFunction) -> None:
    """Raise SettingsError for what is to be set on a netdev that `loses_netdev`."""
    if without_effect := _of_netdev(config):
        raise SettingsError(
            f"{', '.join(without_effect)}: the node's RDMA devices are in exclusive mode, and the IPoIB interface of "
            f"{function.address} ends when its RDMA device moves into the pod. Leave them out, the pod then has the "
            "RDMA device; or have the administrator set `rdma system set netns shared`, for good by the option "
            "netns_mode=1 of module ib_core"
        )


def _of_netdev(config: RdmaVfConfig) -> list[str]:
    """What is said that needs a netdev; a name alone is for those that can have one."""
    return sorted(fields.said(config).keys() - {"interfaceName", "guid", "pkey", "envHints"})


def refuse_without_netdev(config: RdmaVfConfig, function: PciFunction) -> None:
    """Raise SettingsError where settings would have no effect."""
    if without_effect := _of_netdev(config):
        raise SettingsError(
            f"{', '.join(without_effect)}: {function.address} has an RDMA device only and no netdev to set up"
        )


def without_netdev(config: RdmaVfConfig, function: PciFunction) -> NetdevSettings:
    """What is asked for where there is an RDMA device only: the partition. Raises SettingsError."""
    return NetdevSettings(ipoib=ipoib_of(config, function))


def _refuse_unique(config: NetdevConfig) -> None:
    for name, value in (("mac", config.mac), ("addresses", config.addresses), ("routes", config.routes)):
        if value:
            raise SettingsError(
                f"{name} is for a request of one NIC, and this one has several. "
                "Give each NIC a request of its own, or use ipam"
            )


def _mtu(config: NetdevConfig, physical: str | None, most: int | None) -> int | None:
    """What is asked for, if anything. ``most`` is what the physical function has, None where that is not known."""
    if config.mtu is not None and most is not None and config.mtu > most:
        raise SettingsError(
            f"mtu {config.mtu} is above the {most} of its physical function {physical}. "
            "Ask for less, or have the administrator raise that one"
        )
    return config.mtu


def _sysctls(said: vf.Sysctls | None) -> dict[str, str]:
    declared = fields.settings(vf.Sysctls).items()
    values = {vf.kernel_name(one): getattr(said, attribute) for attribute, one in declared} if said else {}
    return {name: str(int(value)) for name, value in values.items() if value is not None}


def vf_settings(config: RdmaVfConfig, function: PciFunction, inventory: Inventory) -> VfSettings | None:
    """What the physical function is to keep of the VF; None: nothing is asked. Raises SettingsError."""
    mac = config.mac.lower() if config.mac else None
    settings = VfSettings(
        vlan=config.vlan,
        qos=(config.vlan_qos or 0) if config.vlan is not None else None,
        protocol=(config.vlan_protocol or "802.1Q") if config.vlan is not None else None,
        trust=config.trust,
        spoof_check=config.spoof_check,
        link_state=config.link_state,
        min_tx_rate=config.min_tx_rate,
        max_tx_rate=config.max_tx_rate,
    )
    port = physical_port(function, inventory)
    if settings == VfSettings():
        # the physical function must know of the MAC, or it drops what the VF sends
        return VfSettings(mac=mac) if mac and port else None
    if port is None:
        raise SettingsError(
            "vlan, trust, spoofCheck, linkState and rates are set through a physical function's netdev, and "
            f"{function.address} has none on this node"
        )
    return replace(settings, mac=mac)


def ipoib_of(config: RdmaVfConfig, function: PciFunction) -> IpoibSettings | None:
    """What is said of the IPoIB interface; None: nothing. Raises SettingsError."""
    if config.pkey is None and config.ipoib is None:
        return None
    refuse_ethernet("pkey" if config.pkey is not None else "ipoib", function)
    mode, umcast = (config.ipoib.mode, config.ipoib.umcast) if config.ipoib else (None, None)
    if config.pkey is None:
        return IpoibSettings(None, mode, umcast)
    if config.pkey == _FULL_MEMBER:
        raise SettingsError("pkey 0x8000 is that of no partition: they are 0x8001 to 0xffff")
    return IpoibSettings(config.pkey | _FULL_MEMBER, mode, umcast)


def refuse_ethernet(what: str, function: PciFunction) -> None:
    """Raise SettingsError unless the function's link is InfiniBand."""
    if not is_infiniband(function):
        raise SettingsError(f"{what} is for InfiniBand, and the link of {function.address} is Ethernet")


def is_infiniband(function: PciFunction) -> bool:
    return any(netdev.link_type == "infiniband" for netdev in function.netdevs) or any(
        device.link_layer == "InfiniBand" for device in function.rdma_devices
    )


def refuse_families(settings: NetdevSettings) -> None:
    """Raise SettingsError where IPv4 and IPv6 are mixed, or IPv6 is not to be had."""
    for route in settings.routes:
        _refuse_mixed(f"the route to {route.destination}", route.destination, route.gateway, route.source)
    for rule in settings.rules:
        _refuse_mixed(f"the rule of priority {rule.priority}", rule.source, rule.destination)
    with_ipv6 = [one for one in settings.addresses if ":" in one]
    if with_ipv6 and settings.sysctls.get("ipv6/disable_ipv6") == "1":
        raise SettingsError(f"{with_ipv6[0]} is an IPv6 address, and disableIPv6 is true")
    if with_ipv6 and settings.mtu is not None and settings.mtu < _IPV6_MTU:
        raise SettingsError(
            f"{with_ipv6[0]} is an IPv6 address, and IPv6 needs an mtu of {_IPV6_MTU} at least"
        )


def _refuse_mixed(what: str, *values: str | None) -> None:
    given = [value for value in values if value]
    if len({":" in value for value in given}) > 1:
        raise SettingsError(f"{what} mixes IPv4 and IPv6 ({', '.join(given)})")


def refuse_unreachable(settings: NetdevSettings) -> None:
    """Raise SettingsError for a gateway that the interface could not reach, and for a source that it has not."""
    own = {ipaddress.ip_interface(one) for one in settings.addresses}
    links = [one.network for one in own]
    links += [
        ipaddress.ip_network(one.destination, strict=False) for one in settings.routes if not one.gateway
    ]
    for route in settings.routes:
        if route.gateway and not _within(route.gateway, [*links, _LINK_LOCAL]):
            raise SettingsError(
                f"the gateway {route.gateway} of the route to {route.destination} is on none of the interface's "
                "networks. Give an address in its network, or a route to it without gateway"
            )
        if route.source and ipaddress.ip_address(route.source) not in {one.ip for one in own}:
            raise SettingsError(
                f"the source {route.source} of the route to {route.destination} is none of the interface's addresses"
            )


def _within(address: str, networks: Iterable[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    one = ipaddress.ip_address(address)
    return any(one.version == network.version and one in network for network in networks)
