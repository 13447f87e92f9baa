"""/healthz and /readyz."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from railmate.errors import RailmateError, UsageError
from railmate.node.health import HealthServer


async def ask(address: Path, request: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(address)
    writer.write(request)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


def says(*missing: str) -> Any:
    """A check that finds these missing."""

    async def check() -> list[str]:
        return list(missing)

    return check


def serve(path: Path, checks: Any, *requests: bytes) -> list[bytes]:
    async def run() -> list[bytes]:
        server = HealthServer(f"unix:{path}", checks)
        await server.start()
        try:
            return [await ask(path, request) for request in requests]
        finally:
            await server.stop()

    return asyncio.run(run())


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def test_ready_when_nothing_is_missing(tmp_path: Path) -> None:
    (answer,) = serve(tmp_path / "h.sock", {"/readyz": says()}, get("/readyz"))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"ok\n")


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    missing = ["the kubelet has not registered the driver", "no runtime"]
    (answer,) = serve(tmp_path / "h.sock", {"/readyz": says(*missing)}, get("/readyz?verbose=1"))
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"the kubelet has not registered the driver; no runtime" in answer


def test_check_that_fails_is_a_failure(tmp_path: Path) -> None:
    async def check() -> list[str]:
        raise ValueError("odd")

    (answer,) = serve(tmp_path / "h.sock", {"/healthz": check}, get("/healthz"))
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"odd" in answer


def test_length_is_the_bodys(tmp_path: Path) -> None:
    (answer,) = serve(tmp_path / "h.sock", {"/readyz": says("é")}, get("/readyz"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head


def test_unknown_page_names_those_there_are(tmp_path: Path) -> None:
    (answer,) = serve(tmp_path / "h.sock", {"/readyz": says(), "/healthz": says()}, get("/"))
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"/readyz, /healthz" in answer


@pytest.mark.parametrize(
    "request_", [b"", b"\r\n", b"GET\r\n", b"POST /readyz HTTP/1.1\r\n\r\n", b"\xff\xfe\x00", b"x" * 200_000]
)
def test_nonsense_does_not_end_the_server(tmp_path: Path, request_: bytes) -> None:
    async def run() -> bytes:
        path = tmp_path / "h.sock"
        server = HealthServer(f"unix:{path}", {"/readyz": says()})
        await server.start()
        try:
            try:
                answer = await ask(path, request_)
                assert not answer.startswith(b"HTTP/1.1 200")
            except ConnectionError:
                pass
            return await ask(path, get("/readyz"))
        finally:
            await server.stop()

    assert asyncio.run(run()).startswith(b"HTTP/1.1 200 ")


def test_socket_left_by_a_killed_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "h.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
    (answer,) = serve(path, {"/readyz": says()}, get("/readyz"))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert not path.exists()


def test_tcp_address_is_served() -> None:
    async def run() -> bytes:
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            port = holder.getsockname()[1]
        server = HealthServer(f"127.0.0.1:{port}", {"/healthz": says()})
        await server.start()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get("/healthz"))
            answer = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            return answer
        finally:
            await server.stop()

    assert asyncio.run(run()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "address", ["", "nonsense", "host:", "host:port", "host:99999", "host:-1", "host:²", "unix:"]
)
def test_address_that_cannot_be_one_is_bad_usage(address: str) -> None:
    with pytest.raises(UsageError, match="--http-address"):
        HealthServer(address, {})


@pytest.mark.parametrize("where", ["missing/h.sock", "file/h.sock", "n" * 120])
def test_socket_that_cannot_be_made_is_said_in_words(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RailmateError, match="http-address"):
        serve(tmp_path / where, {})


def test_port_in_use_is_said_in_words() -> None:
    async def run(port: int) -> None:
        await HealthServer(f"127.0.0.1:{port}", {}).start()

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(RailmateError, match=str(port)):
            asyncio.run(run(port))
