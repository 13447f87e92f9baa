"""From an inventory to a topology: places, roles, machine class, distances and pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TypeVar

from railmate.inventory.address import card, order
from railmate.inventory.model import Inventory, PciFunction
from railmate.topology import roles as role_rules
from railmate.topology.datadirect import dma_functions
from railmate.topology.distance import ORDER, distance, worst
from railmate.topology.machineclass import REASONS, classify
from railmate.topology.matching import groups, match
from railmate.topology.model import Distance, GpuNicPath, MachineClass, Pair, Role, Source, Topology
from railmate.topology.switches import Switches, common, meeting_switch
from railmate.topology.tree import place

Value = TypeVar("Value")


def analyze(inventory: Inventory) -> Topology:
    """The topology of a machine. Pure: the same inventory gives the same answer."""
    return _Analysis(inventory).topology()


class _Analysis:
    def __init__(self, inventory: Inventory) -> None:
        self.functions = inventory.functions
        self.places = {address: place(function) for address, function in self.functions.items()}
        self.switches = Switches(self.functions, self.places)
        self.gpus = [gpu.function for gpu in inventory.gpus]
        self.nics = [nic.function for nic in inventory.nics if not nic.is_vf]
        self.vfs = {
            nic.address: nic.function.physical_function
            for nic in inventory.nics
            if nic.function.physical_function is not None
        }
        self.dma = self._useful_dma_functions()

    def _useful_dma_functions(self) -> Mapping[str, str]:
        """A DMA function counts where it shares a host bridge with a GPU."""
        gpu_bridges = {self.places[gpu.address].host_bridge for gpu in self.gpus}
        tied = dma_functions(self.functions.values())
        return {nic: dma for nic, dma in tied.items() if self.places[dma].host_bridge in gpu_bridges}

    @cached_property
    def chains(self) -> Mapping[str, tuple[str, ...]]:
        """The switches above each function; a NIC with a DMA function is where that is."""
        return {a: self.switches.above(self.places[self.dma.get(a, a)]) for a in self.functions}

    @cached_property
    def gpu_switches(self) -> frozenset[str]:
        return frozenset(switch for gpu in self.gpus for switch in self.chains[gpu.address])

    @cached_property
    def shared_switches(self) -> list[str]:
        """Switches that have a GPU and a NIC which could be a rail below them."""
        candidates = [nic for nic in self.nics if role_rules.can_be_rail(nic)]
        return sorted({s for nic in candidates for s in self.chains[nic.address] if s in self.gpu_switches})

    @cached_property
    def machine_class(self) -> MachineClass:
        candidates = [nic for nic in self.nics if role_rules.can_be_rail(nic)]
        return classify(
            self.gpus,
            candidates,
            self.functions,
            self.places,
            self.shared_switches,
            has_data_direct=bool(self.dma),
        )

    @cached_property
    def roles(self) -> Mapping[str, Role]:
        storage = role_rules.storage_switches(self.functions.values(), self.chains, self.gpu_switches)
        if self.shared_switches and not self.dma:
            gpu_chains = {gpu.address: self.chains[gpu.address] for gpu in self.gpus}
            found = role_rules.roles_by_switch(self.nics, gpu_chains, self.chains, storage)
        else:
            trust_rates = self.machine_class is not MachineClass.VIRTUAL
            found = role_rules.roles_without_switch(self.nics, self.chains, storage, trust_rates)
        return self._with_vfs(found)

    @cached_property
    def rails(self) -> list[PciFunction]:
        return [nic for nic in self.nics if self.roles[nic.address] is Role.RAIL]

    @cached_property
    def cards(self) -> Mapping[str, list[str]]:
        """Rails by card, in PCI order: functions of one card are its ports."""
        result: dict[str, list[str]] = {}
        for nic in self.rails:
            result.setdefault(card(nic.address), []).append(nic.address)
        return result

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
        )

    def distance(self, gpu: str, nic: str) -> Distance:
        """nvidia-smi's class, which looks at the NIC itself and not at its DMA function."""
        return distance(
            self.places[gpu], self.places[nic], self.functions[gpu].numa_node, self.functions[nic].numa_node
        )

    def source(self, gpu: str, nic: str) -> Source:
        """Past a switch the class rests on host bridges and NUMA nodes, which are no knowledge of a way."""
        if self.shares_dma(gpu, nic):
            return Source.DATA_DIRECT
        return Source.SYSFS if common((self.chains[gpu], self.chains[nic])) else Source.NUMA

    def shares_dma(self, gpu: str, nic: str) -> bool:
        dma = self.dma.get(nic)
        return dma is not None and self.places[dma].host_bridge == self.places[gpu].host_bridge

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
        stages: list[Callable[[str, str], bool]] = [self._share_switch]
        if not self.shared_switches or self.dma:
            stages += [self._share_numa_node, lambda _gpu, _card: True]
        pairs = []
        for near in stages:
            for some_gpus, some_cards in groups(gpus, cards, near):
                for matched_gpus, matched_cards in match(some_gpus, some_cards, self.closeness):
                    pairs.append(self._pair(matched_gpus, matched_cards))
                    gpus = [gpu for gpu in gpus if gpu not in matched_gpus]
                    cards = [one for one in cards if one not in matched_cards]
        return tuple(sorted(pairs, key=lambda pair: order(pair.gpus[0])))

    def _share_switch(self, gpu: str, card_address: str) -> bool:
        nic = self.cards[card_address][0]
        return self.shares_dma(gpu, nic) or bool(common((self.chains[gpu], self.chains[nic])))

    def _share_numa_node(self, gpu: str, card_address: str) -> bool:
        return self.distance(gpu, self.cards[card_address][0]) is not Distance.SYS

    def _pair(self, gpus: tuple[str, ...], cards: tuple[str, ...]) -> Pair:
        nics = tuple(nic for one in cards for nic in self.cards[one])
        switches = common(self.chains[address] for address in (*gpus, *nics))
        if all(self.shares_dma(gpu, nic) for gpu in gpus for nic in nics):
            source = Source.DATA_DIRECT
        else:
            source = Source.SYSFS if switches else Source.NUMA
        return Pair(
            gpus=gpus,
            nics=nics,
            distance=worst(self.data_distance(gpu, nic) for gpu in gpus for nic in nics),
            pcie_switch=switches[-1] if switches else None,
            source=source,
        )

    def rail_ordinals(self) -> dict[str, int]:
        ordinals = {nic: index for index, ports in enumerate(self.cards.values()) for nic in ports}
        for pair in self.pairs:
            ordinals.update((gpu, ordinals[pair.nics[0]]) for gpu in pair.gpus)
        return self._with_vfs(ordinals)

    def device_switches(self) -> dict[str, str]:
        above_rails = frozenset(switch for nic in self.rails for switch in self.chains[nic.address])
        result = {}
        for function in (*self.gpus, *self.nics):
            switch = meeting_switch(self.chains[function.address], self.gpu_switches, above_rails)
            if switch is not None:
                result[function.address] = switch
        return self._with_vfs(result)

    def notes(self) -> tuple[str, ...]:
        notes = []
        if not self.gpus:
            notes.append("No GPU was found.")
        elif not self.rails:
            notes.append("No NIC was found that could be a GPU's rail.")
        elif not self.shared_switches and self.machine_class in REASONS and not self.dma:
            notes.append(REASONS[self.machine_class])
        elif self.machine_class is MachineClass.VIRTUAL:
            notes.append(
                "The PCIe switches are the hypervisor's; railmate trusts that it shows them as they are."
            )
        if self.gpus and self.rails:
            if not self.shared_switches and all(gpu.numa_node is None for gpu in self.gpus):
                notes.append("The kernel knows no NUMA node of any GPU, so pairs follow PCI order only.")
            paired = {gpu for pair in self.pairs for gpu in pair.gpus}
            for gpu in self.gpus:
                if gpu.address not in paired:
                    what = "PCIe switch" if self.shared_switches else "NUMA node"
                    notes.append(f"GPU {gpu.address} is in no pair: no rail NIC is on its {what}.")
        return tuple(notes)

    def topology(self) -> Topology:
        return Topology(
            machine_class=self.machine_class,
            paths=tuple(self.path(gpu.address, nic.address) for gpu in self.gpus for nic in self.nics),
            pairs=self.pairs,
            roles=self.roles,
            switches=self.device_switches(),
            rails=self.rail_ordinals(),
            notes=self.notes(),
        )
