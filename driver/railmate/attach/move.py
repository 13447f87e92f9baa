"""The steps that give a netdev to a pod: what its physical function keeps of it, the move, and what is set there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Protocol

from railmate.attach import addressing, ipoib, links, rdmalink, rdmasoft, sysctl, vf
from railmate.attach.errors import AttachError
from railmate.attach.ethtool import Ethtool
from railmate.attach.home import bring_home, find_on_host, restore_vf
from railmate.attach.links import Link, attempt
from railmate.attach.model import AttachedNetdev, MoveRequest, ReturnRequest
from railmate.attach.namespaces import Sides
from railmate.attach.rdma import MoveRdmaDevices
from railmate.attach.settings import NetdevSettings
from railmate.attach.steps import Step
from railmate.inventory.rdmanetlink import NetnsMode
from railmate.netlink import Netlink


def steps_of(request: MoveRequest) -> tuple[list[Step], MoveNetdev]:
    """All steps for one netdev, in order, and the one that knows where it is afterwards."""
    move = MoveNetdev(request)
    before: list[Step] = []
    if request.snapshot.ipoib is not None and any(one.soft is None for one in request.rdma_devices):
        before.append(KeepIpoib(request))
    if request.settings.vf is not None:
        before.append(SetVf(request))
    if request.snapshot.soft_rdma:
        before.append(EndSoftRdma(request))
    after: list[Step] = [MakeSoftRdma(move)] if request.snapshot.soft_rdma else []
    if request.rdma_devices:
        after.append(MoveRdmaDevices(request.rdma_devices))
    return [*before, move, ConfigureNetdev(move, request.settings), *after], move


class Arrival(Protocol):
    """A step that puts a netdev into the pod, and then knows it."""

    attached: AttachedNetdev | None
    renamed: bool  # by a container: it has been in use for some time
    up: bool


class KeepIpoib:
    """The step that refuses an IPoIB interface where it would end with the move of its RDMA device. Claims are planned
    for the mode that the node has; an administrator may change it before the pod comes."""

    def __init__(self, request: MoveRequest) -> None:
        self._snapshot = request.snapshot

    def apply(self, sides: Sides) -> None:
        with rdmalink.open_sides(sides) as rdma:
            if rdma is not None and rdma.mode is NetnsMode.EXCLUSIVE:
                raise AttachError(
                    f"{self._snapshot} is an IPoIB interface, which would end: the node's RDMA devices are in "
                    "exclusive mode now, and were not when the claim was prepared. Delete the pod, so that its "
                    "claim is prepared anew"
                )

    def undo(self, sides: Sides) -> None:
        """Nothing was changed."""


class SetVf:
    """The step that sets what the physical function keeps of the VF. Before the move: the MAC counts from then on."""

    def __init__(self, request: MoveRequest) -> None:
        self._snapshot, self._settings = request.snapshot, request.settings

    def apply(self, sides: Sides) -> None:
        port, before, wanted = self._snapshot.physical, self._snapshot.vf, self._settings.vf
        if wanted is None:
            return
        if port is None or before is None:
            if not self._settings.needs_physical:
                return
            raise AttachError(f"{self._snapshot} has no physical function through which it could be set")
        try:
            vf.write(sides.host, port, vf.filled(wanted, before))
        except AttachError as error:  # what a NIC's driver takes only trying tells
            raise AttachError(
                f"{error}. Leave it out of the claim's config, or ask for another NIC"
            ) from None

    def undo(self, sides: Sides) -> None:
        problems = restore_vf(self._snapshot, sides)
        if problems:
            raise AttachError(f"{self._snapshot}: {'; '.join(problems)}")


class MoveNetdev:
    """The step that moves one netdev into the pod, with its name, MAC and MTU there."""

    def __init__(self, request: MoveRequest) -> None:
        self.request = request
        self.attached: AttachedNetdev | None = None
        self.renamed = False  # by a container: it has been in use for some time
        self.up = False
        self._changed = False

    def apply(self, sides: Sides) -> None:
        snapshot, name = self.request.snapshot, self.request.name
        with attempt(f"{snapshot} cannot be given to the pod as {name}"):
            home = find_on_host(snapshot, sides)  # where it nearly always is
            link = self._move(home, sides) if home else self._find_in_pod(sides)
            if link.name == snapshot.name != name:  # an earlier move that broke off before the rename
                with self._told_of_clashes():
                    self._change(link, sides, name=name)
                link = links.get_index(_pod(sides), link.index) or link
            self.renamed = link.name != name
            link = self._put_right(link, sides)
        self.up = link.up
        self.attached = AttachedNetdev(snapshot.pci_address, link.name, link.index, link.mac, link.mtu)

    def undo(self, sides: Sides) -> None:
        if not self._changed:
            return
        request = self.request
        result = bring_home(ReturnRequest(request.snapshot, self.attached, request.settings), sides)
        self.attached = None
        if not result.home or result.problems:
            raise AttachError(": ".join([f"{self.request.snapshot} is {result.state}", *result.problems]))

    def _find_in_pod(self, sides: Sides) -> Link:
        snapshot, settings = self.request.snapshot, self.request.settings
        there = links.get_all(_pod(sides))
        found = links.find(there, parent=snapshot.parent, mac=snapshot.mac)
        if found is None and settings.mac is not None:
            found = links.find(there, parent=snapshot.parent, mac=settings.mac)
        if found is None:
            raise AttachError(
                f"{snapshot} is neither on the host nor in this pod; another pod may still hold it"
            )
        return found

    def _move(self, link: Link, sides: Sides) -> Link:
        snapshot, name, settings = self.request.snapshot, self.request.name, self.request.settings
        self._changed = True
        if settings.ipoib is not None and not settings.in_partition:
            ipoib.write(sides.host, link.index, settings.ipoib, str(snapshot))
        # One message: the device is never in the pod under its host name, which could be the name of the pod's own
        # interface. It comes up with it, unless there is something that must be set while it is down.
        with self._told_of_clashes():
            links.change(
                sides.host,
                link.index,
                namespace_fd=sides.pod_fd,
                name=name,
                mac=settings.mac if settings.mac != link.mac else None,
                mtu=settings.netdev_mtu if settings.netdev_mtu != link.mtu else None,
                up=None if settings.sysctls or settings.ethtool else True,
            )
        moved = links.get(_pod(sides), name)
        if moved is None:
            raise AttachError(f"{snapshot} did not arrive in the pod")
        return moved

    def _put_right(self, link: Link, sides: Sides) -> Link:
        """What an earlier attempt that broke off did not come to do."""
        settings = self.request.settings
        mac = settings.mac if settings.mac not in (None, link.mac) else None
        mtu = settings.netdev_mtu if settings.netdev_mtu not in (None, link.mtu) else None
        if self.renamed or (mac is None and mtu is None):
            return link
        if mac is not None and link.up:  # drivers may refuse a new MAC to a device that is up
            self._change(link, sides, up=False)
        self._change(link, sides, mac=mac, mtu=mtu)
        return links.get_index(_pod(sides), link.index) or link

    def _change(self, link: Link, sides: Sides, name: str | None = None, mac: str | None = None,
                mtu: int | None = None, up: bool | None = None) -> None:  # fmt: skip
        self._changed = True
        links.change(_pod(sides), link.index, name=name, mac=mac, mtu=mtu, up=up)

    @contextmanager
    def _told_of_clashes(self) -> Iterator[None]:
        try:
            yield
        except FileExistsError:
            raise AttachError(
                f"{self.request.snapshot} cannot be given to the pod as {self.request.name}: the pod has "
                "another interface of that name; choose a different interface name in the claim's config"
            ) from None


class ConfigureNetdev:
    """The step that sets up a netdev that is in the pod, and brings it up. One that a container has renamed has been
    in use for some time, and stays as it is. Undone with the move, but for what belongs to the pod."""

    def __init__(self, move: Arrival, settings: NetdevSettings) -> None:
        self._move, self._settings = move, settings

    def apply(self, sides: Sides) -> None:
        attached, settings = self._move.attached, self._settings
        if attached is None or self._move.renamed:
            return
        name, index, pod = attached.name, attached.ifindex, _pod(sides)
        what = f"interface {name} ({attached.pci_address})"
        if settings.ethtool:
            with attempt(f"{what} cannot be set up"), closing(Ethtool()) as ethtool:
                ethtool.set(index, settings.ethtool, what)
        up = self._move.up
        if settings.ipoib is not None and settings.in_partition:
            with attempt(f"{what} cannot be brought up in the pod"):
                links.change(pod, index, up=True)
            child = ipoib.make_child(pod, index, settings.interface(name), settings.ipoib)
            name, index, up = child.name, child.index, child.up
            what = f"interface {name} ({attached.pci_address})"
            if settings.mtu not in (None, child.mtu):
                with attempt(f"{what} does not take the MTU {settings.mtu}"):
                    links.change(pod, index, mtu=settings.mtu)
        sysctl.write(name, settings.sysctls)
        for address in settings.addresses:
            with attempt(f"{what} cannot get the address {address}"):
                addressing.add_address(pod, index, address)
        if not up:
            with attempt(f"{what} cannot be brought up in the pod"):
                links.change(pod, index, up=True)
        for route in settings.routes:
            with attempt(f"{what} cannot get the route to {route.destination}"):
                addressing.add_route(pod, index, route)
        for rule in settings.rules:
            with attempt(f"the pod cannot get the rule of priority {rule.priority} for {what}"):
                addressing.add_rule(pod, rule)
        for neighbour in settings.neighbours:
            with attempt(f"{what} cannot get the neighbour {neighbour.address}"):
                addressing.add_neighbour(pod, index, neighbour)

    def undo(self, sides: Sides) -> None:
        for rule in self._settings.rules:
            with attempt(f"the rule of priority {rule.priority} cannot be removed from the pod"):
                addressing.remove_rule(_pod(sides), rule)


class EndSoftRdma:
    """The step that ends the host's soft RDMA devices over a netdev before it moves."""

    def __init__(self, request: MoveRequest) -> None:
        self._snapshot = request.snapshot

    def apply(self, sides: Sides) -> None:
        rdmasoft.end(self._snapshot.soft_rdma, self._snapshot.name, sides)

    def undo(self, sides: Sides) -> None:
        problems = rdmasoft.restore(self._snapshot.soft_rdma, self._snapshot.name, sides)
        if problems:
            raise AttachError("; ".join(problems))


class MakeSoftRdma:
    """The step that makes the netdev's soft RDMA devices anew in the pod. The host's come back with the netdev."""

    def __init__(self, move: MoveNetdev) -> None:
        self._move = move

    def apply(self, sides: Sides) -> None:
        if self._move.attached is not None:
            rdmasoft.give(self._move.request.snapshot.soft_rdma, self._move.attached.name, sides)

    def undo(self, sides: Sides) -> None:
        rdmasoft.take_back(self._move.request.snapshot.soft_rdma, sides)


def _pod(sides: Sides) -> Netlink:
    assert sides.pod is not None
    return sides.pod
