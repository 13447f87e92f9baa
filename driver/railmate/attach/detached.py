"""A file system of this thread's namespaces, mounted nowhere (fsopen(2), fsmount(2); Linux 5.2).

What the container's own /sys and /proc show is of another network namespace, or read-only. Such a mount is attached to
no directory and gone with its file descriptor: nobody else sees it, and no directory is needed for it.
"""

from __future__ import annotations

import ctypes
import os

#: Numbers of system calls made since Linux 5.2 are the same on all architectures.
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_CLOEXEC, _FSCONFIG_CMD_CREATE = 1, 6


def mount(filesystem: str) -> int:
    """A file descriptor of the root of a new ``sysfs`` or ``proc``. Raises OSError."""
    context = _system_call(_FSOPEN, filesystem.encode(), _CLOEXEC)
    try:
        _system_call(_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        return _system_call(_FSMOUNT, context, _CLOEXEC, 0)
    finally:
        os.close(context)


def _system_call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
