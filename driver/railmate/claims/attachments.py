"""Moves the netdevs of one claim into a sandbox and home again, and keeps the gate in step.

The order is always the same: the gate opens last and closes first, and the ledger knows of a move before
it is made. What the runtime reads of a claim is right before the gate opens, too. Called under the ledger's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from railmate.attach.model import (
    AttachedNetdev,
    MoveRequest,
    NetdevReturn,
    ReturnRequest,
    ReturnState,
    SubInterfaceRequest,
)
from railmate.attach.namespaces import is_namespace
from railmate.attach.netdev import attach_all, remove_all, return_all
from railmate.attach.rdma import attach_rdma, return_rdma
from railmate.claims import leases, presence
from railmate.claims.attempt import attempt
from railmate.claims.ledger import Ledger
from railmate.claims.records import Attachment, Entry, PreparedNic
from railmate.claims.sandbox import Sandbox, why_not
from railmate.claims.strays import Strays
from railmate.claims.surroundings import Surroundings
from railmate.errors import RailmateError

log = logging.getLogger(__name__)

#: Address and share: see `railmate.claims.records.PreparedNic.key`.
NicKey = tuple[str, str | None]


class Attachments:
    def __init__(self, driver: str, ledger: Ledger, boot_id: str, around: Surroundings | None = None) -> None:
        self.driver, self._ledger, self.boot_id = driver, ledger, boot_id
        self.around = around or Surroundings()
        self.strays = Strays(ledger, boot_id, self.around)

    def attach(self, entries: Sequence[Entry], sandbox: Sandbox) -> None:
        """Move all netdevs of these claims into the sandbox, in one go, and open the gate for each claim."""
        entries = [self.mend(entry) if entry.attached_to(sandbox.id) else entry for entry in entries]
        noted: list[Entry] = []
        try:
            for entry in entries:
                one = self._note(entry, sandbox)
                if one is not None:
                    noted.append(one)
        except Exception:
            self._take_back(noted)
            raise
        try:
            netdevs = self._move([nic for entry in noted for nic in entry.nics], sandbox)
            # also on the host network: between two pods of a claim its devices have been somewhere else
            noted = [self.around.refreshed(entry) for entry in noted]
        except RailmateError as error:
            self._take_back(noted)
            claims = ", ".join(str(entry.claim) for entry in noted)
            raise RailmateError(
                f"{self.driver}: the NIC of {claims} cannot be attached to pod {sandbox.pod}: {error}"
            ) from error
        for entry in noted:
            self._complete(entry, netdevs, sandbox)

    def _take_back(self, noted: Sequence[Entry]) -> None:
        """After an attach that failed. Claims that were attached before it stay: a container may be using them.

        Normally all is home again. What is not must not be forgotten: this looks, and keeps the record.
        """
        for entry in noted:
            attempt(partial(self.detach, entry, "it could not be attached"))

    def _note(self, entry: Entry, sandbox: Sandbox) -> Entry | None:
        """The entry with its attachment as it is about to be; None when it is complete already."""
        if entry.attached_to(sandbox.id):
            self.open_gate(entry)
            return None
        if leases.wanted(entry):
            raise RailmateError(
                f"{self.driver}: the addresses of {entry.claim} are not there yet; it is tried again."
            )
        if any(nic.change is not None and not nic.change.made for nic in entry.nics):
            raise RailmateError(
                f"{self.driver}: the NIC of {entry.claim} is not bound to its driver yet; it is tried again."
            )
        if entry.attachment is not None:
            if entry.attachment.pod_uid != sandbox.pod_uid:
                raise RailmateError(why_not(self.driver, entry, sandbox))
            entry = self.detach(entry, "its pod has a new sandbox")
        netns = str(sandbox.netns) if sandbox.netns else None
        entry = entry.with_attachment(Attachment(sandbox.id, sandbox.pod_uid, sandbox.pod, netns))
        if netns is not None and any(nic.snapshot or nic.sub or nic.rdma for nic in entry.nics):
            # before the move: if this process ends between the two, the next one knows where to look
            self._ledger.put(entry, durable=False)
        return entry

    def _move(self, nics: Sequence[PreparedNic], sandbox: Sandbox) -> Mapping[NicKey, AttachedNetdev]:
        """By the NIC's key."""
        if sandbox.netns is None:
            return {}
        requests: list[MoveRequest | SubInterfaceRequest] = []
        for nic in nics:
            if nic.snapshot:
                requests.append(MoveRequest(nic.snapshot, nic.interface, nic.settings, nic.rdma))
            elif nic.sub:
                requests.append(SubInterfaceRequest(nic.address, nic.sub, nic.interface, nic.settings))
        without_netdev = [device for nic in nics if not (nic.snapshot or nic.sub) for device in nic.rdma]
        moved: Sequence[AttachedNetdev] = ()
        if requests:
            moved = attach_all(requests, sandbox.netns, without_netdev)
        else:
            attach_rdma(without_netdev, sandbox.netns)
        return {(netdev.pci_address, netdev.share): netdev for netdev in moved}

    def _complete(self, entry: Entry, netdevs: Mapping[NicKey, AttachedNetdev], sandbox: Sandbox) -> None:
        assert entry.attachment is not None
        mine = tuple(netdevs[nic.key] for nic in entry.nics if nic.key in netdevs)
        entry = entry.with_attachment(replace(entry.attachment, netdevs=mine, complete=True))
        self._ledger.put(entry, durable=False)
        self.open_gate(entry)
        self.around.observer.attached(entry)
        moved = ", ".join(f"{netdev.pci_address} as {netdev.name}" for netdev in mine) or "nothing to move"
        log.info(
            "%s: attached to %s: %s", entry.claim, sandbox.pod, moved if sandbox.netns else "host network"
        )

    def open_gate(self, entry: Entry) -> None:
        """For the sandbox that the claim is attached to, and containers with the device nodes that it has now."""
        at = entry.attachment
        assert at is not None
        self._ledger.open_gate(
            entry.claim.uid, at.sandbox, host_network=at.netns is None, nodes=entry.nodes_word
        )

    def detach_all(self, sandbox_id: str, why: str) -> None:
        errors: list[Exception] = []
        for entry in self._ledger.entries(mentioning=sandbox_id).values():
            if entry.attachment is not None and entry.attachment.sandbox == sandbox_id:
                try:
                    self.detach(entry, why)
                except Exception as error:
                    log.warning("%s", error)
                    errors.append(error)
        if errors:
            raise errors[0]

    def mend(self, entry: Entry) -> Entry:
        """Attach again what has left the claim's sandbox by itself: its driver was bound anew, as a rule. What is still
        there stays: a container may be using it. Returns the entry as it is now.

        Raises RailmateError when it cannot be attached, and the gate stays closed then; and when the devices have other
        nodes now: a container that is being made at this moment has the former ones.
        """
        at = entry.attachment
        if at is None or not at.complete or entry.boot_id != self.boot_id:
            return entry
        if at.netns is None:
            self.say_nodes_now(entry)
            return entry
        sandbox = Sandbox(at.sandbox, at.pod_uid, at.pod, Path(at.netns))
        gone = [nic for _, nic in presence.gone([entry], Path(at.netns))]
        if not gone:
            if not self._ledger.is_open(entry.claim.uid, at.sandbox):
                return self._with_nodes_now(entry)
            self.say_nodes_now(entry)
            return entry
        self._ledger.close_gate(entry.claim.uid)
        names = ", ".join(nic.address for nic in gone)
        what = (
            f"the NIC {names} of {entry.claim} has left pod {at.pod}, whose sandbox lives "
            "(was its driver loaded anew?)"
        )
        log.warning("%s", what)
        try:
            moved = self._move(gone, sandbox)
            now = self.around.refreshed(entry)
        except RailmateError as error:
            message = f"{what}, and cannot be attached to it again: {error}"
            self.around.observer.claim_event(
                entry.claim,
                "NicNotInPod",
                f"{message}. It is tried again. Delete the pod to move it elsewhere.",
            )
            raise RailmateError(f"{self.driver}: {message}. It is tried again.") from error
        netdevs = {(one.pci_address, one.share): one for one in at.netdevs} | dict(moved)
        self._complete(now, netdevs, sandbox)
        self.around.repaired("NIC that had left its pod")
        self.around.observer.claim_event(
            entry.claim, "NicAttachedAgain", f"{what}. It is attached again; what used it must open it anew."
        )
        if now.devices != entry.devices:
            raise RailmateError(
                f"{self.driver}: the devices of {entry.claim} have come anew, with other device nodes; "
                "the container starts with them by itself."
            )
        return now

    def say_nodes_now(self, entry: Entry) -> None:
        """To a gate that is open for former device nodes of the claim: it would refuse each container that has those of
        now. Not while a NIC is not in its sandbox: then the gate is not to open at all."""
        at = entry.attachment
        if at is None or not at.complete or entry.boot_id != self.boot_id or not entry.nics:
            return
        uid, on_host, nodes = entry.claim.uid, at.netns is None, entry.nodes_word
        if not self._ledger.is_open(uid, at.sandbox):
            return
        if self._ledger.is_open_as(uid, at.sandbox, host_network=on_host, nodes=nodes):
            return
        if at.netns is None or not presence.gone([entry], Path(at.netns)):
            self.open_gate(entry)
            self.around.repaired("outdated gate marker")

    def _with_nodes_now(self, entry: Entry) -> Entry:
        """Of an entry whose gate is closed though all is in place: who moved its devices may have ended right after the
        move, and what is known of their nodes be from before."""
        now = self.around.refreshed(entry)
        if now != entry:
            self._ledger.put(now, durable=False)
        return now

    def bring_in_line(self, entry: Entry, live: Mapping[str, Sandbox]) -> None:
        """Make the attachment what the pods' live sandboxes (by pod UID) say it should be.

        An attachment is taken back only when its pod has another sandbox or its namespace has ended. That the runtime
        does not name its sandbox proves nothing: what it said may be older than the attachment.
        """
        at = entry.attachment
        sandbox = live.get(at.pod_uid) if at else None
        ended = at is not None and at.netns is not None and not is_namespace(Path(at.netns))
        if at is not None and (ended or (sandbox is not None and sandbox.id != at.sandbox)):
            # after a restart of containerd the end of an older sandbox is never told
            entry = self.detach(entry, "its namespace has ended" if ended else "its pod has a new sandbox")
            if ended:
                self.around.repaired("ended namespace")
        # where one pod has it the others that it is reserved for wait, and are told when their containers are made
        holder = entry.attachment.pod_uid if entry.attachment is not None else None
        for uid in (one for one in entry.pods if holder in (None, one)):
            if uid in live and entry.nics and not entry.attached_to(live[uid].id):
                self.attach([entry], live[uid])
                return
        self.mend(entry)

    def detach(self, entry: Entry, why: str, *, keep_record: bool = True) -> Entry:
        """Close the gate, then bring the netdevs home. Returns the entry without attachment, which is written unless
        the caller drops the entry anyway (``keep_record``): on a full disk that alone must still work.
        """
        self._ledger.close_gate(entry.claim.uid)
        attachment = entry.attachment
        if attachment is None:
            return entry
        # after a reboot everything is where the kernel has put it
        if attachment.netns is not None and entry.boot_id == self.boot_id:
            in_pod = {(netdev.pci_address, netdev.share): netdev for netdev in attachment.netdevs}
            requests = [
                ReturnRequest(nic.snapshot, in_pod.get(nic.key), nic.settings)
                for nic in entry.nics
                if nic.snapshot
            ]
            left = self._end_shares(entry, in_pod, Path(attachment.netns))
            # what is not there is a stray then, and fetched as soon as it comes
            self._return_rdma(entry, Path(attachment.netns))
            returned = return_all(requests, Path(attachment.netns)) if requests else []
            self.strays.remember(entry, returned)
            self._report(entry, returned, why)
            if left:
                raise RailmateError(f"{entry.claim}: {'; '.join(left)}. It is tried again.")
        entry = entry.with_attachment(None)
        if keep_record:
            attempt(
                partial(self._ledger.put, entry, durable=False)
            )  # the next look finds all home, and tries again
        return entry

    def _end_shares(self, entry: Entry, in_pod: Mapping[NicKey, AttachedNetdev], netns: Path) -> list[str]:
        """End the claim's own sub-interfaces; those of other claims on the same NIC stay. A sentence for each that
        cannot be ended: it would be left in a pod that lives on."""
        ends = [
            SubInterfaceRequest(nic.address, nic.sub, nic.interface, nic.settings, in_pod.get(nic.key))
            for nic in entry.nics
            if nic.sub
        ]
        return remove_all(ends, netns) if ends else []

    def _return_rdma(self, entry: Entry, netns: Path) -> None:
        """RDMA devices before their netdevs. What is not home yet, or has another name, is looked for."""
        nics = [nic for nic in entry.nics if not nic.sub and nic.rdma]
        problems = {
            one.name: one.problem
            for one in return_rdma([device for nic in nics for device in nic.rdma], netns)
            if one.problem
        }
        for problem in problems.values():
            log.warning("%s: %s", entry.claim, problem)
        for nic in nics:
            if any(device.name in problems for device in nic.rdma):
                self.strays.remember_rdma(nic)

    def _report(self, entry: Entry, returned: Sequence[NetdevReturn], why: str) -> None:
        """Log what became of the netdevs. Raises RailmateError when one is still in the pod."""
        for one in returned:
            for problem in one.problems:
                log.warning("%s: %s: %s", entry.claim, one.pci_address, problem)
            if one.state is ReturnState.LOST:
                log.warning(
                    "%s: the netdev of %s is neither in the pod nor on the node; it is looked for until it is back",
                    entry.claim, one.pci_address,
                )  # fmt: skip
        stuck = [one.pci_address for one in returned if one.state is ReturnState.FAILED]
        if stuck:
            raise RailmateError(
                f"{entry.claim}: the netdev of {', '.join(stuck)} is still in the pod and could not be taken back; "
                "see the log above for the cause. It is tried again."
            )
        ended = [f"sub-interface of {nic.address} ended" for nic in entry.nics if nic.sub]
        states = ", ".join([*(f"{one.pci_address} {one.state}" for one in returned), *ended])
        log.info("%s: detached (%s): %s", entry.claim, why, states)
