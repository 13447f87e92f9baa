"""A VF's netdev on its way into a pod and home: what the rest of the driver calls.

All functions block. Devices are found by what they are, never by name alone: a container can rename its
interface, and a namespace that ends gives a VF back under the name it had in the pod, or another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from railmate.attach import (
    addressing,
    ethtool,
    ipoib,
    links,
    linkstate,
    macvlan,
    programs,
    queues,
    steering,
    sysctl,
    vf,
)
from railmate.attach.errors import AttachError, NamespaceGoneError, UnfitError
from railmate.attach.ethtool import Ethtool
from railmate.attach.home import bring_home
from railmate.attach.links import attempt
from railmate.attach.macvlan import MakeSubInterface, remove_all
from railmate.attach.model import (
    AttachedNetdev,
    MoveRequest,
    NetdevReturn,
    NetdevSnapshot,
    PhysicalPort,
    ReturnRequest,
    ReturnState,
    SubInterface,
    SubInterfaceRequest,
)
from railmate.attach.move import MoveNetdev, steps_of
from railmate.attach.namespaces import Sides, open_namespace, with_host, with_namespace
from railmate.attach.rdma import MoveRdmaDevices
from railmate.attach.rdmamodel import RdmaDeviceRef
from railmate.attach.settings import NO_SETTINGS, NetdevSettings, VfSettings
from railmate.attach.steps import Step, apply_all

__all__ = [
    "AttachedNetdev",
    "MoveRequest",
    "NetdevReturn",
    "NetdevSnapshot",
    "PhysicalPort",
    "ReturnRequest",
    "ReturnState",
    "SubInterface",
    "SubInterfaceRequest",
    "attach_all",
    "move_back",
    "move_in",
    "remove_all",
    "return_all",
    "snapshot",
]

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# dev_valid_name() of the kernel; % would make the name a template
_INTERFACE_NAME = re.compile(r"(?!\.{1,2}$)[^\s/:%]{1,15}")


def snapshot(
    ifname: str,
    pci_address: str,
    physical: PhysicalPort | None = None,
    settings: NetdevSettings = NO_SETTINGS,
) -> NetdevSnapshot:
    """The present state of the host's netdev ``ifname`` of the PCI function ``pci_address``, and of what
    ``physical`` keeps of it.

    Raises AttachError when there is none or when it belongs to another PCI function, UnfitError when it could not
    take the ``settings``.
    """
    return with_host(lambda sides: _snapshot(ifname, pci_address, physical, settings, sides))


def _snapshot(
    ifname: str, pci_address: str, physical: PhysicalPort | None, settings: NetdevSettings, sides: Sides
) -> NetdevSnapshot:
    with attempt(f"netdev {ifname} cannot be read"):
        link = links.get(sides.host, ifname)
        if link is None:
            raise AttachError(f"netdev {ifname} of {pci_address} is not on the host; is it in a pod?")
        if link.parent is not None and _PCI_ADDRESS.fullmatch(link.parent) and link.parent != pci_address:
            raise AttachError(f"netdev {ifname} belongs to PCI function {link.parent}, not to {pci_address}")
        with closing(Ethtool()) as kernel:
            state = kernel.state(link.index)
        missing = ethtool.impossible(settings.ethtool, state)
        if missing:
            raise UnfitError(f"netdev {ifname} of {pci_address} cannot have {missing}")
        kept = _kept(physical, settings, sides)
        return NetdevSnapshot(
            pci_address,
            link.name,
            link.mac,
            link.mtu,
            link.up,
            link.parent,
            addresses=addressing.addresses(sides.host, link.index),
            ethtool=state.now,
            physical=physical if kept else None,
            vf=kept,
            ipoib=ipoib.read(sides.host, link.index) if ipoib.is_ipoib(link) else None,
            link=linkstate.read(sides.host, link.index),
            programs=programs.attached(sides.host, link.index),
            queues=queues.read(link.name),
            steering=steering.read(link.name),
            sysctls=sysctl.read(link.name),
        )


def _kept(physical: PhysicalPort | None, settings: NetdevSettings, sides: Sides) -> VfSettings | None:
    """What the physical function keeps of the VF; None where it cannot be asked and need not be."""
    if physical is None:
        return None
    try:
        return vf.read(sides.host, physical)
    except AttachError as error:
        if settings.needs_physical:
            raise UnfitError(str(error)) from error
        return None


def move_in(snapshot: NetdevSnapshot, netns_path: Path, *, name: str) -> AttachedNetdev:
    """Move one netdev into the namespace at ``netns_path`` as interface ``name``; see :func:`attach_all`."""
    return attach_all([MoveRequest(snapshot, name)], netns_path)[0]


def attach_all(
    requests: Sequence[MoveRequest | SubInterfaceRequest],
    netns_path: Path,
    rdma_devices: Sequence[RdmaDeviceRef] = (),
) -> list[AttachedNetdev]:
    """Move netdevs, with their RDMA devices, into the namespace at ``netns_path``, make sub-interfaces there and set
    all of them up: all or none. ``rdma_devices`` are those of NICs without a netdev, which go there too.

    Repeatable: a netdev that is there already stays as it is, also when a container has renamed it since.
    Raises AttachError that names the netdev and the cause; what this call had moved is home again by then.
    """
    for request in requests:
        if not _INTERFACE_NAME.fullmatch(request.name):
            raise AttachError(f"{request.name!r} is no interface name: 1 to 15 characters, no space, / or :")
    steps: list[Step] = []
    moves: list[MoveNetdev | MakeSubInterface] = []
    for request in requests:
        move: MoveNetdev | MakeSubInterface
        if isinstance(request, SubInterfaceRequest):
            its_steps, move = macvlan.steps_of(request)
        else:
            its_steps, move = steps_of(request)
        steps += its_steps
        moves.append(move)
    if rdma_devices:
        steps.append(MoveRdmaDevices(rdma_devices))
    with open_namespace(netns_path) as fd:
        with_namespace(fd, lambda sides: apply_all(steps, sides))
    return [move.attached for move in moves if move.attached is not None]


def move_back(
    snapshot: NetdevSnapshot, netns_path: Path | None, *, attached: AttachedNetdev | None = None
) -> NetdevReturn:
    """Bring one netdev home; see :func:`return_all`."""
    return return_all([ReturnRequest(snapshot, attached)], netns_path)[0]


def return_all(requests: Sequence[ReturnRequest], netns_path: Path | None) -> list[NetdevReturn]:
    """Bring netdevs home and restore what their snapshots know. Repeatable; a failure does not stop the rest.

    ``netns_path`` is where they should be; None or a namespace that has ended means that the kernel has taken
    them back or is about to; one that is not there yet is lost, and has to be asked for again. Raises AttachError
    only when the namespace exists and cannot be entered.
    """
    if netns_path is not None:
        try:
            with open_namespace(netns_path) as fd:
                return with_namespace(fd, lambda sides: [bring_home(request, sides) for request in requests])
        except NamespaceGoneError:
            pass
    return with_host(lambda sides: [bring_home(request, sides) for request in requests])
