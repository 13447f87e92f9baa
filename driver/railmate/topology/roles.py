"""Which NICs carry a GPU's traffic between nodes (rails) and which must never be offered for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from railmate.inventory.address import card
from railmate.inventory.model import PciFunction
from railmate.topology.model import Role

_NVIDIA_NETWORKING = 0x15B3
_NVSWITCH_MANAGEMENT_SUBSYSTEM = (0x15B3, 0x0087)
_MANAGEMENT_VPD = b"SW_MNG"
DATA_DIRECT = (0x15B3, 0x2100)
_NVME_CLASS = 0x0108
_CRAY = 0x17DB  # Slingshot: fabric NICs whose driver makes no RDMA device
_ETHERNET_ONLY = {  # ConnectX-4 Lx and -6 Lx, at most 50 Gbit/s, for the host's own network
    (_NVIDIA_NETWORKING, 0x1015),
    (_NVIDIA_NETWORKING, 0x101F),
}
_DPUS = {(_NVIDIA_NETWORKING, device) for device in (0xA2D2, 0xA2D6, 0xA2DC)}  # BlueField 1 to 3
_INFINIBAND = "InfiniBand"

Model = tuple[int, int]


def model(function: PciFunction) -> Model:
    return function.vendor, function.device


def is_management(function: PciFunction) -> bool:
    """NVSwitch management: a NIC in looks, in fact the way to the switches of NVLink."""
    subsystem = (function.subsystem_vendor, function.subsystem_device)
    return subsystem == _NVSWITCH_MANAGEMENT_SUBSYSTEM or _MANAGEMENT_VPD in (function.vpd or b"")


def can_be_rail(function: PciFunction) -> bool:
    return (
        (function.has_rdma or function.vendor == _CRAY)
        and model(function) != DATA_DIRECT
        and not is_management(function)
    )


def roles_by_switch(
    nics: Iterable[PciFunction],
    gpu_chains: Mapping[str, tuple[str, ...]],
    chains: Mapping[str, tuple[str, ...]],
    storage_switches: frozenset[str],
) -> dict[str, Role]:
    """Roles where the machine has switches: a rail shares one with a GPU.

    Where a switch holds NICs of the model most rails have, another model beside it serves something
    else (Dell XE9680: a BlueField for north-south traffic beside GPU 4 and its rail).
    """
    nics = list(nics)
    gpu_switches = frozenset(switch for chain in gpu_chains.values() for switch in chain)
    candidates = [
        nic for nic in nics if can_be_rail(nic) and not gpu_switches.isdisjoint(chains[nic.address])
    ]
    usual = usual_model(candidates)
    usual_switches = {
        _nearest(chains[nic.address], gpu_switches) for nic in candidates if model(nic) == usual
    }
    rails = {
        nic.address
        for nic in candidates
        if model(nic) == usual or _nearest(chains[nic.address], gpu_switches) not in usual_switches
    }
    return {nic.address: _role(nic, rails, chains, storage_switches) for nic in nics}


def roles_without_switch(
    nics: Iterable[PciFunction],
    chains: Mapping[str, tuple[str, ...]],
    storage_switches: frozenset[str],
    trust_rates: bool,
) -> dict[str, Role]:
    """Roles where no switch tells: RDMA NICs are rails, except those that are clearly something else.

    ``trust_rates``: link rates of a hypervisor's devices mean nothing.
    """
    nics = list(nics)
    candidates = [nic for nic in nics if can_be_rail(nic)]
    candidates = _without(candidates, _ETHERNET_ONLY)
    candidates = _without(candidates, _DPUS)
    if len({model(nic) for nic in candidates}) > 1:
        # Azure: beside its InfiniBand functions a guest has an Ethernet one of another model for its own network
        infiniband = [nic for nic in candidates if _link_layer(nic) == _INFINIBAND]
        if 2 * len(infiniband) >= len(candidates):
            candidates = infiniband
    if trust_rates and len({model(nic) for nic in candidates}) > 1:
        rates = {
            nic.address: max((device.rate or 0 for device in nic.rdma_devices), default=0)
            for nic in candidates
        }
        if all(rates.values()):
            fastest = max(rates.values())
            candidates = [nic for nic in candidates if rates[nic.address] * 2 > fastest]
    rails = {nic.address for nic in candidates}
    return {nic.address: _role(nic, rails, chains, storage_switches) for nic in nics}


def _link_layer(nic: PciFunction) -> str | None:
    return next((device.link_layer for device in nic.rdma_devices), None)


def usual_model(nics: Iterable[PciFunction]) -> Model | None:
    """The model of most cards; between equals the one that comes first in PCI order."""
    cards = {card(nic.address): model(nic) for nic in nics}
    counts = Counter(cards.values())
    return max(counts, key=counts.__getitem__) if counts else None


def _nearest(chain: tuple[str, ...], switches: frozenset[str]) -> str | None:
    return next((switch for switch in reversed(chain) if switch in switches), None)


def _without(nics: list[PciFunction], models: set[Model]) -> list[PciFunction]:
    """Leaves out models that only serve as rails where there is nothing better."""
    return [nic for nic in nics if model(nic) not in models] or nics


def _role(
    nic: PciFunction, rails: set[str], chains: Mapping[str, tuple[str, ...]], storage_switches: frozenset[str]
) -> Role:
    if nic.address in rails:
        return Role.RAIL
    if is_management(nic):
        return Role.MANAGEMENT
    if nic.has_rdma and not storage_switches.isdisjoint(chains[nic.address]):
        return Role.STORAGE
    return Role.OTHER


def storage_switches(
    functions: Iterable[PciFunction], chains: Mapping[str, tuple[str, ...]], gpu_switches: frozenset[str]
) -> frozenset[str]:
    """Switches with NVMe drives and no GPU: an RDMA NIC beside the drives serves them."""
    return frozenset(
        switch
        for function in functions
        if function.class_code >> 8 == _NVME_CLASS
        for switch in chains[function.address]
        if switch not in gpu_switches
    )
