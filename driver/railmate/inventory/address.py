"""PCI addresses: what one looks like, and their order."""

from __future__ import annotations

import re
from functools import lru_cache

# A domain has at least four hexadecimal digits; VMD gives 10000, others use all 32 bits.
_ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([01][0-9a-f])\.([0-7])")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


def is_address(text: str) -> bool:
    return _ADDRESS.fullmatch(text) is not None


def is_host_bridge(text: str) -> bool:
    """Whether a component of a sysfs path is a host bridge, such as ``pci0000:00``."""
    return _HOST_BRIDGE.fullmatch(text) is not None


@lru_cache(maxsize=8192)
def order(address: str) -> tuple[int, int, int, int]:
    """The key that sorts addresses as the kernel enumerates them (by number, not by text).

    Raises ValueError for what is no address.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise ValueError(f"{address!r} is not a PCI address (dddd:bb:dd.f)")
    domain, bus, device, function = match.groups()
    return int(domain, 16), int(bus, 16), int(device, 16), int(function)


def card(address: str) -> str:
    """The address without its function digit: functions of one card share it."""
    return address.rpartition(".")[0]
