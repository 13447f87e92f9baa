"""A netdev comes home: moved back from the pod, or found where the kernel has put it, and put right."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

from railmate.attach import (
    addressing,
    ethtool,
    ipoib,
    links,
    linkstate,
    programs,
    queues,
    rdmasoft,
    steering,
    sysctl,
    vf,
)
from railmate.attach.errors import AttachError
from railmate.attach.ethtool import Ethtool
from railmate.attach.links import Link, attempt, error_of
from railmate.attach.model import NetdevReturn, NetdevSnapshot, ReturnRequest, ReturnState
from railmate.attach.namespaces import Sides

_RESET_PATIENCE, _POLL = 0.3, 0.03  # seconds; what takes longer is put right later


def find_on_host(snapshot: NetdevSnapshot, sides: Sides) -> Link | None:
    """The snapshot's device on the host. Looks at the one of its name first: a host can have hundreds.

    A name proves nothing: another device may have taken it.
    """
    named = links.get(sides.host, snapshot.name)
    link = links.find([named] if named else [], parent=snapshot.parent, mac=snapshot.mac)
    return link or links.find(links.get_all(sides.host), parent=snapshot.parent, mac=snapshot.mac)


def bring_home(request: ReturnRequest, sides: Sides) -> NetdevReturn:
    """From the pod, or where it is not there, from the host's own devices. Never raises."""
    try:
        return _bring_home(request, sides)
    except AttachError as error:
        why = str(error)
    except OSError as error:
        why = f"{request.snapshot} cannot be looked for: {error_of(error)[1]}"
    return NetdevReturn(request.snapshot.pci_address, ReturnState.FAILED, None, (why,))


def _bring_home(request: ReturnRequest, sides: Sides) -> NetdevReturn:
    link = in_pod(request, sides)
    if link is None:
        return restore(request, sides)
    if request.settings.vf is not None:
        restore_vf(request.snapshot, sides)  # so that the VF has its own MAC again when the move closes it
    try:
        _move_home(request, link, sides)
    except AttachError as error:
        return NetdevReturn(request.snapshot.pci_address, ReturnState.FAILED, link.name, (str(error),))
    return restore(request, sides, ReturnState.RETURNED)


def in_pod(request: ReturnRequest, sides: Sides) -> Link | None:
    """The device in the pod's namespace, whatever it is called there. Raises OSError."""
    if sides.pod is None:
        return None
    snapshot, attached = request.snapshot, request.attached
    if attached is not None:
        named = links.get(sides.pod, attached.name)
        if named is not None and (named.parent, named.mac) == (snapshot.parent, attached.mac):
            return named  # as it was left, which saves reading all
    macs = (snapshot.mac, attached.mac if attached else None, request.settings.mac)
    there = links.get_all(sides.pod)
    for mac in dict.fromkeys(mac for mac in macs if mac is not None):
        link = links.find(
            there,
            parent=snapshot.parent,
            mac=mac,
            index=attached.ifindex if attached else None,
            name=attached.name if attached else None,
        )
        if link is not None:
            return link
    return None


def _move_home(request: ReturnRequest, link: Link, sides: Sides) -> None:
    """The kernel closes a device that changes its namespace, so it arrives down. What it has left in the pod's
    namespace goes as well: the pod may have other claims, and live on."""
    assert sides.pod is not None
    snapshot = request.snapshot
    for rule in request.settings.rules:
        with suppress(OSError):
            addressing.remove_rule(sides.pod, rule)
    if snapshot.parent is None and link.mac != snapshot.mac:
        # On the host only the MAC will tell which device this is. If it cannot be set, the device is found lost.
        with suppress(OSError):
            links.change(sides.pod, link.index, up=False)
            links.change(sides.pod, link.index, mac=snapshot.mac)
    rdmasoft.take_back(snapshot.soft_rdma, sides)
    with attempt(f"interface {link.name} ({snapshot.pci_address}) cannot be moved from the pod to the host"):
        linkstate.end_uppers(sides.pod, link.index)
        # A name that the host knows already would keep it in the pod. So would one equal to its own on the host.
        linkstate.remove_names(sides.pod, link.index, _unwelcome_names(snapshot, link, sides))
        if snapshot.programs is not None:
            programs.detach_others(sides.pod, link.index, snapshot.programs)
        name = _free_name(snapshot, sides)
        links.change(sides.pod, link.index, namespace_fd=sides.host_fd, name=name)


def _unwelcome_names(snapshot: NetdevSnapshot, link: Link, sides: Sides) -> tuple[str, ...]:
    """Alternative names that it did not have on the host, or that another device has got there."""
    before = snapshot.link.other_names if snapshot.link is not None else link.other_names
    return tuple(
        one
        for one in link.other_names
        if one == snapshot.name or one not in before or links.get(sides.host, one) is not None
    )


def _free_name(snapshot: NetdevSnapshot, sides: Sides) -> str:
    """Its own name, or when another device took that, one that says which VF it is and cannot be taken."""
    if links.get(sides.host, snapshot.name) is None:
        return snapshot.name
    domain, bus, rest = snapshot.pci_address.split(":")
    device, function = rest.split(".")
    return f"rm{domain}{bus}{device}{function}"[:15]


