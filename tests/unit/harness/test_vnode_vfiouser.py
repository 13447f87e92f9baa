"""The functions that look like H100s, asked as QEMU asks them."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.vnode_vfiouser import BARS, CONFIG_REGION, Command, Function, config_space, serve


def capabilities(space: bytes) -> dict[int, int]:
    """Capability id -> offset, as the chain has them."""
    found, offset = {}, space[0x34]
    while offset:
        found[space[offset]] = offset
        offset = space[offset + 1]
    return found


def access(offset: int, region: int, count: int) -> bytes:
    return struct.pack("<QII", offset, region, count)


def test_the_function_is_an_h100_with_a_gen5_x16_link() -> None:
    space = bytes(config_space())
    assert struct.unpack_from("<HH", space) == (0x10DE, 0x2330)
    assert space[0x09:0x0C] == b"\x00\x02\x03"  # 3D controller
    express = capabilities(space)[0x10]
    (link,) = struct.unpack_from("<I", space, express + 0x0C)
    assert (link & 0xF, link >> 4 & 0x3F) == (5, 16)


def test_bars_are_64_bit_and_their_sizes_powers_of_two() -> None:
    function = Function()
    for index in range(6):
        answer = function.answer(Command.GET_REGION_INFO, struct.pack("<IIIIQQ", 32, 0, index, 0, 0, 0))
        size = struct.unpack("<IIIIQQ", answer)[4]
        assert size == BARS.get(index, (0, 0))[0]
        assert size & (size - 1) == 0
        if size:
            assert struct.unpack_from("<I", function.config, 0x10 + 4 * index)[0] == 0xC


def test_identity_cannot_be_overwritten_and_the_command_register_can() -> None:
    function = Function()
    function.answer(Command.WRITE, access(0, CONFIG_REGION, 4) + b"\xff\xff\xff\xff")
    function.answer(Command.WRITE, access(4, CONFIG_REGION, 2) + b"\x06\x00")
    answer = function.answer(Command.READ, access(0, CONFIG_REGION, 8))
    assert answer[16:] == struct.pack("<HHHH", 0x10DE, 0x2330, 0x0006, 0x0010)


def test_a_reset_forgets_what_was_written() -> None:
    function = Function()
    function.answer(Command.WRITE, access(4, CONFIG_REGION, 2) + b"\x06\x00")
    function.answer(Command.RESET, b"")
    assert function.config == config_space()


@pytest.mark.parametrize(("region", "offset"), [(0, 0), (2, 1 << 27), (CONFIG_REGION, 4094)])
def test_as_much_is_read_as_was_asked_for(region: int, offset: int) -> None:
    assert len(Function().answer(Command.READ, access(offset, region, 8))) == 16 + 8


def talk(directory: Path, exchange: Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]) -> None:
    async def run() -> None:
        path = directory / "gpu.sock"
        server = await asyncio.start_unix_server(lambda r, w: serve(Function(), r, w), path)
        async with server:
            reader, writer = await asyncio.open_unix_connection(path)
            await exchange(reader, writer)  # type: ignore[misc]
            writer.close()

    asyncio.run(run())


def test_a_session_begins_with_versions_and_unknown_commands_get_an_error(tmp_path: Path) -> None:
    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def ask(number: int, command: int, payload: bytes) -> tuple[tuple[int, ...], bytes]:
            writer.write(struct.pack("<HHIII", number, command, 16 + len(payload), 0, 0) + payload)
            header = struct.unpack("<HHIII", await reader.readexactly(16))
            return header, await reader.readexactly(header[2] - 16)

        header, payload = await ask(7, Command.VERSION, struct.pack("<HH", 0, 1) + b'{"capabilities":{}}\0')
        assert (header[0], header[1], header[3], header[4]) == (7, Command.VERSION, 1, 0)
        assert payload[:4] == struct.pack("<HH", 0, 1)
        assert "capabilities" in json.loads(payload[4:].rstrip(b"\0"))
        header, payload = await ask(8, 14, b"")
        assert (header[3], header[4], payload) == (0x21, 95, b"")  # a reply, an error: EOPNOTSUPP

    talk(tmp_path, exchange)
