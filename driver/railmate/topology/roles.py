"""Which NICs carry a GPU's traffic between nodes (rails) and which must never be offered for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from railmate.inventory.model import PciFunction
from railmate.topology.model import Role
from railmate.topology.nickinds import Model, is_management, make, model, tier
from railmate.topology.preference import (
    better_kinds,
    by_card,
    cards_by_switch,
    fast,
    rates_of,
    without_slow_extra,
)

_NVME_CLASS = 0x0108
_INFINIBAND = "InfiniBand"

Chains = Mapping[str, tuple[str, ...]]


def roles_by_switch(
    possible: Sequence[PciFunction],
    gpu_chains: Chains,
    chains: Chains,
    drives: Mapping[str, int],
    trust_rates: bool,
    lost_gpu: Callable[[str, Iterable[str]], bool],
    silent: Sequence[PciFunction] = (),
) -> set[str]:
    """The rails of a machine that has switches: a rail shares one with a GPU, or looks like those that do.

    Where a switch holds NICs of the model most rails have, another model beside it serves something
    else (Dell XE9680: a BlueField for north-south traffic beside GPU 4 and its rail). Alone on its
    switch it is a rail only if it is the usual model's equal. ``possible``: NICs that can be rails;
    ``drives``: NVMe drives by switch; ``lost_gpu``: whether a NIC has the empty place of a GPU beside
    it, as one of the rails has its GPU; ``silent``: NICs that would tell more with their driver.
    """
    gpu_switches = frozenset(switch for chain in gpu_chains.values() for switch in chain)
    rates = rates_of(possible) if trust_rates else {}
    nearest = {nic.address: _nearest(chains[nic.address], gpu_switches) for nic in (*possible, *silent)}
    candidates = [nic for nic in possible if nearest[nic.address] is not None]
    by_switch: dict[str | None, list[PciFunction]] = {}
    for nic in candidates:
        by_switch.setdefault(nearest[nic.address], []).append(nic)
    gpus = Counter(switch for chain in gpu_chains.values() for switch in chain)
    fitting = [
        nic
        for switch, beside in by_switch.items()
        if switch is not None
        for nic in fast(better_kinds(beside, gpus[switch], rates), rates)
    ]
    usual = usual_model(fitting, rates)
    seen = _usual_makes([nic for nic in candidates if model(nic) == usual], nearest)
    if trust_rates:
        seen = without_slow_extra(seen, nearest)
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
    rails |= _alike(others, seen, nearest, chains, drives, flat_gpus, lost_gpu)
    return rails | _stand_ins(silent, seen, nearest)


def _stand_ins(
    silent: Iterable[PciFunction], rails: Iterable[PciFunction], nearest: Mapping[str, str | None]
) -> set[str]:
    """NICs without their driver that are the rails' own card, where a switch has fewer of these than others.

    A rail whose driver failed, or that a virtual machine has, still is its GPU's: without it the rails after
    it would count anew, and on a switch of several GPUs two would have one NIC left between them.
    """
    rails = list(rails)
    makes = {make(nic) for nic in rails}
    cards = by_card(rails)
    held, typical = cards_by_switch(cards.values(), nearest)
    result = set()
    for name, ports in by_card(silent).items():
        switch = nearest[ports[0].address]
        if (
            name in cards
            or make(ports[0]) not in makes
            or switch is None
            or held[switch] >= max(typical, default=0)
        ):
            continue
        held[switch] += 1
        result |= {port.address for port in ports}
    return result


def _usual_makes(nics: list[PciFunction], nearest: Mapping[str, str | None]) -> list[PciFunction]:
    """Of NICs of one model those of the usual cards. A card of another make (subsystem) is a rail where it
    stands in for a usual one, not where it comes on top: then it serves something else."""
    cards = by_card(nics)
    makes = Counter(make(held[0]) for held in cards.values())
    if len(makes) < 2:
        return nics
    most = max(makes.values())
    usual = {one for one, count in makes.items() if 2 * count > most}
    held, typical = cards_by_switch((one for one in cards.values() if make(one[0]) in usual), nearest)
    taken = []
    for ports in cards.values():
        switch = nearest[ports[0].address]
        if make(ports[0]) not in usual:
            if held[switch] >= max(typical, default=0):
                continue
            held[switch] += 1
        taken += ports
    return taken


def _alike(
    nics: Iterable[PciFunction],
    rails: Iterable[PciFunction],
    nearest: Mapping[str, str | None],
    chains: Chains,
    drives: Mapping[str, int],
    flat_gpus: bool,
    lost_gpu: Callable[[str, Iterable[str]], bool],
) -> set[str]:
    """NICs that no GPU shares a switch with and that are rails all the same: the GPU may be lost.

    They are the same card as ``rails``. Below a switch, that has no more drives than a rail's may have
    (more, and they serve the drives), or an empty port where a rail's has its GPU. Without a switch
    only where GPUs have none either.
    """
    rails = list(rails)
    cards_of_rails = {make(nic) for nic in rails}
    usual_drives = max((drives.get(nearest[nic.address] or "", 0) for nic in rails), default=0)
    result = set()
    for nic in nics:
        chain = chains[nic.address]
        if make(nic) not in cards_of_rails or not (chain or flat_gpus):
            continue
        beside = max((drives.get(switch, 0) for switch in chain), default=0)
        if beside <= usual_drives or lost_gpu(nic.address, (rail.address for rail in rails)):
            result.add(nic.address)
    return result


def _is_equal(one: Model, usual: Model, rates: Mapping[Model, int]) -> bool:
    if tier(one) < tier(usual):
        return False
    return one not in rates or usual not in rates or rates[one] * 2 > rates[usual]


def roles_without_switch(
    possible: Sequence[PciFunction],
    gpus: int,
    chains: Chains,
    storage_switches: frozenset[str],
    trust_rates: bool,
) -> set[str]:
    """The rails where no switch tells: RDMA NICs, except those that are clearly something else.

    ``trust_rates``: link rates of a hypervisor's devices mean nothing.
    """
    rates = rates_of(possible) if trust_rates else {}
    candidates = better_kinds(list(possible), gpus, rates)
    if len({model(nic) for nic in candidates}) > 1:
        # Azure: beside its InfiniBand functions a guest has an Ethernet one of another model for its own network
        infiniband = [nic for nic in candidates if _link_layer(nic) == _INFINIBAND]
        if 2 * len(infiniband) >= len(candidates):
            candidates = infiniband
    candidates = fast(candidates, rates)
    # last: a slow NIC elsewhere is no reason to take the rails for the drives' NICs
    away = [nic for nic in candidates if storage_switches.isdisjoint(chains[nic.address])]
    return {nic.address for nic in away or candidates}


def roles_by_data_direct(possible: Sequence[PciFunction], tied: Iterable[str]) -> set[str]:
    """The rails where DMA functions beside GPUs tell: the NICs they belong to, and the same cards elsewhere,
    whose GPU may be lost. Any other NIC of such a machine has no way to a GPU but through the processor."""
    tied = frozenset(tied)
    makes = {make(nic) for nic in possible if nic.address in tied}
    return {nic.address for nic in possible if make(nic) in makes}


def _link_layer(nic: PciFunction) -> str | None:
    return next((device.link_layer for device in nic.rdma_devices), None)


def usual_model(nics: Iterable[PciFunction], rates: Mapping[Model, int]) -> Model | None:
    """The model of most cards; between equals a rail's model, then the faster, then the first in PCI order."""
    counts = Counter(model(ports[0]) for ports in by_card(nics).values())
    return max(counts, key=lambda one: (counts[one], tier(one), rates.get(one, 0))) if counts else None


def _nearest(chain: tuple[str, ...], switches: frozenset[str]) -> str | None:
    return next((switch for switch in reversed(chain) if switch in switches), None)


def role_of(
    nic: PciFunction, rails: set[str], does_rdma: bool, chains: Chains, storage_switches: frozenset[str]
) -> Role:
    """``storage_switches``: those with drives below and neither a GPU nor a rail."""
    if nic.address in rails:
        return Role.RAIL
    if is_management(nic):
        return Role.MANAGEMENT
    if does_rdma and not storage_switches.isdisjoint(chains[nic.address]):
        return Role.STORAGE
    return Role.OTHER


def drives_by_switch(functions: Iterable[PciFunction], chains: Chains) -> Mapping[str, int]:
    """How many NVMe drives are below each switch that has any."""
    return Counter(
        switch
        for function in functions
        if function.class_code >> 8 == _NVME_CLASS
        for switch in chains[function.address]
    )
