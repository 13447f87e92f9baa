"""From an inventory to a topology: places, roles, machine class, distances and pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

from railmate.inventory.address import card, order
from railmate.inventory.cards import cards
from railmate.inventory.model import Inventory
from railmate.topology.distance import ORDER, bridges_between, distance, worst
from railmate.topology.matching import groups, match
from railmate.topology.model import Distance, GpuNicPath, MachineClass, Pair, Role, Source, Topology
from railmate.topology.nccl import NcclTree
from railmate.topology.notes import Knowledge, explain
from railmate.topology.rails import rail_ordinals
from railmate.topology.rolenotes import explain_beside, explain_roles, explain_unknown
from railmate.topology.survey import Survey
from railmate.topology.switches import common, meeting_switch
from railmate_api.override import TopologyOverride

_MORE_THAN_BRIDGES = 1 << 10  # between two devices; a path has some ten
_WEAKEST_FIRST = (Source.NUMA, Source.OVERRIDE, Source.DATA_DIRECT, Source.SYSFS)


def analyze(inventory: Inventory, override: TopologyOverride | None = None) -> Topology:
    """The topology of a machine; what ``override`` says wins over sysfs.

    Pure: the same arguments give the same answer.
    """
    return _Analysis(inventory, override).topology()


class _Analysis(Survey):
    def __init__(self, inventory: Inventory, override: TopologyOverride | None) -> None:
        super().__init__(inventory, override)
        self.nccl = NcclTree(self.functions)
        # ports of a card, halves of a socket-direct card, members of a bond: each one way out of the node
        self.joined = (*cards(inventory.nics), *(bond.functions for bond in inventory.bonds))

    @cached_property
    def cards(self) -> Mapping[str, list[str]]:
        """Rails to be matched, by card, in PCI order: functions of one card are its ports."""
        taken = {nic for _, nics in self.stated.pairs for nic in nics}
        result: dict[str, list[str]] = {}
        for nic in self.rails:
            if nic.address not in taken:
                result.setdefault(card(nic.address), []).append(nic.address)
        return result

    @cached_property
    def depth(self) -> int:
        return max((len(self.chains[gpu.address]) for gpu in self.gpus), default=0)

    def path(self, gpu: str, nic: str) -> GpuNicPath:
        switches = common((self.chains[gpu], self.chains[nic]))
        return GpuNicPath(
            gpu=gpu,
            nic=nic,
            distance=self.distance(gpu, nic),
            pcie_switch=switches[-1] if switches else None,
            source=self.source(gpu, nic),
            nccl_distance=self.nccl.distance(gpu, nic),
        )

    def distance(self, gpu: str, nic: str) -> Distance:
        """nvidia-smi's class, which looks at the NIC itself and not at its DMA function."""
        if not self.is_overridden(gpu, nic):
            return distance(self.places[gpu], self.places[nic], self.numa_node(gpu), self.numa_node(nic))
        chains = self.chains[gpu], self.chains[nic]
        shared = common(chains)
        if shared:
            return Distance.PIX if {len(chain) for chain in chains} == {len(shared)} else Distance.PXB
        first, second = (replace(self.places[address], bridges=()) for address in (gpu, nic))
        return distance(first, second, self.numa_node(gpu), self.numa_node(nic))

    def is_overridden(self, gpu: str, nic: str) -> bool:
        """Whether the override tells the switches of one of the two, and by that what they share."""
        return gpu in self.stated.chains or nic in self.stated.chains

    def source(self, gpu: str, nic: str) -> Source:
        """Past a switch the class rests on host bridges and NUMA nodes, which are no knowledge of a way."""
        if self.is_overridden(gpu, nic):
            return Source.OVERRIDE
        if self.shares_dma(gpu, nic):
            return Source.DATA_DIRECT
        if common((self.chains[gpu], self.chains[nic])):
            return Source.SYSFS
        return Source.OVERRIDE if {gpu, nic} & self.stated.numa_nodes.keys() else Source.NUMA

    def shares_dma(self, gpu: str, nic: str) -> bool:
        dma = self.dma.get(nic)
        if dma is None or self.is_overridden(gpu, nic):
            return False
        return self.places[dma].host_bridge == self.places[gpu].host_bridge

    def data_distance(self, gpu: str, nic: str) -> Distance:
        """The class of the way the data take: from the DMA function where there is one for this GPU."""
        if not self.shares_dma(gpu, nic):
            return self.distance(gpu, nic)
        return distance(self.places[gpu], self.places[self.dma[nic]], None, None)

    def closeness(self, gpu: str, card_address: str) -> int:
        """Cost of a GPU and a card: the deeper their nearest common switch the nearer, then the class, then
        the number of bridges between them.

        That last one tells apart the NICs of a chip which shows as two levels: on DGX A100 two GPUs and two
        NICs share each chip, and one GPU and one NIC of them its lower level.
        """
        nic = self.cards[card_address][0]
        shared = common((self.chains[gpu], self.chains[nic]))
        near = (self.depth - len(shared)) * len(Distance) + ORDER[self.data_distance(gpu, nic)]
        between = 0
        if shared and not self.is_overridden(gpu, nic):
            between = bridges_between(self.places[gpu], self.places[self.dma.get(nic, nic)])
        return near * _MORE_THAN_BRIDGES + between

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """By switch first. What that leaves is matched over the whole node where no switch is known at all, and
        where some are, only within a host bridge or NUMA node: a rail whose GPU is lost is no other socket's."""
        gpus, cards = [gpu.address for gpu in self.gpus], list(self.cards)
        stated = [self._pair(*pair, Source.OVERRIDE) for pair in self.stated.pairs]
        gpus = [gpu for gpu in gpus if not any(gpu in pair.gpus for pair in stated)]
        rest: Callable[[str, str], bool] = self._are_near if self.by_switch else lambda _gpu, _card: True
        stages: list[Callable[[str, str], bool]] = [self._share_switch, rest]
        pairs = stated
        for near in stages:
            for some_gpus, some_cards in groups(gpus, cards, near):
                for matched_gpus, matched_cards in match(some_gpus, some_cards, self.closeness):
                    nics = tuple(nic for one in matched_cards for nic in self.cards[one])
                    pairs.append(self._pair(matched_gpus, nics))
                    gpus = [gpu for gpu in gpus if gpu not in matched_gpus]
                    cards = [one for one in cards if one not in matched_cards]
        return tuple(sorted(pairs, key=lambda pair: order(pair.gpus[0])))

    @cached_property
    def shares(self) -> tuple[Pair, ...]:
        stated = {gpus for gpus, _ in self.stated.pairs}
        return tuple(
            self._pair((gpu,), pair.nics, Source.OVERRIDE if pair.gpus in stated else None)
            for pair in self.pairs
            if len(pair.gpus) > 1
            for gpu in pair.gpus
        )

    def _share_switch(self, gpu: str, card_address: str) -> bool:
        nic = self.cards[card_address][0]
        return self.shares_dma(gpu, nic) or bool(common((self.chains[gpu], self.chains[nic])))

    def _are_near(self, gpu: str, card_address: str) -> bool:
        return self.distance(gpu, self.cards[card_address][0]) is not Distance.SYS

    def _pair(self, gpus: tuple[str, ...], nics: tuple[str, ...], source: Source | None = None) -> Pair:
        switches = common(self.chains[address] for address in (*gpus, *nics))
        ways = [(gpu, nic) for gpu in gpus for nic in nics]
        if source is None:
            sources = {self.source(*way) for way in ways}
            # one answer for several ways: by the weakest of what it rests on
            source = next(one for one in _WEAKEST_FIRST if one in sources)
        return Pair(
            gpus=gpus,
            nics=nics,
            distance=worst(self.data_distance(*way) for way in ways),
            pcie_switch=switches[-1] if switches else None,
            source=source,
        )

    def rail_ordinals(self) -> dict[str, int]:
        ordinals = rail_ordinals([nic.address for nic in self.rails], self.joined)
        stated = {a: rail for a, rail in self.stated.rails.items() if a not in self.roles or a in ordinals}
        ordinals.update(stated)
        for pair in self.pairs:
            ordinals.update((gpu, ordinals[pair.nics[0]]) for gpu in pair.gpus if gpu not in stated)
        return self.with_vfs(ordinals)

    def role_notes(self) -> tuple[str, ...]:
        nics = [nic for nic in self.nics if nic.address not in self.stated.roles]
        unknown = explain_unknown(nics)
        gpus = [gpu.address for gpu in self.gpus]
        if not self.by_switch:
            beside = [] if self.by_data_direct or not self.rails else nics
            return (*explain_beside(gpus, beside, self.roles, self.chains), *unknown)
        return (*explain_roles(gpus, nics, self.roles, self.pairs, self.chains), *unknown)

    def lost_rails(self) -> list[str]:
        """Rail ordinals that the override gives to NICs which are no rails: these have none."""
        asked = self.override.rails if self.override is not None else {}
        return [
            f"The override gives {address} rail {asked[address]}, but its role is {role}: it has no rail."
            for address, role in self.roles.items()
            if address in asked and address in self.stated.rails and role is not Role.RAIL
        ]

    @cached_property
    def device_switches(self) -> dict[str, str]:
        above_rails = frozenset(switch for nic in self.rails for switch in self.chains[nic.address])
        result = {}
        for function in (*self.gpus, *self.nics):
            switch = meeting_switch(self.chains[function.address], self.gpu_switches, above_rails)
            if switch is not None:
                result[function.address] = switch
        return self.with_vfs(result)

    def device_sources(self) -> dict[str, Source]:
        """Where a device's place is from: its pcieSwitch, or that it has none."""
        tied = {a for path in self.paths if path.source is Source.DATA_DIRECT for a in (path.gpu, path.nic)}
        knows = Source.SYSFS if self.machine_class is MachineClass.SWITCHED else Source.NUMA
        result = {}
        for function in (*self.gpus, *self.nics):
            address = function.address
            if address in self.stated.chains:
                result[address] = Source.OVERRIDE
            elif address in tied:
                result[address] = Source.DATA_DIRECT
            else:
                result[address] = Source.SYSFS if address in self.device_switches else knows
        return self.with_vfs(result)

    @cached_property
    def paths(self) -> tuple[GpuNicPath, ...]:
        return tuple(self.path(gpu.address, nic.address) for gpu in self.gpus for nic in self.nics)

    def topology(self) -> Topology:
        devices = [function.address for function in (*self.gpus, *self.nics)]
        nodes = {a: node for a in devices if (node := self.numa_node(a)) is not None}
        knowledge = Knowledge(
            machine_class=self.machine_class,
            gpus=tuple(gpu.address for gpu in self.gpus),
            rails=tuple(nic.address for nic in self.rails),
            pairs=self.pairs,
            numa_known=any(gpu.address in nodes for gpu in self.gpus),
            shared_switches=bool(self.shared(self.chains, self.leading)),
            data_direct=self.by_data_direct,
            stated_switches=len({switch for chain in self.stated.chains.values() for switch in chain}),
        )
        return Topology(
            machine_class=self.machine_class,
            paths=self.paths,
            pairs=self.pairs,
            shares=self.shares,
            roles=self.roles,
            switches=self.device_switches,
            rails=self.rail_ordinals(),
            sources=self.device_sources(),
            numa_nodes=self.with_vfs(nodes),
            notes=(*explain(knowledge), *self.role_notes(), *self.stated.notes, *self.lost_rails()),
        )
