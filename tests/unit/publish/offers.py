"""Offers of real machines, what must hold of any, and inventories that differ a little from a machine's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

from railmate.inventory.model import Gpu, Inventory, Nic
from railmate.publish.devices import OfferOptions, build_offer
from railmate.publish.model import Offer, OfferedDevice, overlap
from railmate.topology.analyze import analyze

Scanned = Callable[[str, int], Inventory]
DGX_SWITCHES = ["0000:01:00.0", "0000:41:00.0", "0000:81:00.0", "0000:b1:00.0"]


def offer_of(inventory: Inventory, **options: object) -> Offer:
    return build_offer(inventory, analyze(inventory), OfferOptions(**options))  # type: ignore[arg-type]


def of_kind(offer: Offer, kind: str) -> list[OfferedDevice]:
    return [device for device in offer.devices if device.kind == kind]


def parent_of(inventory: Inventory, nic: str) -> str:
    return inventory.functions[nic].physical_function or nic


def check_invariants(offer: Offer) -> None:
    """What the API server and the scheduler need of any offer, and what keeps hardware from going out twice."""
    assert len({device.name for device in offer.devices}) == len(offer.devices)
    counters = {
        (name, counter): units for name, held in offer.counter_sets.items() for counter, units in held.items()
    }
    assert len({counter for _, counter in counters}) == len(counters), (
        "one counter for each piece of hardware"
    )
    assert all(len(held) <= 32 for held in offer.counter_sets.values())
    consumed = {(name, counter) for device in offer.devices for name, counter, _ in device.consumes}
    assert consumed == set(counters), "no counter without a user, no user without a counter"
    for device in offer.devices:
        assert len({name for name, _, _ in device.consumes}) <= 2
        assert len(device.attributes) + len(device.capacity) <= 32
        assert all(len(v.encode()) <= 64 for v in device.attributes.values() if isinstance(v, str))
        assert all(v != "" for v in device.attributes.values())
        assert not device.attributes.keys() & device.facts.keys()
    by_part: dict[str, list[OfferedDevice]] = {}
    for device in offer.devices:
        for part in device.gpus + device.nics:
            by_part.setdefault(part, []).append(device)
    for one, other in ((a, b) for users in by_part.values() for a, b in combinations(users, 2)):
        excluded = any(
            units + taken > counters[name, counter]
            for name, counter, units in one.consumes
            for also, too, taken in other.consumes
            if (also, too) == (name, counter)
        )
        assert excluded == bool(overlap(one.parts, other.parts)), f"{one.name}, {other.name}"
    assert {device.section for device in offer.devices} <= offer.sections.keys()


# --- inventories that differ a little from a machine's
def changed(inventory: Inventory, changes: dict[str, dict[str, object]]) -> Inventory:
    functions = {
        address: replace(function, **changes.get(address, {}))  # type: ignore[arg-type]
        for address, function in inventory.functions.items()
    }
    gpus: tuple[Gpu, ...] = tuple(replace(gpu, function=functions[gpu.address]) for gpu in inventory.gpus)
    nics: tuple[Nic, ...] = tuple(replace(nic, function=functions[nic.address]) for nic in inventory.nics)
    return replace(inventory, functions=functions, gpus=gpus, nics=nics)


def without_driver(inventory: Inventory, *addresses: str) -> Inventory:
    """As after an unbind: what the driver made is gone with it."""
    gone: dict[str, object] = {"driver": None, "netdevs": (), "rdma_devices": (), "auxiliary": ()}
    return changed(inventory, dict.fromkeys(addresses, gone))


def away_from_home(inventory: Inventory, *addresses: str) -> Inventory:
    """As while a pod has the netdev; in shared RDMA mode the RDMA device stays in sight."""
    return changed(inventory, {address: {"netdevs": ()} for address in addresses})


def shuffled(inventory: Inventory) -> Inventory:
    return replace(inventory, functions=dict(reversed(inventory.functions.items())))
