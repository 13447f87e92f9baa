"""Which NIC functions are ports of one card."""

from __future__ import annotations

from collections.abc import Iterable

from railmate.inventory.address import card
from railmate.inventory.model import Nic

_HALVES = 2


def cards(nics: Iterable[Nic]) -> tuple[tuple[str, ...], ...]:
    """Addresses of physical functions, a tuple a card, in the order of ``nics``.

    Functions of one PCI device are one card; so are two devices of one model whose RDMA devices have the
    same system image GUID: a socket-direct card is a PCI device on each of two sockets, in two domains. A
    GUID that more than two devices have tells nothing: hypervisors and test trees make them up.
    """
    devices: dict[str, list[Nic]] = {}
    by_guid: dict[str, dict[str, None]] = {}  # GUID -> devices, in order
    for nic in nics:
        if nic.is_vf:
            continue
        devices.setdefault(card(nic.address), []).append(nic)
        for device in nic.function.rdma_devices:
            if device.sys_image_guid is not None:
                by_guid.setdefault(device.sys_image_guid, {})[card(nic.address)] = None
    other_half = {}
    for held in map(list, by_guid.values()):
        if len(held) == _HALVES and len({_model(devices[one][0]) for one in held}) == 1:
            other_half[held[1]] = held[0]
    groups: dict[str, list[str]] = {}
    for name, ports in devices.items():
        groups.setdefault(other_half.get(name, name), []).extend(port.address for port in ports)
    return tuple(tuple(group) for group in groups.values())


def _model(nic: Nic) -> tuple[int, int]:
    return nic.function.vendor, nic.function.device
