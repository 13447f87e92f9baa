"""A netdev comes home: moved back from the pod, or found where the kernel has put it, and put right."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any

from pyroute2.netlink.exceptions import NetlinkError

from railmate.attach import links
from railmate.attach.errors import AttachError
from railmate.attach.links import Link, attempt
from railmate.attach.model import NetdevReturn, NetdevSnapshot, ReturnRequest, ReturnState
from railmate.attach.namespaces import Sides

_POLL = 0.02  # seconds


def find_on_host(snapshot: NetdevSnapshot, sides: Sides) -> Link | None:
    """The snapshot's device on the host. Looks at the one of its name first: a host can have hundreds.

    A name proves nothing: another device may have taken it.
    """
    named = links.get(sides.host, snapshot.name)
    link = links.find([named] if named else [], parent=snapshot.parent, mac=snapshot.mac)
    return link or links.find(links.get_all(sides.host), parent=snapshot.parent, mac=snapshot.mac)


def bring_home(request: ReturnRequest, sides: Sides) -> NetdevReturn:
    """From the pod, or where it is not there, from the host's own devices."""
    snapshot, attached = request.snapshot, request.attached
    link = links.find(
        links.get_all(sides.pod),
        parent=snapshot.parent,
        mac=snapshot.mac,
        index=attached.ifindex if attached else None,
        name=attached.name if attached else None,
    )
    if link is None:
        return _restore(snapshot, sides, ReturnState.ALREADY_HOME)
    try:
        _move_home(snapshot, link, sides)
    except AttachError as error:
        return NetdevReturn(snapshot.pci_address, ReturnState.FAILED, link.name, (str(error),))
    return _restore(snapshot, sides, ReturnState.RETURNED)


def _move_home(snapshot: NetdevSnapshot, link: Link, sides: Sides) -> None:
    """The kernel closes a device that changes its namespace, so it arrives down."""
    if snapshot.parent is None and link.mac != snapshot.mac:
        # On the host only the MAC will tell which device this is. If it cannot be set, the device is found lost.
        with suppress(NetlinkError):
            sides.pod.link("set", index=link.index, state="down")
            sides.pod.link("set", index=link.index, address=snapshot.mac)
    with attempt(f"interface {link.name} ({snapshot.pci_address}) cannot be moved from the pod to the host"):
        name = _free_name(snapshot, sides)
        sides.pod.link("set", index=link.index, net_ns_fd=sides.host_fd, ifname=name)


def _free_name(snapshot: NetdevSnapshot, sides: Sides) -> str:
    """Its own name, or when another device took that, one that says which VF it is and cannot be taken."""
    if links.get(sides.host, snapshot.name) is None:
        return snapshot.name
    domain, bus, rest = snapshot.pci_address.split(":")
    device, function = rest.split(".")
    return f"rm{domain}{bus}{device}{function}"[:15]


def await_home(request: ReturnRequest, sides: Sides, deadline: float) -> NetdevReturn:
    while True:
        result = _restore(request.snapshot, sides, ReturnState.ALREADY_HOME)
        if result.state != ReturnState.LOST or time.monotonic() >= deadline:
            return result
        time.sleep(_POLL)


def _restore(snapshot: NetdevSnapshot, sides: Sides, state: ReturnState) -> NetdevReturn:
    """Give a device that is on the host its name, MAC, MTU and state back, and look whether it has them."""
    try:
        found = find_on_host(snapshot, sides)
        if found is None:
            return NetdevReturn(snapshot.pci_address, ReturnState.LOST, None)
        problems = _put_right(snapshot, found, sides)
        link = links.get_index(sides.host, found.index)
    except NetlinkError as error:
        return NetdevReturn(snapshot.pci_address, ReturnState.FAILED, None, (os.strerror(error.code),))
    if link is None:
        return NetdevReturn(snapshot.pci_address, ReturnState.LOST, None)
    return NetdevReturn(snapshot.pci_address, state, link.name, tuple(problems))


def _put_right(snapshot: NetdevSnapshot, link: Link, sides: Sides) -> list[str]:
    """Set what differs from the snapshot; a sentence for each thing that could not be set."""
    changes: list[tuple[str, dict[str, Any]]] = []
    problems = []
    if link.name != snapshot.name:
        name = _free_name(snapshot, sides)
        if name != snapshot.name:
            problems.append(f"its name {snapshot.name} is taken by another device; it is called {name} now")
        if name != link.name:
            changes.append((f"name {name}", {"ifname": name}))
    if link.mac != snapshot.mac:
        changes.append((f"MAC {snapshot.mac}", {"address": snapshot.mac}))
    if link.mtu != snapshot.mtu:
        changes.append((f"MTU {snapshot.mtu}", {"mtu": snapshot.mtu}))
    up = link.up
    if up and (changes or not snapshot.up):  # drivers may refuse a new name or MAC to a device that is up
        changes.insert(0, ("state down", {"state": "down"}))
        up = False
    if up != snapshot.up:
        changes.append(("state up", {"state": "up"}))
    for what, change in changes:
        try:
            sides.host.link("set", index=link.index, **change)
        except NetlinkError as error:
            problems.append(f"{what} cannot be set: {os.strerror(error.code)}")
    return problems
