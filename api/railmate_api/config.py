"""Config that users write into claims, templates and DeviceClasses (opaque parameters).

``apiVersion: railmate.dev/v1alpha1``, decoded strictly: an unknown kind, an unknown field or a value
of the wrong type is an error that names the field. Class config comes first, claim config wins.

The dataclasses here and in ``railmate_api.vf`` are the table of all fields. Decoder, JSON schema and the admission
policy are derived from it; after a change run ``python -m railmate_api.schema`` and ``python -m
railmate_api.admission`` (their files are named there, and a unit test tells when they are out of date).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

from railmate_api import fields, vf
from railmate_api.attributes import CONFIG_API_VERSION, CONFIG_KIND_RDMA_SHARED, CONFIG_KIND_RDMA_VF
from railmate_api.fields import Boolean, Choice, Group, Integer, Items, Network, Problem, Text, setting
from railmate_api.rules import AtMost, Excludes, Needs, Rule

#: Fields of every config, whatever its kind.
TYPE_FIELDS: Final = ("apiVersion", "kind")

#: Kernel include/uapi/linux/if.h: IFNAMSIZ is 16 with the closing NUL. dev_valid_name() refuses "/", ":", white space,
#: "." and ".."; the pattern is a narrower, safe set. lo and eth0 are taken in every pod.
INTERFACE_NAME: Final = Text(
    pattern="[A-Za-z0-9_][A-Za-z0-9_.-]*",
    words="letters, digits, '_', '-', '.', the first a letter, digit or '_'",
    maximum=15,
    reserved=("eth0", "lo"),
)


class ConfigError(ValueError):
    """The config cannot be used; the message names each wrong field and says what is allowed."""


#: net/core/rtnetlink.c gives rates to the driver as u32, in Mbit/s; no NIC has this much.
RATE: Final = Integer(1, 4_000_000, "Mbit/s")
_OF_PF: Final = "as the administrator of the physical function has set it"
_RDMA_HINTS: Final = (
    "Variables for NCCL and UCX that name the container's RDMA devices and their GID index (NCCL_IB_HCA, "
    "NCCL_IB_GID_INDEX, UCX_NET_DEVICES)"
)
_TOPOLOGY_HINT: Final = (
    "where the node's topology is given by an override, an NCCL topology file (NCCL_TOPO_FILE); none that the pod or "
    "its image sets is replaced."
)
#: What is set on a netdev or an RDMA device: nothing for a function that a program drives by itself.
_OF_NETDEV: Final = (
    "interfaceName", "mtu", "addresses", "ipam", "routes", "rules", "neighbours", "sysctls", "features", "rings",
    "channels", "guid", "pkey", "ipoib",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NetdevConfig:
    """What every kind of NIC may be given in the pod."""

    interface_name: str | None = setting(
        "interfaceName",
        INTERFACE_NAME,
        "The netdev's name in the pod. With several NICs in one request the name gets the NIC's ordinal within the "
        "request appended from the second one on: rail, rail1.",
        unset="net1, net2 and so on, in the order of the claim's requests",
    )
    mtu: int | None = setting(
        "mtu",
        Integer(68, 65535, "bytes"),
        "Largest packet; not above the physical function's, and at least 1280 with IPv6 addresses.",
        unset="the physical function's MTU",
    )
    mac: str | None = setting(
        "mac", vf.MAC, "The MAC address in the pod. For a request of one NIC.", unset="the netdev's own"
    )
    addresses: tuple[str, ...] | None = setting(
        "addresses", Items(Network(), 16), "The pod's addresses. For a request of one NIC.", unset="none"
    )
    ipam: dict[str, Any] | None = setting(
        "ipam",
        Group(vf.Ipam, open=True),
        "Further addresses and routes from a CNI IPAM plugin, asked when the claim is prepared.",
        unset="none",
    )
    routes: tuple[vf.Route, ...] | None = setting(
        "routes",
        Items(Group(vf.Route), 64),
        "Routes through the interface. For a request of one NIC.",
        unset="the addresses' own",
    )
    rules: tuple[vf.RoutingRule, ...] | None = setting(
        "rules", Items(Group(vf.RoutingRule), 32), "Routing rules of the pod.", unset="the pod's own"
    )
    neighbours: tuple[vf.Neighbour, ...] | None = setting(
        "neighbours", Items(Group(vf.Neighbour), 64), "Permanent neighbours.", unset="none"
    )
    sysctls: vf.Sysctls | None = setting(
        "sysctls", Group(vf.Sysctls), "Kernel settings of the interface.", unset="the kernel's defaults"
    )
    env_hints: bool | None = setting(
        "envHints",
        Boolean(),
        f"{_RDMA_HINTS} and, {_TOPOLOGY_HINT}",
        unset="none",
    )


@dataclass(frozen=True, slots=True)
class RdmaVfConfig(NetdevConfig):
    """How a virtual function appears in the pod. Applies to rdma-vf devices and to the NIC half of pairs. All of it is
    undone when the pod ends. What is set on the physical function (vlan to maxTxRate) is for virtual functions only."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Needs("vlanQoS", "vlan"),
        Needs("vlanProtocol", "vlan"),
        AtMost("minTxRate", "maxTxRate"),
        Excludes("driver", _OF_NETDEV),
    )

    features: dict[str, bool] | None = setting(
        "features", vf.FEATURES, "Offloads that are switched on or off (ethtool -K).", unset="as they are"
    )
    rings: vf.Rings | None = setting("rings", Group(vf.Rings), "Sizes of the rings.", unset="as they are")
    channels: vf.Channels | None = setting(
        "channels", Group(vf.Channels), "Numbers of queues.", unset="as they are"
    )
    vlan: int | None = setting(
        "vlan",
        Integer(1, 4094),
        "The VLAN that the NIC tags and filters without the pod's knowledge.",
        unset=_OF_PF,
    )
    vlan_qos: int | None = setting("vlanQoS", Integer(0, 7), "Priority in the VLAN tag.", unset="0")
    vlan_protocol: str | None = setting(
        "vlanProtocol", Choice(("802.1Q", "802.1ad")), "Kind of the VLAN tag.", unset="802.1Q"
    )
    trust: bool | None = setting(
        "trust", Boolean(), "Whether the pod may change the MAC address and be promiscuous.", unset=_OF_PF
    )
    spoof_check: bool | None = setting(
        "spoofCheck", Boolean(), "Whether the NIC drops packets with a foreign source MAC.", unset=_OF_PF
    )
    link_state: str | None = setting(
        "linkState",
        Choice(("auto", "enable", "disable")),
        "The link that the virtual function sees: the port's (auto), always up, always down.",
        unset=_OF_PF,
    )
    min_tx_rate: int | None = setting("minTxRate", RATE, "Guaranteed sending rate.", unset=_OF_PF)
    max_tx_rate: int | None = setting("maxTxRate", RATE, "Highest sending rate.", unset=_OF_PF)
    driver: str | None = setting(
        "driver",
        Choice(("vfio-pci",)),
        "The driver that the virtual function is bound to for the pod. vfio-pci: a program in the pod (DPDK) drives it "
        "through /dev/vfio/<IOMMU group>; there is no netdev and no RDMA device. Needs the chart's rebindVFs.",
        unset="its own driver, with netdev and RDMA device",
    )
    guid: str | None = setting(
        "guid",
        vf.GUID,
        "InfiniBand: node and port GUID of the virtual function. stable: one made from the physical function's and the "
        "VF's index, the same at every boot; a GUID: for a request of one NIC. Its driver is bound anew. Needs the "
        "chart's rebindVFs.",
        unset="keep, its own",
    )
    pkey: int | None = setting(
        "pkey",
        Integer(1, 65535),
        "InfiniBand: the partition, like 0x8001; the subnet manager must have put the port into it. The pod has an "
        "IPoIB interface in it, named after the NIC's own and the partition (net1.8001): mtu, addresses, ipam, routes, "
        "neighbours, sysctls and ipoib are for this one; features, rings and channels are for the NIC's own below it.",
        unset="the port's default partition, on the NIC's own interface",
    )
    ipoib: vf.Ipoib | None = setting(
        "ipoib",
        Group(vf.Ipoib),
        "InfiniBand: the kind of the IPoIB interface. In exclusive RDMA mode (rdma-system(8)) a pod has none.",
        unset="as it is",
    )
    env_hints: bool | None = setting(
        "envHints",
        Boolean(),
        f"{_RDMA_HINTS}, with driver vfio-pci the functions' addresses (PCIDEVICE_RAILMATE_DEV_<REQUEST>), and, "
        f"{_TOPOLOGY_HINT}",
        unset="none",
    )