def restore(
    request: ReturnRequest, sides: Sides, state: ReturnState = ReturnState.ALREADY_HOME
) -> NetdevReturn:
    """Give a device that is on the host everything back that the snapshot knows, and look whether it has it."""
    snapshot = request.snapshot
    try:
        found = find_on_host(snapshot, sides)
        if found is None and snapshot.parent is None and request.settings.mac is not None:
            # the kernel has brought it home with the MAC that it had in the pod
            found = links.find(links.get_all(sides.host), parent=None, mac=request.settings.mac)
        if found is None:
            return NetdevReturn(snapshot.pci_address, ReturnState.LOST, None)
        if request.settings.vf is not None:
            restore_vf(
                snapshot, sides
            )  # a MAC that the physical function has set would keep the VF from its own
        problems = [
            *_foreign_ended(snapshot, found, sides),
            *ipoib.restore(sides.host, found.index, snapshot.ipoib, found.name),  # it changes the MTU
            *_put_right(snapshot, found, sides),
            # after the netdev: where the pod has set a MAC the physical function follows the VF by itself
            *restore_vf(snapshot, sides),
        ]
        _clear_steering(snapshot, found, sides)  # it may keep channels from going back
        problems += [
            *_ethtool_right(snapshot, found, sides),
            *_sysctls_right(snapshot, found, sides),  # some of them say which addresses it can have
            *_addresses_right(snapshot, found, sides),
            *linkstate.restore(sides.host, found.index, snapshot.link),
        ]
        link = links.get_index(sides.host, found.index)
    except OSError as error:
        return NetdevReturn(snapshot.pci_address, ReturnState.FAILED, None, (error_of(error)[1],))
    if link is None:
        return NetdevReturn(snapshot.pci_address, ReturnState.LOST, None)
    if not problems:
        problems += _still_wrong(snapshot, link)
    problems += _queues_right(snapshot, link, sides)
    problems += _steering_right(snapshot, link, sides)  # its table names queues that must be there
    problems += rdmasoft.restore(snapshot.soft_rdma, link.name, sides)
    return NetdevReturn(snapshot.pci_address, state, link.name, tuple(problems))


def _foreign_ended(snapshot: NetdevSnapshot, link: Link, sides: Sides) -> list[str]:
    """What must be gone before anything is set: a pod's BPF programs, which may keep an MTU or an offload from being
    set, and names, which may be the netdev's own.

    Where the host itself attaches programs it may have attached new ones by now: then nobody can tell whose these are,
    and only those that were there while the netdev was in the pod are gone.
    """
    problems: list[str] = []
    if snapshot.programs == ():
        with sides.on_host():
            problems = programs.detach_others(sides.host, link.index, ())
    if snapshot.link is not None:
        foreign = tuple(one for one in link.other_names if one not in snapshot.link.other_names)
        linkstate.remove_names(sides.host, link.index, foreign)
    return problems


def _put_right(snapshot: NetdevSnapshot, link: Link, sides: Sides) -> list[str]:
    """Set what differs from the snapshot; a sentence for each thing that could not be set."""
    changes: list[tuple[str, Callable[[], None]]] = []
    problems: list[str] = []

    def change(what: str, name: str | None = None, mac: str | None = None, mtu: int | None = None,
               up: bool | None = None) -> None:  # fmt: skip
        changes.append(
            (what, lambda: links.change(sides.host, link.index, name=name, mac=mac, mtu=mtu, up=up))
        )

    name = link.name if link.name == snapshot.name else _free_name(snapshot, sides)
    if name != snapshot.name:
        problems.append(f"its name {snapshot.name} is taken by another device; it is called {name} now")
    if name != link.name:
        change(f"name {name}", name=name)
    if link.mac != snapshot.mac:
        change(f"MAC {snapshot.mac}", mac=snapshot.mac)
    if link.mtu != snapshot.mtu:
        change(f"MTU {snapshot.mtu}", mtu=snapshot.mtu)
    up = link.up
    if up and (changes or not snapshot.up):  # drivers may refuse a new name or MAC to a device that is up
        changes.insert(0, ("state down", lambda: links.change(sides.host, link.index, up=False)))
        up = False
    if up != snapshot.up:
        change("state up", up=True)
    for what, verb in changes:
        _try(what, verb, problems)
    _insist_on_mac(snapshot, link.index, sides, problems)
    return problems


def _insist_on_mac(snapshot: NetdevSnapshot, index: int, sides: Sides, problems: list[str]) -> None:
    """A VF whose physical function has just been given another MAC refuses its own until its driver has reset it
    (seen with igbvf). The driver does that when the interface goes down, and by itself some time later."""
    refused = [one for one in problems if one.startswith("MAC ")]
    deadline = time.monotonic() + _RESET_PATIENCE
    while refused and time.monotonic() < deadline:
        for up in (True, False):
            with suppress(OSError):
                links.change(sides.host, index, up=up)
        with suppress(OSError):
            links.change(sides.host, index, mac=snapshot.mac)
        with suppress(OSError):
            links.change(sides.host, index, up=snapshot.up)
        now = links.get_index(sides.host, index)
        if now is None or now.mac == snapshot.mac:
            problems.remove(refused.pop())
        else:
            time.sleep(_POLL)


