"""Sub-interfaces of a netdev that stays on the host, made in a pod's namespace (macvlan; ip-link(8)).

One is made where it is to be: a message in the host's namespace names the netdev below by index and the pod's
namespace by file descriptor (rtnl_newlink in the kernel's net/core/rtnetlink.c), so the host never shows it. It ends
with the pod's namespace by itself.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from railmate.attach import addressing, linkmessages, links
from railmate.attach.errors import AttachError, NamespaceGoneError
from railmate.attach.linkmessages import (
    ADDRESS,
    DELLINK,
    IFNAME,
    INFO_DATA,
    INFO_KIND,
    LINK,
    LINKINFO,
    MTU,
    NET_NS_FD,
    NEWLINK,
)
from railmate.attach.links import Link, attempt, mac_bytes
from railmate.attach.model import AttachedNetdev, SubInterface, SubInterfaceRequest
from railmate.attach.move import ConfigureNetdev
from railmate.attach.namespaces import Sides, open_namespace, with_host, with_namespace
from railmate.attach.steps import Step
from railmate.netlink import CREATE, EXCL, Netlink, attribute, nested, text, u32

KIND = "macvlan"
_MACVLAN_MODE = 1
_MODES = {"private": 1, "vepa": 2, "bridge": 4}  # MACVLAN_MODE_* of linux/if_link.h


@dataclass(frozen=True, slots=True)
class Port:
    """A netdev of the host that sub-interfaces may stand on, as `SubInterface` names it."""

    name: str
    mac: str
    mtu: int
    parent: str | None


def port(ifname: str, pci_address: str) -> Port:
    """The host's netdev ``ifname`` of a PCI function. Raises AttachError when it is not there."""

    def look(sides: Sides) -> Port:
        with attempt(f"netdev {ifname} cannot be read"):
            link = links.get(sides.host, ifname)
        if link is None:
            raise AttachError(f"netdev {ifname} of {pci_address} is not on the host; is it in a pod?")
        return Port(link.name, link.mac, link.mtu, link.parent)

    return with_host(look)


def stable_mac(share: str) -> str:
    """The MAC of a share's sub-interface: the same in each sandbox of its pod, and another for each share.

    Locally administered and unicast (IEEE 802, 8.2: bits 1 and 0 of the first octet); 46 bits of a hash.
    """
    digest = hashlib.sha256(f"railmate share {share}".encode()).digest()
    return ":".join(f"{byte:02x}" for byte in (digest[0] & 0b11111100 | 0b10, *digest[1:6]))


def steps_of(request: SubInterfaceRequest) -> tuple[list[Step], MakeSubInterface]:
    """All steps for one sub-interface, in order, and the one that knows it afterwards."""
    make = MakeSubInterface(request)
    return [make, ConfigureNetdev(make, request.settings)], make


