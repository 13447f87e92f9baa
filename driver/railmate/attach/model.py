"""What is remembered of a netdev, asked for it and said about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class NetdevSnapshot:
    """A netdev as it was on the host before a pod got it, to be restored afterwards.

    ``parent`` is the device behind it as the kernel says (the PCI address of a VF), None where it does not
    say; then the MAC identifies the netdev. ``mtu`` in bytes.
    """

    pci_address: str
    name: str
    mac: str
    mtu: int
    up: bool
    parent: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"netdev {self.name} of {self.pci_address}"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NetdevSnapshot:
        """The inverse of ``to_dict``; unknown keys are ignored. Raises KeyError when one is missing."""
        return cls(
            pci_address=data["pci_address"],
            name=data["name"],
            mac=data["mac"],
            mtu=data["mtu"],
            up=data["up"],
            parent=data.get("parent"),
        )


@dataclass(frozen=True, slots=True)
class MoveRequest:
    """The netdev of ``snapshot`` is to be the pod's interface ``name``."""

    snapshot: NetdevSnapshot
    name: str


@dataclass(frozen=True, slots=True)
class AttachedNetdev:
    """A netdev in a pod: its name and its interface index there."""

    pci_address: str
    name: str
    ifindex: int
    mac: str
    mtu: int


@dataclass(frozen=True, slots=True)
class ReturnRequest:
    """The netdev of ``snapshot`` is to come home; ``attached`` is what attaching it returned, if known."""

    snapshot: NetdevSnapshot
    attached: AttachedNetdev | None = None


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
