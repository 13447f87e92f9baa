"""Where a GPU that is gone would be: an empty port at the place where other switches have theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from railmate.inventory.model import PciFunction
from railmate.topology.switches import common
from railmate.topology.tree import Place

_STORAGE, _NETWORK, _BRIDGE = 0x01, 0x02, 0x06


class GpuPlaces:
    """The ways from switches down to GPUs, and what is there on switches without.

    A way is the device and function numbers of the bridges below a switch: equal boards have equal ones,
    whatever their bus numbers.
    """

    def __init__(
        self,
        functions: Mapping[str, PciFunction],
        places: Mapping[str, Place],
        chains: Mapping[str, tuple[str, ...]],
        gpus: Sequence[str],
    ) -> None:
        self._places, self._chains, self._gpus = places, chains, gpus
        self._below: dict[str, dict[str, str]] = {}  # bridge -> bridges below it by their numbers
        self._occupied: set[str] = set()  # bridges with a drive or NIC below
        for address, function in functions.items():
            bridges = places[address].bridges
            if function.class_code >> 16 == _BRIDGE and bridges:
                self._below.setdefault(bridges[-1], {})[_numbers(address)] = address
            elif function.class_code >> 16 in (_STORAGE, _NETWORK):
                self._occupied.update(bridges)

    def is_lost_beside(self, nic: str, rails: Iterable[str]) -> bool:
        """Whether a rail has its GPU where the switch of ``nic``, which sits as that rail does, has an empty port."""
        for rail in rails:
            for gpu in self._gpus:
                shared = common((self._chains[gpu], self._chains[rail]))
                if shared and self._is_lost(nic, self._way(rail, shared[-1]), self._way(gpu, shared[-1])):
                    return True
        return False

    def _is_lost(self, nic: str, to_nic: tuple[str, ...] | None, to_gpu: tuple[str, ...] | None) -> bool:
        if to_nic is None or to_gpu is None:
            return False
        return any(
            self._way(nic, switch) == to_nic and self._is_empty(switch, to_gpu)
            for switch in self._chains[nic]
        )

    def _way(self, address: str, switch: str) -> tuple[str, ...] | None:
        bridges = self._places[address].bridges
        if switch not in bridges:  # an override's
            return None
        return tuple(_numbers(bridge) for bridge in bridges[bridges.index(switch) + 1 :])

    def _is_empty(self, switch: str, way: Iterable[str]) -> bool:
        """A GPU that is gone may have taken the bridges near it along, its switch's port stays."""
        at = switch
        for numbers in way:
            below = self._below.get(at, {}).get(numbers)
            if below is None:
                break
            at = below
        return at != switch and at not in self._occupied


def _numbers(address: str) -> str:
    return address.rpartition(":")[2]
