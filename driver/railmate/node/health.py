"""``/healthz`` and ``/readyz`` over HTTP, on a unix socket or on TCP.

A unix socket in the plugin directory is the default of the chart: two instances run on one node
during a rolling update, both on the host's network, and a fixed TCP port would be one too few.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from railmate import files
from railmate.errors import RailmateError, UsageError

log = logging.getLogger(__name__)

#: What is still missing, by name; empty when all is well.
Missing = Callable[[], Awaitable[list[str]]]
_REQUEST_TIMEOUT = 5.0


class HealthServer:
    def __init__(self, address: str, checks: Mapping[str, Missing]) -> None:
        """``checks`` by path: ``{"/readyz": …}``. Raises UsageError for an address that cannot be one."""
        self._address, self._checks = address, checks
        self._socket: Path | None = None
        self._host, self._port = "", 0
        path = address.removeprefix("unix:")
        if path != address and path.startswith("/"):
            self._socket = Path(path)
        else:
            host, _, port = address.rpartition(":")
            if path != address or not (port.isascii() and port.isdigit() and int(port) <= 65535):
                raise UsageError(f"--http-address {address!r} is neither unix:/path nor host:port.")
            self._host, self._port = host.strip("[]"), int(port)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Raises RailmateError when the address cannot be served."""
        try:
            if self._socket:
                if self._socket.is_socket():
                    self._socket.unlink()
                self._server = await asyncio.start_unix_server(self._serve, self._socket)
            else:
                self._server = await asyncio.start_server(self._serve, self._host or None, self._port)
        except OSError as error:
            raise RailmateError(
                f"--http-address {self._address} cannot be served ({error}). Choose another, or free this one."
            ) from error

    async def stop(self) -> None:
        if self._server:
            self._server.close()
        if self._socket:
            files.remove(self._socket)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, ValueError):
            head = await asyncio.wait_for(reader.readline(), _REQUEST_TIMEOUT)
            words = head.decode("latin-1").split()
            status, body = await self._answer(words)
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()
        writer.close()

    async def _answer(self, words: list[str]) -> tuple[str, bytes]:
        if len(words) < 2 or words[0] not in {"GET", "HEAD"}:
            return "405 Method Not Allowed", b"only GET\n"
        check = self._checks.get(words[1].partition("?")[0])
        if check is None:
            return "404 Not Found", f"no such page; there are {', '.join(self._checks)}\n".encode()
        try:
            missing = await check()
        except Exception as error:
            log.exception("%s cannot be answered", words[1])
            return "500 Internal Server Error", f"{type(error).__name__}: {error}\n".encode()
        if missing:
            return "503 Service Unavailable", ("not yet: " + "; ".join(missing) + "\n").encode()
        return "200 OK", b"ok\n"
