"""Which kernel driver a PCI function is bound to, and binding it to another.

Files as kernel Documentation/ABI/testing/sysfs-bus-pci has them: ``driver_override``, ``drivers_probe``, ``unbind``.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from railmate.attach.errors import AttachError, UnfitError

#: Seconds. Drivers take some tenths to let a VF go; vfio-pci waits until nobody has the function open any more.
_UNBIND_PATIENCE = 10.0
_NO_OVERRIDE = "(null)"  # what the kernel prints where there is none
_RTMGRP_LINK = 1  # linux/rtnetlink.h
#: Unbinds that the kernel has not ended, by address. It takes the function's link to its driver away before it waits
#: for the program that has it open, so a function without a driver may still be in use. A new process knows no more.
_unbinding: dict[str, subprocess.Popen[bytes]] = {}
#: The program that does it: the kernel waits without end while a process has the function open, and this one must not.
_UNBIND = """
import sys
try:
    with open(sys.argv[1], "w") as file:
        file.write(sys.argv[2])
except OSError as error:
    sys.exit(error.errno)
"""


class DriverBinding:
    """One function's files. Methods that change something raise AttachError that names the function and the cause."""

    def __init__(self, sysfs_root: Path, address: str) -> None:
        self.address = address
        self._bus = sysfs_root / "bus/pci"
        self.directory = self._bus / "devices" / address

    @property
    def present(self) -> bool:
        return self.directory.exists()

    @property
    def driver(self) -> str | None:
        """None: no driver, or no function."""
        try:
            return (self.directory / "driver").readlink().name
        except OSError:
            return None

    @property
    def override(self) -> str:
        """The driver that an administrator has named for it, "" for none."""
        try:
            said = (self.directory / "driver_override").read_text().strip()
        except OSError:
            return ""
        return "" if said == _NO_OVERRIDE else said

    @property
    def has_netdev(self) -> bool:
        """Whether a netdev of it is in this network namespace."""
        return any((self.directory / "net").glob("*"))

    def refuse_unwritable(self) -> None:
        """Raises UnfitError where no driver can be changed from here."""
        if not os.access(self._bus / "drivers_probe", os.W_OK):
            raise UnfitError(
                f"the driver of {self.address} cannot be changed: {self._bus}/drivers_probe is not writable. "
                "The administrator allows it with the chart value rebindVFs"
            )

    def rebind(self, driver: str, between: Callable[[], None] = lambda: None) -> None:
        """Bind it to ``driver``, whatever it is bound to now; ``between`` is called while it has none.

        The driver stays named in ``driver_override``: a VF whose PF forbids automatic probing has no driver without.
        May be repeated.
        """
        if not (self._bus / "drivers" / driver).exists():
            raise AttachError(
                f"{self.address} cannot be bound to {driver}: it is not loaded. Load it (modprobe {driver})"
            )
        self.set_override(driver)
        self._unbind()
        between()
        self._write(self._bus / "drivers_probe", self.address)
        if (now := self.driver) != driver:
            raise AttachError(
                f"{self.address} is bound to {now or 'no driver'}, not to {driver}: {driver} does not take it. "
                "See the kernel's log"
            )

    def set_override(self, driver: str) -> None:
        if self.override != driver:
            self._write(self.directory / "driver_override", driver or "\n")

    def _unbind(self) -> None:
        pending = _unbinding.pop(self.address, None)
        if pending is not None:
            self._await(pending)
        if (driver := self.driver) is None:
            return
        path = self._bus / "drivers" / driver / "unbind"
        code = self._await(self._start_unbind(path, self.address))
        if code and self.driver is not None:  # else somebody else was faster
            raise AttachError(f"{path} does not take {self.address!r}: {os.strerror(code)}")

    def _await(self, unbinding: subprocess.Popen[bytes]) -> int:
        """The error number that it ended with, 0 for none."""
        try:
            return unbinding.wait(_UNBIND_PATIENCE)
        except subprocess.TimeoutExpired:
            _unbinding[self.address] = unbinding
            raise AttachError(
                f"{self.address} is not let go by its driver: a process still has it open"
            ) from None

    @staticmethod
    def _start_unbind(path: Path, address: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", "-c", _UNBIND, str(path), address]
        try:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except OSError as error:
            raise AttachError(
                f"{address} cannot be taken from its driver: {sys.executable} cannot be started: {error.strerror}"
            ) from None

    @staticmethod
    def _write(path: Path, text: str) -> None:
        try:
            with path.open("w") as file:
                file.write(text)
        except OSError as error:
            raise AttachError(f"{path} does not take {text.strip()!r}: {error.strerror}") from None


@contextmanager
def arrival(binding: DriverBinding, seconds: float) -> Iterator[Callable[[], bool]]:
    """``with arrival(…) as arrived:`` probe, then ``arrived()`` waits for the function's netdev, at most so long;
    whether it came. The kernel's messages about links are heard from the beginning on, so none is missed."""
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE) as news:
        news.bind((0, _RTMGRP_LINK))

        def arrived() -> bool:
            deadline = time.monotonic() + seconds
            while not binding.has_netdev:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([news], [], [], left)[0]:
                    return binding.has_netdev
                _drain(news)
            return True

        yield arrived


def _drain(news: socket.socket) -> None:
    try:
        while news.recv(65536):
            pass
    except OSError:  # nothing more, or some were lost: the netdev is looked for in any case
        pass
