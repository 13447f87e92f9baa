"""Of several instances on a node, the slices are the youngest's.

While a rolling update lasts two instances run, and where the update changes what is offered each would write the
other's slices back; pods would be given devices that the instance which answers for them does not know.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

_STARTING = "starting-"


class Instances:
    """A file for each instance in the plugin's directory, which all on the node share: named after the time of its
    start, and locked, which the kernel ends whatever ends the instance."""

    def __init__(self, plugin_dir: Path) -> None:
        self._directory = plugin_dir / "instances"
        # since boot: a clock that is set does not make the younger the elder
        self._stamp = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self._held: int | None = None
        self._left = False

    def enter(self) -> None:
        """This instance publishes from now on. Where the file cannot be made the elder is not told."""
        if self._held is not None or self._left:
            return
        starting = self._directory / f"{_STARTING}{self._stamp}-{os.getpid()}"
        with contextlib.suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(starting, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._held = descriptor
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # under its name only when it is locked: what is not is taken for left behind
            starting.rename(self._directory / f"{self._stamp}-{os.getpid()}")
        self.outdone()  # which removes what others left

    def leave(self) -> None:
        """This instance publishes no more. The file is removed by who looks next."""
        self._left = True
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def outdone(self) -> bool:
        """Whether a younger instance publishes. Files of instances that are no more are removed."""
        try:
            found = list(self._directory.iterdir())
        except OSError:
            return False
        living = [file for file in found if not file.name.startswith(_STARTING) and self._lives(file)]
        return any(self._younger(file) for file in living)

    def _younger(self, file: Path) -> bool:
        stamp = file.name.partition("-")[0]
        return stamp.isdigit() and int(stamp) > self._stamp

    @staticmethod
    def _lives(file: Path) -> bool:
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            file.unlink()
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return False
