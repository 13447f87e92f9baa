"""Short names that all views use: GPU0, NIC0 and so on, in PCI order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from railmate.inventory.model import Gpu, Inventory, Nic
from railmate.topology.model import Pair, Role, Topology


@dataclass(frozen=True)
class View:
    """An inventory and its topology, with what views look up."""

    inventory: Inventory
    topology: Topology

    @cached_property
    def nics(self) -> tuple[Nic, ...]:
        """Physical functions only."""
        return tuple(nic for nic in self.inventory.nics if not nic.is_vf)

    @cached_property
    def shown_nics(self) -> tuple[Nic, ...]:
        """NICs of the matrix: those that do RDMA, as ``nvidia-smi topo -m`` has it, and all rails."""
        return tuple(nic for nic in self.nics if nic.function.has_rdma or self.role(nic) is Role.RAIL)

    @cached_property
    def names(self) -> dict[str, str]:
        """Address -> ``GPU3``, ``NIC0``."""
        result = {gpu.address: f"GPU{index}" for index, gpu in enumerate(self.inventory.gpus)}
        result.update((nic.address, f"NIC{index}") for index, nic in enumerate(self.shown_nics))
        return result

    @cached_property
    def pair_of(self) -> dict[str, Pair]:
        """GPU or NIC address -> its pair."""
        return {address: pair for pair in self.topology.pairs for address in (*pair.gpus, *pair.nics)}

    def role(self, nic: Nic) -> Role:
        return self.topology.roles.get(nic.address, Role.OTHER)

    def vfs(self, nic: Nic) -> Iterator[Nic]:
        return (one for one in self.inventory.nics if one.function.physical_function == nic.address)


def device_name(nic: Nic) -> str:
    """The RDMA device, else the netdev, else nothing."""
    function = nic.function
    names = [device.name for device in function.rdma_devices] or [netdev.name for netdev in function.netdevs]
    return ",".join(names)


def product(gpu: Gpu) -> str:
    return gpu.product or f"{gpu.vendor} {gpu.function.vendor:04x}:{gpu.function.device:04x}"


def short(address: str) -> str:
    """Without domain 0000, for people."""
    return address.removeprefix("0000:")
