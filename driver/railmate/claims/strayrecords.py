"""What is kept of devices that did not come home with their claim, until they do: one file a PCI function."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from railmate import files
from railmate.errors import not_written

log = logging.getLogger(__name__)

T = TypeVar("T")


class StrayRecords(Generic[T]):
    """Records by PCI address. Use it inside the ledger's lock.

    ``what`` a record is of, for people. ``decode`` gets the address and the decoded JSON, and raises ValueError,
    LookupError, TypeError or AttributeError when that is no record; ``encode`` gives what can be written as JSON.
    """

    def __init__(
        self, directory: Path, what: str, decode: Callable[[str, Any], T], encode: Callable[[T], Any]
    ) -> None:
        self._directory, self._what, self._decode, self._encode = directory, what, decode, encode
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)

    def all(self) -> dict[str, T]:
        """In the order of their addresses. A file that is no record is removed."""
        found = {}
        for path in sorted(self._directory.glob("*.json")):
            try:
                found[path.stem] = self._decode(path.stem, json.loads(path.read_bytes()))
            except OSError as error:
                log.error("%s cannot be read (%s); tried again", path, error)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                log.error("%s is no record of %s (%s); removed", path, self._what, error)
                files.remove(path)
        return found

    def put(self, pci_address: str, record: T, whose: str) -> None:
        """Raises RailmateError that names ``whose`` record it is when the disk refuses."""
        path = self._path(pci_address)
        try:
            files.write_json(path, self._encode(record))
        except OSError as error:
            raise not_written(whose, path, error) from error

    def drop(self, pci_address: str) -> None:
        files.remove(self._path(pci_address))

    def remove_temporaries(self) -> int:
        """Remove what killed writers left; return how many."""
        return files.remove_temporaries(self._directory)

    def _path(self, pci_address: str) -> Path:
        return self._directory / f"{pci_address}.json"
