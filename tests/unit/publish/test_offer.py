"""From real machines to offered devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from railmate.inventory.model import Gpu, Inventory, Nic
from railmate.publish.devices import OfferOptions, build_offer, gpu_attributes
from railmate.publish.model import Offer, OfferedDevice
from railmate.topology.analyze import analyze
from railmate_api import attributes as names

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
    counters = [(name, counter) for name, held in offer.counter_sets.items() for counter in held]
    assert len(set(counters)) == len(counters)
    assert len({counter for _, counter in counters}) == len(counters), (
        "one counter for each piece of hardware"
    )
    assert all(len(held) <= 32 for held in offer.counter_sets.values())
    consumed = {counter for device in offer.devices for counter in device.consumes}
    assert consumed == set(counters), "no counter without a user, no user without a counter"
    users = Counter(part for device in offer.devices for part in device.gpus + device.nics)
    for device in offer.devices:
        assert len({name for name, _ in device.consumes}) <= 2
        assert len(device.attributes) + len(device.capacity) <= 32
        assert all(len(v.encode()) <= 64 for v in device.attributes.values() if isinstance(v, str))
        assert all(v != "" for v in device.attributes.values())
        counted = {counter for _, counter in device.consumes}
        for part in device.gpus + device.nics:
            label = part.replace(":", "-").replace(".", "-")
            has_counter = bool(counted & {f"gpu-{label}", f"vf-{label}"})
            assert has_counter == (users[part] > 1), f"{device.name}: {part}"


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("vfs", [0, 1, 2, 4, 16])
def test_dgx_a100_keeps_the_invariants(scanned: Scanned, vfs: int, share: bool) -> None:
    check_invariants(offer_of(scanned("dgx-a100", vfs), share_pair_vfs=share))


@pytest.mark.parametrize("machine", ["aws-p5en", "aws-p4d", "tuolumne-mi300a", "b200-8gpu", "lassen-p9"])
def test_other_machines_keep_the_invariants(scanned: Scanned, machine: str) -> None:
    check_invariants(offer_of(scanned(machine, 0)))


def test_dgx_a100_with_4_vfs_has_8_pairs_8_gpus_and_3_free_vfs_a_rail(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 4))
    assert Counter(device.kind for device in offer.devices) == {"pair": 8, "gpu": 8, "rdma-vf": 24}
    kept = {nic for pair in of_kind(offer, "pair") for nic in pair.nics}
    assert kept.isdisjoint(nic for vf in of_kind(offer, "rdma-vf") for nic in vf.nics)


def test_pairs_of_dgx_a100_are_the_right_ones(scanned: Scanned) -> None:
    inventory = scanned("dgx-a100", 4)
    pairs = {
        device.gpus[0]: [parent_of(inventory, nic) for nic in device.nics]
        for device in of_kind(offer_of(inventory), "pair")
    }
    assert pairs == {
        "0000:07:00.0": ["0000:0c:00.0"],
        "0000:0f:00.0": ["0000:12:00.0"],
        "0000:47:00.0": ["0000:4b:00.0"],
        "0000:4e:00.0": ["0000:54:00.0"],
        "0000:87:00.0": ["0000:8d:00.0"],
        "0000:90:00.0": ["0000:94:00.0"],
        "0000:b7:00.0": ["0000:ba:00.0"],
        "0000:bd:00.0": ["0000:cc:00.0"],
    }


def test_pair_carries_both_halves(scanned: Scanned) -> None:
    pair = of_kind(offer_of(scanned("dgx-a100", 4)), "pair")[0]
    wanted = {
        names.KIND: "pair",
        names.PCIE_SWITCH: "0000:01:00.0",
        names.DISTANCE: "PXB",
        names.TOPOLOGY_SOURCE: "sysfs",
        names.MACHINE_CLASS: "switched",
        names.GPU_PCI_BUS_ID: "0000:07:00.0",
        names.NIC_PCI_BUS_ID: pair.nics[0],
        names.PCI_BUS_ID: "0000:07:00.0",
        names.PCIE_ROOT: "pci0000:00",
        names.NUMA_NODE: 3,
        names.RAIL: 0,
        names.VENDOR: "nvidia",
        names.DRIVER_VERSION: "535.183.01",
        names.MODE: "vf",
        names.VF_INDEX: 0,
        names.PF_NAME: "enp12s0np0",
        names.PF_PCI_BUS_ID: "0000:0c:00.0",
        names.LINK_LAYER: "Ethernet",
        names.LINK_SPEED: 200000,
        names.RDMA_DEVICE: "mlx5_0v0",
    }
    assert {name: pair.attributes.get(name) for name in wanted} == wanted


def test_vf_carries_what_users_select_on(scanned: Scanned) -> None:
    vf = of_kind(offer_of(scanned("dgx-a100", 4)), "rdma-vf")[0]
    wanted = {
        names.KIND: "rdma-vf",
        names.PCI_BUS_ID: vf.nics[0],
        names.PCIE_SWITCH: "0000:01:00.0",
        names.PF_NAME: "enp12s0np0",
        names.PF_PCI_BUS_ID: "0000:0c:00.0",
        names.VF_INDEX: 1,
        names.RAIL: 0,
        names.MODE: "vf",
        names.LINK_LAYER: "Ethernet",
    }
    assert {name: vf.attributes.get(name) for name in wanted} == wanted


def test_without_vfs_the_whole_port_is_the_pairs_nic_and_nothing_is_offered_alone(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 0))
    assert Counter(device.kind for device in offer.devices) == {"pair": 8, "gpu": 8}
    assert {pair.attributes[names.MODE] for pair in of_kind(offer, "pair")} == {"pf"}


def test_a_single_vf_is_offered_both_ways_under_one_counter(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 1))
    assert Counter(device.kind for device in offer.devices) == {"pair": 8, "gpu": 8, "rdma-vf": 8}
    for pair in of_kind(offer, "pair"):
        (vf,) = [device for device in of_kind(offer, "rdma-vf") if device.nics == pair.nics]
        assert vf.consumes
        assert set(vf.consumes) < set(pair.consumes)


def test_share_pair_vfs_offers_every_vf_alone(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 4), share_pair_vfs=True)
    assert Counter(device.kind for device in offer.devices) == {"pair": 8, "gpu": 8, "rdma-vf": 32}
    assert sum(bool(vf.consumes) for vf in of_kind(offer, "rdma-vf")) == 8


def test_counters_follow_the_switches(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 4), share_pair_vfs=True)
    assert [len(counters) for counters in offer.counter_sets.values()] == [4, 4, 4, 4]


@pytest.mark.parametrize("kind", ["pair", "gpu", "rdma-vf"])
def test_first_fit_fills_one_switch_before_it_opens_the_next(scanned: Scanned, kind: str) -> None:
    switches = [
        device.attributes[names.PCIE_SWITCH] for device in of_kind(offer_of(scanned("dgx-a100", 4)), kind)
    ]
    assert list(dict.fromkeys(switches)) == DGX_SWITCHES
    assert switches == sorted(switches, key=DGX_SWITCHES.index)


def test_p5en_gives_each_gpu_its_two_nics(scanned: Scanned) -> None:
    offer = offer_of(scanned("aws-p5en", 0))
    pairs = of_kind(offer, "pair")
    assert [pair.nics for pair in pairs][:2] == [
        ("0000:55:00.0", "0000:56:00.0"),
        ("0000:57:00.0", "0000:58:00.0"),
    ]
    assert sorted(nic for pair in pairs for nic in pair.nics) == sorted(
        {nic for pair in pairs for nic in pair.nics}
    )
    assert len(pairs) == 8
    assert pairs[0].attributes[names.NIC_PCI_BUS_ID] == "0000:55:00.0,0000:56:00.0"


def test_p4d_where_gpus_share_a_nic_offers_no_pair(scanned: Scanned) -> None:
    """A NIC between two GPUs is a group; as a pair of either it would be handed out twice."""
    offer = offer_of(scanned("aws-p4d", 0))
    assert Counter(device.kind for device in offer.devices) == {"gpu": 8}
    assert all(names.PCIE_SWITCH not in gpu.attributes for gpu in offer.devices)
    assert {gpu.attributes[names.TOPOLOGY_SOURCE] for gpu in offer.devices} == {"numa"}


def test_mi300a_whose_nics_have_no_rdma_device_offers_its_gpus(scanned: Scanned) -> None:
    offer = offer_of(scanned("tuolumne-mi300a", 0))
    assert Counter(device.kind for device in offer.devices) == {"gpu": 4}
    assert {gpu.attributes[names.VENDOR] for gpu in offer.devices} == {"amd"}


# --- what is not offered
def test_excluded_port_takes_its_pair_along_and_leaves_the_gpu(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 0), excluded=frozenset({"0000:0c:00.0"}))
    assert not any(name.startswith("pair-0000-07-00-0") for name in offer.by_name)
    assert "gpu-0000-07-00-0" in offer.by_name
    check_invariants(offer)


def test_excluded_vf_is_offered_under_no_name(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 4), excluded=frozenset({"0000:0c:00.1"}), share_pair_vfs=True)
    assert not [device for device in offer.devices if "0000:0c:00.1" in device.nics]
    assert offer.by_name["pair-0000-07-00-0-0000-0c-00-2"].nics == ("0000:0c:00.2",)


def test_gpu_without_driver_is_not_offered_and_its_vfs_are(scanned: Scanned) -> None:
    inventory = without_driver(scanned("dgx-a100", 4), "0000:07:00.0")
    offer = offer_of(inventory)
    assert not [device for device in offer.devices if "0000:07:00.0" in device.gpus]
    assert (
        len([d for d in of_kind(offer, "rdma-vf") if parent_of(inventory, d.nics[0]) == "0000:0c:00.0"]) == 4
    )


def test_vf_without_driver_is_skipped_for_the_next_one(scanned: Scanned) -> None:
    offer = offer_of(without_driver(scanned("dgx-a100", 4), "0000:0c:00.1"))
    assert offer.by_name["pair-0000-07-00-0-0000-0c-00-2"].nics == ("0000:0c:00.2",)


@pytest.mark.parametrize("how", ["no driver", "excluded"])
def test_port_is_never_handed_out_whole_while_it_has_vfs(scanned: Scanned, how: str) -> None:
    """Its VFs may be a virtual machine's (vfio) or the node's own; the port under them stays where it is."""
    inventory, excluded = scanned("dgx-a100", 4), frozenset[str]()
    vfs = inventory.functions["0000:0c:00.0"].virtual_functions
    if how == "excluded":
        excluded = frozenset(vfs)
    else:
        inventory = without_driver(inventory, *vfs)
    offer = offer_of(inventory, excluded=excluded)
    assert not [device.name for device in offer.devices if "0000:0c:00.0" in device.nics]


def test_storage_and_management_ports_are_never_offered(scanned: Scanned) -> None:
    for machine in ("dgx-a100", "b200-8gpu"):
        inventory = scanned(machine, 0)
        roles = analyze(inventory).roles
        offered = {nic for device in offer_of(inventory).devices for nic in device.nics}
        assert offered
        assert {roles[nic] for nic in offered} == {"rail"}


# --- stability
def test_same_machine_same_offer(scanned: Scanned) -> None:
    inventory = scanned("dgx-a100", 4)
    assert offer_of(inventory) == offer_of(shuffled(inventory))


def test_offer_does_not_change_while_a_vf_is_in_a_pod(scanned: Scanned) -> None:
    """Its netdev is not on the node then. A driver that starts at that moment must publish the same."""
    inventory = scanned("dgx-a100", 4)
    away = away_from_home(inventory, "0000:0c:00.1", "0000:0c:00.2")
    assert offer_of(away) == offer_of(inventory)


def test_long_product_name_is_cut_to_what_the_api_takes(scanned: Scanned) -> None:
    gpu = replace(scanned("dgx-a100", 0).gpus[0], product="Ü" * 60)
    value = gpu_attributes(gpu)[names.PRODUCT]
    assert isinstance(value, str)
    assert 0 < len(value.encode()) <= 64


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
