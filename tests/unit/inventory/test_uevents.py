"""Events of the kernel: ours wake the watch once for a whole shower, others never."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import railmate.inventory.uevents as module
from railmate.inventory.uevents import DeviceEvents, concerns_us


def message(subsystem: str, devpath: str = "/devices/pci0000:00/0000:0c:00.1", action: str = "add") -> bytes:
    fields = [
        f"{action}@{devpath}",
        f"ACTION={action}",
        f"DEVPATH={devpath}",
        f"SUBSYSTEM={subsystem}",
        "SEQNUM=7",
    ]
    return "".join(f"{field}\0" for field in fields).encode()


@pytest.mark.parametrize("subsystem", ["pci", "net", "infiniband", "infiniband_verbs", "drm", "auxiliary"])
@pytest.mark.parametrize("action", ["add", "remove", "change", "bind", "unbind", "move"])
def test_devices_that_we_publish_concern_us(subsystem: str, action: str) -> None:
    assert concerns_us(message(subsystem, action=action))


@pytest.mark.parametrize("subsystem", ["", "block", "usb", "cpu", "pcie", "net2", "memory"])
def test_other_devices_do_not(subsystem: str) -> None:
    assert not concerns_us(message(subsystem))


def test_veth_pair_of_a_pod_that_starts_does_not() -> None:
    assert not concerns_us(message("net", "/devices/virtual/net/veth12"))


@given(st.binary(max_size=300))
def test_nonsense_concerns_nobody_and_raises_nothing(data: bytes) -> None:
    assert not concerns_us(data) or b"SUBSYSTEM=" in data


def test_udevs_own_messages_do_not_concern_us() -> None:
    """They come to group 2; one that strays starts with libudev and a binary header."""
    assert not concerns_us(b"libudev\0\xfe\xed\xca\xfe" + b"\0" * 28)


class Kernel:
    """The other end of the socket."""

    def __init__(self, events: DeviceEvents, other: socket.socket) -> None:
        self.events, self._other = events, other

    def says(self, *messages: bytes) -> None:
        for one in messages:
            self._other.send(one)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    monkeypatch.setattr(module, "_QUIET", 0.05)
    monkeypatch.setattr(module, "_LONGEST", 0.5)
    ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.setblocking(False)
    events = DeviceEvents()
    events.close()
    monkeypatch.setattr(events, "_socket", ours)
    with ours, other:
        yield Kernel(events, other)


def test_nothing_said_is_told_after_the_time(kernel: Kernel) -> None:
    began = time.monotonic()
    assert not kernel.events.wait(0.1)
    assert 0.1 <= time.monotonic() - began < 2


def test_messages_of_others_do_not_end_the_wait(kernel: Kernel) -> None:
    kernel.says(message("block"), message("usb"), message("net", "/devices/virtual/net/veth1"))
    assert not kernel.events.wait(0.1)


def test_shower_is_one_event(kernel: Kernel) -> None:
    kernel.says(*[message("net"), message("block"), message("infiniband")] * 5)
    assert kernel.events.wait(5)
    assert not kernel.events.wait(0.1), "all of it was taken in"


def test_shower_without_end_is_told_of_in_time(kernel: Kernel) -> None:
    stop = threading.Event()

    def rain() -> None:
        while not stop.wait(0.01):
            kernel.says(message("pci"))

    thread = threading.Thread(target=rain)
    thread.start()
    try:
        began = time.monotonic()
        assert kernel.events.wait(5)
        assert time.monotonic() - began < 3
    finally:
        stop.set()
        thread.join()


def test_lost_messages_may_have_been_ours(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Overrun:
        def __init__(self, real: socket.socket) -> None:
            self._real = real
            self.times = 1

        def fileno(self) -> int:
            return self._real.fileno()

        def recv(self, size: int) -> bytes:
            if self.times:
                self.times -= 1
                self._real.recv(size)
                raise OSError(errno.ENOBUFS, "No buffer space available")
            return self._real.recv(size)

    kernel.says(message("block"))
    monkeypatch.setattr(kernel.events, "_socket", Overrun(kernel.events._socket))
    assert kernel.events.wait(5)


def test_real_socket_of_the_kernel_can_be_opened_and_closed() -> None:
    events = DeviceEvents()
    assert not events.wait(0.0)
    events.close()
    with pytest.raises((OSError, ValueError)):
        events.wait(0.1)
