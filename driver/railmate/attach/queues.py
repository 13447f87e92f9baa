"""What only sysfs keeps of a netdev: how its interrupts are put off, and which CPUs serve its queues.

A container that may write its /sys, a privileged one, can set it, and the kernel takes it along when the netdev moves
(seen with Linux 6.18). Kernel Documentation/ABI/testing/sysfs-class-net and sysfs-class-net-queues.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from railmate.attach import detached
from railmate.attach.links import error_of

_OF_NETDEV = ("napi_defer_hard_irqs", "gro_flush_timeout", "threaded")
_OF_QUEUE = {"rx": ("rps_cpus", "rps_flow_cnt"), "tx": ("xps_cpus", "xps_rxqs")}
_MOST = 4096  # bytes; a mask has nine for each 32 CPUs


def read(name: str) -> dict[str, str] | None:
    """What is not zero of the netdev ``name`` in this thread's namespace, by its path below the netdev's directory.

    None where the kernel or its security module does not let a sysfs be mounted. Raises OSError without such a netdev.
    """
    with _directory(name) as netdev:
        if netdev is None:
            return None
        return {path: value for path, value in _values(netdev) if not _is_zero(value)}


def restore(name: str, before: Mapping[str, str]) -> list[str]:
    """Set what differs from ``before``; a sentence for each thing that is still not so. Raises OSError like `read`."""
    with _directory(name) as netdev:
        if netdev is None:
            return []
        wrong = _different(netdev, before)
        refused = {}
        for path, _, wanted in wrong:
            try:
                _write(netdev, path, wanted)
            except OSError as error:
                refused[path] = f": {error_of(error)[1]}"
        still = _different(netdev, before) if wrong else []
        return [
            f"its {path} is {value}, not {wanted}{refused.get(path, '')}" for path, value, wanted in still
        ]


def _different(netdev: int, before: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Path, value, and the value that it is to have; of the queues that there are now."""
    found = [(path, value, before.get(path, "0")) for path, value in _values(netdev)]
    return [
        (path, value, wanted)
        for path, value, wanted in found
        if value != wanted and not (_is_zero(value) and _is_zero(wanted))
    ]


def _is_zero(value: str) -> bool:
    """Masks are written in words: 00000000,00000000."""
    return not value.strip("0,")


def _values(netdev: int) -> Iterator[tuple[str, str]]:
    """Path and value of what this kernel has for this netdev: one with a single queue has no xps_cpus."""
    paths = list(_OF_NETDEV)
    for queue in _queues(netdev):
        paths += [f"queues/{queue}/{name}" for name in _OF_QUEUE.get(queue[:2], ())]
    for path in paths:
        with suppress(OSError), _opened(path, os.O_RDONLY, netdev) as fd:
            yield path, os.read(fd, _MOST).decode(errors="replace").strip()


def _queues(netdev: int) -> list[str]:
    with _opened("queues", os.O_RDONLY | os.O_DIRECTORY, netdev) as fd, os.scandir(fd) as entries:
        return sorted(entry.name for entry in entries)


def _write(netdev: int, path: str, value: str) -> None:
    with _opened(path, os.O_WRONLY, netdev) as fd:
        os.write(fd, value.encode())


@contextmanager
def _directory(name: str) -> Iterator[int | None]:
    """The netdev's directory. The driver's own /sys may be read-only, or another namespace's."""
    try:
        sysfs = detached.mount("sysfs")
    except OSError:
        yield None
        return
    try:
        with _opened(f"class/net/{name}", os.O_RDONLY | os.O_DIRECTORY, sysfs) as netdev:
            yield netdev
    finally:
        os.close(sysfs)


@contextmanager
def _opened(path: str, flags: int, directory: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, dir_fd=directory)
    try:
        yield fd
    finally:
        os.close(fd)
