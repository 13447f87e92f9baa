"""Of two instances on a node, the runtime is the elder's until that has ended.

While an instance is being stopped containerd lets no new NRI plugin in, and once one waits there it makes, starts and
stops no other pod either (seen with containerd 2.4: StopContainer holds what a plugin's synchronization waits for). An
instance that ends may take half a minute, and wait for just such a pod to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from pathlib import Path

_POLL = 0.25


class Ending:
    """A lock in the plugin's directory, which all instances on the node share. The kernel gives it back whatever ends
    its holder."""

    def __init__(self, plugin_dir: Path) -> None:
        self._path = plugin_dir / "ending.lock"
        self._held: int | None = None

    def begin(self) -> None:
        """This instance ends from now on. Where the lock cannot be had its successor does not wait."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                raise
            self._held = descriptor

    async def ended(self, at_most: float) -> bool:
        """Wait, at most so many seconds, while another instance ends; whether none does any more."""
        loop = asyncio.get_running_loop()
        end = loop.time() + at_most
        while self._is_held():
            if loop.time() >= end:
                return False
            await asyncio.sleep(_POLL)
        return True

    def _is_held(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False  # nobody ever has
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return False
