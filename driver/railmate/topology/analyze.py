"""From an inventory to a topology: places, roles, machine class, distances and pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

from railmate.inventory.address import card, order
from railmate.inventory.model import Inventory, PciFunction
from railmate.topology import roles as role_rules
from railmate.topology.datadirect import dma_functions
from railmate.topology.distance import ORDER, distance, worst
from railmate.topology.machineclass import classify
from railmate.topology.matching import groups, match
from railmate.topology.model import Distance, GpuNicPath, MachineClass, Pair, Role, Source, Topology
from railmate.topology.nccl import NcclTree
from railmate.topology.notes import Knowledge, explain
from railmate.topology.override import NOTHING, fit
from railmate.topology.rolenotes import explain_roles, explain_unknown
from railmate.topology.switches import Switches, common, meeting_switch
from railmate.topology.tree import place
from railmate_api.override import TopologyOverride

Value = TypeVar("Value")
_WEAKEST_FIRST = (Source.NUMA, Source.OVERRIDE, Source.DATA_DIRECT, Source.SYSFS)


def analyze(inventory: Inventory, override: TopologyOverride | None = None) -> Topology:
    """The topology of a machine; what ``override`` says wins over sysfs.

    Pure: the same arguments give the same answer.
    """
    return _Analysis(inventory, override).topology()


class _Analysis:
    def __init__(self, inventory: Inventory, override: TopologyOverride | None) -> None:
        self.functions = inventory.functions
        self.places = {address: place(function) for address, function in self.functions.items()}
        self.tree = Switches(self.functions, self.places)
        self.nccl = NcclTree(self.functions)
        self.gpus = [gpu.function for gpu in inventory.gpus]
        self.nics = [nic.function for nic in inventory.nics if not nic.is_vf]
        self.vfs = {
            nic.address: nic.function.physical_function
            for nic in inventory.nics
            if nic.function.physical_function is not None
        }
        self.override = override
        self.stated = NOTHING if override is None else fit(override, inventory)
        self.dma = self._useful_dma_functions()

    def _useful_dma_functions(self) -> Mapping[str, str]:
        """A DMA function counts where it shares a host bridge with a GPU."""
        gpu_bridges = {self.places[gpu.address].host_bridge for gpu in self.gpus}
        tied = dma_functions(self.functions.values())
        return {nic: dma for nic, dma in tied.items() if self.places[dma].host_bridge in gpu_bridges}

    @cached_property
    def seen_chains(self) -> Mapping[str, tuple[str, ...]]:
        """The switches above each function as sysfs has them; a NIC with a DMA function is where that is."""
        return {a: self.tree.above(self.places[self.dma.get(a, a)]) for a in self.functions}

    @cached_property
    def chains(self) -> Mapping[str, tuple[str, ...]]:
        return {**self.seen_chains, **self.stated.chains}

    @cached_property
    def gpu_switches(self) -> frozenset[str]:
        return frozenset(switch for gpu in self.gpus for switch in self.chains[gpu.address])

    @cached_property
    def candidates(self) -> list[PciFunction]:
        """NICs that could be rails."""
        stated = self.stated.roles
        return [
            nic
            for nic in self.nics
            if (stated[nic.address] is Role.RAIL if nic.address in stated else role_rules.can_be_rail(nic))
        ]

    def shared(self, chains: Mapping[str, tuple[str, ...]]) -> list[str]:
        """Switches that have a GPU and a NIC which could be a rail below them."""
        above_gpus = {switch for gpu in self.gpus for switch in chains[gpu.address]}
        return sorted({s for nic in self.candidates for s in chains[nic.address] if s in above_gpus})

    @cached_property
    def shared_switches(self) -> list[str]:
        return self.shared(self.chains)

    @cached_property
    def machine_class(self) -> MachineClass:
        """Of the machine itself: an override adds knowledge and makes no other machine of it."""
        return classify(
            self.gpus,
            self.candidates,
            self.functions,
            self.places,
            self.shared(self.seen_chains),
            has_data_direct=bool(self.dma),
        )

    @cached_property
    def roles(self) -> Mapping[str, Role]:
        drives = role_rules.drives_by_switch(self.functions.values(), self.chains)
        nics = [nic for nic in self.nics if nic.address not in self.stated.roles]
        trust_rates = self.machine_class is not MachineClass.VIRTUAL
        if self.shared_switches and not self.dma:
            gpu_chains = {gpu.address: self.chains[gpu.address] for gpu in self.gpus}
            found = role_rules.roles_by_switch(nics, gpu_chains, self.chains, drives, trust_rates)
        else:
            # beside drives and no GPU an RDMA NIC serves the drives
            storage = frozenset(drives) - self.gpu_switches
            found = role_rules.roles_without_switch(nics, self.chains, storage, trust_rates)
        return self._with_vfs({nic.address: {**found, **self.stated.roles}[nic.address] for nic in self.nics})

    @cached_property
    def rails(self) -> list[PciFunction]:
        return [nic for nic in self.nics if self.roles[nic.address] is Role.RAIL]

    @cached_property
    def cards(self) -> Mapping[str, list[str]]:
        """Rails to be matched, by card, in PCI order: functions of one card are its ports."""
        taken = {nic for _, nics in self.stated.pairs for nic in nics}
        result: dict[str, list[str]] = {}
        for nic in self.rails:
            if nic.address not in taken:
                result.setdefault(card(nic.address), []).append(nic.address)
        return result

    def numa_node(self, address: str) -> int | None:
        if address in self.stated.numa_nodes:
            return self.stated.numa_nodes[address]
        return self.functions[address].numa_node

    @cached_property
    def depth(self) -> int:
        return max((len(self.chains[gpu.address]) for gpu in self.gpus), default=0)

    def _with_vfs(self, by_address: Mapping[str, Value]) -> dict[str, Value]:
        """VFs have what their PF has."""
        result = dict(by_address)
        result.update((vf, by_address[pf]) for vf, pf in self.vfs.items() if pf in by_address)
        return result

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
        """Cost of a GPU and a card: the deeper their nearest common switch the nearer, then the class."""
        nic = self.cards[card_address][0]
        depth = len(common((self.chains[gpu], self.chains[nic])))
        return (self.depth - depth) * len(Distance) + ORDER[self.data_distance(gpu, nic)]

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """Nearest knowledge first; on a machine whose switches are known nothing else makes a pair."""
        gpus, cards = [gpu.address for gpu in self.gpus], list(self.cards)
        stated = [self._pair(*pair, Source.OVERRIDE) for pair in self.stated.pairs]
        gpus = [gpu for gpu in gpus if not any(gpu in pair.gpus for pair in stated)]
        stages: list[Callable[[str, str], bool]] = [self._share_switch]
        if not self.shared_switches or self.dma:
            stages += [self._share_numa_node, lambda _gpu, _card: True]
        pairs = stated
        for near in stages:
            for some_gpus, some_cards in groups(gpus, cards, near):
                for matched_gpus, matched_cards in match(some_gpus, some_cards, self.closeness):
                    nics = tuple(nic for one in matched_cards for nic in self.cards[one])
                    pairs.append(self._pair(matched_gpus, nics))
                    gpus = [gpu for gpu in gpus if gpu not in matched_gpus]
                    cards = [one for one in cards if one not in matched_cards]
        return tuple(sorted(pairs, key=lambda pair: order(pair.gpus[0])))

    def _share_switch(self, gpu: str, card_address: str) -> bool:
        nic = self.cards[card_address][0]
        return self.shares_dma(gpu, nic) or bool(common((self.chains[gpu], self.chains[nic])))

    def _share_numa_node(self, gpu: str, card_address: str) -> bool:
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
        cards: dict[str, int] = {}
        for nic in self.rails:
            cards.setdefault(card(nic.address), len(cards))
        ordinals = {nic.address: cards[card(nic.address)] for nic in self.rails}
        stated = {a: rail for a, rail in self.stated.rails.items() if a not in self.roles or a in ordinals}
        ordinals.update(stated)
        for pair in self.pairs:
            ordinals.update((gpu, ordinals[pair.nics[0]]) for gpu in pair.gpus if gpu not in stated)
        return self._with_vfs(ordinals)

    def role_notes(self) -> tuple[str, ...]:
        nics = [nic for nic in self.nics if nic.address not in self.stated.roles]
        unknown = explain_unknown(nics)
        if not self.shared_switches or self.dma:
            return unknown
        gpus = [gpu.address for gpu in self.gpus]
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
        return self._with_vfs(result)

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
        return self._with_vfs(result)

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
            shared_switches=bool(self.shared_switches),
            data_direct=bool(self.dma),
            stated_switches=len({switch for chain in self.stated.chains.values() for switch in chain}),
        )
        return Topology(
            machine_class=self.machine_class,
            paths=self.paths,
            pairs=self.pairs,
            roles=self.roles,
            switches=self.device_switches,
            rails=self.rail_ordinals(),
            sources=self.device_sources(),
            numa_nodes=self._with_vfs(nodes),
            notes=(*explain(knowledge), *self.role_notes(), *self.stated.notes, *self.lost_rails()),
        )
