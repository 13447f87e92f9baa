"""Which NICs carry a GPU's traffic between nodes (rails) and which must never be offered for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from railmate.inventory.address import card, order
from railmate.inventory.model import PciFunction
from railmate.inventory.vpd import keyword
from railmate.topology.model import Role

_NVIDIA_NETWORKING = 0x15B3
_NVSWITCH_MANAGEMENT_SUBSYSTEM = (0x15B3, 0x0087)
_MANAGEMENT_VPD = b"SW_MNG"
DATA_DIRECT = (0x15B3, 0x2100)
_NVME_CLASS = 0x0108
_CRAY = 0x17DB  # Slingshot: fabric NICs whose driver makes no RDMA device
_ETHERNET_ONLY = {  # at most 50 Gbit/s, for the host's own network
    (_NVIDIA_NETWORKING, 0x1015),  # ConnectX-4 Lx
    (_NVIDIA_NETWORKING, 0x101F),  # ConnectX-6 Lx
    (0x8086, 0x1599),  # Intel E810-XXV: backplane, QSFP, SFP
    (0x8086, 0x159A),
    (0x8086, 0x159B),
}
_DPUS = {(_NVIDIA_NETWORKING, device) for device in (0xA2D2, 0xA2D6, 0xA2DC)}  # BlueField 1 to 3
_INFINIBAND = "InfiniBand"
_ACTIVE = "ACTIVE"

Model = tuple[int, int]


def model(function: PciFunction) -> Model:
    return function.vendor, function.device


def is_management(function: PciFunction) -> bool:
    """NVSwitch management: a NIC in looks, in fact the way to the switches of NVLink."""
    subsystem = (function.subsystem_vendor, function.subsystem_device)
    return subsystem == _NVSWITCH_MANAGEMENT_SUBSYSTEM or _MANAGEMENT_VPD in (function.vpd or b"")


def may_be_management(function: PciFunction) -> bool:
    """Whether it cannot be told from NVSwitch management: no subsystem ids, no vital product data instead."""
    if function.subsystem_known or function.vendor != _NVIDIA_NETWORKING or is_management(function):
        return False
    return all(keyword(function.vpd or b"", name) is None for name in ("PN", "SN"))


def is_rdma_nic(function: PciFunction) -> bool:
    """Whether it does RDMA, or is Slingshot; a data-direct function is a part of a NIC."""
    return (function.has_rdma or function.vendor == _CRAY) and model(function) != DATA_DIRECT


def can_be_rail(function: PciFunction) -> bool:
    return is_rdma_nic(function) and not is_management(function) and not may_be_management(function)


def kind(function: PciFunction) -> str:
    """For people: what sort of NIC this is."""
    if model(function) in _DPUS:
        return "BlueField"
    return "Ethernet only" if model(function) in _ETHERNET_ONLY else "another model"


def roles_by_switch(
    nics: Iterable[PciFunction],
    gpu_chains: Mapping[str, tuple[str, ...]],
    chains: Mapping[str, tuple[str, ...]],
    drives: Mapping[str, int],
    trust_rates: bool,
) -> dict[str, Role]:
    """Roles where the machine has switches: a rail shares one with a GPU, or looks like those that do.

    Where a switch holds NICs of the model most rails have, another model beside it serves something
    else (Dell XE9680: a BlueField for north-south traffic beside GPU 4 and its rail). Alone on its
    switch it is a rail only if it is the usual model's equal. ``drives``: NVMe drives by switch.
    """
    nics = list(nics)
    gpu_switches = frozenset(switch for chain in gpu_chains.values() for switch in chain)
    possible = [nic for nic in nics if can_be_rail(nic)]
    rates = _rates(possible) if trust_rates else {}
    nearest = {nic.address: _nearest(chains[nic.address], gpu_switches) for nic in possible}
    candidates = [nic for nic in possible if nearest[nic.address] is not None]
    by_switch: dict[str | None, list[PciFunction]] = {}
    for nic in candidates:
        by_switch.setdefault(nearest[nic.address], []).append(nic)
    fitting = [nic for beside in by_switch.values() for nic in _best(beside, rates)]
    usual = usual_model(fitting, rates)
    seen = [nic for nic in candidates if model(nic) == usual]
    usual_switches = {nearest[nic.address] for nic in seen}
    rails = {nic.address for nic in seen}
    if usual is not None:
        rails |= {
            nic.address
            for nic in fitting
            if nearest[nic.address] not in usual_switches and _is_equal(model(nic), usual, rates)
        }
    flat_gpus = any(not chain for chain in gpu_chains.values())
    others = [nic for nic in possible if nearest[nic.address] is None]
    rails |= _alike(others, seen, nearest, chains, drives, flat_gpus)
    above_rails = {switch for address in rails for switch in chains[address]}
    storage = frozenset(drives) - gpu_switches - above_rails
    return {nic.address: _role(nic, rails, chains, storage) for nic in nics}


def _alike(
    nics: Iterable[PciFunction],
    rails: Iterable[PciFunction],
    nearest: Mapping[str, str | None],
    chains: Mapping[str, tuple[str, ...]],
    drives: Mapping[str, int],
    flat_gpus: bool,
) -> set[str]:
    """NICs that no GPU shares a switch with and that are rails all the same: the GPU may be lost.

    They are the same card as ``rails``, below a switch that has no more drives than a rail's may have
    (more, and they serve the drives); without a switch only where GPUs have none either.
    """
    rails = list(rails)
    cards_of_rails = {make(nic) for nic in rails}
    usual_drives = max((drives.get(nearest[nic.address] or "", 0) for nic in rails), default=0)
    result = set()
    for nic in nics:
        chain = chains[nic.address]
        beside = max((drives.get(switch, 0) for switch in chain), default=0)
        if make(nic) in cards_of_rails and beside <= usual_drives and (chain or flat_gpus):
            result.add(nic.address)
    return result


def make(nic: PciFunction) -> tuple[int, int, int, int]:
    """Model and subsystem: a machine's storage and north-south cards may be of the rails' chip."""
    return nic.vendor, nic.device, nic.subsystem_vendor, nic.subsystem_device


def _tier(one: Model) -> int:
    """What serves as a rail only where there is nothing better comes last."""
    return 0 if one in _ETHERNET_ONLY else 1 if one in _DPUS else 2


def _rates(nics: Iterable[PciFunction]) -> dict[Model, int]:
    """Gbit/s of each model's fastest link: a link that is down, or has a bad cable, tells less than it can do."""
    rates: dict[Model, int] = {}
    for nic in nics:
        for device in nic.rdma_devices:
            if device.rate and device.state in (None, _ACTIVE):
                rates[model(nic)] = max(rates.get(model(nic), 0), device.rate)
    return rates


