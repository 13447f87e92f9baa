"""The NRI plugin: stays connected to the container runtime and passes its events to a handler."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from pathlib import Path

from railmate.errors import RailmateError, UsageError
from railmate.nri.events import NriHandler
from railmate.nri.mux import Mux
from railmate.nri.session import Session
from railmate.nri.work import WorkQueue

log = logging.getLogger(__name__)

FIRST_DELAY = 0.2  # seconds before the first reconnect; each further one doubles it
LAST_DELAY = 2.0
_POLL = 0.05  # seconds between looks at the socket; a stat each
_GRACE = 5.0  # seconds for work in progress at the end; a change to the kernel takes milliseconds


class NriPlugin:
    """Connects to the runtime's NRI socket, again and again, and serves the events there.

    ``index`` is two digits: the runtime calls its plugins in this order. ``on_connection_change`` is called
    with True when the runtime has synchronized (from then on no event is missed) and with False when the
    connection is lost. Raises UsageError for a name or an index that runtimes refuse.
    """

    def __init__(
        self,
        name: str,
        index: str,
        socket_path: Path,
        handler: NriHandler,
        *,
        on_connection_change: Callable[[bool], None] | None = None,
    ) -> None:
        if not re.fullmatch(r"[a-zA-Z0-9_.+-]+", name):
            raise UsageError(f"NRI plugin name {name!r}: only letters, digits and _.+- are allowed")
        if not re.fullmatch(r"[0-9]{2}", index):
            raise UsageError(f"NRI plugin index {index!r}: it must be two digits")
        self._name = name
        self._index = index
        self._socket = socket_path
        self._handler = handler
        self._on_connection_change = on_connection_change
        self._work = WorkQueue()
        self._connected = False

    @property
    def connected(self) -> bool:
        """Whether the runtime has synchronized on a connection that still stands."""
        return self._connected

    def _set_connected(self, connected: bool) -> None:
        if connected != self._connected:
            self._connected = connected
            if self._on_connection_change is not None:
                self._on_connection_change(connected)

    async def run_forever(self) -> None:
        """Serve until cancelled. Work that is in progress then is waited for, some seconds at most."""
        delay = FIRST_DELAY
        reported = ""
        try:
            while True:
                socket = self._socket_identity()
                was_connected, reason = await self._serve_once()
                if was_connected:
                    delay, reported = FIRST_DELAY, ""
                level = logging.DEBUG if reason == reported else logging.WARNING
                log.log(level, "NRI socket %s: %s; trying again", self._socket, reason)
                reported = reason
                await self._wait(delay, socket)
                delay = min(2 * delay, LAST_DELAY)
        finally:
            await self._work.drain(_GRACE)

    async def _serve_once(self) -> tuple[bool, str]:
        """One connection: whether it came to be synchronized, and why it ended."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
        except OSError as error:
            return (
                False,
                f"cannot connect: {error.strerror or error} (NRI must be enabled in the container runtime)",
            )
        session = Session(Mux(reader, writer), self._handler, self._work, lambda: self._set_connected(True))
        try:
            await session.run(self._name, self._index)
            reason = "the runtime closed the connection"
        except (OSError, RailmateError) as error:
            reason = str(error)
        finally:
            was_connected = self._connected
            self._set_connected(False)
        return was_connected, reason

    async def _wait(self, delay: float, failed: tuple[int, int, int] | None) -> None:
        """Wait ``delay`` seconds, or until there is another socket than the one that ``failed``."""
        loop = asyncio.get_running_loop()
        end = loop.time() + delay
        while (left := end - loop.time()) > 0:
            await asyncio.sleep(min(_POLL, left))
            if self._socket_identity() not in (None, failed):
                return

    def _socket_identity(self) -> tuple[int, int, int] | None:
        """What tells a socket from the one a restarted runtime makes at the same path."""
        try:
            stat = self._socket.stat()
        except OSError:
            return None
        return stat.st_dev, stat.st_ino, stat.st_ctime_ns
