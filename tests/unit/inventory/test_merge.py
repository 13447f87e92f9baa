"""What pods hold keeps what was known of it; the rest is as the machine shows it now."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from railmate.inventory.address import order
from railmate.inventory.merge import keep_facts, keep_held
from railmate.inventory.model import GpuVendor, Inventory, Partition
from unit.claims.claims_world import GPUS, PF, VFS, inventory


def without(*addresses: str) -> Inventory:
    """The machine after these functions were removed."""
    full = inventory()
    return replace(
        full,
        functions={a: f for a, f in full.functions.items() if a not in addresses},
        gpus=tuple(gpu for gpu in full.gpus if gpu.address not in addresses),
        nics=tuple(nic for nic in full.nics if nic.address not in addresses),
    )


def netdevs_away(*addresses: str) -> Inventory:
    """The netdevs of these VFs are in a pod."""
    full = inventory()
    functions = {a: replace(f, netdevs=()) if a in addresses else f for a, f in full.functions.items()}
    nics = tuple(replace(nic, function=functions[nic.address]) for nic in full.nics)
    return replace(full, functions=functions, nics=nics)


def test_same_machine_stays_the_same() -> None:
    assert keep_held(inventory(), inventory(), {VFS[0], GPUS[0]}) == (inventory(), frozenset())


def test_netdev_in_a_pod_is_still_known() -> None:
    merged, gone = keep_held(inventory(), netdevs_away(VFS[0]), {VFS[0]})
    assert (merged, gone) == (inventory(), frozenset())


def test_netdev_that_is_away_without_a_pod_is_not_made_up() -> None:
    merged, _ = keep_held(inventory(), netdevs_away(VFS[0]), {VFS[1]})
    assert merged == netdevs_away(VFS[0])


def test_vf_that_is_gone_while_a_pod_holds_it_stays_and_is_named() -> None:
    merged, gone = keep_held(inventory(), without(VFS[2]), {VFS[2]})
    assert gone == {VFS[2]}
    assert merged == inventory()


def test_gpu_that_is_gone_while_a_pod_holds_it_stays_and_is_named() -> None:
    merged, gone = keep_held(inventory(), without(GPUS[1]), {GPUS[1]})
    assert gone == {GPUS[1]}
    assert merged == inventory()


def test_what_nobody_holds_goes() -> None:
    merged, gone = keep_held(inventory(), without(VFS[1], VFS[2]), {VFS[2]})
    assert gone == {VFS[2]}
    assert merged == without(VFS[1])


def test_new_hardware_comes_while_some_is_held() -> None:
    merged, gone = keep_held(without(VFS[3], GPUS[1]), inventory(), {VFS[0]})
    assert (merged, gone) == (inventory(), frozenset())


def test_held_hardware_that_was_never_seen_is_not_made_up() -> None:
    merged, gone = keep_held(Inventory(), without(VFS[0]), {VFS[0], "0000:ff:00.0"})
    assert (merged, gone) == (without(VFS[0]), frozenset())


@given(
    old=st.sets(st.sampled_from([*VFS, *GPUS])),
    new=st.sets(st.sampled_from([*VFS, *GPUS])),
    held=st.sets(st.sampled_from([*VFS, *GPUS, PF, "0000:ff:00.0"])),
)
def test_whatever_comes_and_goes_nothing_held_is_lost(old: set[str], new: set[str], held: set[str]) -> None:
    before, now = without(*old), without(*new)
    merged, gone = keep_held(before, now, held)
    assert gone == (held & before.functions.keys()) - now.functions.keys()
    assert set(merged.functions) == set(now.functions) | gone
    assert list(merged.functions) == sorted(merged.functions, key=order)
    for found in (merged.gpus, merged.nics):
        assert all(merged.functions[one.address] == one.function for one in found)
    assert [gpu.address for gpu in merged.gpus] == [a for a in merged.functions if a in GPUS]


def with_speed(speed: int | None) -> Inventory:
    full = inventory()
    functions = {
        a: replace(f, netdevs=tuple(replace(n, speed=speed) for n in f.netdevs))
        for a, f in full.functions.items()
    }
    nics = tuple(replace(nic, function=functions[nic.address]) for nic in full.nics)
    gpus = tuple(replace(gpu, function=functions[gpu.address]) for gpu in full.gpus)
    return replace(full, functions=functions, nics=nics, gpus=gpus)


def test_link_that_went_down_keeps_its_speed() -> None:
    assert keep_facts(with_speed(200_000), with_speed(None)) == with_speed(200_000)


def test_speed_that_is_known_is_the_present_one() -> None:
    assert keep_facts(with_speed(200_000), with_speed(100_000)) == with_speed(100_000)
    assert keep_facts(Inventory(), with_speed(None)) == with_speed(None)


MIG = (Partition("gi1ci0", profile="1g.10gb", uuid="MIG-1"),)


def with_first_gpu(**fields: object) -> Inventory:
    full = inventory()
    first = replace(full.gpus[0], vendor=GpuVendor.NVIDIA, **fields)  # type: ignore[arg-type]
    return replace(full, gpus=(first, *full.gpus[1:]))


def test_gpu_in_parts_is_not_whole_because_its_library_is_silent_once() -> None:
    cut = with_first_gpu(compute_capability="9.0", partition_mode="MIG", partitions=MIG)
    kept = keep_facts(cut, with_first_gpu()).gpus[0]
    assert (kept.partition_mode, kept.partitions) == ("MIG", MIG)


def test_gpu_that_is_whole_again_is_whole() -> None:
    cut = with_first_gpu(compute_capability="9.0", partition_mode="MIG", partitions=MIG)
    kept = keep_facts(cut, with_first_gpu(compute_capability="9.0")).gpus[0]
    assert (kept.partition_mode, kept.partitions) == (None, ())
