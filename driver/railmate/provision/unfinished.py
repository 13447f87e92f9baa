"""What has been begun and not ended, on disk: what a killed driver has left half done, the next one finishes."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from railmate import files
from railmate.attach.errors import AttachError

log = logging.getLogger(__name__)


class Unfinished:
    """Physical functions whose VFs are being made, a file each. There from before the first change until the VFs have
    names and drivers.

    Holds what cannot be seen in the machine any more: whether the kernel looked for drivers by itself before
    (sriov_drivers_autoprobe), which is off meanwhile. A file of an earlier boot tells nothing of this one. Use it while
    the physical function is kept from claims: two instances of the driver share it.
    """

    def __init__(self, directory: Path, boot: str) -> None:
        self._directory, self._boot = directory, boot

    def addresses(self) -> frozenset[str]:
        found = {path.stem for path in self._directory.glob("*.json")}
        return frozenset(address for address in found if self.autoprobe(address) is not None)

    def autoprobe(self, address: str) -> bool | None:
        """How it was before the first change; None where nothing is unfinished."""
        path = self._path(address)
        try:
            record = json.loads(path.read_bytes())
            boot, autoprobe = record["boot"], record["autoprobe"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            log.warning("%s cannot be read (%s); the kernel's default is taken", path, error)
            return True
        return autoprobe is not False if boot == self._boot else None

    def begin(self, address: str, autoprobe: bool) -> bool:
        """Note that it begins, and that ``autoprobe`` is how it is now. Returns how it was before the first change,
        which somebody may have been killed after. Raises AttachError."""
        before = self.autoprobe(address)
        if before is not None:
            return before
        path = self._path(address)
        try:
            self._directory.mkdir(mode=0o750, exist_ok=True)
            files.write_json(path, {"boot": self._boot, "autoprobe": autoprobe}, durable=False)
        except OSError as error:
            raise AttachError(f"{path} cannot be written ({error.strerror or error})") from None
        return autoprobe

    def end(self, address: str) -> None:
        """Raises AttachError."""
        path = self._path(address)
        try:
            files.remove(path)
            files.remove_temporaries(self._directory, address)
        except OSError as error:
            raise AttachError(f"{path} cannot be removed ({error.strerror or error})") from None

    def _path(self, address: str) -> Path:
        return self._directory / f"{address}.json"
