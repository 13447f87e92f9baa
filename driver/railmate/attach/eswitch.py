"""The mode of a NIC's embedded switch, by devlink (kernel Documentation/networking/devlink/)."""

from __future__ import annotations

import errno
from typing import Any

from pyroute2 import DL
from pyroute2.netlink import NLM_F_ACK, NLM_F_REQUEST
from pyroute2.netlink.devlink import DEVLINK_NAMES, devlinkcmd
from pyroute2.netlink.exceptions import NetlinkError

from railmate.attach.errors import AttachError
from railmate.attach.links import attempt

_MODES = ("legacy", "switchdev")  # include/uapi/linux/devlink.h: DEVLINK_ESWITCH_MODE_*
_NONE = {errno.ENODEV, errno.ENOENT, errno.EOPNOTSUPP}


def mode(device: str, bus: str = "pci") -> str | None:
    """``legacy`` or ``switchdev``; None where kernel or driver have no embedded switch to ask about."""
    try:
        socket = DL()
    except NetlinkError:
        return None  # a kernel without devlink
    with socket as netlink:
        try:
            for message in netlink.nlm_request(
                _command("DEVLINK_CMD_ESWITCH_GET", bus, device),
                msg_type=netlink.prid,
                msg_flags=NLM_F_REQUEST | NLM_F_ACK,
            ):
                number = message.get_attr("DEVLINK_ATTR_ESWITCH_MODE")
                if number is not None and number < len(_MODES):
                    return _MODES[number]
        except NetlinkError as error:
            if error.code in _NONE:
                return None
            raise AttachError(f"the embedded switch of {device} cannot be read: {error}") from None
    return None


def set_mode(device: str, wanted: str, bus: str = "pci") -> None:
    """Raises AttachError where the driver has none, or refuses."""
    command = _command("DEVLINK_CMD_ESWITCH_SET", bus, device)
    command["attrs"].append(("DEVLINK_ATTR_ESWITCH_MODE", _MODES.index(wanted)))
    what = f"the embedded switch of {device} cannot be set to {wanted}"
    try:
        socket = DL()
    except NetlinkError as error:
        raise AttachError(f"{what}: this kernel has no devlink ({error})") from None
    with socket as netlink, attempt(what):
        for _ in netlink.nlm_request(command, msg_type=netlink.prid, msg_flags=NLM_F_REQUEST | NLM_F_ACK):
            pass


def _command(name: str, bus: str, device: str) -> Any:
    message = devlinkcmd()
    message["cmd"] = DEVLINK_NAMES[name]
    message["attrs"] = [("DEVLINK_ATTR_BUS_NAME", bus), ("DEVLINK_ATTR_DEV_NAME", device)]
    return message