def _still_wrong(snapshot: NetdevSnapshot, now: Link) -> list[str]:
    """What the kernel said it had set and has not, or what was changed meanwhile."""
    wanted = (snapshot.name, snapshot.mac, snapshot.mtu, "up" if snapshot.up else "down")
    found = (now.name, now.mac, now.mtu, "up" if now.up else "down")
    return [
        f"its {what} is {other}, not {one}"
        for what, one, other in zip(("name", "MAC", "MTU", "state"), wanted, found, strict=True)
        if one != other
    ]


def restore_vf(snapshot: NetdevSnapshot, sides: Sides) -> list[str]:
    """What the physical function keeps of the VF; a sentence for each thing that could not be set."""
    if snapshot.physical is None or snapshot.vf is None:
        return []
    try:
        wrong = vf.difference(snapshot.vf, vf.read(sides.host, snapshot.physical))
        if wrong == vf.NOTHING:
            return []
        vf.write(sides.host, snapshot.physical, wrong)
        wrong = vf.difference(snapshot.vf, vf.read(sides.host, snapshot.physical))
    except AttachError as error:
        return [str(error)]
    return [] if wrong == vf.NOTHING else [f"{snapshot.physical} does not take {vf.words(wrong)}"]


def _ethtool_right(snapshot: NetdevSnapshot, link: Link, sides: Sides) -> list[str]:
    if not snapshot.ethtool:
        return []
    before = snapshot.ethtool
    try:
        with sides.on_host(), closing(Ethtool()) as kernel:
            wrong = ethtool.difference(before, kernel.state(link.index).now)
            if not wrong:
                return []
            problems = []
            for part in ethtool.one_by_one(wrong):
                try:
                    kernel.set(link.index, part, f"netdev {snapshot.name}")
                except AttachError as error:
                    if part.link and error.code == errno.EOPNOTSUPP:
                        before = replace(before, link={})  # nobody set it: a VF's speed follows its port's
                    else:
                        problems.append(str(error))
            wrong = ethtool.difference(before, kernel.state(link.index).now)
    except AttachError as error:
        return [str(error)]
    if wrong and not problems:
        problems.append(f"netdev {snapshot.name} does not take {ethtool.words(wrong)}")
    return problems


def _queues_right(snapshot: NetdevSnapshot, link: Link, sides: Sides) -> list[str]:
    if snapshot.queues is None:
        return []
    try:
        with sides.on_host():
            return queues.restore(link.name, snapshot.queues)
    except OSError as error:
        return [f"its queues cannot be read: {error_of(error)[1]}"]


def _clear_steering(snapshot: NetdevSnapshot, link: Link, sides: Sides) -> None:
    """By the name that it has by now; what fails is told by `_steering_right`."""
    if snapshot.steering is None:
        return
    now = links.get_index(sides.host, link.index)
    if now is None:
        return
    with sides.on_host(), suppress(OSError):
        steering.clear(now.name, snapshot.steering)


def _steering_right(snapshot: NetdevSnapshot, link: Link, sides: Sides) -> list[str]:
    if snapshot.steering is None:
        return []
    try:
        with sides.on_host():
            return steering.restore(link.name, snapshot.steering)
    except OSError as error:
        return [f"how it steers packets cannot be read: {error_of(error)[1]}"]


def _sysctls_right(snapshot: NetdevSnapshot, link: Link, sides: Sides) -> list[str]:
    """By the name that it has by now."""
    now = links.get_index(sides.host, link.index) if snapshot.sysctls else None
    if now is None:
        return []
    with sides.on_host():
        return sysctl.restore(now.name, snapshot.sysctls)


def _addresses_right(snapshot: NetdevSnapshot, link: Link, sides: Sides) -> list[str]:
    """A netdev loses its addresses with its namespace."""
    missing = _missing_addresses(snapshot, link, sides)
    problems: list[str] = []
    for address in missing:
        verb = partial(addressing.add_address, sides.host, link.index, address)
        _try(f"address {address}", verb, problems)
    if missing and not problems:
        problems += [f"its address {one} is missing" for one in _missing_addresses(snapshot, link, sides)]
    return problems


def _missing_addresses(snapshot: NetdevSnapshot, link: Link, sides: Sides) -> list[str]:
    if not snapshot.addresses:
        return []
    there = addressing.addresses(sides.host, link.index)
    return [one for one in snapshot.addresses if one not in there]


def _try(what: str, verb: Callable[[], None], problems: list[str]) -> None:
    try:
        verb()
    except OSError as error:
        problems.append(f"{what} cannot be set: {error_of(error)[1]}")
