"""ttrpc, the small RPC protocol of containerd: unary calls, both directions.

A message is a length, a stream id (four bytes each, big endian), a type and flags (a byte each), then a
protobuf Request or Response. Client stream ids are odd and grow. Source: PROTOCOL.md of
github.com/containerd/ttrpc. Streaming calls, which NRI does not use, are refused.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from railmate.errors import RailmateError
from railmate.nri.mux import ProtocolError
from railmate_api.proto import ttrpc_pb2

log = logging.getLogger(__name__)

MAX_MESSAGE = 4 << 20  # bytes after the header

REQUEST = 1
RESPONSE = 2

# gRPC status codes
INVALID_ARGUMENT = 3
DEADLINE_EXCEEDED = 4
RESOURCE_EXHAUSTED = 8
FAILED_PRECONDITION = 9
UNIMPLEMENTED = 12
INTERNAL = 13
UNAVAILABLE = 14

_HEADER = struct.Struct(">IIBB")

Send = Callable[[bytes], Awaitable[None]]


class StatusError(RailmateError):
    """A call answered, or to be answered, with an error status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Message:
    stream: int
    type: int
    body: bytes

    def encode(self) -> bytes:
        return _HEADER.pack(len(self.body), self.stream, self.type, 0) + self.body


class Decoder:
    """Puts messages together from pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete with ``data``. Raises ProtocolError for one that is too large."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            length, stream, kind, _flags = _HEADER.unpack_from(self._buffer)
            if length > MAX_MESSAGE:
                raise ProtocolError(f"a ttrpc message of {length} bytes; at most {MAX_MESSAGE} are allowed")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield Message(stream, kind, body)


@dataclass(frozen=True, slots=True)
class Call:
    """A request to the server. ``timeout`` is how long the caller waits, in seconds; None: it did not say."""

    service: str
    method: str
    payload: bytes
    timeout: float | None


class Server:
    """Answers requests, each in a task of its own.

    ``dispatch`` returns the payload of the response. A StatusError it raises is answered as it is, any other
    exception as INTERNAL, with its text.
    """

    def __init__(self, send: Send, dispatch: Callable[[Call], Awaitable[bytes]]) -> None:
        self._send = send
        self._dispatch = dispatch
        self._decoder = Decoder()
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, data: bytes) -> None:
        """Take what came in on the server's stream. Raises ProtocolError for anything but requests."""
        for message in self._decoder.feed(data):
            if message.type != REQUEST or message.stream % 2 != 1:
                raise ProtocolError(
                    f"a ttrpc message of type {message.type}, stream {message.stream}; expected a request"
                )
            try:
                request = ttrpc_pb2.Request.FromString(message.body)
            except DecodeError:
                raise ProtocolError("a ttrpc request that is not a protobuf message") from None
            timeout = request.timeout_nano / 1e9 if request.timeout_nano > 0 else None
            call = Call(request.service, request.method, request.payload, timeout)
            task = asyncio.create_task(self._answer(message.stream, call), name=f"nri {call.method}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, stream: int, call: Call) -> None:
        response = ttrpc_pb2.Response()
        try:
            response.payload = await self._dispatch(call)
        except StatusError as error:
            response.status.code, response.status.message = error.code, str(error)
        except Exception as error:
            log.exception("NRI %s failed", call.method)
            response.status.code, response.status.message = INTERNAL, f"{type(error).__name__}: {error}"
        body = response.SerializeToString()
        if len(body) > MAX_MESSAGE:
            text = f"the answer to {call.method} has {len(body)} bytes, more than the {MAX_MESSAGE} of ttrpc"
            status = ttrpc_pb2.Status(code=RESOURCE_EXHAUSTED, message=text)
            body = ttrpc_pb2.Response(status=status).SerializeToString()
        try:
            await self._send(Message(stream, RESPONSE, body).encode())
        except OSError as error:
            log.info("the runtime did not wait for the answer to NRI %s: %s", call.method, error)

    def close(self) -> None:
        """Give up answers that are on their way."""
        for task in self._tasks:
            task.cancel()


class Client:
    """Makes calls and matches the answers to them."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._decoder = Decoder()
        self._next_stream = 1
        self._pending: dict[int, asyncio.Future[bytes]] = {}

    async def call(self, service: str, method: str, payload: bytes, *, within: float) -> bytes:
        """The payload of the response.

        ``within`` is how long to wait, in seconds. Raises StatusError for an error answer, for none in time
        (DEADLINE_EXCEEDED) and for a connection that was closed meanwhile (UNAVAILABLE).
        """
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending[stream] = answer
        request = ttrpc_pb2.Request(
            service=service, method=method, payload=payload, timeout_nano=int(within * 1e9)
        )
        try:
            async with asyncio.timeout(within):
                await self._send(Message(stream, REQUEST, request.SerializeToString()).encode())
                return await answer
        except TimeoutError:
            raise StatusError(DEADLINE_EXCEEDED, f"no answer to {method} in {within:g} s") from None
        finally:
            self._pending.pop(stream, None)

    def receive(self, data: bytes) -> None:
        """Take what came in on the client's stream. Raises ProtocolError for anything but responses."""
        for message in self._decoder.feed(data):
            if message.type != RESPONSE:
                raise ProtocolError(f"a ttrpc message of type {message.type}; expected a response")
            try:
                response = ttrpc_pb2.Response.FromString(message.body)
            except DecodeError:
                raise ProtocolError("a ttrpc response that is not a protobuf message") from None
            answer = self._pending.get(message.stream)
            if answer is None or answer.done():
                continue  # nobody waits for it any more
            if response.status.code:
                answer.set_exception(StatusError(response.status.code, response.status.message))
            else:
                answer.set_result(response.payload)

    def close(self) -> None:
        """End the calls that still wait, with UNAVAILABLE."""
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(StatusError(UNAVAILABLE, "the connection was closed"))
