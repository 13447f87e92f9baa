"""What prepare does under the ledger's lock: whether the claim can be had now, and what is remembered of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from railmate.attach.errors import UnfitError
from railmate.attach.netdev import snapshot
from railmate.claims import leases
from railmate.claims.allocation import ClaimError, Holder, NotYetError, allocated, check_claim, reserved_pods
from railmate.claims.attachments import Attachments
from railmate.claims.devicenodes import DeviceNodes
from railmate.claims.leases import Leases
from railmate.claims.ledger import Ledger
from railmate.claims.nicplan import physical_port
from railmate.claims.nodeview import NodeView
from railmate.claims.plan import make_plan
from railmate.claims.rebinding import Rebinding
from railmate.claims.records import ClaimRef, Entry, PreparedDevice
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.shares import with_port
from railmate.errors import RailmateError
from railmate.publish.model import overlap

log = logging.getLogger(__name__)


class HeldError(RailmateError):
    """The claim's former addresses and functions must be given back first, which is not done under the lock."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(f"{entry.claim} has addresses or changed functions")
        self.entry = entry


class Preparation:
    """From a claim as the API server has it to its entry in the ledger. Use it inside the ledger's lock."""

    def __init__(
        self,
        ledger: Ledger,
        files: RuntimeFiles,
        moves: Attachments,
        leases: Leases,
        rebinding: Rebinding,
        boot_id: str,
    ) -> None:
        self._ledger, self._files, self._moves = ledger, files, moves
        self._leases, self._rebinding, self._boot_id = leases, rebinding, boot_id

    def entry(self, claim: Mapping[str, Any], ref: ClaimRef, node: NodeView) -> Entry:
        """The claim's entry, written, with the files for the runtime. Raises ClaimError, NotYetError and HeldError,
        RailmateError when there is a record of it that cannot be read.

        ``node`` is one view of the node for all of it: the machine may change meanwhile.
        """
        check_claim(claim, ref)
        entries = self._ledger.entries()
        entries.pop(ref.uid, None)
        # raises where there is a record that cannot be read: it is not written over
        known = self._ledger.get(ref.uid)
        entry = None
        if known is not None:
            entry = self._still_valid(known, allocated(claim, node.driver), reserved_pods(claim), node)
        if entry is None:
            if known is not None and known.boot_id == self._boot_id:
                known = self._moves.detach(known, "its allocation has changed")
            if known is not None and (leases.held(known) or self._rebinding.held(known)):
                raise HeldError(known)
            self._ledger.close_gate(ref.uid)  # a marker from before a reboot says nothing
            self._moves.strays.fetch()  # a netdev that came home late is to be remembered by its own name
            entry = self._new_entry(claim, ref, node, entries)
            self._leases.begin(ref.uid)
            self._ledger.put(entry)
            log.info(
                "%s (%s): prepared %s", ref, ref.uid, ", ".join(device.device for device in entry.devices)
            )
        # written again also for a known claim: the CDI directory may have been emptied since
        self._files.write(entry)
        self._moves.say_nodes_now(entry)
        return entry

    def _still_valid(
        self, known: Entry, results: Sequence[Mapping[str, Any]], pods: tuple[str, ...], node: NodeView
    ) -> Entry | None:
        """The known entry, brought up to date with the claim; None when the claim must be prepared anew.

        The kubelet asks again after its own restart, also for the next pod of a claim that outlives its pods. Of
        several pods at once, which the kubelet does not tell apart, the first whose sandbox comes gets a NIC.
        """
        now = [(result["pool"], result["device"], result.get("shareID")) for result in results]
        if known.boot_id != self._boot_id or now != [
            (device.pool, device.device, device.share_id) for device in known.devices
        ]:
            return None
        known = self._renewed(known, node)
        if pods == known.pods:
            return known
        if known.attachment is not None and known.attachment.pod_uid not in pods:
            known = self._moves.detach(known, "its pod is gone")
        entry = replace(known, pods=pods)
        self._ledger.put(entry)
        return entry

    def _renewed(self, known: Entry, node: NodeView) -> Entry:
        """The entry with the device nodes that its devices have at this moment, put where those are others.

        Raises ClaimError when a device is gone, NotYetError when its nodes are not there.
        """
        nodes = DeviceNodes(known.claim, node)
        devices = tuple(nodes.renewed(device) for device in known.devices)
        if devices == known.devices:
            return known
        log.warning("%s: its device nodes are others than before; they are put right", known.claim)
        entry = replace(known, devices=devices)
        self._ledger.put(entry)
        return entry

    def _new_entry(
        self, claim: Mapping[str, Any], ref: ClaimRef, node: NodeView, others: Mapping[str, Entry]
    ) -> Entry:
        held = [one for one in allocated(claim, node.driver) if not one.get("adminAccess")]
        # first: these are asked again and again while a claim waits
        self._refuse_reserved(held, ref, node)
        self._refuse_overlap(held, ref, node, others)
        plan = make_plan(claim, ref, node, self._taken_interfaces(claim, others))
        passing = {nic.address for device in plan.devices for nic in device.nics if nic.passes_through}
        devices = tuple(self._with_snapshots(device, ref, node, passing) for device in plan.devices)
        for warning in plan.warnings:
            log.warning("%s", warning)
        return Entry(ref, plan.pods, devices, self._boot_id, plan.pod_claim_name)

    def _refuse_reserved(self, results: Iterable[Mapping[str, Any]], ref: ClaimRef, node: NodeView) -> None:
        """A physical function whose VFs are made anew at this moment takes what it has with it."""
        offered, functions = node.offer.by_name, node.inventory.functions
        devices = [one["device"] for one in results]
        nics = {nic for device in devices if device in offered for nic in offered[device].nics}
        for physical in sorted({functions[nic].physical_function or nic for nic in nics if nic in functions}):
            if self._ledger.is_reserved(physical):
                raise NotYetError(f"{ref}: the VFs of {physical} are being made.")

    def _refuse_overlap(
        self, results: Iterable[Mapping[str, Any]], ref: ClaimRef, node: NodeView, others: Mapping[str, Entry]
    ) -> None:
        """The last line of defence: after a force delete the scheduler hands a device on while the old pod
        still runs. What was prepared before a reboot holds nothing."""
        offered = node.offer.by_name
        wanted = {
            part
            for result in results
            if result["device"] in offered
            for part in offered[result["device"]].parts_with(result.get("shareID"))
        }
        for other in others.values():
            both = sorted(overlap(wanted, other.parts)) if other.boot_id == self._boot_id else []
            if both:
                raise NotYetError(
                    f"{ref}: {', '.join(both)} is still held by {other.claim} ({other.claim.uid}).",
                    # still under the lock: what is written after this look is to be noticed
                    holder=Holder(other.claim.uid, self._ledger.mark(other.claim.uid)),
                )

    def _with_snapshots(
        self, device: PreparedDevice, ref: ClaimRef, node: NodeView, passing: Set[str]
    ) -> PreparedDevice:
        nics = []
        strays = {stray.pci_address: stray for stray in self._ledger.strays()}
        for nic in device.nics:
            try:
                nic = self._rebinding.inspected(nic, passing)
                if not nic.interface and not (nic.change and nic.change.netdev):  # it has an RDMA device only
                    nics.append(nic)
                    continue
                netdev = node.netdev_of(nic.address)
                if netdev is None:
                    # on its way home from a namespace that has just ended it is back in a moment
                    raise NotYetError(f"{ref}: the netdev of {nic.address} is not on the node.")
                if nic.sub is not None:
                    nics.append(with_port(nic, netdev))
                    continue
                port = physical_port(node.inventory.functions[nic.address], node.inventory)
                soft = tuple(one for one in (nic.change.rdma if nic.change else nic.rdma) if one.soft)
                found = snapshot(netdev, nic.address, port, nic.settings)
                stray = strays.get(nic.address)
                if stray is not None and stray.parent is not None:
                    found = stray  # it came home and is not put right yet: that is what it goes back to
                nics.append(nic.with_snapshot(replace(found, soft_rdma=soft)))
            except UnfitError as error:
                raise ClaimError(f"{ref}: {error}. Correct the config, or ask for another NIC.") from error
            except NotYetError:
                raise
            except RailmateError as error:
                raise NotYetError(f"{ref}: {error}{'' if str(error)[-1:] in '.?!' else '.'}") from error
        return replace(device, nics=tuple(nics))

    def _taken_interfaces(self, claim: Mapping[str, Any], others: Mapping[str, Entry]) -> set[str]:
        pods = {user["uid"] for user in claim.get("status", {}).get("reservedFor", [])}
        return {nic.interface for other in others.values() if pods & set(other.pods) for nic in other.nics}
