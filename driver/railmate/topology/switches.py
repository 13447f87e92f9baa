"""PCIe switches above a device, with chips that show as two levels folded into one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from railmate.inventory.model import PciFunction
from railmate.topology.tree import Place, fan_outs

_BROADCOM = 0x1000
# Conventional PCI bridges, mostly a hypervisor's: what meets on their bus meets on no switch.
_CONVENTIONAL = {
    (0x1B36, 0x0001),  # QEMU pci-bridge
    (0x1B36, 0x000E),  # QEMU pcie-pci-bridge
    (0x8086, 0x244E),  # Intel 82801 PCI bridge, also QEMU's i82801b11-bridge
    (0x15AD, 0x0790),  # VMware PCI bridge
}


def upper_of_two(vendor: int, device: int, subsystem_vendor: int, subsystem_device: int) -> str | None:
    """The switch generation when these ids can be the upper level of a two-level Broadcom switch.

    PEX880xx (Gen4) carries the same subsystem at both levels, PEX890xx (Gen5) 0xxx at the upper and
    1xxx at the lower; the last 12 bits vary. Source: NCCL's topology code, which folds the same ids.
    """
    return _level(vendor, device, subsystem_vendor, subsystem_device, {0xC010: 0xA000, 0xC030: 0x0000})


def lower_of_two(vendor: int, device: int, subsystem_vendor: int, subsystem_device: int) -> str | None:
    return _level(vendor, device, subsystem_vendor, subsystem_device, {0xC010: 0xA000, 0xC030: 0x1000})


def _level(
    vendor: int, device: int, subsystem_vendor: int, subsystem_device: int, subsystem_of: Mapping[int, int]
) -> str | None:
    if vendor != _BROADCOM or subsystem_vendor != _BROADCOM:
        return None
    expected = subsystem_of.get(device)
    if expected is None or subsystem_device & 0xF000 != expected:
        return None
    return f"{device:04x}"


def fold(chain: Iterable[str], functions: Mapping[str, PciFunction]) -> tuple[str, ...]:
    """A chain of switches, from the host bridge down, with every two-level chip in it made one."""
    folded: list[str] = []
    may_take_in: str | None = None  # generation of the last switch if a lower level may fold into it
    for address in chain:
        function = functions.get(address)
        ids = (
            (function.vendor, function.device, function.subsystem_vendor, function.subsystem_device)
            if function is not None
            else (0, 0, 0, 0)
        )
        if may_take_in is not None and lower_of_two(*ids) == may_take_in:
            may_take_in = None  # a third level is another chip
            continue
        folded.append(address)
        may_take_in = upper_of_two(*ids)
    return tuple(folded)


class Switches:
    """The switches of a machine. A switch is named by the address of its upstream port."""

    def __init__(self, functions: Mapping[str, PciFunction], places: Mapping[str, Place]) -> None:
        self._functions = functions
        self._fan_outs = fan_outs(functions.values(), places)
        self._chains: dict[tuple[str, ...], tuple[str, ...]] = {}

    def above(self, place: Place) -> tuple[str, ...]:
        """The switches above a place, from the host bridge down; a folded chip appears once.

        Ports alternate on the way down: root port, upstream port, downstream port, upstream port, and
        so on. Root and downstream ports are not switches, but whatever is attached to one and
        leads on is (a lone bridge too: two devices below it do meet there). A root or downstream
        port with several devices below is no port of a link: the count starts anew with it.
        """
        chain = self._chains.get(place.bridges)
        if chain is None:
            chain = self._chains[place.bridges] = self._walk(place.bridges)
        return chain

    def _walk(self, bridges: tuple[str, ...]) -> tuple[str, ...]:
        chain: list[str] = []
        is_port = True  # the first is a root port
        for address in bridges:
            if is_port and address not in self._fan_outs:
                is_port = False
                continue
            is_port = True
            function = self._functions.get(address)
            if function is None or (function.vendor, function.device) not in _CONVENTIONAL:
                chain.append(address)
        return fold(chain, self._functions)


def common(chains: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The switches that all have above them, from the host bridge down; the last is the nearest."""
    first, *others = chains
    length = len(first)
    for other in others:
        length = min(length, len(other))
        while first[:length] != other[:length]:
            length -= 1
    return first[:length]


def meeting_switch(
    chain: tuple[str, ...], above_gpus: frozenset[str], above_rails: frozenset[str]
) -> str | None:
    """The nearest switch of ``chain`` under which GPUs and rails meet; private bridges drop out by that."""
    return next(
        (switch for switch in reversed(chain) if switch in above_gpus and switch in above_rails), None
    )
