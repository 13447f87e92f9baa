"""Compares what should be with what is, and repairs each difference it can name.

Ledger, CDI directory, gate markers, metadata, network namespaces, kernel: at start and every minute.
The API is asked once about each claim that another process has prepared, so an idle node asks nothing.
Files of other drivers are left alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Set
from functools import partial
from pathlib import Path

from railmate.attach.namespaces import is_namespace
from railmate.claims.allocation import allocated, reserved_pods
from railmate.claims.attachments import Attachments
from railmate.claims.attempt import attempt
from railmate.claims.backoff import Backoff
from railmate.claims.ledger import Ledger
from railmate.claims.records import ClaimRef, Entry
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.sandbox import Sandbox
from railmate.claims.state import ClaimsApi
from railmate.errors import RailmateError
from railmate.kube.errors import ApiError

log = logging.getLogger(__name__)

#: Seconds between two looks whether a pod has ended whose claim is gone.
_ENDS_EVERY = 1.0


class Reconciler:
    def __init__(
        self,
        api: ClaimsApi,
        ledger: Ledger,
        runtime_files: RuntimeFiles,
        moves: Attachments,
        release: Callable[[ClaimRef], None],
        sandboxes: Callable[[], Mapping[str, Sandbox] | None] = dict,
        answered: Callable[[], Set[str]] = frozenset,
        on_node: Callable[[str], bool] = lambda address: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``release`` is unprepare: it gives everything of a claim back. ``sandboxes`` gives the live sandboxes by pod
        UID, None while the runtime cannot be asked. ``answered`` gives the claims, by UID, that this process has
        prepared: the others are inherited. ``on_node``: whether a NIC's netdev is in the node's own namespace."""
        self._api, self._ledger, self._files, self._moves = api, ledger, runtime_files, moves
        self._driver = moves.driver
        self._release, self._repaired = release, moves.around.repaired
        self._sandboxes = sandboxes
        self._answered, self._on_node = answered, on_node
        # of the inherited ones: what is gone from the API while its pod still runs, and what was there
        self._gone: set[str] = set()
        self._backoff = Backoff(clock)  # of claims whose NIC has left its pod
        self._there: set[str] = set()

    def run(self) -> None:
        """One round. Never raises; what fails is logged and tried again in the next round."""
        attempt(self._local)
        attempt(self._inherited_claims)

    def await_ends(self) -> float | None:
        """Between the rounds: put right what has come home, attach again what has left its pod, release what has
        ended. Seconds until this is worth doing again; None where nothing is awaited before the next round."""
        pauses: list[float | None] = []
        for look in (self._fetch_strays, self._bring_back, self._release_ended):
            try:
                pauses.append(look())
            except RailmateError as error:
                log.warning("%s", error)
        return min((pause for pause in pauses if pause is not None), default=None)

    # --- what needs no API
    def _local(self) -> None:
        for uid in self._ledger.entries():
            # claim by claim: pods that start meanwhile must not wait for the whole round
            with self._ledger.locked():
                entry = self._ledger.get(uid)
                if entry is not None:
                    attempt(partial(self._entry, entry))
        with self._ledger.locked():
            self._orphaned_files(self._ledger.claims())
            half_done = self._ledger.remove_temporaries() + self._ledger.remove_orphaned_copies()
            for _ in range(half_done + self._files.remove_temporaries()):
                self._repaired("half-written file")
            home = self._moves.strays.fetch()
            netdevs, rdma = self._moves.strays.fetch_from_elsewhere()
            for kind, count in (("stray netdev", home + netdevs), ("stray RDMA device", rdma)):
                for _ in range(count):
                    self._repaired(kind)

    def _fetch_strays(self) -> float | None:
        """Seconds until the next look."""
        with self._ledger.locked():
            for _ in range(self._moves.strays.fetch_due()):
                self._repaired("stray netdev")
            return self._moves.strays.pause()

    def _bring_back(self) -> float | None:
        """What a pod has and is on the node all the same: its driver was bound anew, as a rule, or its namespace has
        ended. And what is in its pod again, but its gate is closed. Costs a look into sysfs for each NIC of a pod.
        Seconds until the next try where one failed; of the next that leaves the kernel tells."""
        left = {uid for uid, entry in self._ledger.entries().items() if self._has_left(entry)}
        self._backoff.keep(left)
        for uid in filter(self._backoff.is_due, sorted(left)):
            with self._ledger.locked():
                now = self._ledger.get(uid)
                if now is not None and self._has_left(now):
                    self._backoff.tried(uid)
                    attempt(partial(self._entry, now))
        known = {uid: self._ledger.get(uid) for uid in left}
        return self._backoff.pause([uid for uid, entry in known.items() if entry and self._has_left(entry)])

    def _has_left(self, entry: Entry) -> bool:
        at = entry.attachment
        if at is None or not at.complete or at.netns is None or entry.boot_id != self._moves.boot_id:
            return False
        if entry.nics and not self._ledger.is_open(entry.claim.uid, at.sandbox):
            return True
        return any(nic.snapshot is not None and self._on_node(nic.address) for nic in entry.nics)

    def _entry(self, entry: Entry) -> None:
        at = entry.attachment
        if at is not None and entry.boot_id != self._moves.boot_id:
            entry = self._moves.detach(entry, "it was prepared before a reboot")
        elif entry.nics:
            # the kubelet's next look at the pod may be minutes away
            self._moves.bring_in_line(entry, self._sandboxes() or {})
            entry = self._ledger.get(entry.claim.uid) or entry
        wanted = {entry.attachment.sandbox} if entry.attachment and entry.attachment.complete else set()
        open_for = self._ledger.markers().get(entry.claim.uid, set())
        for sandbox in open_for - wanted:
            self._ledger.close_gate(entry.claim.uid, sandbox)
            self._repaired("stale gate marker")
        if wanted - open_for and entry.nics:
            self._moves.open_gate(entry)
            self._repaired("missing gate marker")
        if not self._files.complete(entry):
            log.warning("%s: its CDI spec or metadata was gone or altered; written again", entry.claim)
            # first: a marker of an earlier railmate does not name the nodes
            if wanted & open_for:
                self._moves.open_gate(entry)
            self._files.write(entry)
            self._repaired("CDI spec")

    def _orphaned_files(self, known: set[str]) -> None:
        """Markers, CDI specs and metadata of claims that the ledger has no record of."""
        for uid in self._ledger.markers().keys() - known:
            self._ledger.close_gate(uid)
            self._repaired("stale gate marker")
        for uid in self._files.claims() - known:
            log.warning("claim %s is not in the ledger; its CDI spec and metadata are removed", uid)
            self._files.remove(uid)
            self._repaired("orphaned CDI spec")

    # --- claims that ended while no driver ran
    def _inherited_claims(self) -> None:
        """The kubelet releases claims by itself, but not one whose pod ended while its own state was lost."""
        with self._ledger.locked():
            entries = self._ledger.entries()
        for uid in sorted(entries.keys() - self._there - self._answered()):
            attempt(partial(self._release_if_gone, entries[uid]))
        self._there &= entries.keys()

    def _release_ended(self) -> float | None:
        """Release claims that are gone from the API as soon as their pods have ended, too. Seconds until the next look.

        Asks nobody but the runtime's last word while they run, so it may be called often.
        """
        for uid in sorted(self._gone):
            entry = self._ledger.get(uid)
            if entry is None:
                self._gone.discard(uid)  # the kubelet was faster
            else:
                attempt(partial(self._release_if_gone, entry))
        return _ENDS_EVERY if self._gone else None

    def _release_if_gone(self, entry: Entry) -> None:
        uid = entry.claim.uid
        if uid in self._answered():
            self._gone.discard(uid)  # the kubelet has asked for it since
        elif uid in self._gone and self._still_runs(entry):
            return
        elif not self._is_gone(entry):  # asked again before it is released: another pod may have it by now
            self._gone.discard(uid)
            self._there.add(uid)  # from now on the kubelet tells
        elif self._still_runs(entry):
            log.info("%s is gone from the API, but its pod still runs; its devices stay with it", entry.claim)
            self._gone.add(uid)
        else:
            log.warning(
                "%s (%s) is gone from the API; its devices are released", entry.claim, entry.claim.uid
            )
            self._release(entry.claim)
            self._gone.discard(uid)
            self._repaired("deleted claim")

    def _is_gone(self, entry: Entry) -> bool:
        """Whether the claim no longer exists, or no longer holds these devices for anybody."""
        try:
            claim = self._api.get_claim(entry.claim.namespace, entry.claim.name)
        except ApiError as error:
            if error.not_found:
                return True
            raise
        try:
            if claim["metadata"]["uid"] != entry.claim.uid or not claim.get("status", {}).get("allocation"):
                return True
            held = {(device.pool, device.device, device.share_id) for device in entry.devices}
            now = {
                (result["pool"], result["device"], result.get("shareID"))
                for result in allocated(claim, self._driver)
            }
            return held.isdisjoint(now) or not reserved_pods(claim)
        except (LookupError, TypeError, AttributeError) as error:
            raise RailmateError(
                f"{entry.claim}: the API server's answer is no claim as this railmate knows it ({error})"
            ) from error

    def _still_runs(self, entry: Entry) -> bool:
        """After a force delete a pod's processes outlive its claim by the grace period, and so does their hold."""
        at = entry.attachment
        if at is not None and at.netns is not None and is_namespace(Path(at.netns)):
            return True
        running = self._sandboxes()
        return running is None or not running.keys().isdisjoint(entry.pods)
