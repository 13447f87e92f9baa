"""What a machine is, before anything is paired: switches above each device, machine class, roles of the NICs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TypeVar

from railmate.inventory.model import Inventory, PciFunction
from railmate.topology import nickinds
from railmate.topology import roles as role_rules
from railmate.topology.datadirect import useful_dma_functions
from railmate.topology.lostgpu import GpuPlaces
from railmate.topology.machineclass import classify, is_guest, switch_of_everything
from railmate.topology.model import MachineClass, Role
from railmate.topology.override import NOTHING, fit
from railmate.topology.preference import better_kinds, rates_of, without_few_slow
from railmate.topology.switches import Switches
from railmate.topology.tree import place
from railmate_api.override import TopologyOverride

Value = TypeVar("Value")


class Survey:
    """The parts of a machine and what each is; the analysis goes on from there."""

    def __init__(self, inventory: Inventory, override: TopologyOverride | None) -> None:
        self.functions = inventory.functions
        self.places = {address: place(function) for address, function in self.functions.items()}
        self.tree = Switches(self.functions, self.places)
        self.gpus = [gpu.function for gpu in inventory.gpus]
        self.nics = [nic.function for nic in inventory.nics if not nic.is_vf]
        self.vfs = {
            nic.address: nic.function.physical_function
            for nic in inventory.nics
            if nic.function.physical_function is not None
        }
        self.override = override
        self.stated = NOTHING if override is None else fit(override, inventory)
        gpus = [gpu.address for gpu in self.gpus]
        self.seen_chains = self._seen_chains(gpus)
        self.dma: Mapping[str, str] = {}
        if not self.shared(self.seen_chains, self.leading):  # else data go by the switch, and that decides
            self.dma = useful_dma_functions(self.functions, self.places, gpus)

    def _seen_chains(self, gpus: list[str]) -> Mapping[str, tuple[str, ...]]:
        """The switches above each function that sysfs shows and that tell something."""
        chains = {a: self.tree.above(one) for a, one in self.places.items()}
        nics = [nic.address for nic in self.nics if nickinds.is_rdma_nic(nic)]
        empty = switch_of_everything(gpus, nics, chains, self.functions)
        if empty is None:
            return chains
        return {a: tuple(switch for switch in chain if switch != empty) for a, chain in chains.items()}

    @cached_property
    def chains(self) -> Mapping[str, tuple[str, ...]]:
        """The switches above each function; a NIC with a DMA function is where that is."""
        by_dma = {nic: self.seen_chains[dma] for nic, dma in self.dma.items()}
        return {**self.seen_chains, **by_dma, **self.stated.chains}

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
            if (stated[nic.address] is Role.RAIL if nic.address in stated else nic.address in self.possible)
        ]

    @cached_property
    def leading(self) -> list[PciFunction]:
        """Candidates that decide whether switches tell: a DPU or a slow NIC for the host's own traffic may share a
        switch with GPUs whose rails are on root ports."""
        stated = [nic for nic in self.candidates if nic.address in self.stated.roles]
        others = [nic for nic in self.candidates if nic.address not in self.stated.roles]
        is_real = not is_guest(self.gpus, self.functions, self.places)
        rates = rates_of(others) if is_real else {}
        return [*stated, *without_few_slow(better_kinds(others, len(self.gpus), rates), rates)]

    @cached_property
    def vfs_of(self) -> Mapping[str, list[PciFunction]]:
        result: dict[str, list[PciFunction]] = {}
        for vf, pf in self.vfs.items():
            result.setdefault(pf, []).append(self.functions[vf])
        return result

    @cached_property
    def possible(self) -> frozenset[str]:
        """NICs that could be rails by what they are."""
        return frozenset(
            nic.address for nic in self.nics if nickinds.can_be_rail(nic, self.vfs_of.get(nic.address, ()))
        )

    def shared(self, chains: Mapping[str, tuple[str, ...]], nics: Iterable[PciFunction]) -> list[str]:
        """Switches that have a GPU and one of ``nics`` below them."""
        above_gpus = {switch for gpu in self.gpus for switch in chains[gpu.address]}
        return sorted({s for nic in nics for s in chains[nic.address] if s in above_gpus})

    @cached_property
    def by_data_direct(self) -> bool:
        """Whether it is DMA functions that tell: no GPU meets a NIC that could be a rail on a switch."""
        return bool(self.dma)

    @cached_property
    def by_switch(self) -> bool:
        """Whether switches, of sysfs or an override, tell."""
        return bool(self.shared(self.chains, self.leading)) and not self.by_data_direct

    @cached_property
    def machine_class(self) -> MachineClass:
        """Of the machine itself: an override adds knowledge and makes no other machine of it."""
        nics = self.leading or self.nics  # without RDMA the tree is what it is all the same
        return classify(
            self.gpus,
            nics,
            self.functions,
            self.places,
            self.shared(self.seen_chains, nics),
            has_data_direct=self.by_data_direct,
        )

    @cached_property
    def roles(self) -> Mapping[str, Role]:
        drives = role_rules.drives_by_switch(self.functions.values(), self.chains)
        possible = [
            nic for nic in self.nics if nic.address in self.possible and nic.address not in self.stated.roles
        ]
        storage = frozenset(drives) - self.gpu_switches
        if self.by_switch:
            rails = self._rails_by_switch(possible, drives)
            storage -= {switch for address in rails for switch in self.chains[address]}
        elif self.by_data_direct:
            rails = role_rules.roles_by_data_direct(possible, self.dma)
        else:
            # beside drives and no GPU an RDMA NIC serves the drives
            rails = role_rules.roles_without_switch(
                possible, len(self.gpus), self.chains, storage, self._trust_rates
            )
        found = {
            nic.address: role_rules.role_of(
                nic, rails, nic.has_rdma or nic.address in self.possible, self.chains, storage
            )
            for nic in self.nics
        }
        return self.with_vfs({**found, **self.stated.roles})

    @property
    def _trust_rates(self) -> bool:
        return self.machine_class is not MachineClass.VIRTUAL

    def _rails_by_switch(self, possible: list[PciFunction], drives: Mapping[str, int]) -> set[str]:
        gpu_chains = {gpu.address: self.chains[gpu.address] for gpu in self.gpus}
        places = GpuPlaces(self.functions, self.places, self.seen_chains, list(gpu_chains))
        silent = [
            nic
            for nic in self.nics
            if nickinds.is_silent(nic) and nic.address not in self.possible | self.stated.roles.keys()
        ]
        rails = role_rules.roles_by_switch(
            possible, gpu_chains, self.chains, drives, self._trust_rates, places.is_lost_beside, silent
        )
        left_out = [gpu for gpu in gpu_chains if gpu not in self.stated.chains]
        if not self.stated.chains or not left_out or self.shared(self.seen_chains, self.leading):
            return rails
        # the override tells the switches of some devices; of the others sysfs tells what it did without it
        others = [nic for nic in possible if nic.address not in self.stated.chains]
        storage = frozenset(drives) - self.gpu_switches
        return (rails & self.stated.chains.keys()) | role_rules.roles_without_switch(
            others, len(left_out), self.chains, storage, self._trust_rates
        )

    @cached_property
    def rails(self) -> list[PciFunction]:
        return [nic for nic in self.nics if self.roles[nic.address] is Role.RAIL]

    def numa_node(self, address: str) -> int | None:
        if address in self.stated.numa_nodes:
            return self.stated.numa_nodes[address]
        return self.functions[address].numa_node

    def with_vfs(self, by_address: Mapping[str, Value]) -> dict[str, Value]:
        """VFs have what their PF has."""
        result = dict(by_address)
        result.update((vf, by_address[pf]) for vf, pf in self.vfs.items() if pf in by_address)
        return result
