"""Which netdev an RDMA device runs over, asked of the kernel's RDMA netlink (include/uapi/rdma/rdma_netlink.h).

Needed for soft devices whose driver shows no ``parent`` in sysfs (siw) and that have no GID yet.
pyroute2 does not speak this protocol. The kernel answers for the caller's network namespace.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

_NETLINK_RDMA = 20
_NLDEV = 5 << 10  # RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, 0)
_GET, _PORT_GET = _NLDEV + 1, _NLDEV + 5
_DEV_INDEX, _DEV_NAME, _NDEV_NAME = 1, 2, 51
_NLM_F_REQUEST, _NLM_F_DUMP = 0x1, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_TIMEOUT_S = 2.0
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port id
_ATTRIBUTE = struct.Struct("=HH")  # length, type

Attributes = dict[int, bytes]


def netdevs_by_rdma_device() -> dict[str, str]:
    """RDMA device -> netdev of its first port that has one.

    Raises OSError: EPROTONOSUPPORT where the kernel has no RDMA, else what the kernel answered.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_RDMA) as netlink:
        netlink.settimeout(_TIMEOUT_S)
        netlink.bind((0, 0))
        found = {}
        for device in list(_dump(netlink, _GET, b"")):
            if _DEV_INDEX not in device or _DEV_NAME not in device:
                continue
            ports = list(_dump(netlink, _PORT_GET, attribute(_DEV_INDEX, device[_DEV_INDEX])))
            netdev = next((port[_NDEV_NAME] for port in ports if _NDEV_NAME in port), None)
            if netdev is not None:
                found[_text(device[_DEV_NAME])] = _text(netdev)
        return found


def _dump(netlink: socket.socket, command: int, attributes: bytes) -> Iterator[Attributes]:
    size = _HEADER.size + len(attributes)
    netlink.send(_HEADER.pack(size, command, _NLM_F_REQUEST | _NLM_F_DUMP, 1, 0) + attributes)
    while True:
        for kind, body in messages(netlink.recv(1 << 16)):
            if kind == _NLMSG_DONE:
                return
            if kind == _NLMSG_ERROR:
                code = -struct.unpack_from("=i", body)[0]
                if code:
                    raise OSError(code, "RDMA netlink refused the request")
                return
            if kind == command:
                yield parse(body)


def messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(type, body) of each message; ends where lengths make no sense."""
    while len(data) >= _HEADER.size:
        length, kind, _, _, _ = _HEADER.unpack_from(data)
        if not _HEADER.size <= length <= len(data):
            return
        yield kind, data[_HEADER.size : length]
        data = data[_aligned(length) :]


def parse(body: bytes) -> Attributes:
    """The attributes of one message, by number; of equal ones the last."""
    found = {}
    while len(body) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(body)
        if not _ATTRIBUTE.size <= length <= len(body):
            break
        found[kind & 0x3FFF] = body[_ATTRIBUTE.size : length]  # the top bits are flags
        body = body[_aligned(length) :]
    return found


def attribute(kind: int, value: bytes) -> bytes:
    size = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(size, kind) + value + bytes(_aligned(size) - size)


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _text(value: bytes) -> str:
    return value.split(b"\0", 1)[0].decode(errors="replace")
