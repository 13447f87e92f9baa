"""An offer's notes: what a machine has and does not offer is said, with the reason and a way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.machines import with_vfs
from harness.synthetic import inventory_of, synthetic
from railmate.inventory.model import Inventory
from railmate.publish.devices import OfferOptions, build_offer
from railmate.publish.model import Offer
from railmate.topology.analyze import analyze
from railmate_api import attributes as names
from unit.publish.offers import check_invariants

Scanned = Callable[[str, int], Inventory]
MODELS = {
    "15b3:1021": {"driver": "mlx5_core", "vfs": 64, "vf": "15b3:101e"},
    "15b3:101e": {"driver": "mlx5_core"},
    "10de:2330": {"driver": "nvidia"},
}


def offer_of(inventory: Inventory, **options: object) -> Offer:
    return build_offer(inventory, analyze(inventory), OfferOptions(**options))  # type: ignore[arg-type]


def one_switch(gpus: int, nics: int, vfs: int) -> Inventory:
    """All GPUs and NICs of a machine below one PCIe switch; each NIC has ``vfs`` virtual functions."""
    tree = ["pci0000:00 numa=0", "  00:01.0 port", "    01:00.0 port"]
    for i in range(gpus):
        tree += [f"      02:{i:02x}.0 port", f"        {0x10 + i:02x}:00.0 gpu"]
    for i in range(nics):
        tree += [f"      02:{16 + i // 8:02x}.{i % 8} port", f"        {0x40 + i:02x}:00.0 nic rdma=mlx5_{i}"]
    machine = synthetic("\n".join(tree), MODELS)
    if vfs:
        machine = with_vfs(machine, [f"0000:{0x40 + i:02x}:00.0" for i in range(nics)], vfs, MODELS)
    return inventory_of(machine)


def changed(inventory: Inventory, address: str, **change: object) -> Inventory:
    function = replace(inventory.functions[address], **change)  # type: ignore[arg-type]
    return replace(
        inventory,
        functions={**inventory.functions, address: function},
        gpus=tuple(replace(g, function=function) if g.address == address else g for g in inventory.gpus),
        nics=tuple(replace(n, function=function) if n.address == address else n for n in inventory.nics),
    )


def test_a_machine_that_offers_everything_has_no_notes(scanned: Scanned) -> None:
    for vfs in (0, 1, 4):
        assert offer_of(scanned("dgx-a100", vfs)).notes == ()


def test_notes_are_no_part_of_what_is_published(scanned: Scanned) -> None:
    """The node agent writes slices again where two offers differ."""
    offer = offer_of(scanned("dgx-a100", 4))
    noted = replace(offer, notes=("something",))
    assert noted == offer
    assert noted.by_name == offer.by_name


def test_gpus_that_share_a_port_or_have_vfs_enough_need_no_note() -> None:
    for vfs in (0, 4):
        assert offer_of(one_switch(gpus=4, nics=1, vfs=vfs)).notes == ()


def test_gpus_that_share_a_nic_with_too_few_vfs_are_named_and_what_would_help() -> None:
    (note,) = offer_of(one_switch(gpus=4, nics=1, vfs=3)).notes
    gpus = ", ".join(f"0000:1{n}:00.0" for n in range(4))
    assert note == (
        f"GPUs {gpus} share NIC 0000:40:00.0 and are offered as a group only: with 4 usable VFs or more on it, each "
        "GPU would have a pair device too"
    )


def test_nics_without_rdma_device_are_named_once(scanned: Scanned) -> None:
    offer = offer_of(scanned("tuolumne-mi300a", 0))
    assert all(device.kind == names.KIND_GPU for device in offer.devices)
    nics, gpus = offer.notes
    assert nics.startswith("rail NICs 0000:")
    assert nics.endswith(" are not offered: no RDMA device")
    assert "offered without a pair device" in gpus


def test_a_nic_whose_rdma_device_is_elsewhere_is_not_called_one_without(scanned: Scanned) -> None:
    inventory = changed(
        scanned("dgx-a100", 0), "0000:0c:00.0", rdma_devices=(), auxiliary=("mlx5_core.rdma.0",)
    )
    assert "rail NIC 0000:0c:00.0 is not offered: RDMA device in another network namespace" in (
        offer_of(inventory).notes
    )


def test_the_uplink_is_named_and_its_gpu_too(scanned: Scanned) -> None:
    offer = offer_of(scanned("dgx-a100", 0), excluded=frozenset({"0000:12:00.0"}))
    assert offer.notes == (
        "rail NIC 0000:12:00.0 is not offered: the node's uplink",
        "GPU 0000:07:00.0 is offered without a pair device: "
        "a NIC of its pair is not offered or has no VF left",
    )


def test_vfs_of_virtual_machines_are_counted(scanned: Scanned) -> None:
    inventory = scanned("dgx-a100", 4)
    for vf in inventory.functions["0000:0c:00.0"].virtual_functions[:3]:
        inventory = changed(inventory, vf, driver="vfio-pci", rdma_devices=())
    (note,) = offer_of(inventory).notes
    assert note.startswith("3 VFs of rail NIC 0000:0c:00.0 are not offered: held by driver vfio-pci")


def test_a_gpu_in_mig_mode_or_without_driver_is_named(scanned: Scanned) -> None:
    inventory = changed(scanned("dgx-a100", 4), "0000:0f:00.0", driver=None)
    first, *others = inventory.gpus
    inventory = replace(inventory, gpus=(replace(first, partition_mode="MIG"), *others))
    assert offer_of(inventory).notes == (
        "GPU 0000:07:00.0 is not offered: in MIG mode, and no instance is made",
        "GPU 0000:0f:00.0 is not offered: no driver",
    )


def test_a_pair_of_six_nics_tells_which_attribute_is_left_out() -> None:
    offer = offer_of(one_switch(gpus=1, nics=6, vfs=0))
    (pair,) = [device for device in offer.devices if device.kind == names.KIND_PAIR]
    assert names.NIC_PCI_BUS_ID not in pair.attributes
    assert (
        f"attribute {names.NIC_PCI_BUS_ID} is left out of 1 device as published: too long, 64 bytes are the API's limit"
    ) in offer.notes
    assert str(pair.facts[names.NIC_PCI_BUS_ID]).count(",") == 5, "the pod is told"


# --- counters
def test_vfs_of_a_gpu_with_too_many_for_a_counter_set_are_offered_in_its_pair_only() -> None:
    offer = offer_of(one_switch(gpus=1, nics=62, vfs=1))
    assert [device.kind for device in offer.devices] == [names.KIND_PAIR, names.KIND_GPU]
    assert [len(held) for held in offer.counter_sets.values()] == [1]
    assert any("62 NICs of GPU 0000:10:00.0 are offered only in its pair" in note for note in offer.notes)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 16), st.integers(1, 64), st.integers(0, 3), st.booleans(), st.booleans())
def test_any_offer_keeps_the_invariants(gpus: int, nics: int, vfs: int, share: bool, groups: bool) -> None:
    check_invariants(offer_of(one_switch(gpus, nics, vfs), share_pair_vfs=share, switch_groups=groups))


def test_where_no_function_at_all_has_a_driver_drivers_are_unknown_and_devices_offered() -> None:
    inventory = one_switch(2, 2, 2)
    bare = inventory
    for address in inventory.functions:
        bare = changed(bare, address, driver=None)
    offer = offer_of(bare)
    assert [one.name for one in offer.devices] == [one.name for one in offer_of(inventory).devices]
    (note,) = offer.notes
    assert "no PCI function here has a driver" in note
    one_driver = changed(bare, "0000:10:00.0", driver="nvidia")
    assert any("not offered: no driver" in note for note in offer_of(one_driver).notes)
