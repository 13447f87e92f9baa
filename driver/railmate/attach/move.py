"""The step that moves a netdev into a pod."""

from __future__ import annotations

from railmate.attach import links
from railmate.attach.errors import AttachError
from railmate.attach.home import bring_home, find_on_host
from railmate.attach.links import Link, attempt
from railmate.attach.model import AttachedNetdev, MoveRequest, ReturnRequest
from railmate.attach.namespaces import Sides


class MoveNetdev:
    """The step that moves one netdev into the pod."""

    def __init__(self, request: MoveRequest) -> None:
        self.request = request
        self.attached: AttachedNetdev | None = None
        self._changed = False

    def apply(self, sides: Sides) -> None:
        snapshot, name = self.request.snapshot, self.request.name
        with attempt(f"{snapshot} cannot be given to the pod as {name}"):
            link = self._find_in_pod(sides)
            if link is None:
                link = self._move(sides)
            elif link.name == snapshot.name != name:  # an earlier move that broke off before the rename
                self._refuse_clash(sides)
                self._changed = True
                sides.pod.link("set", index=link.index, ifname=name)
        with attempt(f"interface {name} ({snapshot.pci_address}) cannot be brought up in the pod"):
            if link.name in (name, snapshot.name) and not link.up:
                self._changed = True
                sides.pod.link("set", index=link.index, state="up")
        now_called = name if link.name == snapshot.name else link.name
        self.attached = AttachedNetdev(snapshot.pci_address, now_called, link.index, link.mac, link.mtu)

    def undo(self, sides: Sides) -> None:
        if not self._changed:
            return
        result = bring_home(ReturnRequest(self.request.snapshot, self.attached), sides)
        self.attached = None
        if not result.home or result.problems:
            raise AttachError(": ".join([f"{self.request.snapshot} is {result.state}", *result.problems]))

    def _find_in_pod(self, sides: Sides) -> Link | None:
        snapshot = self.request.snapshot
        return links.find(links.get_all(sides.pod), parent=snapshot.parent, mac=snapshot.mac)

    def _move(self, sides: Sides) -> Link:
        snapshot, name = self.request.snapshot, self.request.name
        link = find_on_host(snapshot, sides)
        if link is None:
            raise AttachError(
                f"{snapshot} is neither on the host nor in this pod; another pod may still hold it"
            )
        self._refuse_clash(sides)
        self._changed = True
        # One message for namespace and name: the device is never in the pod under its host name, which could
        # be the name of the pod's own interface.
        sides.host.link("set", index=link.index, net_ns_fd=sides.pod_fd, ifname=name)
        moved = links.get(sides.pod, name)
        if moved is None:
            raise AttachError(f"{snapshot} did not arrive in the pod")
        return moved

    def _refuse_clash(self, sides: Sides) -> None:
        snapshot, name = self.request.snapshot, self.request.name
        if links.get(sides.pod, name) is not None:
            raise AttachError(
                f"{snapshot} cannot be given to the pod as {name}: the pod has "
                "another interface of that name; choose a different interface name in the claim's config"
            )
