"""Puts the gate, the hook executable of our CDI specs, where the runtime on the node finds it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from railmate import files
from railmate.errors import RailmateError
from railmate.node.settings import Settings

log = logging.getLogger(__name__)


class GateInstaller:
    """``warn`` is told, in a sentence for people, when an older gate has to do for now."""

    def __init__(self, settings: Settings, warn: Callable[[str], None]) -> None:
        self._source, self._target, self._warn = settings.gate_binary, settings.installed_gate, warn

    def look(self) -> None:
        """Install the gate if it is not there or is another one; costs two reads otherwise. Renamed into place, so that
        a container that starts at this moment runs the old or the new one, never half of it.

        Raises RailmateError when it cannot be written and none is there. An older one serves: without a driver nothing
        would be prepared, and nothing given back.
        """
        try:
            self._target.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            wanted = self._source.read_bytes()
            if not self._target.exists() or self._target.read_bytes() != wanted:
                files.write_bytes(self._target, wanted, mode=0o755)
                log.info("the gate is installed as %s", self._target)
        except OSError as error:
            why = f"the gate cannot be installed as {self._target} ({error})"
            if not _runs(self._target):
                raise RailmateError(f"{why}. Is {self._target.parent} mounted, and writable?") from error
            message = (
                f"{why[0].upper()}{why[1:]}. The one that is there, of another version, is used until it can be; free "
                "space on the disk, or make it writable. It is tried again every minute."
            )
            log.warning("%s", message)
            self._warn(message)


def _runs(path: Path) -> bool:
    """Whether there is an executable; it was renamed into place, so it is whole."""
    try:
        return path.is_file() and path.stat().st_size > 0 and os.access(path, os.X_OK)
    except OSError:
        return False
