"""Counter sets: whatever the machine, one counter for what has several names, within the API's limits."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railmate.publish.counters import assign_counters
from railmate.publish.model import Offer, OfferedDevice, overlap
from railmate_api import attributes as names


def device(name: str, gpus: tuple[str, ...] = (), nics: tuple[str, ...] = ()) -> OfferedDevice:
    return OfferedDevice(name, "any", {}, gpus=gpus, nics=nics)


def held(name: str, gpus: tuple[str, ...] = (), nics: tuple[str, ...] = ()) -> OfferedDevice:
    return OfferedDevice(name, names.KIND_HELD, {}, gpus=gpus, nics=nics)


def whole(devices: list[OfferedDevice]) -> OfferedDevice:
    """All pairs as one device."""
    pairs = [one for one in devices if one.name.startswith("pair")]
    gpus = tuple(gpu for one in pairs for gpu in one.gpus)
    nics = tuple(nic for one in pairs for nic in one.nics)
    return OfferedDevice("whole", "node", {}, gpus=gpus, nics=nics)


def node(gpus: int, vfs_a_gpu: int, shared: int, switches: int) -> tuple[list[OfferedDevice], dict[str, str]]:
    """A GPU's pair takes its first VF; the first ``shared`` VFs of each GPU are offered alone as well."""
    devices, switch_of = [], {}
    for g in range(gpus):
        gpu = f"0000:{g:02x}:00.0"
        vfs = [f"0001:{g:02x}:{v >> 3:02x}.{v & 7}" for v in range(vfs_a_gpu)]
        if switches:
            switch_of |= dict.fromkeys([gpu, *vfs], f"0002:{g % switches:02x}:00.0")
        devices += [device(f"gpu{g}", (gpu,)), device(f"pair{g}", (gpu,), tuple(vfs[:1]))]
        devices += [device(f"vf{g}-{v}", nics=(vf,)) for v, vf in enumerate(vfs) if v < shared or v > 0]
    return devices, switch_of


def exclusive(offer: Offer) -> None:
    """Taking a device leaves exactly those others that share no hardware with it."""
    for one in offer.devices:
        for other in offer.devices:
            if one is not other:
                share = bool(set(one.gpus + one.nics) & set(other.gpus + other.nics))
                assert share == bool(set(one.consumes) & set(other.consumes)), (one.name, other.name)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(0, 6), st.integers(0, 2), st.integers(0, 5))
def test_devices_exclude_each_other_exactly_when_they_share_hardware(
    gpus: int, vfs: int, shared: int, switches: int
) -> None:
    devices, switch_of = node(gpus, vfs, shared, switches)
    offer = assign_counters(devices, switch_of)
    exclusive(offer)
    assert all(0 < len(counters) <= 32 for counters in offer.counter_sets.values())
    assert all(len({name for name, _, _ in one.consumes}) <= 2 for one in offer.devices)
    assert [one.name for one in offer.devices] == [one.name for one in devices], "the order is the caller's"


@pytest.mark.parametrize(
    ("gpus", "sets"), [(16, {"node": 32}), (17, {"gpus": 17, "nics": 17}), (32, {"gpus": 32, "nics": 32})]
)
def test_counters_are_in_one_set_or_in_one_of_gpus_and_one_of_nics(gpus: int, sets: dict[str, int]) -> None:
    devices, switch_of = node(gpus, vfs_a_gpu=2, shared=1, switches=4)
    offer = assign_counters([*devices, whole(devices)], switch_of)
    assert {name: len(held) for name, held in offer.counter_sets.items()} == sets
    assert offer.devices[-1].kind == "node"
    assert not offer.notes
    exclusive(offer)


def test_more_than_two_sets_of_counters_are_by_switch_and_the_whole_node_is_none() -> None:
    devices, switch_of = node(gpus=33, vfs_a_gpu=2, shared=1, switches=3)
    offer = assign_counters([*devices, whole(devices)], switch_of)
    assert {name: len(held) for name, held in offer.counter_sets.items()} == {
        f"switch-0002-{n:02x}-00-0": 22 for n in range(3)
    }
    assert all(one.kind != "node" for one in offer.devices)
    (note,) = offer.notes
    assert note.startswith("the whole node is not offered as one device: that would need 66 counters")
    exclusive(offer)


