"""RDMA devices that did not come home with their claim, or not under their own name."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable

from railmate.attach.elsewhere import Elsewhere
from railmate.attach.rdma import put_right
from railmate.attach.rdmamodel import RdmaDeviceRef
from railmate.claims.ledger import Ledger

log = logging.getLogger(__name__)


class RdmaStrays:
    """Use it inside the ledger's lock."""

    def __init__(self, ledger: Ledger) -> None:
        self._records = ledger.rdma_strays

    def all(self) -> dict[str, tuple[RdmaDeviceRef, ...]]:
        """By PCI address."""
        return self._records.all()

    def put(self, pci_address: str, devices: Iterable[RdmaDeviceRef]) -> None:
        """Raises RailmateError when the disk refuses."""
        self._records.put(pci_address, tuple(devices), f"the RDMA device of {pci_address}")

    def fetch(self, held: Container[str], elsewhere: Elsewhere | None) -> int:
        """Put right what is back, and bring home what is in a namespace that no claim knows. ``held`` functions are
        claims' again, and stay where those have them. How many are right now."""
        found = 0
        for address, devices in self.all().items():
            if address in held:
                continue
            problems = [one.problem for one in put_right(devices) if one.problem]
            if problems and elsewhere is not None and elsewhere.fetch_rdma(devices):
                problems = [one.problem for one in put_right(devices) if one.problem]
            if problems:
                log.warning("%s: %s. It is tried again", address, "; ".join(problems))
                continue
            self._records.drop(address)
            log.info("the RDMA device of %s is home again", address)
            found += 1
        return found
