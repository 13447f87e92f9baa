"""Sentences for people about roles that need a second look, each with the option that settles it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from railmate.inventory.address import card
from railmate.inventory.model import PciFunction
from railmate.topology.model import Pair, Role
from railmate.topology.nickinds import is_rdma_nic, kind, make, may_be_management
from railmate.topology.switches import common


def explain_roles(
    gpus: Sequence[str],
    nics: Iterable[PciFunction],
    roles: Mapping[str, Role],
    pairs: Iterable[Pair],
    chains: Mapping[str, tuple[str, ...]],
) -> tuple[str, ...]:
    """Of a switched machine. ``nics``: those whose role nobody stated. One sentence a card."""
    cards: dict[str, PciFunction] = {}
    for nic in nics:
        if is_rdma_nic(nic):
            cards.setdefault(card(nic.address), nic)
    firsts = list(cards.values())
    rails = [nic for nic in firsts if roles[nic.address] is Role.RAIL]
    makes = {make(nic) for nic in rails}
    beside = {
        nic.address: [gpu for gpu in gpus if common((chains[gpu], chains[nic.address]))] for nic in firsts
    }
    pairs = list(pairs)
    paired = {gpu for pair in pairs for gpu in pair.gpus}
    paired_nics = {nic for pair in pairs for nic in pair.nics}
    notes = [
        f"GPU {gpu} is in no pair; NIC {nic.address} ({kind(nic)}) is beside it; give "
        f"--role {nic.address}=rail if it is meant to be its rail."
        for gpu in gpus
        if gpu not in paired
        for nic in firsts
        if gpu in beside[nic.address] and roles[nic.address] is Role.OTHER and not may_be_management(nic)
    ]
    notes += [
        f"NIC {nic.address} looks like a rail but no GPU is on its switch; it keeps its rail number and is in "
        f"no pair. Look for a lost GPU, or give --role {nic.address}=other."
        for nic in rails
        if not beside[nic.address] and nic.address not in paired_nics
    ]
    notes += _uneven(rails, beside, chains)
    notes += [
        f"NIC {nic.address} is of the rails' model and has only drives beside it, so it is for storage; if a GPU "
        f"was lost there, give --role {nic.address}=rail."
        for nic in firsts
        if roles[nic.address] is Role.STORAGE and make(nic) in makes and not may_be_management(nic)
    ]
    return tuple(notes)


def _uneven(
    rails: Iterable[PciFunction], beside: Mapping[str, list[str]], chains: Mapping[str, tuple[str, ...]]
) -> list[str]:
    """Switches with more rails than most others that have as many GPUs: the number alone does not tell which."""
    by_gpus: dict[tuple[str, ...], list[str]] = {}
    for nic in rails:
        if beside[nic.address]:
            by_gpus.setdefault(tuple(beside[nic.address]), []).append(nic.address)
    notes = []
    for gpus, nics in by_gpus.items():
        alike = Counter(len(held) for others, held in by_gpus.items() if len(others) == len(gpus))
        usual, times = max(alike.items(), key=lambda item: (item[1], -item[0]))
        if times > 1 and len(nics) > usual:
            switch = common(chains[address] for address in (*gpus, *nics))[-1]
            notes.append(
                f"Switch {switch} has {len(nics)} rail NICs ({', '.join(nics)}), others with as many GPUs have "
                f"{usual}; where one of them serves something else, give --role ADDRESS=other."
            )
    return notes


def explain_beside(
    gpus: Sequence[str],
    nics: Iterable[PciFunction],
    roles: Mapping[str, Role],
    chains: Mapping[str, tuple[str, ...]],
) -> tuple[str, ...]:
    """Of a machine whose rails share no switch with GPUs: NICs that do, and are not taken for rails."""
    return tuple(
        f"NIC {nic.address} ({kind(nic)}) is on a PCIe switch with GPUs, but the machine's better NICs are not, and "
        f"those are the rails; give --role {nic.address}=rail if it is one."
        for nic in nics
        if is_rdma_nic(nic)
        and roles[nic.address] is Role.OTHER
        and not may_be_management(nic)
        and any(common((chains[gpu], chains[nic.address])) for gpu in gpus)
    )


def explain_unknown(nics: Iterable[PciFunction]) -> tuple[str, ...]:
    """NICs that cannot be told from NVSwitch management. ``nics``: those whose role nobody stated."""
    return tuple(
        f"NIC {nic.address}: role unknown, not offered: its subsystem cannot be read, so it may be the "
        f"NVSwitches' management. Give --role {nic.address}=rail if it is a rail."
        for nic in nics
        if is_rdma_nic(nic) and may_be_management(nic)
    )
