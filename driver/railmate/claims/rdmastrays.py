"""RDMA devices that did not come home with their claim, or not under their own name: one file a PCI function."""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Iterable
from dataclasses import asdict
from pathlib import Path

from railmate import files
from railmate.attach.elsewhere import Elsewhere
from railmate.attach.rdma import put_right
from railmate.attach.rdmamodel import RdmaDeviceRef
from railmate.claims.ledger import not_written
from railmate.plain import read

log = logging.getLogger(__name__)


class RdmaStrays:
    """Use it inside the ledger's lock."""

    def __init__(self, plugin_dir: Path) -> None:
        self._directory = plugin_dir / "rdma-strays"
        self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)

    def all(self) -> dict[str, tuple[RdmaDeviceRef, ...]]:
        """By PCI address. A file that is no such record is removed."""
        found = {}
        for path in sorted(self._directory.glob("*.json")):
            try:
                said = json.loads(path.read_bytes())["devices"]
                found[path.stem] = tuple(read(RdmaDeviceRef, one) for one in said)
            except OSError as error:
                log.error("%s cannot be read (%s); tried again", path, error)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                log.error("%s is no record of RDMA devices (%s); removed", path, error)
                files.remove(path)
        return found

    def put(self, pci_address: str, devices: Iterable[RdmaDeviceRef]) -> None:
        """Raises RailmateError when the disk refuses."""
        path = self._path(pci_address)
        try:
            files.write_json(path, {"devices": [asdict(one) for one in devices]})
        except OSError as error:
            raise not_written(f"the RDMA device of {pci_address}", path, error) from error

    def drop(self, pci_address: str) -> None:
        files.remove(self._path(pci_address))

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
            self.drop(address)
            log.info("the RDMA device of %s is home again", address)
            found += 1
        return found

    def _path(self, pci_address: str) -> Path:
        return self._directory / f"{pci_address}.json"
