"""GPUs that are cut up, and hardware that is not offered."""

from __future__ import annotations

from collections import Counter

import pytest

from railmate.inventory.model import GpuVendor, Partition
from railmate.topology.analyze import analyze
from railmate_api import attributes as names
from unit.publish.offered_machines import MIG, cut
from unit.publish.offers import (
    Scanned,
    check_invariants,
    of_kind,
    offer_of,
    parent_of,
    without_driver,
)


# --- GPUs that are cut up
def test_mig_instances_are_offered_in_place_of_their_gpu(scanned: Scanned) -> None:
    offer = offer_of(cut(scanned("dgx-a100", 4), "0000:07:00.0", "MIG", *MIG))
    assert Counter(d.kind for d in offer.devices) == {"pair": 7, "gpu": 7, "gpu-partition": 2, "rdma-vf": 25}
    small, large = of_kind(offer, "gpu-partition")
    assert small.name == "gpu-0000-07-00-0-gi7ci0"
    wanted = {
        names.PROFILE: "3g.20gb",
        names.UUID: "MIG-1",
        names.PRODUCT: "NVIDIA A100-SXM4-40GB",
        names.PCIE_SWITCH: "0000:01:00.0",
        names.PCI_BUS_ID: "0000:07:00.0",
    }
    assert {name: large.attributes.get(name) for name in wanted} == wanted
    assert large.capacity == {names.MEMORY: 20 << 30}
    assert any("in MIG mode: its instances are offered" in note for note in offer.notes)
    check_invariants(offer)


def test_mig_instances_do_not_exclude_each_other(scanned: Scanned) -> None:
    offer = offer_of(cut(scanned("dgx-a100", 4), "0000:07:00.0", "MIG", *MIG))
    assert [one.consumes for one in of_kind(offer, "gpu-partition")] == [(), ()]


def test_parts_and_the_whole_of_a_gpu_exclude_each_other(scanned: Scanned) -> None:
    """AMD's XCPs: all of them together are the GPU, and can be had as one."""
    xcps = tuple(Partition(f"xcp{n}", "CPX", f"u{n}", 16 << 30, (f"dri/renderD{130 + n}",)) for n in range(8))
    address = "0000:02:00.0"
    offer = offer_of(cut(scanned("tuolumne-mi300a", 0), address, "CPX/NPS1", *xcps))
    whole = next(one for one in of_kind(offer, "gpu") if one.gpus == (address,))
    parts = of_kind(offer, "gpu-partition")
    ((counter_set, counter, units),) = whole.consumes
    assert (offer.counter_sets[counter_set][counter], units, len(parts)) == (8, 8, 8)
    assert {part.consumes for part in parts} == {((counter_set, counter, 1),)}
    check_invariants(offer)


def test_gpus_that_a_device_plugin_hands_out_are_left_to_it(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 2), handed_out={GpuVendor.NVIDIA: "nvidia.com/gpu"})
    assert Counter(device.kind for device in offer.devices) == {"rdma-vf": 16}
    (note,) = offer.notes
    assert note.startswith("GPUs 0000:07:00.0, ")
    assert "a device plugin on this node hands out nvidia.com/gpu" in note
    other = offer_of(scanned("dgx-a100", 2), handed_out={GpuVendor.AMD: "amd.com/gpu"})
    assert other == offer_of(scanned("dgx-a100", 2))


@pytest.mark.parametrize("vfs", [0, 1, 4])
def test_beside_another_vendors_gpu_driver_nics_alone_are_offered(scanned: Scanned, vfs: int) -> None:
    """All of their VFs: there is no pair to keep one for."""
    inventory = cut(scanned("dgx-a100", vfs), "0000:07:00.0", "MIG", *MIG)
    offer = offer_of(inventory, nics_only=True)
    assert Counter(device.kind for device in offer.devices) == {"rdma-vf": 8 * max(vfs, 1)}
    assert not offer.counter_sets
    assert offer.notes == ()
    for device in offer.devices:
        assert {names.PCIE_ROOT, names.PCIE_SWITCH, names.NUMA_NODE} <= device.attributes.keys()
    check_invariants(offer)
    uplink = offer_of(inventory, nics_only=True, excluded=frozenset({offer.devices[0].nics[0]}))
    assert len(uplink.devices) == len(offer.devices) - 1


def test_mi300a_whose_nics_have_no_rdma_device_offers_its_gpus(scanned: Scanned) -> None:
    offer = offer_of(scanned("tuolumne-mi300a", 0))
    assert Counter(device.kind for device in offer.devices) == {"gpu": 4}
    assert {gpu.attributes[names.VENDOR] for gpu in offer.devices} == {"amd"}


# --- what is not offered
def test_excluded_port_takes_its_pair_along_and_leaves_the_gpu(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 0), excluded=frozenset({"0000:12:00.0"}))
    assert not any(name.startswith("pair-0000-07-00-0") for name in offer.by_name)
    assert "gpu-0000-07-00-0" in offer.by_name
    check_invariants(offer)


def test_excluded_vf_is_offered_under_no_name(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 4), excluded=frozenset({"0000:12:00.1"}), share_pair_vfs=True)
    assert not [device for device in offer.devices if "0000:12:00.1" in device.nics]
    assert offer.by_name["pair-0000-07-00-0-0000-12-00-2"].nics == ("0000:12:00.2",)


def test_gpu_without_driver_is_not_offered_and_its_vfs_are(scanned: Scanned) -> None:
    inventory = without_driver(scanned("dgx-a100", 4), "0000:07:00.0")
    offer = offer_of(inventory)
    assert not [device for device in offer.devices if "0000:07:00.0" in device.gpus]
    assert (
        len([d for d in of_kind(offer, "rdma-vf") if parent_of(inventory, d.nics[0]) == "0000:12:00.0"]) == 4
    )


def test_vf_without_driver_is_skipped_for_the_next_one(scanned: Scanned) -> None:
    offer = offer_of(without_driver(scanned("dgx-a100", 4), "0000:12:00.1"))
    assert offer.by_name["pair-0000-07-00-0-0000-12-00-2"].nics == ("0000:12:00.2",)


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
