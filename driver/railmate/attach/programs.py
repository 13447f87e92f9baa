"""BPF programs on a netdev: XDP and tcx. They go with it into another namespace and outlive the container that has
attached them (seen with Linux 6.18), and can drop, change or send elsewhere what the next user sends.

Kernel include/uapi/linux/bpf.h and if_link.h; Documentation/networking/filter.rst. Programs that tc attaches end with
their qdisc when the netdev moves.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from railmate.attach import linkmessages
from railmate.attach.linkmessages import GETLINK, SETLINK, XDP
from railmate.attach.links import error_of
from railmate.netlink import Netlink, attribute, attributes, nested, number, u32

_XDP_FD, _XDP_FLAGS = 1, 3
_NO_PROGRAM = struct.pack("=i", -1)
#: Attribute with the program's id, and the flag of its mode: driver, generic, hardware (XDP_FLAGS_*_MODE).
_MODES = {5: 1 << 2, 6: 1 << 1, 7: 1 << 3}
_SYSCALL = {"x86_64": 321, "aarch64": 280, "ppc64le": 361, "s390x": 351, "riscv64": 280}
_PROG_DETACH, _PROG_FD_BY_ID, _PROG_QUERY = 9, 13, 16
_OBJECT_INFO, _LINK_FD_BY_ID, _LINK_NEXT_ID, _LINK_DETACH = 15, 30, 31, 34
_XDP_LINK, _INFO_BYTES = 6, 256  # BPF_LINK_TYPE_XDP; more than struct bpf_link_info has
_TCX = (46, 47)  # BPF_TCX_INGRESS, BPF_TCX_EGRESS
_MOST = 64  # BPF_MPROG_MAX
_ATTRIBUTES = 128  # bytes of union bpf_attr that are passed on: what is beyond ours is zero
_QUERY = struct.Struct("=IIIIQIIQQQQ")


def attached(netlink: Netlink, index: int) -> tuple[int, ...]:
    """Ids of the programs on a netdev of this thread's namespace, which is the socket's. Raises OSError."""
    return tuple(sorted({*_xdp(netlink, index).values(), *(program for _, program, _ in _tcx(index))}))


def detach_others(netlink: Netlink, index: int, before: tuple[int, ...]) -> list[str]:
    """Detach what was not there ``before`` from a netdev of this thread's namespace; a sentence for each that stays.
    Raises OSError."""
    problems = []
    for mode, program in _xdp(netlink, index).items():
        if program not in before:
            try:
                _detach_xdp(netlink, index, mode, program)
            except OSError as error:
                problems.append(_stays("XDP", program, error))
    for where, program, link in _tcx(index):
        if program not in before:
            try:
                _detach_tcx(index, where, program, link)
            except OSError as error:
                problems.append(_stays("tcx", program, error))
    return problems


def _stays(kind: str, program: int, error: OSError) -> str:
    return (
        f"the {kind} program {program} that the pod attached cannot be detached: {error_of(error)[1]}; "
        "see bpftool link show"
    )


def _xdp(netlink: Netlink, index: int) -> dict[int, int]:
    """Mode's flag to program's id."""
    (answer,) = netlink.request(GETLINK, linkmessages.question(index))
    found = attributes(linkmessages.answer(answer)[2].get(XDP, b""))
    return {mode: number(found[kind]) for kind, mode in _MODES.items() if kind in found}


def _detach_xdp(netlink: Netlink, index: int, mode: int, program: int) -> None:
    parts = nested(XDP, attribute(_XDP_FD, _NO_PROGRAM), attribute(_XDP_FLAGS, u32(mode)))
    try:
        netlink.request(SETLINK, linkmessages.about(index, parts))
    except OSError as error:
        if error.errno != errno.EBUSY or not _detach_xdp_link(index, program):
            raise


def _detach_xdp_link(index: int, program: int) -> bool:
    """Whether a link held the program, which only that link can give up. rtnetlink does not tell it: all are asked."""
    link = 0
    while True:
        try:
            link = struct.unpack_from("=II", _bpf(_LINK_NEXT_ID, struct.pack("=I", link))[1])[1]
        except FileNotFoundError:
            return False
        with suppress(FileNotFoundError), _descriptor(_LINK_FD_BY_ID, link) as fd:  # it may have ended since
            about = ctypes.create_string_buffer(_INFO_BYTES)
            _bpf(_OBJECT_INFO, struct.pack("=IIQ", fd, _INFO_BYTES, ctypes.addressof(about)))
            kind, _, its, _, where = struct.unpack_from("=IIIII", about.raw)
            if (kind, its, where) == (_XDP_LINK, program, index):
                _bpf(_LINK_DETACH, struct.pack("=I", fd))
                return True


def _tcx(index: int) -> Iterator[tuple[int, int, int]]:
    """Where it is attached, the program's id and, if a link holds it, the link's. Nothing before Linux 6.6."""
    for where in _TCX:
        programs, held = (ctypes.c_uint32 * _MOST)(), (ctypes.c_uint32 * _MOST)()
        query = _QUERY.pack(
            index, where, 0, 0, ctypes.addressof(programs), _MOST, 0, 0, ctypes.addressof(held), 0, 0
        )
        try:
            count = _QUERY.unpack_from(_bpf(_PROG_QUERY, query)[1])[5]
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOSYS, errno.ENOENT, errno.EPERM):
                return
            raise
        yield from ((where, programs[one], held[one]) for one in range(count))


def _detach_tcx(index: int, where: int, program: int, link: int) -> None:
    if link:
        with _descriptor(_LINK_FD_BY_ID, link) as fd:
            _bpf(_LINK_DETACH, struct.pack("=I", fd))
        return
    with _descriptor(_PROG_FD_BY_ID, program) as fd:
        _bpf(_PROG_DETACH, struct.pack("=III", index, fd, where))


@contextmanager
def _descriptor(command: int, number: int) -> Iterator[int]:
    fd, _ = _bpf(command, struct.pack("=I", number))
    try:
        yield fd
    finally:
        os.close(fd)


def _bpf(command: int, values: bytes) -> tuple[int, bytes]:
    """bpf(2): its result and the attributes as it has left them. Raises OSError."""
    system_call = _SYSCALL.get(platform.machine())
    if system_call is None:
        raise OSError(errno.ENOSYS, "railmate does not know bpf(2) on this architecture")
    libc = ctypes.CDLL(None, use_errno=True)
    passed = ctypes.create_string_buffer(values, _ATTRIBUTES)
    result = libc.syscall(ctypes.c_long(system_call), command, passed, ctypes.c_uint(_ATTRIBUTES))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result, passed.raw
