"""Compares what should be with what is, and repairs each difference it can name.

Ledger, CDI directory, gate markers, metadata, network namespaces, kernel: at start and every minute.
The API is asked once about each claim that an earlier process had prepared, so an idle node asks nothing.
Files of other drivers are left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from railmate.attach.namespaces import is_namespace
from railmate.claims.attachments import Attachments, attempt
from railmate.claims.ledger import Ledger
from railmate.claims.records import ClaimRef, Entry
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.state import ClaimsApi
from railmate.kube.errors import ApiError

log = logging.getLogger(__name__)

#: Counts a repair, by kind.
Repaired = Callable[[str], None]


class Reconciler:
    def __init__(
        self,
        api: ClaimsApi,
        ledger: Ledger,
        runtime_files: RuntimeFiles,
        moves: Attachments,
        release: Callable[[ClaimRef], None],
        repaired: Repaired,
    ) -> None:
        """``release`` is unprepare: it gives everything of a claim back."""
        self._api, self._ledger, self._files, self._moves = api, ledger, runtime_files, moves
        self._release, self._repaired = release, repaired
        self._inherited: set[str] | None = (
            None  # claims of earlier processes that the API was not asked about yet
        )

    def run(self) -> None:
        """One round. Never raises; what fails is logged and tried again in the next round."""
        attempt(self._local)
        attempt(self._inherited_claims)

    # --- what needs no API
    def _local(self) -> None:
        with self._ledger.locked():
            entries = self._ledger.entries()
            for entry in entries.values():
                attempt(partial(self._entry, entry))
            self._orphaned_files(set(entries))
            for _ in range(self._moves.fetch_strays()):
                self._repaired("stray netdev")

    def _entry(self, entry: Entry) -> None:
        at = entry.attachment
        if at is not None and at.netns is not None and not is_namespace(Path(at.netns)):
            # after a restart of containerd the end of an older sandbox is never told
            self._moves.detach(entry, "its network namespace has ended")
            self._repaired("ended namespace")
            entry = entry.with_attachment(None)
        wanted = {entry.attachment.sandbox} if entry.attachment and entry.attachment.complete else set()
        open_for = self._ledger.markers().get(entry.claim.uid, set())
        for sandbox in open_for - wanted:
            self._ledger.close_gate(entry.claim.uid, sandbox)
            self._repaired("stale gate marker")
        for sandbox in wanted - open_for:
            if entry.nics:
                self._ledger.open_gate(entry.claim.uid, sandbox)
                self._repaired("missing gate marker")
        if not self._files.complete(entry):
            log.warning("%s: its CDI spec or metadata was gone or altered; written again", entry.claim)
            self._files.write(entry)
            self._repaired("CDI spec")

    def _orphaned_files(self, known: set[str]) -> None:
        """Markers, CDI specs and metadata of claims that the ledger does not know."""
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
        if self._inherited is None:
            self._inherited = set(entries)
        for uid in sorted(self._inherited):
            if uid not in entries or attempt(partial(self._release_if_gone, entries[uid])):
                self._inherited.discard(uid)

    def _release_if_gone(self, entry: Entry) -> None:
        try:
            gone = (
                self._api.get_claim(entry.claim.namespace, entry.claim.name)["metadata"]["uid"]
                != entry.claim.uid
            )
        except ApiError as error:
            if not error.not_found:
                raise
            gone = True
        if gone:
            log.warning(
                "%s (%s) is gone from the API; its devices are released", entry.claim, entry.claim.uid
            )
            self._release(entry.claim)
            self._repaired("deleted claim")