class MakeSubInterface:
    """The step that makes a sub-interface in the pod. One that is there already stays as it is."""

    def __init__(self, request: SubInterfaceRequest) -> None:
        self._request = request
        self.attached: AttachedNetdev | None = None
        self.renamed = False  # by a container: it has been in use for some time
        self.up = False
        self._made = False

    def apply(self, sides: Sides) -> None:
        request, pod = self._request, _pod(sides)
        what = f"{request} cannot be made in the pod as {request.name}"
        with attempt(what):
            below = _below(sides.host, request.sub)
            if below is None:
                raise AttachError(f"{what}: {request.sub.port} is not on the host; is it in a pod?")
            link = _find(pod, below, request)
            if link is None:
                self._made = True
                self._make(below, sides)
                link = links.get(pod, request.name)
            if link is None:
                raise AttachError(f"{what}: it did not arrive there")
        self.renamed, self.up = link.name != request.name, link.up
        self.attached = AttachedNetdev(
            request.pci_address, link.name, link.index, link.mac, link.mtu, request.sub.share
        )

    def _make(self, below: Link, sides: Sides) -> None:
        request = self._request
        data = nested(INFO_DATA, attribute(_MACVLAN_MODE, u32(_MODES[request.sub.mode])))
        parts = (
            attribute(IFNAME, text(request.name))
            + attribute(ADDRESS, mac_bytes(request.sub.mac))
            + attribute(LINK, u32(below.index))
            + nested(LINKINFO, attribute(INFO_KIND, KIND.encode()), data)
            + attribute(NET_NS_FD, u32(sides.pod_fd))
        )
        if request.settings.mtu is not None:  # else it is that of the netdev below
            parts += attribute(MTU, u32(request.settings.mtu))
        try:
            sides.host.request(NEWLINK, linkmessages.about(0, parts), CREATE | EXCL)
        except OSError as error:
            raise self._explained(error, below) from None

    def _explained(self, error: OSError, below: Link) -> OSError | AttachError:
        request = self._request
        if error.errno == errno.EEXIST:
            return AttachError(
                f"{request} cannot be made in the pod as {request.name}: the pod has another interface of that name; "
                "choose a different interface name in the claim's config"
            )
        if error.errno == errno.EBUSY:
            return AttachError(
                f"{request} cannot be made: {below.name} is a port of a bond or bridge, or shared in another way. Free "
                "it, or do not share it (--shared-pfs)"
            )
        if error.errno == errno.EINVAL and (request.settings.mtu or 0) > below.mtu:
            return AttachError(
                f"{request} cannot be made: mtu {request.settings.mtu} is above the {below.mtu} of {below.name}"
            )
        if error.errno == errno.EOPNOTSUPP:
            return AttachError(f"{request} cannot be made: this kernel has no macvlan (module macvlan)")
        return error

    def undo(self, sides: Sides) -> None:
        if self._made:
            _remove(self._request, self.attached, sides)
            self.attached = None


def remove_all(requests: Sequence[SubInterfaceRequest], netns_path: Path) -> list[str]:
    """End sub-interfaces, each with what it has left in the pod's namespace; a sentence for each that could not be.

    One that is not there, or whose namespace has ended, has ended. Raises AttachError only when the namespace exists
    and cannot be entered.
    """

    def work(sides: Sides) -> list[str]:
        problems = []
        for request in requests:
            for rule in request.settings.rules:
                with suppress(OSError):
                    addressing.remove_rule(_pod(sides), rule)
            try:
                _remove(request, request.attached, sides)
            except AttachError as error:
                problems.append(str(error))
        return problems

    try:
        with open_namespace(netns_path) as fd:
            return with_namespace(fd, work)
    except NamespaceGoneError:
        return []


def _remove(request: SubInterfaceRequest, attached: AttachedNetdev | None, sides: Sides) -> None:
    pod = _pod(sides)
    with attempt(f"{request} cannot be removed from the pod"):
        link = _find(pod, _below(sides.host, request.sub), request, attached)
        if link is None:
            return
        try:
            pod.request(DELLINK, linkmessages.about(link.index))
        except OSError as error:
            if error.errno != errno.ENODEV:  # its port went meanwhile, and it with that
                raise


def _below(host: Netlink, sub: SubInterface) -> Link | None:
    """The netdev that the sub-interface stands on, under whatever name. A name proves nothing."""
    named = links.get(host, sub.port)
    found = links.find([named] if named else [], parent=sub.parent, mac=sub.port_mac)
    return found or links.find(links.get_all(host), parent=sub.parent, mac=sub.port_mac)


def _find(
    pod: Netlink, below: Link | None, request: SubInterfaceRequest, attached: AttachedNetdev | None = None
) -> Link | None:
    """The sub-interface in the pod. A container may have changed its name and its MAC; its index stays, and that it
    stands on the port."""
    there = [link for link in links.get_all(pod) if link.kind == KIND]
    if below is not None:
        there = [link for link in there if link.lower == below.index]
    if attached is not None:
        return next((link for link in there if link.index == attached.ifindex), None)
    return next((link for link in there if link.mac == request.sub.mac), None)


def _pod(sides: Sides) -> Netlink:
    assert sides.pod is not None
    return sides.pod
