"""The verbs of the driver: prepare, unprepare, attach, detach, check, synchronize.

All of them are idempotent, block, and may be called from any thread of any instance; the ledger's
lock puts them in order. What they promise: a device is with one claim at a time, a container that
references a claim starts only where the claim's devices are, and whatever moved comes home.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from railmate.claims import leases, presence, rebinding
from railmate.claims.allocation import ClaimError, GivenUpError, NotYetError, reserved_pods
from railmate.claims.attachments import Attachments
from railmate.claims.attempt import attempt
from railmate.claims.holdings import Holdings
from railmate.claims.leases import Leases
from railmate.claims.ledger import Ledger
from railmate.claims.nodeview import NodeView
from railmate.claims.preparation import HeldError, Preparation
from railmate.claims.rebinding import Rebinding, partition_missing
from railmate.claims.records import ClaimRef, Entry, PreparedDevice, PreparedNic
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.sandbox import Sandbox, why_not
from railmate.claims.surroundings import Surroundings
from railmate.claims.waiting import POLL, Waiting
from railmate.errors import RailmateError
from railmate.inventory.rdmanetlink import NetnsMode
from railmate.kube.errors import ApiError

log = logging.getLogger(__name__)

#: Seconds that prepare waits for devices that are about to come free. The kubelet gives the call 45 s,
#: and asks again only after 60-90 s when it fails, so waiting is the shorter way.
PREPARE_PATIENCE = 30.0
#: Seconds between two tries to reach an API server that does not answer, at most.
_LONGEST_PAUSE = 2.0


@dataclass(frozen=True, slots=True)
class PreparedClaim:
    """The answer to the kubelet."""

    devices: tuple[PreparedDevice, ...]
    cdi_ids: Mapping[str, Sequence[str]]  # by the key of the device


class ClaimsApi(Protocol):
    def get_claim(self, namespace: str, name: str) -> dict[str, Any]: ...


@contextmanager
def _as_a_claim(ref: ClaimRef) -> Iterator[None]:
    """Turn what an object of another shape than the API's makes of us into words."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ClaimError(
            f"{ref}: the API server's answer is no claim as this railmate knows it ({type(error).__name__}: {error}). "
            "Is the server newer than 1.37? Then update railmate."
        ) from error


