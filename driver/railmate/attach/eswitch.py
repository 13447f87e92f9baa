"""The mode of a NIC's embedded switch, by devlink (kernel Documentation/networking/devlink/; numbers as in
include/uapi/linux/devlink.h)."""

from __future__ import annotations

import errno
import struct

from railmate.attach.errors import AttachError
from railmate.attach.links import attempt, error_of
from railmate.netlink import (
    GENERIC,
    GENERIC_HEADER,
    Netlink,
    attribute,
    attributes,
    generic_family,
    number,
    text,
)

_MODES = ("legacy", "switchdev")  # DEVLINK_ESWITCH_MODE_*
_GET, _SET = 29, 30  # DEVLINK_CMD_ESWITCH_*
_BUS_NAME, _DEVICE_NAME, _MODE = 1, 2, 25
_NONE = {errno.ENODEV, errno.ENOENT, errno.EOPNOTSUPP}


def mode(device: str, bus: str = "pci") -> str | None:
    """``legacy`` or ``switchdev``; None where kernel or driver have no embedded switch to ask about."""
    try:
        answers = _send(_GET, bus, device)
    except OSError as error:
        if error.errno in _NONE:
            return None
        raise AttachError(f"the embedded switch of {device} cannot be read: {error_of(error)[1]}") from None
    for answer in answers:
        value = attributes(answer, GENERIC_HEADER.size).get(_MODE)
        if value is not None and number(value) < len(_MODES):
            return _MODES[number(value)]
    return None


def set_mode(device: str, wanted: str, bus: str = "pci") -> None:
    """Raises AttachError where the driver has none, or refuses: in its words."""
    with attempt(f"the embedded switch of {device} cannot be set to {wanted}"):
        _send(_SET, bus, device, attribute(_MODE, struct.pack("=H", _MODES.index(wanted))))


def _send(command: int, bus: str, device: str, parts: bytes = b"") -> list[bytes]:
    body = attribute(_BUS_NAME, text(bus)) + attribute(_DEVICE_NAME, text(device)) + parts
    with Netlink(GENERIC) as netlink:
        family = generic_family(netlink, "devlink")  # ENOENT: a kernel without
        return netlink.request(family, GENERIC_HEADER.pack(command, 1, 0) + body)
