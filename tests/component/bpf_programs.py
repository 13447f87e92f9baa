"""Attaches a BPF program that drops everything to a netdev of this namespace, as a container with CAP_BPF can.

``bpf_programs.py NETDEV driver|generic|ingress|egress|ingress-link|xdp-link``: prints the program's id. One that a link
holds is there as long as this process: it ends when its input does. Exit status 3: the kernel has no such thing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
import sys

LOAD, ATTACH, OBJECT_INFO, LINK_CREATE = 5, 8, 15, 28
XDP, SCHED_CLS = 6, 3  # BPF_PROG_TYPE_*
ATTACH_XDP, TCX = 37, {"ingress": 46, "egress": 47}
DROP = {XDP: 1, SCHED_CLS: 2}  # XDP_DROP, TCX_DROP


def bpf(command: int, values: bytes) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    number = {"x86_64": 321, "aarch64": 280}[platform.machine()]
    attributes = ctypes.create_string_buffer(values, 128)
    result: int = libc.syscall(ctypes.c_long(number), command, attributes, ctypes.c_uint(128))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def load(kind: int) -> int:
    code = struct.pack("=BBhiBBhi", 0xB7, 0, 0, DROP[kind], 0x95, 0, 0, 0)  # r0 = DROP; exit
    instructions, licence = ctypes.create_string_buffer(code), ctypes.create_string_buffer(b"GPL")
    where = ctypes.addressof(instructions), ctypes.addressof(licence)
    return bpf(LOAD, struct.pack("=IIQQ", kind, 2, *where))


def identity(program: int) -> int:
    info = ctypes.create_string_buffer(256)
    bpf(OBJECT_INFO, struct.pack("=IIQ", program, 256, ctypes.addressof(info)))
    return int(struct.unpack_from("=II", info.raw)[1])


def set_xdp(index: int, program: int, mode: int) -> None:
    """rtnetlink(7): IFLA_XDP with IFLA_XDP_FD and IFLA_XDP_FLAGS."""
    inner = struct.pack("=HHi", 8, 1, program) + struct.pack("=HHI", 8, 3, mode)
    body = struct.pack("=BxHiII", 0, 0, index, 0, 0) + struct.pack("=HH", 4 + len(inner), 43 | 0x8000) + inner
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.send(struct.pack("=IHHII", 16 + len(body), 19, 5, 1, 0) + body)
        code = -struct.unpack_from("=i", netlink.recv(4096), 16)[0]
        if code:
            raise OSError(code, os.strerror(code))


def main(netdev: str, how: str) -> None:
    index = socket.if_nametoindex(netdev)
    where, _, held = how.partition("-")
    program = load(SCHED_CLS if where in TCX else XDP)
    if held:
        bpf(LINK_CREATE, struct.pack("=IIII", program, index, TCX.get(where, ATTACH_XDP), 0))
    elif where in TCX:
        bpf(ATTACH, struct.pack("=IIII", index, program, TCX[where], 0))
    else:
        set_xdp(index, program, {"driver": 1 << 2, "generic": 1 << 1}[where])
    print(identity(program), flush=True)
    if held:
        sys.stdin.read()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EPERM):
            raise
        print(f"{sys.argv[2]}: {error}", file=sys.stderr)
        sys.exit(3)
