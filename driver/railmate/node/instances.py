"""Of several instances on a node, the one that the kubelet asks keeps the slices: the one that it registered last.

While a rolling update lasts two instances run, and where the update changes what is offered each would write the
other's slices back; pods would be given devices that the instance which is asked for them does not know. Beside an
instance of a release without this that still happens. Where a kubelet that starts finds both it tells them in any order
which one it asks.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

_STARTING = "starting-"
#: Seconds after which such a file was left by an instance that was killed while it made it.
_STARTED = 60.0
#: Seconds after which an instance that has not seen to the slices any more keeps them no longer, though it lives: it
#: hangs, or cannot reach the API server. The controller looks every four minutes at least.
_SILENT = 900.0


class Instances:
    """A file for each registered instance in the plugin's directory, which all on the node share: named after the time
    of its registration and locked, which the kernel ends whatever ends the instance. Methods may be called by any
    thread."""

    def __init__(self, plugin_dir: Path) -> None:
        self._directory = plugin_dir / "instances"
        self._lock = threading.Lock()
        self._stamp = 0  # nanoseconds since boot, which setting the clock does not change; 0: not registered
        self._held: tuple[int, Path] | None = None
        self._left = False

    def registered(self) -> None:
        """The kubelet asks this instance from now on."""
        with self._lock:
            if self._left:
                return
            former, self._stamp = self._held, time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            try:
                self._held = self._make()
            except OSError as error:
                log.warning(
                    "%s: %s. Another instance on this node, if one runs, is not told that this one is asked now, and "
                    "may write its own devices into the ResourceSlices.",
                    self._directory, error.strerror,
                )  # fmt: skip
            else:
                _end(former)
        self.outdone()  # which removes what others left

    def kept(self) -> None:
        """This instance has seen to the slices."""
        with self._lock, suppress(OSError):
            if self._stamp and self._held is None:
                self._held = self._make()
            elif self._held:
                os.utime(self._held[0])

    def withdraw(self) -> None:
        """The kubelet, or the API server with the slices, has refused this instance: until it is registered the next
        time they are another's, if there is one."""
        with self._lock:
            held, self._held, self._stamp = self._held, None, 0
            _end(held)

    def leave(self) -> None:
        """The kubelet asks this instance no more, and never will."""
        self._left = True
        self.withdraw()

    def outdone(self) -> bool:
        """Whether the slices are another's to keep. Files of instances that are no more are removed."""
        with self._lock:
            living = [stamp for stamp, file in self._others() if _lives(file)]
            return any(stamp > self._stamp for stamp in living)

    def _others(self) -> Iterator[tuple[int, Path]]:
        try:
            found = list(self._directory.iterdir())
        except OSError:
            return
        for file in found:
            stamp = file.name.partition("-")[0]
            if stamp.isdecimal() and (self._held is None or file != self._held[1]):
                yield int(stamp), file

    def _make(self) -> tuple[int, Path]:
        self._directory.mkdir(parents=True, exist_ok=True)
        for left in self._directory.glob(f"{_STARTING}*"):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _STARTED:
                    left.unlink()
        name = f"{self._stamp}-{os.getpid()}"
        starting, file = self._directory / f"{_STARTING}{name}", self._directory / name
        descriptor = os.open(starting, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            starting.rename(file)  # not before: what is not locked is taken for left behind
        except OSError:
            os.close(descriptor)
            starting.unlink(missing_ok=True)
            raise
        return descriptor, file


def _end(held: tuple[int, Path] | None) -> None:
    if held is not None:
        descriptor, file = held
        with suppress(OSError):
            file.unlink()
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child may have the descriptor, too
        os.close(descriptor)


def _lives(file: Path) -> bool:
    """Whether the file's instance lives and keeps the slices; where that cannot be told, yes."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return time.time() - os.fstat(descriptor).st_mtime < _SILENT
    else:
        with suppress(OSError):
            file.unlink()
        return False
    finally:
        os.close(descriptor)
