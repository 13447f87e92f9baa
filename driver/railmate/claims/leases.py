"""Addresses that CNI IPAM plugins have lent to a claim.

The ledger knows of a lease before its plugin is asked, and forgets it after the plugin has it back: whatever is cut
short is given back with the claim. Plugins may take seconds, so they are never asked under the ledger's lock, for
which pods wait; a lock of the claim's own keeps two askers for it apart.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path

from railmate.attach import ipam
from railmate.attach.settings import Route
from railmate.claims.allocation import ClaimError
from railmate.claims.ledger import Ledger
from railmate.claims.nicplan import refuse_families, refuse_unreachable
from railmate.claims.records import ClaimRef, Entry, PreparedNic
from railmate.claims.runtime_files import RuntimeFiles
from railmate.errors import RailmateError


def wanted(entry: Entry) -> bool:
    """Whether the claim has addresses to be asked for that are not there yet."""
    return any(nic.ipam is not None and not nic.leased for nic in entry.nics)


def held(entry: Entry) -> bool:
    """Whether the claim has, or may have, addresses from plugins."""
    return any(nic.ipam is not None for nic in entry.nics)


class Leases:
    """Asks plugins in ``plugins()``, the node's CNI directory, and keeps the ledger in step."""

    def __init__(self, ledger: Ledger, files: RuntimeFiles, plugins: Callable[[], Path | None]) -> None:
        self._ledger, self._files, self._plugins = ledger, files, plugins
        self._untouched: set[str] = set()  # UIDs of claims for which no plugin was ever asked

    def begin(self, uid: str) -> None:
        """The claim is about to get its entry, and nobody has anything for it."""
        self._untouched.add(uid)

    def obtain(self, ref: ClaimRef) -> Entry:
        """The claim's entry with the addresses among its NICs' settings. Raises ClaimError; what was obtained by then
        is given back with the claim, or when it is prepared again."""
        with self._ledger.leasing(ref.uid):
            entry = self._ledger.get(ref.uid)
            if entry is None:
                raise ClaimError(f"{ref}: it was given back while it was being prepared.")
            # for an entry of an earlier process, or after an attempt that failed, it is not known how far that came
            asked_before = ref.uid not in self._untouched
            self._untouched.discard(ref.uid)
            try:
                nics = self._obtained(entry, asked_before)
            except RailmateError as error:
                raise ClaimError(f"{ref}: {error}.") from error
            with self._ledger.locked():
                entry = (self._ledger.get(ref.uid) or entry).with_nics(lambda nic: nics.get(nic.key, nic))
                self._ledger.put(entry)
                self._files.write(entry)
                return entry

    def _obtained(self, entry: Entry, asked_before: bool) -> dict[tuple[str, str | None], PreparedNic]:
        nics: dict[tuple[str, str | None], PreparedNic] = {}
        routes: set[tuple[object, ...]] = set()
        for nic in entry.nics:
            nics[nic.key] = one = _obtained(nic, self._directory(), routes, asked_before) if nic.ipam else nic
            routes |= {_place(route) for route in one.settings.routes}
        return nics

    def forget(self, entry: Entry) -> None:
        """Give back what the claim had before its devices were others, or before a reboot."""
        with self._ledger.leasing(entry.claim.uid):
            self._release(entry)
            with self._ledger.locked():
                now = self._ledger.get(entry.claim.uid) or entry
                self._ledger.put(now.with_nics(lambda nic: replace(nic, ipam=None)))

    def end(self, entry: Entry) -> None:
        """Give back all that the claim may have, and drop its entry and what was written for it meanwhile."""
        with self._ledger.leasing(entry.claim.uid):
            self._release(entry)
            with self._ledger.locked():
                self._files.remove(entry.claim.uid)
                self._ledger.drop(entry.claim.uid)

    def _release(self, entry: Entry) -> None:
        """Every plugin is asked; the first error is raised."""
        errors = []
        if entry.claim.uid in self._untouched:
            self._untouched.discard(entry.claim.uid)
            return
        for nic in entry.nics:
            if nic.ipam is not None:
                try:
                    ipam.release(nic.ipam, self._directory())
                except RailmateError as error:
                    errors.append(error)
        if errors:
            raise RailmateError(
                f"{entry.claim}: its addresses cannot be given back: {errors[0]}. It is tried again."
            ) from errors[0]

    def _directory(self) -> Path:
        directory = self._plugins()
        if directory is None:
            raise RailmateError("no CNI directory is known (--cni-bin-dir), and an IPAM plugin is needed")
        return directory


def _obtained(
    nic: PreparedNic, plugins: Path, taken: Container[tuple[object, ...]], asked_before: bool
) -> PreparedNic:
    """The NIC with its lease. Of routes to one place the first NIC's counts, as with CNI (its libraries' ipam)."""
    if nic.ipam is None or nic.leased:
        return nic
    lease = ipam.obtain(nic.ipam, plugins, asked_before=asked_before)
    settings = replace(
        nic.settings,
        addresses=nic.settings.addresses + lease.addresses,
        routes=nic.settings.routes + tuple(one for one in lease.routes if _place(one) not in taken),
    )
    refuse_families(settings)
    refuse_unreachable(settings)
    return replace(nic, settings=settings, leased=True)


def _place(route: Route) -> tuple[object, ...]:
    """What two routes cannot share in one namespace."""
    return route.destination, route.metric, route.table
