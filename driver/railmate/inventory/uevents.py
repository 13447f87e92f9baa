"""The kernel's word that a device came, went or changed.

Messages of NETLINK_KOBJECT_UEVENT, group 1, are strings ended by NUL: ``action@devpath`` and then KEY=value
(kernel Documentation/ABI/testing/sysfs-uevent, lib/kobject_uevent.c).
"""

from __future__ import annotations

import errno
import select
import socket
import time

_NETLINK_KOBJECT_UEVENT = 15
_KERNEL_GROUP = 1
#: Subsystems whose devices are offered, or say something about one that is.
_SUBSYSTEMS = frozenset({"pci", "net", "infiniband", "infiniband_verbs", "drm", "auxiliary"})
#: Seconds. Devices come in showers: all VFs of a port, each with its netdev and RDMA device.
_QUIET, _LONGEST = 0.5, 5.0


class DeviceEvents:
    """A socket to wait on. Close it to be done; ``wait`` then raises OSError."""

    def __init__(self) -> None:
        """Raises OSError where the kernel has no such socket."""
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_KOBJECT_UEVENT
        )
        self._socket.bind((0, _KERNEL_GROUP))
        self._socket.setblocking(False)

    def close(self) -> None:
        self._socket.close()

    def wait(self, seconds: float) -> bool:
        """Wait for a device of ours to change, then until it is quiet again; False when none did in time."""
        if not self._one(time.monotonic() + seconds):
            return False
        latest = time.monotonic() + _LONGEST
        while self._one(min(time.monotonic() + _QUIET, latest)) and time.monotonic() < latest:
            pass
        return True

    def _one(self, deadline: float) -> bool:
        """Read until a message concerns us."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._socket], [], [], left)[0]:
                return False
            try:
                message = self._socket.recv(65536)
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno == errno.ENOBUFS:  # messages were lost, so anything may have changed
                    return True
                raise
            if concerns_us(message):
                return True


def concerns_us(message: bytes) -> bool:
    """Whether the message is of a subsystem that we publish from."""
    fields = dict(part.split("=", 1) for part in message.decode(errors="replace").split("\0") if "=" in part)
    # each pod that starts makes a veth pair
    virtual = fields.get("DEVPATH", "").startswith("/devices/virtual/")
    return fields.get("SUBSYSTEM") in _SUBSYSTEMS and not virtual
