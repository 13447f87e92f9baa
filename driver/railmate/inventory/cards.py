"""Which NIC functions are ports of one card."""

from __future__ import annotations

from collections.abc import Iterable

from railmate.inventory.address import card
from railmate.inventory.model import Nic


def cards(nics: Iterable[Nic]) -> tuple[tuple[str, ...], ...]:
    """Addresses of physical functions, a tuple a card, in the order of ``nics``.

    Functions of one PCI device are one card; so are devices whose RDMA devices have the same system
    image GUID: a socket-direct card is a PCI device on each of two sockets, in two domains.
    """
    groups: dict[str, list[str]] = {}
    by_guid: dict[str, str] = {}
    for nic in nics:
        if nic.is_vf:
            continue
        key = card(nic.address)
        for device in nic.function.rdma_devices:
            if device.sys_image_guid is not None:
                key = by_guid.setdefault(device.sys_image_guid, key)
        groups.setdefault(key, []).append(nic.address)
    return tuple(tuple(group) for group in groups.values())
