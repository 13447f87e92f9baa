"""Which GPUs go out together with which NICs: what is behind the devices of pairs and groups. Pure.

A pair of the matching is one GPU with its NICs, or, where NICs are fewer than GPUs, several GPUs with the NIC that they
share. Of a NIC with VFs a unit has a VF, of one without any the whole port.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from railmate.inventory.model import Gpu, Nic, PciFunction
from railmate.topology.distance import worst
from railmate.topology.model import Pair, Source, Topology


@dataclass(frozen=True, slots=True)
class Unit:
    """GPUs that are offered with NICs (VFs, or whole ports), and what is known of the way between them."""

    pair: Pair
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]


class Units:
    """The units of a machine. ``gpus`` and ``nics`` are what may be offered, by address; ``vfs`` the VFs among the
    NICs by the address of their physical function, in VF order.

    ``pairs`` have one GPU each, ``groups`` several. ``kept``: addresses of VFs that are theirs. ``without_half``: GPUs
    without a unit for want of a NIC. ``few_vfs``: groups whose NIC has VFs, but not one for each of its GPUs.
    """

    def __init__(
        self,
        topology: Topology,
        functions: Mapping[str, PciFunction],
        gpus: Mapping[str, Gpu],
        nics: Mapping[str, Nic],
        vfs: Mapping[str, Sequence[Nic]],
    ) -> None:
        self._functions, self._gpus, self._nics, self._vfs = functions, gpus, nics, vfs
        self._share_of = {pair.gpus[0]: pair for pair in topology.shares}
        # an n-th unit of the same physical function takes its n-th VF
        self._taken: Counter[str] = Counter()
        self.pairs: list[Unit] = []
        self.groups: list[Unit] = []
        self.kept: set[str] = set()
        self.without_half: list[str] = []
        self.few_vfs: list[Unit] = []
        for pair in topology.pairs:
            self._add(pair)

    def _add(self, pair: Pair) -> None:
        gpus = tuple(self._gpus[address] for address in pair.gpus if address in self._gpus)
        if not gpus:
            return
        if len(pair.gpus) > 1 and all(self._free_vfs(nic) >= len(pair.gpus) for nic in pair.nics):
            self._add_shared(pair, gpus)
            return
        halves = [self._next(nic) for nic in pair.nics]
        nics = tuple(nic for nic in halves if nic is not None)
        if not nics or len(nics) != len(halves):
            self.without_half += [gpu.address for gpu in gpus]
            return
        self._take(pair.nics, nics)
        unit = Unit(pair, gpus, nics)
        if len(gpus) == 1:
            self.pairs.append(unit)
            return
        self.groups.append(unit)
        if any(nic.is_vf for nic in nics):
            self.few_vfs.append(unit)

    def _add_shared(self, pair: Pair, gpus: tuple[Gpu, ...]) -> None:
        """Each GPU with VFs of its own, and all of them with those of the first. A GPU has its VFs by its place among
        all that share the NIC: one that is lost changes nothing for the others."""
        nics_of = {
            gpu: tuple(self._vfs[nic][self._taken[nic] + place] for nic in pair.nics)
            for place, gpu in enumerate(pair.gpus)
        }
        for nics in nics_of.values():
            self._take(pair.nics, nics)
        self.pairs += [Unit(self._share_of[gpu.address], (gpu,), nics_of[gpu.address]) for gpu in gpus]
        if len(gpus) > 1:
            self.groups.append(Unit(pair, gpus, nics_of[gpus[0].address]))

    def _free_vfs(self, physical_function: str) -> int:
        return len(self._vfs.get(physical_function, ())) - self._taken[physical_function]

    def _next(self, physical_function: str) -> Nic | None:
        """The next VF of the physical function, or the function itself where it has none at all: it would
        go into the pod from under VFs that are only not offered."""
        used = self._taken[physical_function]
        if self._functions[physical_function].virtual_functions:
            return self._vfs[physical_function][used] if self._free_vfs(physical_function) > 0 else None
        nic = self._nics.get(physical_function)
        return nic if nic is not None and used == 0 else None

    def _take(self, physical_functions: Iterable[str], nics: Iterable[Nic]) -> None:
        self._taken.update(physical_functions)
        self.kept.update(nic.address for nic in nics)


def whole_switches(units: Iterable[Unit]) -> list[Unit]:
    """All of a switch as one, where the matching made several units below it."""
    below: defaultdict[str, list[Unit]] = defaultdict(list)
    for unit in units:
        if unit.pair.pcie_switch:
            below[unit.pair.pcie_switch].append(unit)
    return [joined(held, switch) for switch, held in below.items() if len(held) > 1]


def joined(units: Sequence[Unit], switch: str | None) -> Unit:
    """Several units as one."""
    sources = {unit.pair.source for unit in units}
    whole = Pair(
        gpus=tuple(gpu for unit in units for gpu in unit.pair.gpus),
        nics=tuple(nic for unit in units for nic in unit.pair.nics),
        distance=worst(unit.pair.distance for unit in units),
        pcie_switch=switch,
        source=sources.pop() if len(sources) == 1 else Source.OVERRIDE,  # only an override makes a mixture
    )
    gpus = tuple(gpu for unit in units for gpu in unit.gpus)
    return Unit(whole, gpus, tuple(nic for unit in units for nic in unit.nics))
