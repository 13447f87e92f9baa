"""What the kernel's RDMA netlink tells (include/uapi/rdma/rdma_netlink.h): devices, and how namespaces share them.

Soft devices whose driver shows no ``parent`` in sysfs (siw) and that have no GID yet name their netdev only here.
The kernel answers for the network namespace that the socket was opened in.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import StrEnum

from railmate.netlink import Attributes, Netlink, attribute, attributes, number, u32, words

_NETLINK_RDMA = 20
_NLDEV = 5 << 10  # RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, 0)
_GET, _PORT_GET, _SYS_GET = _NLDEV + 1, _NLDEV + 5, _NLDEV + 6
SET, NEWLINK, DELLINK = _NLDEV + 2, _NLDEV + 3, _NLDEV + 4
DEV_INDEX, DEV_NAME, NODE_GUID, NDEV_NAME, LINK_TYPE, NETNS_MODE, NET_NS_FD = 1, 2, 6, 51, 65, 66, 68


class NetnsMode(StrEnum):
    """How network namespaces see RDMA devices (rdma-system(8))."""

    SHARED = "shared"  # every namespace sees all of them
    EXCLUSIVE = "exclusive"  # each of them is in one namespace


@dataclass(frozen=True, slots=True)
class RdmaLink:
    """An RDMA device as one namespace sees it. ``index`` stays the same for as long as the device lives;
    ``node_guid`` (as sysfs writes it) is None where the device has none."""

    index: int
    name: str
    node_guid: str | None = None


class RdmaNetlink(Netlink):
    """Raises OSError: EPROTONOSUPPORT where the kernel has no RDMA, else what the kernel answered."""

    def __init__(self) -> None:
        super().__init__(_NETLINK_RDMA)

    def mode(self) -> NetnsMode:
        """Kernels before 5.2 know only the shared one, and not the question."""
        try:
            answers = [attributes(answer) for answer in self.request(_SYS_GET, b"")]
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return NetnsMode.SHARED
            raise
        exclusive = any(answer.get(NETNS_MODE) == b"\0" for answer in answers)
        return NetnsMode.EXCLUSIVE if exclusive else NetnsMode.SHARED

    def links(self) -> list[RdmaLink]:
        """The devices that the namespace sees."""
        found: list[Attributes] = [attributes(answer) for answer in self.dump(_GET, b"")]
        return [
            RdmaLink(number(one[DEV_INDEX]), words(one[DEV_NAME]), _guid(number(one.get(NODE_GUID, b""))))
            for one in found
            if DEV_INDEX in one and DEV_NAME in one
        ]

    def netdev(self, index: int) -> str | None:
        """The netdev of the device's first port that has one in the namespace."""
        answers = self.dump(_PORT_GET, attribute(DEV_INDEX, u32(index)))
        ports = [attributes(answer) for answer in answers]
        return next((words(port[NDEV_NAME]) for port in ports if NDEV_NAME in port), None)


def netdevs_by_rdma_device() -> dict[str, str]:
    """RDMA device -> netdev of its first port that has one. Raises OSError as ``RdmaNetlink`` does."""
    with RdmaNetlink() as netlink:
        found = ((link.name, netlink.netdev(link.index)) for link in netlink.links())
        return {name: netdev for name, netdev in found if netdev is not None}


def netns_mode() -> NetnsMode | None:
    """How this machine's network namespaces share RDMA devices; None without RDMA, or where it cannot be told."""
    try:
        with RdmaNetlink() as netlink:
            return netlink.mode()
    except OSError:
        return None


def _guid(value: int) -> str | None:
    """As sysfs writes it: ``0c42:a103:0016:1c5e``."""
    digits = f"{value:016x}"
    return ":".join(digits[start : start + 4] for start in range(0, 16, 4)) if value else None
