"""Several byte streams over the one socket that NRI gives: the frames of its multiplexer.

A frame is the stream's number and the payload's length, four bytes each, big endian, then the payload. Frame
boundaries mean nothing to the stream above. Source: ``pkg/net/multiplex`` of github.com/containerd/nri.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator

from railmate.errors import RailmateError

PLUGIN_STREAM = 1  # the runtime calls the plugin
RUNTIME_STREAM = 2  # the plugin calls the runtime

# The runtime reads a stream through a buffer of this size and gives the plugin up when one frame holds more.
MAX_FRAME_OUT = 4096
# The largest frame an NRI peer makes: one ttrpc message, header and body.
MAX_FRAME_IN = 10 + (4 << 20)

_HEADER = struct.Struct(">II")


class ProtocolError(RailmateError):
    """The peer sent what the protocol does not allow; the connection is of no use any more."""


class Mux:
    """Sends to and receives from the numbered streams of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._write_lock = asyncio.Lock()

    async def send(self, stream: int, data: bytes) -> None:
        """Send all of ``data``; two senders' data never mix.

        Raises OSError when the connection is gone.
        """
        async with self._write_lock:
            for start in range(0, len(data), MAX_FRAME_OUT):
                part = data[start : start + MAX_FRAME_OUT]
                self._writer.write(_HEADER.pack(stream, len(part)) + part)
            await self._writer.drain()

    async def frames(self) -> AsyncIterator[tuple[int, bytes]]:
        """The stream number and payload of each frame until the peer closes the connection.

        Raises ProtocolError for a frame that is too large or cut off, OSError when the connection breaks.
        """
        while True:
            try:
                header = await self._reader.readexactly(_HEADER.size)
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise ProtocolError("the connection ended inside a frame's header") from None
                return
            stream, length = _HEADER.unpack(header)
            if length > MAX_FRAME_IN:
                raise ProtocolError(
                    f"a frame of {length} bytes on stream {stream}; at most {MAX_FRAME_IN} are allowed"
                )
            try:
                payload = await self._reader.readexactly(length)
            except asyncio.IncompleteReadError as error:
                raise ProtocolError(
                    f"the connection ended after {len(error.partial)} of the {length} bytes of a frame"
                ) from None
            yield stream, payload

    def close(self) -> None:
        """Close the connection; what was sent before still goes out."""
        self._writer.close()
