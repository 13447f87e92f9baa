"""The runtime's end of an NRI connection, for tests, written from the protocol and not from railmate's code.

It is as strict as the real one: a frame of more than 4096 bytes ends the connection.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from railmate_api.proto import nri_pb2, ttrpc_pb2

PLUGIN, RUNTIME = 1, 2
PLUGIN_SERVICE = "nri.pkg.api.v1alpha1.Plugin"

Pieces = Callable[[bytes], list[bytes]]


def whole(data: bytes) -> list[bytes]:
    return [data]


def bytewise(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


def frame(stream: int, payload: bytes) -> bytes:
    return struct.pack(">II", stream, len(payload)) + payload


def message(stream_id: int, kind: int, body: bytes) -> bytes:
    return struct.pack(">IIBB", len(body), stream_id, kind, 0) + body


def pod(name: str = "train-0", sandbox: str = "ab" * 32, netns: str = "/proc/self/ns/net") -> Any:
    message = nri_pb2.PodSandbox(id=sandbox, name=name, namespace="ml", uid=f"uid-of-{name}", pid=4711)
    message.annotations["color"] = "green"
    message.linux.namespaces.add(type="ipc", path="/proc/4711/ns/ipc")
    if netns:
        message.linux.namespaces.add(type="network", path=netns)
    return message


class Refused(Exception):
    def __init__(self, status: Any) -> None:
        super().__init__(status.message)
        self.code = status.code


class Connection:
    """One plugin that has connected."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._buffers = {PLUGIN: bytearray(), RUNTIME: bytearray()}
        self._stream_id = 1
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.requests: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self.largest_frame = 0
        self.closed = asyncio.Event()
        self.pieces: Pieces = whole  # how what we send is cut into frames

    async def read(self) -> None:
        try:
            while True:
                stream, length = struct.unpack(">II", await self._reader.readexactly(8))
                self.largest_frame = max(self.largest_frame, length)
                if length > 4096:
                    return
                self._buffers[stream] += await self._reader.readexactly(length)
                self._take_messages(stream)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writer.close()
            self.closed.set()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(ConnectionError("the plugin went away"))

    def _take_messages(self, stream: int) -> None:
        buffer = self._buffers[stream]
        while len(buffer) >= 10:
            length, stream_id, kind, _ = struct.unpack_from(">IIBB", buffer)
            if len(buffer) < 10 + length:
                return
            body = bytes(buffer[10 : 10 + length])
            del buffer[: 10 + length]
            if stream == RUNTIME:
                assert kind == 1
                self.requests.put_nowait((stream_id, ttrpc_pb2.Request.FromString(body)))
            else:
                assert kind == 2
                self._answers.pop(stream_id).set_result(ttrpc_pb2.Response.FromString(body))

    def send(self, stream: int, data: bytes) -> None:
        for piece in self.pieces(data):
            self.writer.write(frame(stream, piece))

    async def accept_registration(self) -> Any:
        stream_id, request = await self.requests.get()
        assert (request.service, request.method) == ("nri.pkg.api.v1alpha1.Runtime", "RegisterPlugin")
        self.send(RUNTIME, message(stream_id, 2, ttrpc_pb2.Response().SerializeToString()))
        return nri_pb2.RegisterPluginRequest.FromString(request.payload)

    async def call(
        self, method: str, request: Any = None, *, service: str = PLUGIN_SERVICE, patience: float = 2.0
    ) -> bytes:
        """The payload of the answer; raises Refused for an error status.

        ``patience`` is the deadline that the plugin is told, in seconds.
        """
        stream_id, self._stream_id = self._stream_id, self._stream_id + 2
        answer = self._answers[stream_id] = asyncio.get_running_loop().create_future()
        payload = request if isinstance(request, bytes) else (request or nri_pb2.Empty()).SerializeToString()
        body = ttrpc_pb2.Request(
            service=service, method=method, payload=payload, timeout_nano=int(patience * 1e9)
        ).SerializeToString()
        self.send(PLUGIN, message(stream_id, 1, body))
        response = await asyncio.wait_for(answer, 10)
        if response.status.code:
            raise Refused(response.status)
        return bytes(response.payload)

    async def sandbox(self, method: str, pod: Any, patience: float = 2.0) -> None:
        await self.call(method, nri_pb2.PodSandboxRequest(pod=pod), patience=patience)

    async def start(self, pods: list[Any] | None = None) -> None:
        """What a runtime does with a new plugin, up to where events begin."""
        await self.accept_registration()
        await self.call("Configure", nri_pb2.ConfigureRequest(runtime_name="test", request_timeout=2000))
        await self.call("Synchronize", nri_pb2.SynchronizeRequest(pods=pods or []))


class FakeRuntime:
    """Listens on ``path``; hands out the connections of plugins in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connections: asyncio.Queue[Connection] = asyncio.Queue()
        self._readers: list[asyncio.Task[None]] = []
        self._open: list[Connection] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._connected, self.path)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        self._open.append(connection)
        self._readers.append(asyncio.create_task(connection.read()))
        self._connections.put_nowait(connection)

    async def plugin(self) -> Connection:
        return await asyncio.wait_for(self._connections.get(), 10)

    async def stop(self) -> None:
        """End as a runtime does that is restarted: connections and socket are gone."""
        assert self._server is not None
        self._server.close()
        for connection in self._open:
            connection.writer.close()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self.path.unlink(missing_ok=True)


@asynccontextmanager
async def fake_runtime(path: Path) -> AsyncIterator[FakeRuntime]:
    runtime = FakeRuntime(path)
    await runtime.start()
    try:
        yield runtime
    finally:
        await runtime.stop()


@asynccontextmanager
async def running(serve: Awaitable[None]) -> AsyncIterator[asyncio.Future[None]]:
    """``serve`` in the background for as long as the block takes."""
    task = asyncio.ensure_future(serve)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
