"""PCI functions that a claim changes: given to vfio-pci, or to their own driver with another GUID.

The ledger knows what a function was before it is touched, and forgets it after it is that again: whatever is cut short
is undone with the claim. A driver may take seconds, so none is bound under the ledger's lock, for which pods wait; a
lock of the claim's own keeps two changers of it apart, and lets other claims' go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import replace

from railmate.attach import functions, pkeys, vfio
from railmate.attach.drivers import DriverBinding
from railmate.attach.errors import AttachError
from railmate.attach.functions import FunctionChange
from railmate.attach.model import NetdevReturn, ReturnState
from railmate.attach.netdev import snapshot
from railmate.attach.rdmamodel import RdmaDeviceRef
from railmate.cdi.spec import DeviceNode
from railmate.claims.allocation import ClaimError
from railmate.claims.ledger import Ledger
from railmate.claims.nodeview import NodeView
from railmate.claims.rdmanodes import with_rdma_nodes
from railmate.claims.rdmastrays import RdmaStrays
from railmate.claims.records import ClaimRef, Entry, PreparedDevice, PreparedNic
from railmate.claims.runtime_files import RuntimeFiles
from railmate.errors import RailmateError

log = logging.getLogger(__name__)

#: Of the group's node in the container. On the node it is root's alone, and a pod's user need not be root.
_NODE_MODE = 0o666


def wanted(entry: Entry) -> bool:
    """Whether a function of the claim is still to be changed, or on its way back."""
    return any(nic.change is not None and not nic.change.made for nic in entry.nics)


class Rebinding:
    """``node`` gives the node as it is now."""

    def __init__(
        self, ledger: Ledger, files: RuntimeFiles, node: Callable[[], NodeView], boot_id: str
    ) -> None:
        self._ledger, self._files, self._node, self._boot_id = ledger, files, node, boot_id
        self._rdma_strays = RdmaStrays(ledger)

    def held(self, entry: Entry) -> bool:
        """Whether functions are, or may be, changed for the claim. After a reboot all are what they were."""
        return entry.boot_id == self._boot_id and any(nic.change is not None for nic in entry.nics)

    def changing(self) -> set[str]:
        """Addresses of functions that may have no driver because they are on their way to another."""
        found = self._ledger.entries().values()
        return {
            nic.address
            for entry in found
            for nic in entry.nics
            if nic.change is not None and not nic.change.made
        }

    def inspected(self, nic: PreparedNic, ours: Container[str]) -> PreparedNic:
        """The NIC with all that its function returns to, but for the netdev. ``ours``: what the claim passes through.

        Raises UnfitError where the change is impossible, AttachError where it is not possible now.
        """
        change, node = nic.change, self._node()
        if change is None:
            return nic
        binding = DriverBinding(node.sysfs_root, nic.address)
        binding.refuse_unwritable()
        if binding.driver != change.own_driver:
            has = binding.driver or "no driver"
            raise AttachError(f"{nic.address} has {has} at the moment, and {change.own_driver} is its own")
        if change.passes_through:
            warning = vfio.refuse_unfit(node.sysfs_root, node.dev_root, nic.address, ours)
            if warning:
                log.warning("%s", warning)
        before = None if change.netdev else functions.kept(change)
        if functions.is_so(change, before, next((one.node_guid for one in change.rdma), None)):
            return replace(nic, change=None)
        return replace(nic, change=replace(change, override=binding.override, before=before))

    def make(self, ref: ClaimRef) -> Entry:
        """The claim's entry with its functions changed. Raises ClaimError; what was changed by then is undone with the
        claim."""
        with self._ledger.leasing(ref.uid):
            entry = self._ledger.get(ref.uid)
            if entry is None:
                raise ClaimError(f"{ref}: it was given back while it was being prepared.")
            try:
                made = {nic.address: self._made(nic) for nic in entry.nics}
            except RailmateError as error:
                raise ClaimError(f"{ref}: {error}.") from error
            with self._ledger.locked():
                entry = (self._ledger.get(ref.uid) or entry).with_nics(lambda nic: made.get(nic.address, nic))
                entry = replace(entry, devices=tuple(self._with_nodes(device) for device in entry.devices))
                self._ledger.put(entry)
                self._files.write(entry)
                return entry

    def _made(self, nic: PreparedNic) -> PreparedNic:
        change, node = nic.change, self._node()
        if change is None or change.made:
            return nic
        functions.make(nic.address, change, node.sysfs_root)
        log.info("%s: bound to %s", nic.address, change.driver)
        if change.passes_through:
            path = vfio.device_node(node.sysfs_root, nic.address)
            return replace(nic, change=replace(change, made=True, node=path))
        nic = replace(nic, change=replace(change, made=True), rdma=self._rdma_now(nic))
        if change.snapshot is not None:
            # it has another hardware address now, and that is what it comes home with from its pod
            name = node.netdev_of(nic.address) or change.snapshot.name
            now = snapshot(name, nic.address, change.physical, nic.settings)
            nic = replace(nic, snapshot=replace(now, soft_rdma=change.snapshot.soft_rdma))
        return nic

    def _rdma_now(self, nic: PreparedNic) -> tuple[RdmaDeviceRef, ...]:
        """Its RDMA device has come anew, with another GUID and perhaps another number."""
        device = pkeys.rdma_device(self._node().sysfs_root, nic.address)
        if device is None or len(nic.rdma) != 1:
            return nic.rdma
        guid = nic.rdma[0].node_guid
        with suppress(OSError):
            guid = (device / "node_guid").read_text().strip()
        return (replace(nic.rdma[0], name=device.name, node_guid=guid),)

    def _with_nodes(self, device: PreparedDevice) -> PreparedDevice:
        device = self._with_new_numbers(device)
        found = [nic.change.node for nic in device.nics if nic.change is not None and nic.change.node]
        if not found:
            return device
        root = self._node().dev_root
        nodes = [
            DeviceNode.of(vfio.CONTROL, root),
            *(DeviceNode.of(path, root, _NODE_MODE) for path in found),
        ]
        return replace(device, nodes=tuple(dict.fromkeys((*device.nodes, *nodes))))

    def _with_new_numbers(self, device: PreparedDevice) -> PreparedDevice:
        """RDMA devices that have come anew have other character devices, and the former ones may be another's now. The
        config is a request's, so all of a device's NICs were bound anew, or none."""
        if not device.nics or any(nic.change is None or nic.passes_through for nic in device.nics):
            return device
        names = [
            name for nic in device.nics for one in nic.rdma for name in self._node().char_devices(one.name)
        ]
        return with_rdma_nodes(device, names, self._node().dev_root)

    def give_back(self, entry: Entry) -> None:
        """Make the claim's functions what they were. Every one is tried; raises RailmateError when one is not, and it
        is still in the ledger then."""
        if not self.held(entry):
            return
        errors: list[RailmateError] = []
        with self._ledger.leasing(entry.claim.uid):
            self._note(entry.claim, _on_its_way)
            for nic in (self._ledger.get(entry.claim.uid) or entry).nics:
                if nic.change is None:
                    continue
                try:
                    self._undo(nic.address, nic.change, entry.claim)
                except RailmateError as error:
                    errors.append(error)
                    continue
                self._note(entry.claim, lambda one, done=nic.address: _forgotten(one, done))  # type: ignore[misc]
        if errors:
            raise RailmateError(f"{entry.claim}: {errors[0]}. It is tried again.") from errors[0]

    def _note(self, claim: ClaimRef, change: Callable[[PreparedNic], PreparedNic]) -> None:
        """Not needed to undo what the kernel shows, so a full disk is no obstacle."""
        with self._ledger.locked(), suppress(RailmateError):
            if (entry := self._ledger.get(claim.uid)) is not None:
                self._ledger.put(entry.with_nics(change), durable=False)

    def _undo(self, address: str, change: FunctionChange, claim: ClaimRef) -> None:
        result = functions.undo(address, change, self._node().sysfs_root)
        log.info("%s: %s is bound to %s again", claim, address, change.own_driver)
        if result is None:
            return
        for problem in result.problems:
            log.warning("%s: %s: %s", claim, address, problem)
        with self._ledger.locked():
            if result.problems and any(one.soft is None for one in change.rdma):
                self._rdma_strays.put(address, change.rdma)
            if change.snapshot is None:
                return
            if _is_stray(result):
                self._ledger.put_stray(change.snapshot)
            else:
                self._ledger.drop_stray(address)


def _on_its_way(nic: PreparedNic) -> PreparedNic:
    return nic if nic.change is None else replace(nic, change=replace(nic.change, made=False, node=""))


def _forgotten(nic: PreparedNic, address: str) -> PreparedNic:
    return replace(nic, change=None) if nic.address == address else nic


def _is_stray(result: NetdevReturn) -> bool:
    return result.state is ReturnState.LOST or bool(result.problems)


def partition_missing(entry: Entry, node: NodeView) -> str | None:
    """Which of the claim's NICs is not in the partition that it is to be used in, and why; None: all are."""
    for nic in entry.nics:
        pkey = nic.settings.ipoib.pkey if nic.settings.ipoib is not None else None
        if pkey is not None and (why := pkeys.missing(node.sysfs_root, nic.address, pkey)) is not None:
            return why
    return None