def test_forty_gpus_below_one_switch_take_several_sets() -> None:
    devices, switch_of = node(gpus=40, vfs_a_gpu=2, shared=1, switches=1)
    offer = assign_counters(devices, switch_of)
    assert len(offer.counter_sets) > 2
    exclusive(offer)


def test_hardware_with_one_name_needs_no_counter() -> None:
    offer = assign_counters([device("gpu0", ("0000:01:00.0",)), device("vf0", nics=("0000:02:00.1",))], {})
    assert not offer.counter_sets
    assert not any(one.consumes for one in offer.devices)


def test_chain_of_shared_hardware_gets_one_set() -> None:
    """Two GPUs that both pair with the same NIC: all three counters together, or a device spans sets."""
    gpu0, gpu1, nic = "0000:01:00.0", "0000:02:00.0", "0000:03:00.0"
    devices = [
        device("gpu0", (gpu0,)),
        device("gpu1", (gpu1,)),
        device("a", (gpu0,), (nic,)),
        device("b", (gpu1,), (nic,)),
    ]
    offer = assign_counters(devices, {gpu0: "s0", gpu1: "s1"})
    assert [len(counters) for counters in offer.counter_sets.values()] == [3]
    exclusive(offer)


@pytest.mark.parametrize(("nics", "alone"), [(30, 30), (32, 32), (33, 0), (62, 0)])
def test_nics_too_many_for_a_set_are_offered_only_with_their_gpu(nics: int, alone: int) -> None:
    gpu, vfs = "0000:01:00.0", tuple(f"0000:02:{n >> 3:02x}.{n & 7}" for n in range(nics))
    other = [device("gpu1", ("0000:03:00.0",)), device("pair1", ("0000:03:00.0",), ("0000:04:00.0",))]
    lone = [device(f"vf{n}", nics=(vf,)) for n, vf in enumerate(vfs)]
    offer = assign_counters([device("pair", (gpu,), vfs), device("gpu", (gpu,)), *lone, *other], {})
    assert [one.name for one in offer.devices] == [
        "pair", "gpu", *(one.name for one in lone[:alone]), "gpu1", "pair1",
    ]  # fmt: skip
    assert sorted(len(held) for held in offer.counter_sets.values()) == (
        [32] if alone == 30 else [2, 32] if alone else [1, 1]
    )
    assert bool(offer.notes) == (alone == 0)
    exclusive(offer)


def test_more_gpus_than_a_set_has_counters_are_offered_one_by_one() -> None:
    gpus = [f"0000:{g:02x}:00.0" for g in range(40)]
    devices = [device("all", tuple(gpus)), *(device(f"gpu{g}", (gpu,)) for g, gpu in enumerate(gpus))]
    offer = assign_counters(devices, {})
    assert [one.name for one in offer.devices] == [one.name for one in devices[1:]]
    assert "40 counters" in offer.notes[0]


def test_nic_that_goes_nowhere_without_its_gpu_needs_no_counter() -> None:
    gpu, nic = "0000:01:00.0", "0000:02:00.0"
    devices = [
        device("pair", (gpu,), (nic,)),
        device("group", (gpu, "0000:03:00.0"), (nic,)),
        device("gpu", (gpu,)),
    ]
    offer = assign_counters(devices, {})
    assert [list(held) for held in offer.counter_sets.values()] == [["gpu-0000-01-00-0"]]
    exclusive(offer)