class ClaimState:
    def __init__(
        self,
        api: ClaimsApi,
        node: NodeView,
        ledger: Ledger,
        runtime_files: RuntimeFiles,
        boot_id: str,
        around: Surroundings | None = None,
    ) -> None:
        self._api, self._node, self._ledger, self._files = api, node, ledger, runtime_files
        self.holdings = Holdings(ledger, boot_id)
        self.moves = Attachments(node.driver, ledger, boot_id, around)
        self._leases = Leases(ledger, runtime_files, lambda: self._node.cni_dir)
        self._rebinding = Rebinding(ledger, runtime_files, lambda: self._node, boot_id)
        self._preparation = Preparation(
            ledger, runtime_files, self.moves, self._leases, self._rebinding, boot_id
        )
        self._waiting = Waiting(ledger)
        self._answered: set[str] = set()  # claim UIDs: prepared by this process and not given back since
        self._preparing: set[tuple[str, object]] = set()  # claim UID and call, of all that have not ended

    def update(self, node: NodeView) -> None:
        """The machine has changed; claims that are prepared keep what they have."""
        self._node = node

    def stop(self) -> None:
        """No prepare waits any longer: this instance has no time left."""
        self._waiting.stop()

    def changing(self) -> Set[str]:
        """PCI addresses of functions that are on their way from one driver to another."""
        return self._rebinding.changing()

    # --- the kubelet's verbs
    def prepare(
        self,
        ref: ClaimRef,
        patience: float = PREPARE_PATIENCE,
        *,
        given_up: threading.Event | None = None,
    ) -> PreparedClaim:
        """Make the claim's devices ready. Raises RailmateError that names the claim, cause and next step.

        Waits up to ``patience`` seconds for a device whose former pod is still ending. Nothing is prepared any more
        once ``given_up`` is set: the kubelet may have had the claim given back by another instance.
        """
        call = (ref.uid, object())
        self._preparing.add(call)
        try:
            return self._prepare(ref, patience, call, given_up or threading.Event())
        finally:
            self._preparing.discard(call)

    def _prepare(
        self, ref: ClaimRef, patience: float, call: tuple[str, object], given_up: threading.Event
    ) -> PreparedClaim:
        deadline = time.monotonic() + patience
        claim = self._claim(ref, deadline, given_up)
        self._node.vendor_cdi()  # parsed now if need be, and not under the lock
        waiting = False
        while True:
            try:
                with self._ledger.locked(), _as_a_claim(ref):
                    if call not in self._preparing:
                        # the kubelet gave up on this call, and nobody would ever give back what it still prepares
                        raise ClaimError(f"{ref}: it was given back while it was being prepared.")
                    if given_up.is_set():
                        raise GivenUpError(ref)
                    entry = self._preparation.entry(claim, ref, self._node)
                    self._answered.add(ref.uid)
                return self._answer(entry)
            except HeldError as reason:
                self._rebinding.give_back(reason.entry)
                self._leases.forget(reason.entry)
                continue
            except NotYetError as reason:
                if not waiting:
                    log.info("%s Waiting for it.", reason)
                    waiting = True
                if self._waiting.pause(reason.holder, deadline, given_up):
                    continue
                if self._waiting.stopped:
                    raise ClaimError(
                        f"{ref}: the driver is being replaced. The kubelet asks its successor."
                    ) from reason
                if given_up.is_set():
                    raise GivenUpError(ref) from reason
                next_step = reason.next_step or (
                    f"If no pod on node {self._node.pool} uses it any more, "
                    "look at the railmate pod's log on this node."
                )
                raise ClaimError(f"{reason} Waited {patience:.0f} s. {next_step}") from reason

    def _claim(self, ref: ClaimRef, deadline: float, given_up: threading.Event) -> Mapping[str, Any]:
        """As the API server has it. One that restarts or is overloaded is asked again until the deadline."""
        pause = POLL
        while True:
            try:
                return self._api.get_claim(ref.namespace, ref.name)
            except ApiError as error:
                if not error.passes or time.monotonic() + pause >= deadline or self._waiting.stopped:
                    raise
                log.warning("%s: %s. Trying again in %.2f s.", ref, error, pause)
                self._waiting.rest(pause, given_up)
                if self._waiting.stopped:
                    raise
            if given_up.is_set():
                raise GivenUpError(ref)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def answered(self) -> Set[str]:
        """UIDs of the claims that this process has prepared, or prepares: the kubelet has those given back itself."""
        return self._answered | {uid for uid, _ in self._preparing.copy()}

    def unprepare(self, ref: ClaimRef, *, inherited: bool = False) -> None:
        """Give everything of the claim back. Works from the ledger alone; an unknown claim is fine. ``inherited``: not
        what the kubelet has asked this process for.

        Raises RailmateError when a netdev could not be brought home; the kubelet then asks again.
        """
        given_up = {call for call in self._preparing.copy() if call[0] == ref.uid}
        with self._ledger.locked():
            if inherited and ref.uid in self.answered():
                return
            self._preparing.difference_update(given_up)
            self._answered.discard(ref.uid)
            entry = self._ledger.get(ref.uid)
            # then the record is needed a little longer
            more = entry is not None and (leases.held(entry) or self._rebinding.held(entry))
            if entry is not None:
                self.moves.detach(entry, "the claim is no longer used", keep_record=more)
            self._ledger.close_gate(ref.uid)
            self._files.remove(ref.uid)
            if not more:
                self._ledger.drop(ref.uid)
        if entry is not None and more:
            self._rebinding.give_back(entry)
            self._leases.end(entry)
        self.moves.around.observer.released(ref)
        self._waiting.freed()
        log.info("%s (%s): unprepared", ref, ref.uid)

    # --- the runtime's verbs
    def attach(self, sandbox: Sandbox) -> None:
        """Move the netdevs of the pod's claims into its sandbox and open the gate for it.

        Raises RailmateError when a netdev cannot be moved; what was moved is home again by then, and what was in the
        sandbox before stays there.
        """
        if not self._concerns(sandbox.pod_uid, lambda entry: sandbox.pod_uid in entry.pods):
            return
        with self._ledger.locked():
            found = self._ledger.entries(mentioning=sandbox.pod_uid).values()
            mine = [entry for entry in found if sandbox.pod_uid in entry.pods and entry.nics]
            self.moves.attach(mine, sandbox)

    def renews_nodes(self, sandbox: Sandbox) -> bool:
        """Whether the attach gives RDMA devices of the pod's claims other device nodes: soft devices are made anew, and
        in exclusive mode a move does it (see `Observations.refreshed`). Without the lock, as it is now."""
        exclusive = self._node.inventory.rdma_netns_mode == NetnsMode.EXCLUSIVE

        def renews(nic: PreparedNic) -> bool:
            return not nic.sub and any(exclusive or device.soft is not None for device in nic.rdma)

        return sandbox.netns is not None and self._concerns(
            sandbox.pod_uid,
            lambda entry: sandbox.pod_uid in entry.pods and any(renews(nic) for nic in entry.nics),
        )

    def detach(self, sandbox_id: str) -> None:
        """The sandbox ends: bring home what it holds. One failure does not stop the rest; the first is raised."""
        if not self._concerns(
            sandbox_id, lambda entry: entry.attachment is not None and entry.attachment.sandbox == sandbox_id
        ):
            return
        try:
            with self._ledger.locked():
                self.moves.detach_all(sandbox_id, "the sandbox ends")
        finally:
            self._waiting.freed()

    def check(self, sandbox: Sandbox, claim_uids: Iterable[str]) -> None:
        """Raise RailmateError unless all devices of these claims are in this sandbox: the kernel is asked, too."""
        entries = []
        for uid in claim_uids:
            entry = self._ledger.get(uid)
            if entry is None:
                raise RailmateError(
                    f"{self._node.driver}: claim {uid} of pod {sandbox.pod} is not prepared on node "
                    f"{self._node.pool}. Delete the pod; its successor's claim is prepared afresh."
                )
            if entry.nics and not entry.attached_to(sandbox.id):
                raise RailmateError(why_not(self._node.driver, entry, sandbox))
            if entry.nics and not self._ledger.is_open(uid, sandbox.id):
                raise RailmateError(
                    f"{self._node.driver}: the gate of {entry.claim} is closed for pod {sandbox.pod}: its NIC is being "
                    "attached again; the container starts by itself once that has ended."
                )
            entries.append(entry)
        for entry, nic in presence.gone(entries, sandbox.netns) if sandbox.netns else ():
            raise RailmateError(
                f"{self._node.driver}: the NIC {nic.address} of {entry.claim} is not in pod {sandbox.pod} any more; "
                "the container starts by itself once it is attached again."
            )

    def adopt(self, sandbox: Sandbox, claim_uids: Iterable[str]) -> None:
        """A pod that the claims were not prepared for wants them. The kubelet prepares a claim once, also when one
        pod after the other uses it: if the claim is this pod's now and no other has it, the pod gets it."""
        for uid in claim_uids:
            entry = self._ledger.get(uid)
            if entry is None or sandbox.pod_uid in entry.pods or entry.attachment is not None:
                continue
            claim = self._api.get_claim(entry.claim.namespace, entry.claim.name)
            with self._ledger.locked():
                entry = self._ledger.get(uid)
                if entry is None or entry.attachment is not None or claim["metadata"]["uid"] != uid:
                    continue
                if reserved_pods(claim) == (sandbox.pod_uid,):
                    entry = replace(entry, pods=(sandbox.pod_uid,))
                    self._ledger.put(entry)
                    self.moves.attach([entry], sandbox)

    def synchronize(self, live: Sequence[Sandbox]) -> None:
        """After a (re)connect to the runtime: take back what sits in sandboxes that are gone, attach what
        is missing in those that live. One failure does not stop the rest; all are logged."""
        by_pod = {sandbox.pod_uid: sandbox for sandbox in live}
        for uid in self._ledger.entries():
            # the lock is taken claim by claim: pods that start meanwhile must not wait for all of them
            with self._ledger.locked():
                entry = self._ledger.get(uid)
                if entry is not None:
                    attempt(partial(self.moves.bring_in_line, entry, by_pod))
        self._waiting.freed()

    def _concerns(self, text: str, question: Callable[[Entry], bool]) -> bool:
        """Whether any entry that mentions the text answers yes. Without the lock: most sandboxes of a node have none
        of our claims, and must not wait for those that have. Entries are replaced whole, and a pod's are there before
        its sandbox."""
        return any(question(entry) for entry in self._ledger.entries(text).values() if entry.nics)

    def _answer(self, entry: Entry) -> PreparedClaim:
        if rebinding.wanted(entry):
            entry = self._rebinding.make(entry.claim)
        # once it is attached its RDMA device may be in the pod, where it is not looked for
        if entry.attachment is None and (missing := partition_missing(entry, self._node)) is not None:
            raise NotYetError(f"{entry.claim}: {missing}.")  # a subnet manager needs a moment for a new GUID
        if leases.wanted(entry):
            entry = self._leases.obtain(entry.claim)
        return PreparedClaim(entry.devices, self._files.cdi_ids(entry))
