"""Kernel settings of one interface below /proc/sys/net, in the namespace of the thread that writes."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from railmate.attach import detached
from railmate.attach.errors import AttachError

_ROOT = "/proc/sys/net"
#: What the host's netdevs may have of their own and find again: all that claims can set. A netdev that leaves its
#: namespace loses them (inetdev_destroy() in net/ipv4/devinet.c, addrconf_ifdown() in net/ipv6/addrconf.c).
KEPT = (
    "ipv4/arp_ignore", "ipv4/arp_announce", "ipv4/arp_filter", "ipv4/arp_notify", "ipv4/rp_filter",
    "ipv4/accept_local", "ipv6/accept_ra", "ipv6/disable_ipv6",
)  # fmt: skip
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)


def read(interface: str) -> dict[str, str]:
    """The values of `KEPT` by the names that ``write`` takes; what the kernel has not is left out."""
    found = {}
    for name in KEPT:
        family, _, setting = name.partition("/")
        with suppress(OSError):
            found[name] = Path(f"{_ROOT}/{family}/conf/{interface}/{setting}").read_text().strip()
    return found


def restore(interface: str, before: Mapping[str, str]) -> list[str]:
    """Set what differs from ``before``; a sentence for each thing that is still not so."""
    now = read(interface) if before else {}
    problems = []
    for name, value in before.items():
        if now.get(name, value) == value:
            continue
        try:
            write(interface, {name: value})
        except AttachError as error:
            problems.append(str(error))
            continue
        if read(interface).get(name, value) != value:
            problems.append(f"its net/{name} does not stay at {value}")
    return problems


def write(interface: str, values: Mapping[str, str]) -> None:
    """``values`` by the kernel's name without the interface's: ``ipv4/arp_ignore``. Raises AttachError.

    In an unprivileged container /proc/sys is read-only; then a procfs of the driver's own is used.
    """
    if not values:
        return
    try:
        _write_all(_ROOT, interface, values)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise _refused(error) from None
        _write_detached(interface, values, error)


def _write_detached(interface: str, values: Mapping[str, str], first: OSError) -> None:
    try:
        procfs = detached.mount("proc")
    except OSError:
        raise _refused(first) from None
    try:
        _write_all(f"/proc/self/fd/{procfs}/sys/net", interface, values)
    except OSError as error:
        raise _refused(error) from None
    finally:
        with suppress(OSError):
            os.close(procfs)


def _write_all(root: str, interface: str, values: Mapping[str, str]) -> None:
    for name, value in values.items():
        family, _, setting = name.partition("/")
        path = f"{root}/{family}/conf/{interface}/{setting}"
        try:
            with Path(path).open("w") as file:
                file.write(value)
        except OSError as error:
            raise OSError(
                error.errno, f"net/{name} of {interface} does not take {value}: {error.strerror}"
            ) from None


def _refused(error: OSError) -> AttachError:
    hint = ""
    if error.errno in _REFUSED:
        hint = "; the driver's container may not write /proc/sys (AppArmor? then the chart value privileged helps)"
    return AttachError(f"{error.strerror}{hint}")