# --- what pods hold
@pytest.mark.parametrize("gpus", [15, 16, 17, 32, 33, 40])
def test_a_held_device_of_all_hardware_stays_whatever_the_number_of_counters(gpus: int) -> None:
    devices, switch_of = node(gpus, vfs_a_gpu=2, shared=1, switches=4)
    all_of_it = whole(devices)
    former = held("former", all_of_it.gpus, all_of_it.nics)
    offer = assign_counters([*devices, all_of_it, former], switch_of)
    assert offer.devices[-1].name == "former"
    within_limits(offer)
    nothing_twice(offer)
    if gpus <= 32:
        assert len(offer.devices) == len(devices) + 2
    else:
        assert "until pods give back what they have of them" in offer.notes[1]
        alone = [one.name for one in devices if not overlap(one.parts, former.parts)]
        assert [one.name for one in offer.devices] == [*alone, "former"], "what is free stays offered"


def test_what_nobody_could_get_anyway_goes_first_and_lone_nics_stay() -> None:
    gpu, vfs = "0000:01:00.0", tuple(f"0000:02:{n >> 3:02x}.{n & 7}" for n in range(40))
    lone = [device(f"vf{n}", nics=(vf,)) for n, vf in enumerate(vfs)]
    former = held("former-vf", nics=vfs[:1])
    offer = assign_counters([device("pair", (gpu,), vfs), device("gpu", (gpu,)), *lone, former], {})
    assert [one.name for one in offer.devices] == ["gpu", *(one.name for one in lone[1:]), "former-vf"]
    within_limits(offer)
    nothing_twice(offer)
    free = assign_counters([device("pair", (gpu,), vfs), device("gpu", (gpu,)), *lone], {})
    assert [one.name for one in free.devices] == ["pair", "gpu"], "once it is given back"


def within_limits(offer: Offer) -> None:
    counters = {(name, counter) for name, found in offer.counter_sets.items() for counter in found}
    assert all(0 < len(found) <= 32 for found in offer.counter_sets.values())
    for one in offer.devices:
        assert len({name for name, _, _ in one.consumes}) <= 2
        assert {(name, counter) for name, counter, _ in one.consumes} <= counters


def nothing_twice(offer: Offer) -> None:
    """Two devices with common hardware exclude each other, unless both are held: nobody is given those."""
    for one, other in combinations(offer.devices, 2):
        if not one.kind == other.kind == names.KIND_HELD and overlap(one.parts, other.parts):
            assert set(one.consumes) & set(other.consumes), (one.name, other.name)


_PARTS = [f"0000:{n:02x}:00.0" for n in range(60)]
_SOME = st.lists(st.sampled_from(_PARTS), min_size=1, max_size=50, unique=True)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(_SOME, st.sampled_from(["pair", "group", "gpu", "rdma-vf", "node"])), max_size=25),
    st.permutations(_PARTS),
    st.lists(st.integers(1, 60), max_size=8),
    st.integers(0, 60),
    st.integers(0, 4),
)
def test_whatever_is_offered_and_held_there_is_an_offer_and_what_is_held_is_in_it(
    offered: list[tuple[list[str], str]], order: list[str], sizes: list[int], gpus: int, switches: int
) -> None:
    """Hardware in any combination; of what is held no two devices have the same."""
    is_gpu = set(_PARTS[:gpus])

    def made(name: str, kind: str, parts: list[str]) -> OfferedDevice:
        mine = (
            tuple(part for part in parts if part in is_gpu),
            tuple(part for part in parts if part not in is_gpu),
        )
        return OfferedDevice(name, kind, {}, gpus=mine[0], nics=mine[1])

    devices = [made(f"device{n}", kind, parts) for n, (parts, kind) in enumerate(offered)]
    left = list(order)
    for n, size in enumerate(sizes):
        mine, left = left[:size], left[size:]
        if mine:
            devices.append(made(f"held{n}", names.KIND_HELD, mine))
    switch_of = {part: f"0001:{n % switches:02x}:00.0" for n, part in enumerate(_PARTS)} if switches else {}
    offer = assign_counters(devices, switch_of)
    assert {one.name for one in offer.devices if one.kind == names.KIND_HELD} == {
        one.name for one in devices if one.kind == names.KIND_HELD
    }
    assert bool(offer.notes) == (len(offer.devices) < len(devices))
    within_limits(offer)
    nothing_twice(offer)
