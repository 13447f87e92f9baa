"""What the ledger keeps of a claim. Plain data with a JSON form of its own.

A reader ignores fields it does not know and fills the ones that are missing, so that one version
back and forth can be read; ``version`` is raised only when that no longer holds: an entry has the version that its
reader must know at least.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from railmate.attach.functions import FunctionChange, is_so
from railmate.attach.ipam import IpamRequest
from railmate.attach.model import AttachedNetdev, NetdevSnapshot, SubInterface
from railmate.attach.rdmamodel import RdmaDeviceRef, SeenNic
from railmate.attach.settings import NO_SETTINGS, NetdevSettings
from railmate.cdi.spec import DeviceNode, nodes_word
from railmate.errors import RailmateError
from railmate.plain import read
from railmate.publish.model import OfferedDevice, part_of

#: 2: functions bound to another driver, sub-interfaces and partitions, which a reader of 1 would take for plain NICs,
#: and never give back.
LEDGER_VERSION = 2

#: A claim's UID becomes part of file names.
_UID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,127}")


def is_claim_uid(text: str) -> bool:
    return _UID.fullmatch(text) is not None


class NewerRecordError(RailmateError):
    """A record of a later version: whole, but not to be understood here. It is left for who wrote it."""


@dataclass(frozen=True, slots=True)
class ClaimRef:
    """A claim as the kubelet names it."""

    uid: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"ResourceClaim {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class PreparedNic:
    """A NIC of a claim: who it is, what it is called in the pod, and what it returns to.

    ``address`` identifies it for good. ``snapshot`` is its netdev on the node before any pod had it;
    None for a NIC with an RDMA device only. ``rdma`` are its RDMA devices, soft ones too. ``settings`` are what it
    gets in the pod, with the addresses that ``ipam`` lends once it is ``leased``. ``change`` is what is done to the
    function itself, when the claim is prepared: one that passes through has no interface and no RDMA device. Of a share
    the NIC stays on the node, and the pod gets ``sub`` over it; several shares of a NIC may be in one claim.
    """

    address: str
    interface: str
    snapshot: NetdevSnapshot | None = None
    settings: NetdevSettings = NO_SETTINGS
    ipam: IpamRequest | None = None
    leased: bool = False
    rdma: tuple[RdmaDeviceRef, ...] = ()
    change: FunctionChange | None = None
    sub: SubInterface | None = None

    def with_snapshot(self, snapshot: NetdevSnapshot) -> PreparedNic:
        """The NIC with what its netdev returns to. One that passes through has none to give to a pod."""
        if self.change is None:
            return replace(self, snapshot=snapshot)
        hardware_address = snapshot.mac.split(":")
        guid = ":".join(hardware_address[-8:]) if len(hardware_address) == 20 else None  # of IPoIB, RFC 4391
        if is_so(self.change, snapshot.vf, guid):
            return replace(self, snapshot=snapshot, change=None)
        change = replace(self.change, snapshot=snapshot, before=snapshot.vf)
        return replace(self, snapshot=None if self.passes_through else snapshot, change=change)

    @property
    def pod_interface(self) -> str:
        """The interface that a program in the pod uses."""
        return self.settings.interface(self.interface)

    @property
    def passes_through(self) -> bool:
        return self.change is not None and self.change.passes_through

    @property
    def share(self) -> str | None:
        return self.sub.share if self.sub else None

    @property
    def key(self) -> tuple[str, str | None]:
        """What tells it from all other NICs and shares."""
        return self.address, self.share

    @property
    def part(self) -> str:
        """What of the hardware it holds: see `railmate.publish.model.part_of`."""
        return part_of(self.address, self.share)


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """An allocated device and what a container gets with it.

    ``request`` is the base name, without a subrequest. ``nodes`` are device nodes, ``vendor_cdi_ids``
    the GPU vendor's own CDI devices. ``attributes`` (in the API's form) go into the metadata file.
    With ``admin_access`` (KEP-5018) the device is looked at beside its user: device nodes only, nothing is held.
    With ``partition`` it is that part of its GPU. With ``env_hints`` containers get variables that name its NICs.
    ``share_id``: which share of the device it is, where several claims have one each (KEP-5075).
    """

    request: str
    pool: str
    device: str
    gpus: tuple[str, ...] = ()
    nics: tuple[PreparedNic, ...] = ()
    nodes: tuple[DeviceNode, ...] = ()
    vendor_cdi_ids: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    admin_access: bool = False
    partition: str | None = None
    env_hints: bool = False
    nccl_topology: bool = False
    share_id: str | None = None

    @property
    def key(self) -> str:
        """Its name, with its share where it has one: different for each device of a claim."""
        return f"{self.device}-{self.share_id}" if self.share_id else self.device


@dataclass(frozen=True, slots=True)
class Attachment:
    """Where a claim's netdevs are: in which sandbox, in which namespace. ``complete`` only when all are
    there; an attachment that is not was cut short, and is undone or finished."""

    sandbox: str
    pod_uid: str
    pod: str  # namespace/name, for people
    netns: str | None  # None: a pod on the host network, nothing was moved
    complete: bool = False
    netdevs: tuple[AttachedNetdev, ...] = ()


@dataclass(frozen=True, slots=True)
class Seen:
    """What the pod's sandbox saw of the claim's NICs after they were attached. ``told``: whether the API knows of it;
    None in records of a railmate that did not say."""

    sandbox: str
    nics: tuple[SeenNic, ...] = ()
    told: bool | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """All that is known of a prepared claim."""

    claim: ClaimRef
    pods: tuple[str, ...]  # UIDs the claim was reserved for when it was prepared
    devices: tuple[PreparedDevice, ...]
    boot_id: str
    pod_claim_name: str | None = None  # of a claim made from a template
    attachment: Attachment | None = None
    seen: Seen | None = None

    @property
    def nics(self) -> tuple[PreparedNic, ...]:
        return tuple(nic for device in self.devices for nic in device.nics)

    @property
    def hardware(self) -> frozenset[str]:
        """PCI addresses of everything that the claim alone holds."""
        gpus = {gpu for device in self.devices if not device.admin_access for gpu in device.gpus}
        return frozenset(gpus | {nic.address for nic in self.nics if nic.sub is None})

    @property
    def shared(self) -> frozenset[str]:
        """PCI addresses of NICs that it has a share of."""
        return frozenset(nic.address for nic in self.nics if nic.sub is not None)

    @property
    def parts(self) -> frozenset[str]:
        """Of a GPU that is cut up only the part that is held (``0000:07:00.0/gi3ci0``), of a shared NIC the share."""
        gpus = {
            part_of(gpu, device.partition)
            for device in self.devices
            if not device.admin_access
            for gpu in device.gpus
        }
        return frozenset(gpus | {nic.part for nic in self.nics})

    @property
    def nodes_word(self) -> str:
        """What the claim's CDI spec and the gate's marker must agree in."""
        return nodes_word(node for device in self.devices for node in device.nodes)

    def attached_to(self, sandbox: str) -> bool:
        return self.attachment is not None and self.attachment.complete and self.attachment.sandbox == sandbox

    def with_nics(self, change: Callable[[PreparedNic], PreparedNic]) -> Entry:
        """The entry with each NIC as ``change`` makes it."""
        devices = [replace(one, nics=tuple(change(nic) for nic in one.nics)) for one in self.devices]
        return replace(self, devices=tuple(devices))

    def with_attachment(self, attachment: Attachment | None) -> Entry:
        return replace(self, attachment=attachment)

    def to_json(self) -> dict[str, Any]:
        new = any(nic.change or nic.sub or nic.settings.ipoib for nic in self.nics)
        return {"version": LEDGER_VERSION if new else 1, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any) -> Entry:
        """Raises ValueError when this cannot be a ledger entry."""
        try:
            if not isinstance(value["version"], int):
                raise TypeError("its version is no whole number")
            if value["version"] > LEDGER_VERSION:
                raise NewerRecordError(
                    f"a ledger entry was written by a newer railmate (version {value['version']}; this one reads "
                    f"{LEDGER_VERSION}). Run that railmate on this node until its pods are gone."
                )
            entry = read(cls, value)
            return entry
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a ledger entry: {type(error).__name__}: {error}") from error


def of_boot(entries: Iterable[Entry], boot_id: str) -> list[Entry]:
    """Those that were prepared in this boot. After a reboot a claim holds nothing until it is prepared again."""
    return [entry for entry in entries if entry.boot_id == boot_id]


def devices_of(entries: Iterable[Entry]) -> list[OfferedDevice]:
    """What claims have: each device's name and what it is made of. A shared port is one device, and its
    ``sub_interfaces`` are the shares that claims have of it."""
    found: dict[str, OfferedDevice] = {}
    for one in (device for entry in entries for device in entry.devices if not device.admin_access):
        shares = found[one.device].sub_interfaces if one.device in found else 0
        found[one.device] = OfferedDevice(
            one.device,
            "",
            {},
            gpus=one.gpus,
            nics=tuple(nic.address for nic in one.nics),
            partition=one.partition,
            sub_interfaces=shares + 1 if one.share_id is not None else 0,
        )
    return list(found.values())


def netdev_snapshot(value: Any) -> NetdevSnapshot:
    """Raises TypeError or ValueError when this is none."""
    return read(NetdevSnapshot, value)
