"""What is remembered of a netdev, asked for it and said about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from railmate.attach.linkstate import LinkState
from railmate.attach.rdmamodel import RdmaDeviceRef
from railmate.attach.settings import (
    NO_ETHTOOL,
    NO_SETTINGS,
    EthtoolSettings,
    IpoibSettings,
    NetdevSettings,
    VfSettings,
)
from railmate.attach.steering import Steering


@dataclass(frozen=True, slots=True)
class PhysicalPort:
    """The netdev of a VF's physical function, and the VF's index there."""

    netdev: str
    vf: int

    def __str__(self) -> str:
        return f"VF {self.vf} of {self.netdev}"


@dataclass(frozen=True, slots=True)
class NetdevSnapshot:
    """A netdev as it was on the host before a pod got it, to be restored afterwards.

    ``parent`` is the device behind it as the kernel says (the PCI address of a VF), None where it does not
    say; then the MAC identifies the netdev. ``mtu`` in bytes. ``addresses`` with prefix, without those that the
    kernel makes itself. ``vf`` is what the physical function kept of it, None where there is none to ask.
    ``soft_rdma`` are RDMA devices that software makes over it: they end when it moves, and are made anew.
    ``ipoib`` is its kind, where it is an IPoIB interface. ``link`` is what rtnetlink keeps of it besides, ``programs``
    are the ids of BPF programs on it, ``queues`` what only sysfs keeps, ``steering`` which queue a packet goes to;
    None: an earlier railmate did not look, or sysfs cannot be seen. ``sysctls`` are what it has of its own below
    /proc/sys/net, by the names of `railmate.attach.sysctl`.
    """

    pci_address: str
    name: str
    mac: str
    mtu: int
    up: bool
    parent: str | None = None
    addresses: tuple[str, ...] = ()
    ethtool: EthtoolSettings = NO_ETHTOOL
    physical: PhysicalPort | None = None
    vf: VfSettings | None = None
    soft_rdma: tuple[RdmaDeviceRef, ...] = ()
    ipoib: IpoibSettings | None = None
    link: LinkState | None = None
    programs: tuple[int, ...] | None = None
    queues: Mapping[str, str] | None = None
    steering: Steering | None = None
    sysctls: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"netdev {self.name} of {self.pci_address}"


@dataclass(frozen=True, slots=True)
class SubInterface:
    """A sub-interface to be made over a netdev that stays on the host. ``share`` tells it from others over the same.

    ``port``, ``parent`` and ``port_mac`` say which netdev, as in `NetdevSnapshot`. ``mode`` is macvlan's; ``mac`` is
    what it is found by, so it is given and not the kernel's choice.
    """

    share: str
    port: str
    port_mac: str
    mac: str
    mode: str = "bridge"
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class SubInterfaceRequest:
    """``sub`` over the netdev of ``pci_address`` is to be the pod's interface ``name``, with ``settings``; or, on the
    way back, is to end: then ``attached`` is what attaching it returned, if known."""

    pci_address: str
    sub: SubInterface
    name: str
    settings: NetdevSettings = NO_SETTINGS
    attached: AttachedNetdev | None = None

    def __str__(self) -> str:
        return f"a sub-interface of {self.sub.port} ({self.pci_address})"


@dataclass(frozen=True, slots=True)
class MoveRequest:
    """The netdev of ``snapshot`` is to be the pod's interface ``name``, with ``settings``. ``rdma_devices`` of its
    PCI function go with it where namespaces do not share them."""

    snapshot: NetdevSnapshot
    name: str
    settings: NetdevSettings = NO_SETTINGS
    rdma_devices: tuple[RdmaDeviceRef, ...] = ()


@dataclass(frozen=True, slots=True)
class AttachedNetdev:
    """A netdev in a pod: its name and its interface index there. ``share`` is that of a sub-interface."""

    pci_address: str
    name: str
    ifindex: int
    mac: str
    mtu: int
    share: str | None = None


@dataclass(frozen=True, slots=True)
class ReturnRequest:
    """The netdev of ``snapshot`` is to come home; ``attached`` is what attaching it returned, if known, ``settings``
    what was asked for it."""

    snapshot: NetdevSnapshot
    attached: AttachedNetdev | None = None
    settings: NetdevSettings = NO_SETTINGS


class ReturnState(StrEnum):
    RETURNED = "returned"  # it was in the pod
    ALREADY_HOME = "already home"  # it was on the host
    LOST = "lost"  # in neither of the two: destroyed with its namespace, or in another one
    FAILED = "failed"  # it is in the pod and could not be moved; try again


@dataclass(frozen=True, slots=True)
class NetdevReturn:
    """Where a netdev is, its name there, and what could not be restored, a sentence each."""

    pci_address: str
    state: ReturnState
    name: str | None
    problems: tuple[str, ...] = ()

    @property
    def home(self) -> bool:
        return self.state in (ReturnState.RETURNED, ReturnState.ALREADY_HOME)
