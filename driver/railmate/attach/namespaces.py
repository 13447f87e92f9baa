"""Netlink sockets on both sides: in the driver's own network namespace and in a pod's.

A netlink socket belongs for ever to the namespace its thread was in when it was opened. So a thread made for
the purpose opens one socket, enters the pod's namespace, opens the other and ends when the work is done; no
other thread ever changes its namespace (setns(2), network_namespaces(7)). What is below /proc/sys/net also
depends on the thread that looks.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from railmate.attach.errors import AttachError, NamespaceGoneError
from railmate.netlink import Netlink

T = TypeVar("T")

_OWN_NAMESPACE = Path("/proc/thread-self/ns/net")
_CLONE_NEWNET = 0x40000000


def is_namespace(path: Path) -> bool:
    """Whether a network namespace is at ``path``. One that cannot be opened counts: it is there."""
    try:
        with open_namespace(path):
            return True
    except NamespaceGoneError:
        return False
    except AttachError:
        return True


@dataclass(frozen=True, slots=True)
class Sides:
    """The host's side and, where there is one, the pod's: an rtnetlink socket and the namespace's fd each. The thread
    itself is in the pod's namespace where there is one."""

    host: Netlink
    host_fd: int
    pod: Netlink | None = None
    pod_fd: int = -1

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Within it this thread is in the host's namespace."""
        if self.pod is None:
            yield
            return
        enter(self.host_fd)
        try:
            yield
        finally:
            enter(self.pod_fd)


@contextmanager
def open_namespace(path: Path) -> Iterator[int]:
    """A file descriptor of the network namespace at ``path``; while it is open the namespace lives on.

    Raises NamespaceGoneError when nothing or no namespace is there, AttachError when it cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise NamespaceGoneError(f"network namespace {path} does not exist any more") from None
    except OSError as error:
        raise AttachError(f"network namespace {path} cannot be opened: {error.strerror}") from None
    try:
        # All namespaces are files of one nsfs; what an ended sandbox leaves behind, or what a mount without
        # propagation shows, is a plain file.
        if os.fstat(fd).st_dev != _OWN_NAMESPACE.stat().st_dev:
            raise NamespaceGoneError(
                f"{path} is no network namespace: its sandbox has ended, or its directory is mounted into "
                "the railmate pod without mountPropagation: HostToContainer"
            )
        yield fd
    finally:
        os.close(fd)


def with_host(work: Callable[[Sides], T]) -> T:
    """Run ``work`` with a netlink socket in the driver's own namespace."""
    return _in_thread(lambda: _open_and_run(None, work))


def with_namespace(namespace_fd: int, work: Callable[[Sides], T]) -> T:
    """Run ``work`` with netlink sockets in the driver's own namespace and in that of ``namespace_fd``."""
    return _in_thread(lambda: _open_and_run(namespace_fd, work))


def _open_and_run(namespace_fd: int | None, work: Callable[[Sides], T]) -> T:
    with ExitStack() as stack:
        host_fd = os.open(_OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, host_fd)
        host = stack.enter_context(Netlink())
        if namespace_fd is None:
            return work(Sides(host, host_fd))
        try:
            enter(namespace_fd)
        except OSError as error:
            raise AttachError(
                f"the pod's network namespace cannot be entered: {error.strerror}; "
                "railmate needs CAP_SYS_ADMIN"
            ) from None
        pod = stack.enter_context(Netlink())
        return work(Sides(host, host_fd, pod, namespace_fd))


def enter(fd: int) -> None:
    """Put this thread, which must be one of ``_in_thread``, into the namespace. Raises OSError."""
    if hasattr(os, "setns"):  # Python 3.12
        os.setns(fd, _CLONE_NEWNET)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _in_thread(work: Callable[[], T]) -> T:
    """What ``work`` returns or raises, from a thread of its own."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="railmate-netlink")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
