"""Single requests and watches against an API server, with nothing but the standard library."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from harness.shell import HarnessError

_REQUEST_SECONDS = 30
#: A connection that was not used for so long is not used again: the server closes it after 90 s.
_IDLE_SECONDS = 30.0


class _Kept(threading.local):
    """Connections that stay open, by server and process, and when each was used: a child that was forked must not use
    its parent's."""

    def __init__(self) -> None:
        self.connections: dict[tuple[str, int, float], tuple[http.client.HTTPSConnection, float]] = {}

    def take(self, here: tuple[str, int, float]) -> http.client.HTTPSConnection | None:
        connection, used = self.connections.pop(here, (None, 0.0))
        if connection is not None and time.monotonic() - used > _IDLE_SECONDS:
            connection.close()
            return None
        return connection


_kept = _Kept()


class ApiError(HarnessError):
    """The API server refused a request. `status` is the HTTP status code."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


def fetch(
    server: str, token: str, method: str, path: str, body: Any = None, content_type: str = "application/json",
    *, accept: str = "application/json", seconds: float = _REQUEST_SECONDS,
) -> tuple[int, bytes]:  # fmt: skip
    """One request; the status and the body as they came. Raises OSError or http.client.HTTPException.

    Over a connection that stays open: making one costs more than most requests do.
    """
    here = (server, os.getpid(), seconds)
    text = None if body is None else json.dumps(body)
    while True:
        kept = _kept.take(here)
        connection = kept or _connect(server, seconds)
        answer = None
        try:
            connection.request(method, path, text, {**_headers(token, content_type), "Accept": accept})
            answer = connection.getresponse()
            found = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            # Closed by the server since it was used, or the server is another one: it has answered nothing.
            if (
                kept is None
                or answer is not None
                or not isinstance(error, (ConnectionError, ssl.SSLEOFError))
            ):
                raise
            continue
        _kept.connections[here] = connection, time.monotonic()
        return found


def request(
    server: str, token: str, method: str, path: str, body: Any = None, content_type: str = "application/json",
    *, seconds: float = _REQUEST_SECONDS,
) -> Any:  # fmt: skip
    """One request; the decoded answer. Raises ApiError when it is refused, HarnessError without a server."""
    try:
        status, data = fetch(server, token, method, path, body, content_type, seconds=seconds)
    except (OSError, http.client.HTTPException) as error:
        raise HarnessError(f"{method} {path}: the API server at {server} does not answer: {error}") from error
    return _decode(status, data)


def watch(server: str, token: str, path: str, seconds: int) -> Iterator[dict[str, Any]]:
    """Events of a list path, first one for each object there is, until `seconds` are over or the caller stops."""
    connection = _connect(server, seconds + _REQUEST_SECONDS)
    try:
        joint = "&" if "?" in path else "?"
        path = f"{path}{joint}watch=true&timeoutSeconds={seconds}"
        connection.request("GET", path, headers=_headers(token, "application/json"))
        answer = connection.getresponse()
        if answer.status >= 400:
            _decode(answer.status, answer.read())
        for line in answer:
            yield json.loads(line)
    finally:
        connection.close()


def _connect(server: str, seconds: float) -> http.client.HTTPSConnection:
    # Loopback, and a certificate that the server made for itself a moment ago: there is nothing to verify.
    context = ssl._create_unverified_context()
    return http.client.HTTPSConnection(server.removeprefix("https://"), timeout=seconds, context=context)


def _headers(token: str, content_type: str) -> Mapping[str, str]:
    return {"Authorization": f"Bearer {token}", "Content-Type": content_type}


def _decode(status: int, data: bytes) -> Any:
    try:
        answer = json.loads(data)
    except ValueError:
        answer = data.decode(errors="replace")
    if status >= 400:
        raise ApiError(status, answer.get("message", "") if isinstance(answer, dict) else str(answer))
    return answer
