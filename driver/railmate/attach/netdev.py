"""A VF's netdev on its way into a pod and home: what the rest of the driver calls.

All functions block. Devices are found by what they are, never by name alone: a container can rename its
interface, and a namespace that ends gives a VF back under the name it had in the pod, or another.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

from railmate.attach import links
from railmate.attach.errors import AttachError, NamespaceGoneError
from railmate.attach.home import await_home, bring_home
from railmate.attach.links import attempt
from railmate.attach.model import (
    AttachedNetdev,
    MoveRequest,
    NetdevReturn,
    NetdevSnapshot,
    ReturnRequest,
    ReturnState,
)
from railmate.attach.move import MoveNetdev
from railmate.attach.namespaces import open_namespace, with_host, with_namespace
from railmate.attach.steps import apply_all

__all__ = [
    "AttachedNetdev",
    "MoveRequest",
    "NetdevReturn",
    "NetdevSnapshot",
    "ReturnRequest",
    "ReturnState",
    "attach_all",
    "move_back",
    "move_in",
    "return_all",
    "snapshot",
]

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# dev_valid_name() of the kernel; % would make the name a template
_INTERFACE_NAME = re.compile(r"(?!\.{1,2}$)[^\s/:%]{1,15}")

# How long a device may take to come home by itself after its namespace has ended: the kernel does that in the
# background, within some ten milliseconds on an idle machine.
HOMECOMING = 1.0  # seconds


def snapshot(ifname: str, pci_address: str) -> NetdevSnapshot:
    """The present state of the host's netdev ``ifname`` of the PCI function ``pci_address``.

    Raises AttachError when there is none, or when it belongs to another PCI function.
    """
    with attempt(f"netdev {ifname} cannot be read"):
        link = with_host(lambda sides: links.get(sides.host, ifname))
    if link is None:
        raise AttachError(f"netdev {ifname} of {pci_address} is not on the host; is it in a pod?")
    if link.parent is not None and _PCI_ADDRESS.fullmatch(link.parent) and link.parent != pci_address:
        raise AttachError(f"netdev {ifname} belongs to PCI function {link.parent}, not to {pci_address}")
    return NetdevSnapshot(pci_address, link.name, link.mac, link.mtu, link.up, link.parent)


def move_in(snapshot: NetdevSnapshot, netns_path: Path, *, name: str) -> AttachedNetdev:
    """Move one netdev into the namespace at ``netns_path`` as interface ``name``; see :func:`attach_all`."""
    return attach_all([MoveRequest(snapshot, name)], netns_path)[0]


def attach_all(requests: Sequence[MoveRequest], netns_path: Path) -> list[AttachedNetdev]:
    """Move netdevs into the namespace at ``netns_path`` and bring them up there: all of them or none.

    Repeatable: a netdev that is there already stays as it is, also when a container has renamed it since.
    Raises AttachError that names the netdev and the cause; what this call had moved is home again by then.
    """
    for request in requests:
        if not _INTERFACE_NAME.fullmatch(request.name):
            raise AttachError(f"{request.name!r} is no interface name: 1 to 15 characters, no space, / or :")
    moves = [MoveNetdev(request) for request in requests]
    with open_namespace(netns_path) as fd:
        with_namespace(fd, lambda sides: apply_all(moves, sides))
    return [move.attached for move in moves if move.attached is not None]


def move_back(
    snapshot: NetdevSnapshot,
    netns_path: Path | None,
    *,
    attached: AttachedNetdev | None = None,
    wait: float = HOMECOMING,
) -> NetdevReturn:
    """Bring one netdev home; see :func:`return_all`."""
    return return_all([ReturnRequest(snapshot, attached)], netns_path, wait=wait)[0]


def return_all(
    requests: Sequence[ReturnRequest], netns_path: Path | None, *, wait: float = HOMECOMING
) -> list[NetdevReturn]:
    """Bring netdevs home and restore name, MAC, MTU and state. Repeatable; a failure does not stop the rest.

    ``netns_path`` is where they should be; None or a namespace that has ended means that the kernel has taken
    them back or is about to, which is waited for ``wait`` seconds at most. Raises AttachError only when the
    namespace exists and cannot be entered.
    """
    if netns_path is not None:
        try:
            with open_namespace(netns_path) as fd:
                return with_namespace(fd, lambda sides: [bring_home(request, sides) for request in requests])
        except NamespaceGoneError:
            pass
    deadline = time.monotonic() + wait
    return with_host(lambda sides: [await_home(request, sides, deadline) for request in requests])
