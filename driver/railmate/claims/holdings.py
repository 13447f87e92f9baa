"""What claims hold at this moment, for those that look at the machine, or change it, while claims come and go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from railmate.attach.errors import AttachError
from railmate.claims.ledger import Ledger
from railmate.claims.records import ClaimRef, Entry, devices_of, of_boot
from railmate.publish.model import OfferedDevice


@dataclass(frozen=True, slots=True)
class Held:
    """``addresses``: of all hardware that claims have alone; ``shared``: of NICs that they have shares of; ``devices``:
    see `railmate.claims.records.devices_of`."""

    addresses: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    devices: tuple[OfferedDevice, ...] = ()

    def covers(self, other: Held) -> bool:
        """Whether ``other`` has nothing that is not in this one."""
        names = {device.name for device in self.devices}
        return (
            other.addresses <= self.addresses
            and other.shared <= self.shared
            and all(device.name in names for device in other.devices)
        )


class Holdings:
    """Reads the ledger each time: another instance of the driver may write to it, too."""

    def __init__(self, ledger: Ledger, boot_id: str) -> None:
        self._ledger, self._boot_id = ledger, boot_id

    def _entries(self) -> list[Entry]:
        with self._ledger.locked():
            return of_boot(self._ledger.entries().values(), self._boot_id)

    def now(self) -> Held:
        entries = self._entries()
        return Held(
            frozenset(part for entry in entries for part in entry.hardware),
            frozenset(address for entry in entries for address in entry.shared),
            tuple(devices_of(entries)),
        )

    def owners(self) -> dict[str, ClaimRef]:
        """PCI addresses of all hardware that claims have alone, and whose it is. After a reboot nothing is held."""
        return {part: entry.claim for entry in self._entries() for part in entry.hardware}

    def sharers(self) -> dict[str, list[ClaimRef]]:
        """PCI addresses of NICs that claims have shares of, and whose those are."""
        found: dict[str, list[ClaimRef]] = {}
        for entry in self._entries():
            for address in entry.shared:
                found.setdefault(address, []).append(entry.claim)
        return found

    @contextmanager
    def kept_from_claims(self, physical_function: str) -> Iterator[frozenset[str]]:
        """Meanwhile no claim gets this physical function, a share of it or a VF of it; yields the addresses of what
        claims have already. Prepare waits for the end: see ``Ledger.reserving``.

        Raises AttachError while what a claim holds is not known.
        """
        with self._ledger.reserving(physical_function):
            with self._ledger.locked():
                unknown = self._ledger.claims() - self._ledger.entries().keys()
            if unknown:
                raise AttachError(
                    f"the record of claim {', '.join(sorted(unknown))} cannot be read here, and it may hold some of it"
                )
            now = self.now()
            yield now.addresses | now.shared
