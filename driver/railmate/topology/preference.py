"""Which of several NICs that could be rails are it: kinds made for it before others, fast ones before slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import multimode

from railmate.inventory.address import card, order
from railmate.inventory.model import PciFunction
from railmate.topology.nickinds import DPUS, ETHERNET_ONLY, Model, model

_ACTIVE = "ACTIVE"

Rates = Mapping[Model, int]  # Gbit/s of what a model can do
Nearest = Mapping[str, str | None]  # NIC -> the nearest switch above it that a GPU has above it too


def by_card(nics: Iterable[PciFunction]) -> dict[str, list[PciFunction]]:
    cards: dict[str, list[PciFunction]] = {}
    for nic in sorted(nics, key=lambda nic: order(nic.address)):
        cards.setdefault(card(nic.address), []).append(nic)
    return cards


def rates_of(nics: Iterable[PciFunction]) -> dict[Model, int]:
    """Gbit/s of each model's fastest link: a link that is down, or has a bad cable, tells less than it can do."""
    rates: dict[Model, int] = {}
    for nic in nics:
        rate = _active_rate(nic)
        if rate:
            rates[model(nic)] = max(rates.get(model(nic), 0), rate)
    return rates


def _active_rate(nic: PciFunction) -> int:
    """Gbit/s of the fastest link that is up, 0 where none is or none tells."""
    return max((one.rate or 0 for one in nic.rdma_devices if one.state in (None, _ACTIVE)), default=0)


def without(nics: list[PciFunction], models: set[Model]) -> list[PciFunction]:
    """Leaves out models that only serve as rails where there is nothing better."""
    return [nic for nic in nics if model(nic) not in models] or nics


def better_kinds(nics: list[PciFunction], gpus: int, rates: Rates) -> list[PciFunction]:
    """Without the Ethernet-only NICs and DPUs, where there are better ones for ``gpus`` GPUs.

    A DPU for north-south traffic comes alone, or as one of a few. DPUs that are more than the other NICs, and
    faster or one for each GPU, are rails (BlueField-3 SuperNICs), and the others serve storage.
    """
    nics = without(nics, ETHERNET_ONLY)
    others = without(nics, DPUS)
    dpus = [nic for nic in nics if model(nic) in DPUS]
    if len(others) == len(nics) or _are_outdone(dpus, others, gpus, rates):
        return others
    return nics


def _are_outdone(dpus: list[PciFunction], others: list[PciFunction], gpus: int, rates: Rates) -> bool:
    count = len(by_card(dpus))
    if len(by_card(others)) >= min(count, gpus):
        return True
    rate, other_rate = (max(rates.get(model(nic), 0) for nic in some) for some in (dpus, others))
    if rate and other_rate and rate != other_rate:
        return other_rate > rate
    return count < gpus


def fast(nics: list[PciFunction], rates: Rates) -> list[PciFunction]:
    """Those whose model does more than half of what the fastest does, or of which that is not known."""
    fastest = max((rates.get(model(nic), 0) for nic in nics), default=0)
    return [nic for nic in nics if rates.get(model(nic), fastest) * 2 > fastest or not fastest]


def without_few_slow(nics: list[PciFunction], rates: Rates) -> list[PciFunction]:
    """Leaves out slow models where faster cards are more: what a GPU meets on a switch need not be its rail."""
    quick = fast(nics, rates)
    slow = [nic for nic in nics if nic not in quick]
    return quick if len(by_card(quick)) > len(by_card(slow)) else nics


def cards_by_switch(
    cards: Iterable[list[PciFunction]], nearest: Nearest
) -> tuple[Counter[str | None], list[int]]:
    """How many cards each switch has, and the count that most switches have (several when it is a tie)."""
    held = Counter(nearest[ports[0].address] for ports in cards)
    return held, sorted(multimode(held.values()))


def without_slow_extra(nics: list[PciFunction], nearest: Nearest) -> list[PciFunction]:
    """Of NICs of one model without the slow ones (half the rate or less) that switches have on top.

    On top is what comes on top of the same number of fast ones on every switch, else what is more than most
    switches have. A rail with a bad cable is neither: its switch has a fast one less.
    """
    cards = by_card(nics)
    rates = {name: max(map(_active_rate, ports)) for name, ports in cards.items()}
    fastest = max(rates.values(), default=0)
    slow = [name for name, rate in rates.items() if 0 < rate * 2 <= fastest]
    held, typical = cards_by_switch(cards.values(), nearest)
    quick_held, quick = cards_by_switch((ports for name, ports in cards.items() if name not in slow), nearest)
    are_even = len(held) > 1 and quick_held.keys() == held.keys() and len(set(quick_held.values())) == 1
    allowed = max(1, min(quick if are_even else typical, default=1))
    dropped = set()
    for name in sorted(slow, key=rates.__getitem__):
        switch = nearest[cards[name][0].address]
        if held[switch] > allowed:
            held[switch] -= 1
            dropped.add(name)
    return [nic for name, ports in cards.items() if name not in dropped for nic in ports]
