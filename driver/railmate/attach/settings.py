"""What is asked for a netdev in its pod, worked out in full: attach only applies it. Plain data, kept in the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace


@dataclass(frozen=True, slots=True)
class Route:
    """``destination`` with prefix; without ``gateway`` it is on the link. None: the kernel's default."""

    destination: str
    gateway: str | None = None
    source: str | None = None
    metric: int | None = None
    table: int | None = None


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """Packets from ``source`` to ``destination`` (with prefix; None: any) look into ``table``."""

    table: int
    priority: int
    source: str | None = None
    destination: str | None = None


@dataclass(frozen=True, slots=True)
class Neighbour:
    address: str
    mac: str


@dataclass(frozen=True, slots=True)
class VfSettings:
    """What a physical function keeps of one of its VFs (ip-link(8), ``vf``). None: not known, or left as it is.

    ``vlan`` 0 is none. Rates in Mbit/s, 0 is no limit.
    """

    mac: str | None = None
    vlan: int | None = None
    qos: int | None = None
    protocol: str | None = None  # "802.1Q" or "802.1ad"
    trust: bool | None = None
    spoof_check: bool | None = None
    link_state: str | None = None  # "auto", "enable" or "disable"
    min_tx_rate: int | None = None
    max_tx_rate: int | None = None
    guid: str | None = None  # InfiniBand: node and port GUID, set and told as one


@dataclass(frozen=True, slots=True)
class IpoibSettings:
    """Of an IPoIB interface. With ``pkey`` (its membership bit set) one in that partition is made over the netdev."""

    pkey: int | None = None
    mode: str | None = None  # "datagram" or "connected"
    umcast: bool | None = None


@dataclass(frozen=True, slots=True)
class EthtoolSettings:
    """Offloads by the kernel's name, ring sizes (``rx``, ``tx``) and queues (``rx``, ``tx``, ``combined``).

    Only of what is to be restored, by the words of ethtool(8): interrupt ``coalescing``, flow control (``pause``), the
    driver's ``private_flags``, the port's speed (``link``: it is negotiated or fixed, then with ``speed`` in Mbit/s and
    ``duplex``) and what it ``advertises`` where that is negotiated, and what wakes the machine (``wake_on``).
    """

    features: Mapping[str, bool] = field(default_factory=dict)
    rings: Mapping[str, int] = field(default_factory=dict)
    channels: Mapping[str, int] = field(default_factory=dict)
    coalescing: Mapping[str, int] = field(default_factory=dict)
    pause: Mapping[str, int] = field(default_factory=dict)
    private_flags: Mapping[str, bool] = field(default_factory=dict)
    link: Mapping[str, int] = field(default_factory=dict)
    advertises: Mapping[str, bool] = field(default_factory=dict)
    wake_on: Mapping[str, bool] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(getattr(self, one.name) for one in fields(self))


NO_ETHTOOL = EthtoolSettings()


@dataclass(frozen=True, slots=True)
class NetdevSettings:
    """``mtu`` in bytes; None and empty: nothing is changed. ``sysctls`` by the kernel's name without the
    interface's: ``ipv4/arp_ignore``."""

    mtu: int | None = None
    mac: str | None = None
    addresses: tuple[str, ...] = ()
    routes: tuple[Route, ...] = ()
    rules: tuple[RoutingRule, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    sysctls: Mapping[str, str] = field(default_factory=dict)
    ethtool: EthtoolSettings = NO_ETHTOOL
    vf: VfSettings | None = None
    ipoib: IpoibSettings | None = None

    def interface(self, name: str) -> str:
        """The interface that all of it is for, where the netdev is called ``name``: the kernel's own way of naming one
        in a partition."""
        if self.ipoib is None or self.ipoib.pkey is None or not name:
            return name
        return f"{name}.{self.ipoib.pkey:04x}"

    @property
    def in_partition(self) -> bool:
        """Whether the pod's interface is another one than the netdev, made over it."""
        return self.ipoib is not None and self.ipoib.pkey is not None

    @property
    def netdev_mtu(self) -> int | None:
        """The MTU of the netdev itself."""
        return None if self.in_partition else self.mtu

    @property
    def needs_physical(self) -> bool:
        """Whether it cannot be done without the physical function. A MAC alone can: the netdev itself takes it."""
        return self.vf is not None and replace(self.vf, mac=None) != VfSettings()


NO_SETTINGS = NetdevSettings()