def _best(nics: list[PciFunction], rates: Mapping[Model, int]) -> list[PciFunction]:
    """Of the NICs on one GPU's switch those that may be its rails; all ``rates`` that matter are in Gbit/s."""
    nics = _without(_without(nics, _ETHERNET_ONLY), _DPUS)
    fastest = max(rates.get(model(nic), 0) for nic in nics)
    return [nic for nic in nics if rates.get(model(nic), fastest) * 2 > fastest or not fastest]


def _is_equal(one: Model, usual: Model, rates: Mapping[Model, int]) -> bool:
    if _tier(one) < _tier(usual):
        return False
    return one not in rates or usual not in rates or rates[one] * 2 > rates[usual]


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
    # last: a slow NIC elsewhere is no reason to take the rails for the drives' NICs
    away = [nic for nic in candidates if storage_switches.isdisjoint(chains[nic.address])]
    rails = {nic.address for nic in away or candidates}
    return {nic.address: _role(nic, rails, chains, storage_switches) for nic in nics}


def _link_layer(nic: PciFunction) -> str | None:
    return next((device.link_layer for device in nic.rdma_devices), None)


def usual_model(nics: Iterable[PciFunction], rates: Mapping[Model, int]) -> Model | None:
    """The model of most cards; between equals a rail's model, then the faster, then the first in PCI order."""
    cards = {card(nic.address): model(nic) for nic in sorted(nics, key=lambda nic: order(nic.address))}
    counts = Counter(cards.values())
    return max(counts, key=lambda one: (counts[one], _tier(one), rates.get(one, 0))) if counts else None


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


def drives_by_switch(
    functions: Iterable[PciFunction], chains: Mapping[str, tuple[str, ...]]
) -> Mapping[str, int]:
    """How many NVMe drives are below each switch that has any."""
    return Counter(
        switch
        for function in functions
        if function.class_code >> 8 == _NVME_CLASS
        for switch in chains[function.address]
    )
