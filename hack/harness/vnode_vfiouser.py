"""PCIe functions for QEMU's vfio-user-pci device that look like NVIDIA H100s: config space, BARs, nothing behind them.

    python -m harness.vnode_vfiouser DIRECTORY COUNT      serves DIRECTORY/gpu0.sock … until it is ended

The protocol is docs/interop/vfio-user.rst of QEMU; the layout of the config space is that of the PCI Express Base
Specification 6.0, chapter 7. Only what QEMU asks for is answered; anything else gets EOPNOTSUPP.
"""

from __future__ import annotations

import asyncio
import errno
import json
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

VENDOR, DEVICE, SUBSYSTEM, CLASS = 0x10DE, 0x2330, 0x16C1, 0x030200  # H100 SXM5 80GB, 3D controller
CONFIG_SIZE, CONFIG_REGION, _REGIONS, _IRQ_KINDS = 4096, 7, 9, 5
# Sizes and types of BARs as a real one has them, the large one made small: a guest's address space is limited.
# SeaBIOS has no room for 32-bit prefetchable BARs of eight devices, so those are 64-bit (each takes two registers).
_MIB = 1 << 20
_64_BIT_PREFETCHABLE = 0xC
BARS = {
    0: (16 * _MIB, _64_BIT_PREFETCHABLE),
    2: (256 * _MIB, _64_BIT_PREFETCHABLE),
    4: (32 * _MIB, _64_BIT_PREFETCHABLE),
}

_HEADER = struct.Struct("<HHIII")  # message id, command, size, flags, errno
_REPLY, _NO_REPLY, _ERROR = 0x1, 0x10, 0x20
_ACCESS = struct.Struct("<QII")  # offset, region, count
_MOST_DATA = 1 << 20


def config_space() -> bytearray:
    """A type 0 header with power management (at 0x60) and PCI Express (0x78) capabilities: endpoint, 32 GT/s x16."""
    space = bytearray(CONFIG_SIZE)
    struct.pack_into("<HHHH", space, 0x00, VENDOR, DEVICE, 0, 0x0010)  # status: there are capabilities
    struct.pack_into("<I", space, 0x08, CLASS << 8 | 0xA1)  # revision A1
    for number, (_, kind) in BARS.items():
        struct.pack_into("<I", space, 0x10 + 4 * number, kind)
    struct.pack_into("<HH", space, 0x2C, VENDOR, SUBSYSTEM)
    space[0x34] = 0x60
    struct.pack_into("<BBHI", space, 0x60, 0x01, 0x78, 0x0003, 0)
    struct.pack_into(
        "<BBHI", space, 0x78, 0x10, 0, 0x0002, 0x10008000
    )  # version 2, endpoint; function level reset
    struct.pack_into("<IHH", space, 0x78 + 0x0C, 0x105, 0, 0x105)  # link capabilities, control, status
    struct.pack_into("<I", space, 0x78 + 0x2C, 0x3E)  # supported speeds up to 32 GT/s
    return space


class Command(IntEnum):
    VERSION = 1
    DMA_MAP = 2
    DMA_UNMAP = 3
    GET_INFO = 4
    GET_REGION_INFO = 5
    GET_IRQ_INFO = 7
    SET_IRQS = 8
    READ = 9
    WRITE = 10
    RESET = 13


@dataclass
class Function:
    """One function: answers a command's payload with a reply's. Its BARs read as zeros."""

    config: bytearray = field(default_factory=config_space)

    def answer(self, command: int, payload: bytes) -> bytes:
        """Raises OSError with the error number that the peer shall get."""
        match command:
            case Command.VERSION:
                limits = {
                    "max_msg_fds": 8,
                    "max_data_xfer_size": _MOST_DATA,
                    "max_dma_maps": 65535,
                    "pgsize": 4096,
                }
                return payload[:4] + json.dumps({"capabilities": limits}).encode() + b"\0"
            case Command.DMA_MAP | Command.SET_IRQS:  # it never reads memory and never interrupts
                return b""
            case Command.DMA_UNMAP:
                return payload
            case Command.GET_INFO:  # it can be reset, it is a PCI device
                return struct.pack("<IIII", 16, 0x3, _REGIONS, _IRQ_KINDS)
            case Command.GET_REGION_INFO:
                (index,) = struct.unpack_from("<I", payload, 8)
                size = CONFIG_SIZE if index == CONFIG_REGION else BARS.get(index, (0, 0))[0]
                return struct.pack("<IIIIQQ", 32, 0x3 if size else 0, index, 0, size, 0)
            case Command.GET_IRQ_INFO:  # none of any kind
                (index,) = struct.unpack_from("<I", payload, 8)
                return struct.pack("<IIII", 16, 0, index, 0)
            case Command.READ:
                offset, region, count = _ACCESS.unpack_from(payload)
                return payload[: _ACCESS.size] + self._read(region, offset, count)
            case Command.WRITE:
                offset, region, count = _ACCESS.unpack_from(payload)
                self._write(region, offset, payload[_ACCESS.size : _ACCESS.size + count])
                return payload[: _ACCESS.size]
            case Command.RESET:
                self.config = config_space()
                return b""
        raise OSError(errno.EOPNOTSUPP, "unknown command")

    def _read(self, region: int, offset: int, count: int) -> bytes:
        if count > _MOST_DATA:
            raise OSError(errno.EINVAL, "too much at once")
        if region == CONFIG_REGION:
            return bytes(self.config[offset : offset + count]).ljust(count, b"\0")
        return bytes(count)

    def _write(self, region: int, offset: int, data: bytes) -> None:
        writable = offset in (0x04, 0x3C) or 0x60 <= offset < 0xC0  # command, interrupt line, capabilities
        if region == CONFIG_REGION and writable:
            self.config[offset : offset + len(data)] = data


async def serve(function: Function, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers one connection until the peer ends it."""
    try:
        while True:
            number, command, size, flags, _ = _HEADER.unpack(await reader.readexactly(_HEADER.size))
            payload = await reader.readexactly(size - _HEADER.size)
            try:
                reply, kind, code = function.answer(command, payload), _REPLY, 0
            except OSError as error:
                reply, kind, code = b"", _REPLY | _ERROR, error.errno or errno.EIO
            if not flags & _NO_REPLY:
                writer.write(_HEADER.pack(number, command, _HEADER.size + len(reply), kind, code) + reply)
                await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # QEMU has ended
    finally:
        writer.close()


def socket_name(index: int) -> str:
    """File name of a function's socket."""
    return f"gpu{index}.sock"


async def _serve_all(directory: Path, count: int) -> None:
    servers = []
    for index in range(count):
        path = directory / socket_name(index)
        path.unlink(missing_ok=True)
        function = Function()
        servers.append(await asyncio.start_unix_server(lambda r, w, f=function: serve(f, r, w), path))  # type: ignore[misc]
    print("ready", flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main(arguments: Sequence[str]) -> None:
    asyncio.run(_serve_all(Path(arguments[0]), int(arguments[1])))


if __name__ == "__main__":
    main(sys.argv[1:])
