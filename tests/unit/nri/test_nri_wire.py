"""Frames and ttrpc messages, at the level of bytes."""

from __future__ import annotations

import asyncio
import struct
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railmate.nri import ttrpc
from railmate.nri.mux import MAX_FRAME_IN, Mux, ProtocolError
from railmate_api.proto import ttrpc_pb2


class Written:
    """As much of a StreamWriter as Mux needs."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        pass


def frames_of(data: bytes) -> list[tuple[int, bytes]]:
    frames = []
    while data:
        stream, length = struct.unpack_from(">II", data)
        frames.append((stream, data[8 : 8 + length]))
        data = data[8 + length :]
    return frames


def read_all(data: bytes) -> list[tuple[int, bytes]]:
    async def read() -> list[tuple[int, bytes]]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return [frame async for frame in Mux(reader, Written()).frames()]  # type: ignore[arg-type]

    return asyncio.run(read())


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 20_000])
def test_no_frame_sent_is_larger_than_the_runtime_can_read(size: int) -> None:
    async def send() -> bytes:
        writer = Written()
        await Mux(asyncio.StreamReader(), writer).send(1, bytes(range(256)) * 79)  # type: ignore[arg-type]
        await Mux(asyncio.StreamReader(), writer).send(2, b"x" * size)  # type: ignore[arg-type]
        return writer.data

    frames = frames_of(asyncio.run(send()))
    assert max(len(payload) for _, payload in frames) <= 4096
    assert b"".join(payload for stream, payload in frames if stream == 1) == bytes(range(256)) * 79
    assert b"".join(payload for stream, payload in frames if stream == 2) == b"x" * size


def test_messages_of_concurrent_senders_do_not_mix() -> None:
    async def send() -> bytes:
        writer = Written()
        mux = Mux(asyncio.StreamReader(), writer)  # type: ignore[arg-type]
        await asyncio.gather(*(mux.send(1, bytes([i]) * 9000) for i in range(5)))
        return writer.data

    sent = b"".join(payload for _, payload in frames_of(asyncio.run(send())))
    assert sent == b"".join(bytes([i]) * 9000 for i in range(5))


def test_frames_larger_than_our_own_are_read() -> None:
    payload = b"y" * 1_000_000
    assert read_all(struct.pack(">II", 1, len(payload)) + payload) == [(1, payload)]


def test_an_end_between_frames_is_the_end() -> None:
    assert read_all(b"") == []
    assert read_all(struct.pack(">II", 2, 0)) == [(2, b"")]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\0\0\0", "inside a frame's header"),
        (struct.pack(">II", 1, 10) + b"123", "after 3 of the 10 bytes"),
        (struct.pack(">II", 1, MAX_FRAME_IN + 1), f"a frame of {MAX_FRAME_IN + 1} bytes"),
    ],
)
def test_a_malformed_frame_is_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        read_all(data)


@given(bodies=st.lists(st.binary(max_size=50), max_size=6), cuts=st.lists(st.integers(0, 400), max_size=10))
def test_messages_are_put_together_wherever_they_were_cut(bodies: list[bytes], cuts: list[int]) -> None:
    sent = [ttrpc.Message(2 * i + 1, ttrpc.REQUEST, body) for i, body in enumerate(bodies)]
    data = b"".join(message.encode() for message in sent)
    decoder, received = ttrpc.Decoder(), []
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        received += decoder.feed(data[start:end])
    assert received == sent


def test_a_message_above_four_mebibytes_is_refused_before_it_arrives() -> None:
    with pytest.raises(ProtocolError, match="at most 4194304"):
        list(ttrpc.Decoder().feed(struct.pack(">IIBB", (4 << 20) + 1, 1, 1, 0)))


def answered(dispatch: Any) -> Any:
    """The Response that a server with this ``dispatch`` sends to one request."""

    async def answer() -> bytes:
        sent: asyncio.Queue[bytes] = asyncio.Queue()
        server = ttrpc.Server(sent.put, dispatch)
        request = ttrpc_pb2.Request(service="s", method="Do", payload=b"in", timeout_nano=1_500_000_000)
        server.receive(ttrpc.Message(7, ttrpc.REQUEST, request.SerializeToString()).encode())
        return await asyncio.wait_for(sent.get(), 5)

    [message] = ttrpc.Decoder().feed(asyncio.run(answer()))
    assert (message.stream, message.type) == (7, ttrpc.RESPONSE)
    return ttrpc_pb2.Response.FromString(message.body)


def test_the_server_passes_the_call_on_and_answers_on_its_stream() -> None:
    async def dispatch(call: ttrpc.Call) -> bytes:
        assert call == ttrpc.Call("s", "Do", b"in", 1.5)
        return b"out"

    response = answered(dispatch)
    assert (response.status.code, response.payload) == (0, b"out")


def test_errors_become_a_status() -> None:
    async def refuse(call: ttrpc.Call) -> bytes:
        raise ttrpc.StatusError(ttrpc.FAILED_PRECONDITION, "not now")

    async def break_down(call: ttrpc.Call) -> bytes:
        raise LookupError("oops")

    response = answered(refuse)
    assert (response.status.code, response.status.message) == (ttrpc.FAILED_PRECONDITION, "not now")
    response = answered(break_down)
    assert (response.status.code, response.status.message) == (ttrpc.INTERNAL, "LookupError: oops")


def test_an_answer_that_does_not_fit_is_an_error_and_no_broken_connection() -> None:
    async def too_much(call: ttrpc.Call) -> bytes:
        return b"x" * (4 << 20)

    response = answered(too_much)
    assert response.status.code == ttrpc.RESOURCE_EXHAUSTED
    assert "4194304" in response.status.message


def test_calls_get_the_answer_of_their_own_stream() -> None:
    async def call_twice() -> None:
        sent: asyncio.Queue[bytes] = asyncio.Queue()
        client = ttrpc.Client(sent.put)
        first = asyncio.create_task(client.call("s", "First", b"", within=5))
        second = asyncio.create_task(client.call("s", "Second", b"", within=5))
        ids = []
        for _ in range(2):
            [message] = ttrpc.Decoder().feed(await sent.get())
            ids.append(message.stream)
        assert ids == [1, 3]
        for stream, payload in ((3, b"for second"), (1, b"for first"), (99, b"for nobody")):
            body = ttrpc_pb2.Response(payload=payload).SerializeToString()
            client.receive(ttrpc.Message(stream, ttrpc.RESPONSE, body).encode())
        assert (await first, await second) == (b"for first", b"for second")

    asyncio.run(call_twice())


def test_a_call_ends_when_no_answer_comes_or_the_connection_goes() -> None:
    async def call() -> None:
        async def swallow(data: bytes) -> None:
            pass

        client = ttrpc.Client(swallow)
        with pytest.raises(ttrpc.StatusError, match=r"no answer to Slow in 0\.01 s"):
            await client.call("s", "Slow", b"", within=0.01)
        waiting = asyncio.create_task(client.call("s", "Cut", b"", within=5))
        await asyncio.sleep(0)
        client.close()
        with pytest.raises(ttrpc.StatusError, match="the connection was closed"):
            await waiting

    asyncio.run(call())
