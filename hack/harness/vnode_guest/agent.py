#!/usr/bin/python3
"""Runs commands in the virtual node for the machine that runs it: agent.py ADDRESS PORT. Standard library only.

One connection a command. The client sends one line of JSON, {"argv", "env", "cwd", "tty": null | [rows, columns]},
then frames: a byte that says what it is, the payload's length (4 bytes, big-endian), the payload. To the agent go stdin
(0; an empty one ends it) and a terminal's new size (3, JSON [rows, columns]); from it come stdout (1), stderr (2) and,
last, the exit status (4, JSON: a number, or a sentence when the command could not be started). When the connection ends
first, the command's process group is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import sys
import termios
from typing import Any

STDIN, STDOUT, STDERR, SIZE, EXIT = range(5)
HEADER = struct.Struct(">BI")
_CHUNK = 1 << 16
# Seconds that output is awaited after the command's end: a child that it left behind may hold its pipes for ever.
_AFTER_EXIT = 0.5


async def pump(reader: asyncio.StreamReader, kind: int, writer: asyncio.StreamWriter) -> None:
    """One output stream to the client."""
    with contextlib.suppress(OSError):  # a terminal without a process reads as EIO
        while data := await reader.read(_CHUNK):
            writer.write(HEADER.pack(kind, len(data)) + data)
            await writer.drain()


async def stream_of(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(descriptor, "rb", 0))
    return reader


def set_size(descriptor: int, size: list[int]) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", size[0], size[1], 0, 0))


class Command:
    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.terminal: int | None = None
        self.outputs: list[tuple[asyncio.StreamReader, int]] = []

    async def start(self) -> None:
        order = self.order
        env = {**os.environ, **order.get("env", {})}
        common: dict[str, Any] = {
            "env": env,
            "cwd": order.get("cwd") or os.environ.get("HOME", "/"),
            "start_new_session": True,
        }
        if order.get("tty"):
            ours, theirs = pty.openpty()
            set_size(ours, order["tty"])
            take = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # noqa: E731
            try:
                self.process = await asyncio.create_subprocess_exec(
                    *order["argv"], stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take, **common
                )
            finally:
                os.close(theirs)
            self.terminal = ours
            self.outputs = [(await stream_of(os.dup(ours)), STDOUT)]
        else:
            pipe = asyncio.subprocess.PIPE
            self.process = await asyncio.create_subprocess_exec(
                *order["argv"], stdin=pipe, stdout=pipe, stderr=pipe, **common
            )
            streams = ((self.process.stdout, STDOUT), (self.process.stderr, STDERR))
            self.outputs = [(stream, kind) for stream, kind in streams if stream is not None]

    async def feed(self, reader: asyncio.StreamReader) -> None:
        """What the client sends, until it ends the connection; then the command is killed."""
        stdin = self.process.stdin
        try:
            while True:
                kind, size = HEADER.unpack(await reader.readexactly(HEADER.size))
                data = await reader.readexactly(size)
                if kind == SIZE and self.terminal is not None:
                    set_size(self.terminal, json.loads(data))
                elif kind == STDIN and self.terminal is not None:
                    os.write(self.terminal, data or b"\x04")
                elif kind == STDIN and stdin is not None:
                    with contextlib.suppress(ConnectionError):  # it does not read its input
                        if data:
                            stdin.write(data)
                            await stdin.drain()
                        else:
                            stdin.close()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.kill()

    async def wait(self) -> int:
        """Its exit status, at its end: asyncio's own wait() goes on until nobody has its pipes open."""
        with contextlib.suppress(ProcessLookupError):  # collected already
            descriptor = os.pidfd_open(self.process.pid)
            ended = asyncio.Event()
            asyncio.get_running_loop().add_reader(descriptor, ended.set)
            await ended.wait()
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
        while self.process.returncode is None:  # noqa: ASYNC110  (asyncio collects it in a moment)
            await asyncio.sleep(0.01)
        return self.process.returncode

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    def end(result: int | str) -> None:
        data = json.dumps(result).encode()
        writer.write(HEADER.pack(EXIT, len(data)) + data)

    try:
        line = await reader.readline()
        if not line:
            return
        command = Command(json.loads(line))
        try:
            await command.start()
        except (OSError, ValueError) as error:
            end(f"{command.order['argv'][0]}: {getattr(error, 'strerror', None) or error}")
            return
        feeding = asyncio.ensure_future(command.feed(reader))
        pumps = [asyncio.ensure_future(pump(stream, kind, writer)) for stream, kind in command.outputs]
        code = await command.wait()
        await asyncio.wait(pumps, timeout=_AFTER_EXIT)
        for task in (*pumps, feeding):
            task.cancel()
        if command.terminal is not None:
            os.close(command.terminal)
        end(code if code >= 0 else 128 - code)
    finally:
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()


async def main(address: str, port: int) -> None:
    server = await asyncio.start_server(serve, address, port)
    print(f"agent: listening on port {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