@dataclass(frozen=True, slots=True)
class RdmaSharedConfig(NetdevConfig):
    """How a sub-interface of a shared physical function appears in the pod. Applies to rdma-shared devices. It ends
    with the pod. VLAN, trust, rates, offloads, rings and queues are the physical function's, which others use too."""

    mac: str | None = setting(
        "mac",
        vf.MAC,
        "The sub-interface's MAC address. For a request of one NIC.",
        unset="one that is made from the share's id",
    )
    macvlan_mode: str | None = setting(
        "macvlanMode",
        Choice(("bridge", "private", "vepa")),
        "Whether sub-interfaces of one physical function reach each other: within it (bridge), not at all (private), "
        "or by way of the switch outside (vepa).",
        unset="bridge",
    )


#: Kind -> the class that declares its fields.
KINDS: Final[Mapping[str, type[NetdevConfig]]] = {
    CONFIG_KIND_RDMA_VF: RdmaVfConfig,
    CONFIG_KIND_RDMA_SHARED: RdmaSharedConfig,
}
Config = TypeVar("Config", bound=NetdevConfig)


def decode(parameters: Mapping[str, Any]) -> NetdevConfig:
    """Decode one opaque ``parameters`` object.

    Raises ConfigError for anything that is not exactly a known kind with known fields.
    """
    found = problems(parameters)
    if found:
        raise ConfigError("; ".join(str(problem) for problem in found))
    return fields.build(KINDS[parameters["kind"]], parameters)


def problems(parameters: Any, kinds: Mapping[str, type[Any]] = KINDS) -> list[Problem]:
    """All that is wrong with one opaque ``parameters`` object."""
    if not isinstance(parameters, Mapping):
        return [Problem("", "must be an object", fields.shown(parameters))]
    for name, allowed in zip(TYPE_FIELDS, ((CONFIG_API_VERSION,), tuple(kinds)), strict=True):
        value = parameters.get(name)
        if not isinstance(value, str) or value not in allowed:
            seen = fields.shown(value) if name in parameters else "left out"
            return [Problem(name, f"must be {' or '.join(allowed)}", seen)]
    return fields.object_problems(kinds[parameters["kind"]], parameters, "", TYPE_FIELDS)


def merge(configs: Sequence[NetdevConfig], of: type[Config]) -> Config:
    """One config from those of this kind, given in the order of ``status.allocation.devices.config``."""
    merged = of()
    for config in configs:
        if isinstance(config, of):
            merged = fields.merge(merged, config)
    return merged
