"""Carries connections from a listening socket of the machine to a port inside the private engine's network namespace.

Runs as a process of its own: started inside that namespace (nsenter) with a listening socket that was opened
outside, since a socket stays in the namespace where it was made. Ends when the engine ends.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket

_CHUNK = 1 << 16


async def forward(listener: socket.socket, port: int, while_pid: int) -> None:
    """Accepts on `listener` and connects to 127.0.0.1:port until the process `while_pid` ends."""
    ended = asyncio.Event()
    descriptor = os.pidfd_open(while_pid)
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if task := asyncio.current_task():
            connections.add(task)
            task.add_done_callback(connections.discard)
        await _carry(reader, writer, port)

    server = await asyncio.start_server(serve, sock=listener)
    await ended.wait()
    loop.remove_reader(descriptor)
    os.close(descriptor)
    server.close()
    for task in list(connections):
        task.cancel()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    try:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        writer.close()  # the client sees what it would see of a server that is down
        return
    try:
        async with asyncio.TaskGroup() as directions:
            directions.create_task(_copy(reader, inner_writer))
            directions.create_task(_copy(inner_reader, writer))
    except* OSError:
        pass  # one side is gone, which ends both directions
    finally:
        inner_writer.close()
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies until the sender is done; then the other side is told so, and may still answer."""
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listener", type=int, required=True, help="file descriptor of the listening socket")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--while-pid", type=int, required=True)
    arguments = parser.parse_args()
    asyncio.run(forward(socket.socket(fileno=arguments.listener), arguments.port, arguments.while_pid))


if __name__ == "__main__":
    main()
