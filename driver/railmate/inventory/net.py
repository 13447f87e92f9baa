"""Network interfaces of a PCI function (kernel Documentation/ABI/testing/sysfs-class-net)."""

from __future__ import annotations

import os
from pathlib import Path

from railmate.inventory.model import Netdev
from railmate.inventory.reader import Reader

_LINK_TYPES = {1: "ether", 32: "infiniband"}  # ARPHRD_ETHER, ARPHRD_INFINIBAND (linux/if_arp.h)


def read_netdevs(directory: str, entries: frozenset[str], reader: Reader) -> tuple[Netdev, ...]:
    if "net" not in entries:
        return ()
    return tuple(_read(f"{directory}/net/{name}", name, reader) for name in reader.names(f"{directory}/net"))


def _read(directory: str, name: str, reader: Reader) -> Netdev:
    held = frozenset(reader.names(directory))

    def number(attribute: str) -> int | None:
        return reader.number(f"{directory}/{attribute}") if attribute in held else None

    def text(attribute: str) -> str | None:
        return (reader.text(f"{directory}/{attribute}") or None) if attribute in held else None

    speed = number("speed")
    return Netdev(
        name=name,
        mac=text("address"),
        mtu=number("mtu"),
        speed=speed if speed is not None and speed > 0 else None,  # -1: the link is down
        operstate=text("operstate"),
        link_type=_LINK_TYPES.get(number("type") or 0),
    )


def netdev_of(sysfs_root: Path, address: str) -> str | None:
    """The name of the function's netdev in this network namespace at this moment, None when it has none here."""
    try:
        names = sorted(os.listdir(f"{sysfs_root}/bus/pci/devices/{address}/net"))
    except OSError:
        return None  # the directory goes with the last netdev
    return names[0] if names else None
