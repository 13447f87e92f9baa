"""Netlink by hand: one socket, one request, one answer (kernel Documentation/userspace-api/netlink/intro.rst).

For what a pod's start waits for. pyroute2's synchronous classes run an event loop inside, which costs some 10 ms a
socket; what is asked here is a handful of fixed messages.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Literal, Self

ACK, REPLACE, EXCL, CREATE, DUMP = 0x4, 0x100, 0x200, 0x400, 0x300
NESTED = 0x8000
GENERIC = 16  # NETLINK_GENERIC, a protocol
GENERIC_HEADER = struct.Struct("=BBH")  # struct genlmsghdr: command, version

_REQUEST = 0x1
_INTERRUPTED, _DUMP_TRIES = 0x10, 4  # NLM_F_DUMP_INTR: something changed meanwhile
_CAPPED, _ACK_TLVS = 0x100, 0x200  # flags of an acknowledgement: request left out; attributes follow
_ERROR, _DONE = 2, 3
_CONTROLLER, _GET_FAMILY, _FAMILY_ID, _FAMILY_NAME = 16, 3, 1, 2
_ERROR_TEXT = 1  # NLMSGERR_ATTR_MSG
_SOL_NETLINK, _CAP_ACK, _EXT_ACK = 270, 10, 11
_TIMEOUT = 5.0  # seconds; the kernel answers at once or, where a lock is held, soon
_BUFFER = 1 << 18  # a dump comes in messages of 32 KiB at most
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port id
_ATTRIBUTE = struct.Struct("=HH")  # length, type

Attributes = Mapping[int, bytes]


class Netlink:
    """A socket in the network namespace of the thread that makes it. Errors of the kernel are OSErrors, with the
    kernel's own words where it gives some."""

    def __init__(self, protocol: int = socket.NETLINK_ROUTE) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        self._socket.settimeout(_TIMEOUT)
        self._socket.bind((0, 0))
        for option in (_CAP_ACK, _EXT_ACK):
            self._socket.setsockopt(_SOL_NETLINK, option, 1)
        self._sequence = 0
        self._disturbed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def request(self, kind: int, body: bytes, flags: int = 0) -> list[bytes]:
        """One question or change; the bodies of the answers when the kernel has acknowledged it."""
        return list(self._ask(kind, body, flags | ACK))

    def dump(self, kind: int, body: bytes) -> list[bytes]:
        """All objects of a kind. One that the kernel could not finish undisturbed is asked for again."""
        for _ in range(_DUMP_TRIES):
            self._disturbed = False
            found = list(self._ask(kind, body, DUMP))
            if not self._disturbed:
                break
        return found

    def _ask(self, kind: int, body: bytes, flags: int) -> Iterator[bytes]:
        self._sequence += 1
        size = _HEADER.size + len(body)
        self._socket.send(_HEADER.pack(size, kind, flags | _REQUEST, self._sequence, 0) + body)
        while True:
            data = self._socket.recv(_BUFFER)
            for answer, answer_flags, sequence, inside in messages(data):
                if sequence != self._sequence:
                    continue  # the late answer to a request that was given up
                self._disturbed |= bool(answer_flags & _INTERRUPTED) and answer != _ERROR
                if answer in (_ERROR, _DONE):
                    _raise(inside, answer_flags)
                    return
                yield inside


def generic_family(netlink: Netlink, name: str) -> int:
    """The number of a family of generic netlink (Documentation/networking/generic_netlink.rst). Raises
    FileNotFoundError when the kernel has none of that name."""
    body = GENERIC_HEADER.pack(_GET_FAMILY, 1, 0) + attribute(_FAMILY_NAME, text(name))
    (answer,) = netlink.request(_CONTROLLER, body)
    return number(attributes(answer, GENERIC_HEADER.size)[_FAMILY_ID])


def attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + b"\0" * (-len(value) % 4)


def nested(kind: int, *values: bytes) -> bytes:
    return attribute(kind | NESTED, b"".join(values))


def u32(value: int) -> bytes:
    return struct.pack("=I", value)


def text(value: str) -> bytes:
    return value.encode() + b"\0"


def attributes(data: bytes, offset: int = 0) -> dict[int, bytes]:
    """Type to value; of several of one type the last."""
    return dict(attribute_list(data, offset))


def attribute_list(data: bytes, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    while offset + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, offset)
        if size < _ATTRIBUTE.size:
            return
        yield kind & ~0xC000, data[offset + _ATTRIBUTE.size : offset + size]
        offset += (size + 3) & ~3


def number(value: bytes) -> int:
    """An unsigned number of whatever size the kernel gave it."""
    return int.from_bytes(value, _BYTE_ORDER)


def words(value: bytes) -> str:
    return value.split(b"\0", 1)[0].decode(errors="replace")


_BYTE_ORDER: Literal["little", "big"] = "little" if struct.pack("=H", 1)[0] else "big"


def messages(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Type, flags, sequence number and body of each message of a read."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        size, kind, flags, sequence, _ = _HEADER.unpack_from(data, offset)
        yield kind, flags, sequence, data[offset + _HEADER.size : offset + size]
        offset += max((size + 3) & ~3, _HEADER.size)


def _raise(body: bytes, flags: int) -> None:
    code = -struct.unpack_from("=i", body)[0] if len(body) >= 4 else 0
    if code <= 0:
        return
    said = ""
    if flags & _ACK_TLVS:
        # the error, the header of the request, then, unless it was left out, the request's body
        skipped = 4 + _HEADER.size
        if not flags & _CAPPED:
            skipped = 4 + struct.unpack_from("=I", body, 4)[0]
        said = words(attributes(body, skipped).get(_ERROR_TEXT, b""))
    reason = os.strerror(code)
    raise OSError(code, f"{reason} ({said.rstrip('.')})" if said else reason)
