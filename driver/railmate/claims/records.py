"""What the ledger keeps of a claim. Plain data with a JSON form of its own.

A reader ignores fields it does not know and fills the ones that are missing, so that one version
back and forth can be read; ``version`` is raised only when that no longer holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from railmate.attach.model import AttachedNetdev, NetdevSnapshot
from railmate.cdi.spec import DeviceNode
from railmate.errors import RailmateError

LEDGER_VERSION = 1

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
    None for a NIC with an RDMA device only.
    """

    address: str
    interface: str
    snapshot: NetdevSnapshot | None = None


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """An allocated device and what a container gets with it.

    ``request`` is the base name, without a subrequest. ``nodes`` are device nodes, ``vendor_cdi_ids``
    the GPU vendor's own CDI devices. ``attributes`` (in the API's form) go into the metadata file.
    With ``admin_access`` (KEP-5018) the device is looked at beside its user: device nodes only, nothing is held.
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
class Entry:
    """All that is known of a prepared claim."""

    claim: ClaimRef
    pods: tuple[str, ...]  # UIDs the claim was reserved for when it was prepared
    devices: tuple[PreparedDevice, ...]
    boot_id: str
    pod_claim_name: str | None = None  # of a claim made from a template
    attachment: Attachment | None = None

    @property
    def nics(self) -> tuple[PreparedNic, ...]:
        return tuple(nic for device in self.devices for nic in device.nics)

    @property
    def hardware(self) -> frozenset[str]:
        """PCI addresses of everything the claim holds."""
        gpus = {gpu for device in self.devices if not device.admin_access for gpu in device.gpus}
        return frozenset(gpus | {nic.address for nic in self.nics})

    def attached_to(self, sandbox: str) -> bool:
        return self.attachment is not None and self.attachment.complete and self.attachment.sandbox == sandbox

    def with_attachment(self, attachment: Attachment | None) -> Entry:
        return replace(self, attachment=attachment)

    def to_json(self) -> dict[str, Any]:
        return {"version": LEDGER_VERSION, **asdict(self)}

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
            entry: Entry = _pick(
                cls,
                {
                    **value,
                    "claim": _pick(ClaimRef, value["claim"]),
                    "pods": tuple(value["pods"]),
                    "devices": tuple(_device(device) for device in value["devices"]),
                    "attachment": _attachment(value["attachment"]) if value.get("attachment") else None,
                },
            )
            return entry
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"not a ledger entry: {type(error).__name__}: {error}") from error


def _device(value: Any) -> PreparedDevice:
    known = {
        **value,
        "gpus": tuple(value.get("gpus", ())),
        "nics": tuple(_nic(nic) for nic in value.get("nics", ())),
        "nodes": tuple(_pick(DeviceNode, node) for node in value.get("nodes", ())),
        "vendor_cdi_ids": tuple(value.get("vendor_cdi_ids", ())),
    }
    return _pick(PreparedDevice, known)


def _nic(value: Any) -> PreparedNic:
    snapshot = value.get("snapshot")
    return _pick(PreparedNic, {**value, "snapshot": netdev_snapshot(snapshot) if snapshot else None})


def netdev_snapshot(value: Any) -> NetdevSnapshot:
    """Raises TypeError, LookupError or AttributeError when this is none."""
    snapshot: NetdevSnapshot = _pick(NetdevSnapshot, value)
    return snapshot


def _attachment(value: Any) -> Attachment:
    netdevs = tuple(_pick(AttachedNetdev, netdev) for netdev in value.get("netdevs", ()))
    return _pick(Attachment, {**value, "netdevs": netdevs})


#: What a field of a record may hold, by its annotation; others are built by the functions above.
_TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "str | None": (str, type(None)),
}


def _pick(cls: type[Any], value: Any) -> Any:
    """Build the dataclass from the fields it knows. Raises TypeError for a value of another type."""
    known = {name: value[name] for name in cls.__dataclass_fields__ if name in value}
    for name, one in known.items():
        annotation = cls.__dataclass_fields__[name].type
        if annotation in _TYPES and not isinstance(one, _TYPES[annotation]):
            raise TypeError(f"{cls.__name__}.{name} is no {annotation}")
        if annotation == "tuple[str, ...]" and not all(isinstance(part, str) for part in one):
            raise TypeError(f"{cls.__name__}.{name} holds something else than text")
        if annotation == "Mapping[str, Any]" and not isinstance(one, Mapping):
            raise TypeError(f"{cls.__name__}.{name} is no object")
    return cls(**known)
