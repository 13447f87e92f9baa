"""Which NIC is a GPU's rail where PCI order, other cards on its switch or lost devices would mislead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.machines import make_vpd
from harness.synthetic import inventory_of, on_root_port, switch, synthetic
from harness.sysfs import write_tree
from railmate.inventory.model import Inventory, PciFunction
from railmate.inventory.scan import scan
from railmate.topology.analyze import analyze
from railmate.topology.model import Role, Source, Topology
from railmate_api.override import RoleRule, TopologyOverride


def topology_of(*parts: str) -> Topology:
    return analyze(inventory_of(synthetic("\n".join(parts))))


def rails(topology: Topology) -> list[str]:
    return [address[5:7] for address, role in topology.roles.items() if role is Role.RAIL]


@pytest.mark.parametrize("other", ["dpu", "lx", "e810", "cx4"])
@pytest.mark.parametrize("rail_first", [False, True])
@pytest.mark.parametrize("switches", [1, 2])
def test_a_north_south_nic_on_a_gpus_switch_is_no_rail_whichever_comes_first(
    other: str, rail_first: bool, switches: int
) -> None:
    devices = ("gpu", "nic", other) if rail_first else ("gpu", other, "nic")
    topology = topology_of(*(switch(0x20 * index, *devices) for index in range(switches)))
    at = 4 if rail_first else 5
    assert rails(topology) == [f"{0x20 * index + at:02x}" for index in range(switches)]
    assert [pair.nics[0][5:7] for pair in topology.pairs] == rails(topology)
    assert topology.notes == ()


@pytest.mark.parametrize("slow_first", [False, True])
def test_rates_of_a_link_that_is_down_make_no_nic_slow(slow_first: bool) -> None:
    devices = ("bnxt rate=10", "nic") if slow_first else ("nic", "bnxt rate=10")
    machine = synthetic("\n".join([switch(0, "gpu", devices[0]), switch(0x20, "gpu", devices[1])]))
    inventory = inventory_of(machine)
    assert len(rails(analyze(inventory))) == 1
    down = {
        address: replace(
            function,
            rdma_devices=tuple(
                replace(device, state="DOWN") if device.rate == 10 else device
                for device in function.rdma_devices
            ),
        )
        for address, function in inventory.functions.items()
    }
    assert len(rails(analyze(with_functions(inventory, down)))) == 2


@pytest.mark.parametrize("slow_first", [False, True])
@pytest.mark.parametrize(("port", "count"), [("port", 1), ("x3130", 2)])
def test_rates_that_a_hypervisor_shows_make_no_nic_slow(port: str, count: int, slow_first: bool) -> None:
    nics = ("bnxt rate=100", "nic") if slow_first else ("nic", "bnxt rate=100")
    topology = topology_of(*(switch(0x20 * i, "gpu", nic, port=port) for i, nic in enumerate(nics)))
    assert len(rails(topology)) == count


def with_functions(inventory: Inventory, functions: dict[str, PciFunction]) -> Inventory:
    return replace(
        inventory,
        functions=functions,
        gpus=tuple(replace(gpu, function=functions[gpu.address]) for gpu in inventory.gpus),
        nics=tuple(replace(nic, function=functions[nic.address]) for nic in inventory.nics),
    )


@pytest.mark.parametrize(
    ("other", "what"),
    [("dpu", "BlueField"), ("lx", "Ethernet only"), ("e810", "Ethernet only"), ("cx4", "another model")],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_left_beside_a_gpu_without_its_rail_is_no_rail_and_named(
    other: str, what: str, place: int
) -> None:
    present = [other if index == place else "nic" for index in range(3)]
    topology = topology_of(*(switch(0x20 * index, "gpu", nic) for index, nic in enumerate(present)))
    nic, gpu = f"0000:{0x20 * place + 4:02x}:00.0", f"0000:{0x20 * place + 3:02x}:00.0"
    assert topology.roles[nic] is Role.OTHER
    assert len(topology.pairs) == 2
    assert (
        f"GPU {gpu} is in no pair; NIC {nic} ({what}) is beside it; give --role {nic}=rail if it is meant "
        "to be its rail." in topology.notes
    )


@pytest.mark.parametrize("dpu_first", [False, True])
def test_one_dpu_and_one_rail_are_no_tie(dpu_first: bool) -> None:
    nics = ("dpu", "nic") if dpu_first else ("nic", "dpu")
    topology = topology_of(switch(0, "gpu", nics[0]), switch(0x20, "gpu", nics[1]))
    assert rails(topology) == ["24" if dpu_first else "04"]


def test_dpus_are_rails_where_no_gpu_has_anything_else() -> None:
    assert rails(topology_of(switch(0, "gpu", "dpu"), switch(0x20, "gpu", "dpu"))) == ["04", "24"]


@pytest.mark.parametrize("drives_first", [False, True])
def test_without_a_shared_switch_a_nic_beside_drives_is_for_storage(drives_first: bool) -> None:
    storage = switch(0x00 if drives_first else 0x60, "nvme", "nvme", "nic")
    topology = topology_of(storage, on_root_port(0x20, "gpu"), on_root_port(0x40, "nic"))
    assert rails(topology) == ["41"]
    assert topology.roles["0000:05:00.0" if drives_first else "0000:65:00.0"] is Role.STORAGE


def test_without_a_shared_switch_a_nic_beside_drives_is_a_rail_where_there_is_no_other() -> None:
    topology = topology_of(switch(0, "nvme", "nic"), on_root_port(0x20, "gpu"), on_root_port(0x40, "lx"))
    assert rails(topology) == ["04"]


@pytest.mark.parametrize("attribute", ["subsystem_vendor", "subsystem_device"])
@pytest.mark.parametrize("management_first", [False, True])
def test_a_nic_whose_subsystem_cannot_be_read_is_not_offered(
    attribute: str, management_first: bool, tmp_path: Path
) -> None:
    devices = ["management rdma=mlx5_1", "nic"] if management_first else ["nic", "management rdma=mlx5_1"]
    write_tree(synthetic(switch(0, "gpu", *devices)), tmp_path)
    unknown, rail = ("04", "05") if management_first else ("05", "04")
    address = f"0000:{unknown}:00.0"
    (tmp_path / "sys/bus/pci/devices" / address / attribute).write_text("zzz\n")
    inventory = scan(tmp_path / "sys", tmp_path / "proc")
    assert any(attribute in warning for warning in inventory.warnings)
    topology = analyze(inventory)
    assert rails(topology) == [rail]
    assert topology.roles[address] is Role.OTHER
    assert any(address in note and "role unknown, not offered" in note for note in topology.notes)
    told = analyze(inventory, TopologyOverride(roles=(RoleRule("rail", address=address),)))
    assert sorted(rails(told)) == ["04", "05"]
    assert not any("unknown" in note for note in told.notes)


@pytest.mark.parametrize(("keywords", "is_rail"), [({"PN": "X"}, True), ({"VU": "SMDL=SW_MNG"}, False)])
def test_vital_product_data_clear_a_nic_whose_subsystem_cannot_be_read(
    keywords: dict[str, str], is_rail: bool
) -> None:
    inventory = inventory_of(synthetic(switch(0, "gpu", "nic", "nic")))
    functions: dict[str, PciFunction] = dict(inventory.functions)
    functions["0000:05:00.0"] = replace(
        inventory.functions["0000:05:00.0"],
        subsystem_vendor=0,
        subsystem_device=0,
        subsystem_known=False,
        vpd=make_vpd(keywords),
    )
    topology = analyze(with_functions(inventory, functions))
    assert rails(topology) == (["04", "05"] if is_rail else ["04"])
    assert topology.notes == ()


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
@pytest.mark.parametrize("what", ["", "vga"])
def test_the_rail_of_a_lost_gpu_keeps_its_number_and_is_in_no_pair(lost: int, what: str) -> None:
    topology = topology_of(
        *(switch(0x20 * index, what if index == lost else "gpu", "nic") for index in range(4))
    )
    nic = f"0000:{0x20 * lost + 4:02x}:00.0"
    assert [topology.rails[f"0000:{0x20 * index + 4:02x}:00.0"] for index in range(4)] == [0, 1, 2, 3]
    assert len(topology.pairs) == 3
    assert all(nic not in pair.nics for pair in topology.pairs)
    assert any(f"NIC {nic} looks like a rail but no GPU is on its switch" in note for note in topology.notes)


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
@pytest.mark.parametrize("drives", [1, 2, 4])
def test_the_empty_port_of_a_lost_gpu_tells_a_rail_from_a_nic_that_serves_the_drives_beside_it(
    lost: int, drives: int
) -> None:
    """Where the others have no drive, drives alone would make a storage NIC of it and move all rails after it."""
    beside = ["nvme"] * drives
    topology = topology_of(
        *(
            switch(0x20 * index, "", "nic", *beside) if index == lost else switch(0x20 * index, "gpu", "nic")
            for index in range(4)
        )
    )
    assert [topology.rails[f"0000:{0x20 * index + 4:02x}:00.0"] for index in range(4)] == [0, 1, 2, 3]
    assert len(topology.pairs) == 3


def test_the_private_bridge_of_a_lost_gpu_may_be_gone_with_it() -> None:
    def unit(bus: int, gpu: bool) -> str:
        lines = [
            f"pci0000:{bus:02x}",
            f"  {bus:02x}:01.0 port",
            f"    {bus + 1:02x}:00.0 port",
            f"      {bus + 2:02x}:00.0 port",
            f"        {bus + 3:02x}:00.0 nic rdma=mlx5_{bus}",
            f"      {bus + 2:02x}:01.0 port",
            f"        {bus + 4:02x}:00.0 port",
            f"          {bus + 5:02x}:00.0 port",
            f"            {bus + 6:02x}:00.0 gpu",
        ]
        drive = [f"      {bus + 2:02x}:02.0 port", f"        {bus + 7:02x}:00.0 nvme"]
        return "\n".join(lines if gpu else [*lines[:-3], *drive])

    topology = topology_of(unit(0x10, True), unit(0x20, False), unit(0x30, True))
    assert [topology.rails[f"0000:{bus:02x}:00.0"] for bus in (0x13, 0x23, 0x33)] == [0, 1, 2]


@pytest.mark.parametrize(
    "storage",
    [
        ("nvme", "nic"),  # a drive where the rails have their GPU
        ("", "nvme", "nic"),  # the NIC sits elsewhere
        ("nvme", "nic", ""),  # an empty port, but not the GPU's
    ],
)
def test_a_nic_beside_a_drive_is_for_storage_where_no_gpu_is_missing(storage: tuple[str, ...]) -> None:
    topology = topology_of(switch(0, "gpu", "nic"), switch(0x20, *storage), switch(0x40, "gpu", "nic"))
    assert rails(topology) == ["04", "44"]
    assert [role for role in topology.roles.values() if role is Role.STORAGE] == [Role.STORAGE]


@pytest.mark.parametrize("storage_first", [False, True])
def test_a_storage_nic_of_the_rails_model_has_more_drives_beside_it_than_a_rail(storage_first: bool) -> None:
    rail = [switch(bus, "gpu", "nic", "nvme") for bus in (0x20, 0x40)]
    lost = switch(0x60, "", "nic", "nvme")
    storage = switch(0x00 if storage_first else 0x80, "nvme", "nvme", "nic")
    topology = topology_of(*rail, lost, storage)
    assert rails(topology) == ["24", "44", "64"]
    address = "0000:05:00.0" if storage_first else "0000:85:00.0"
    assert topology.roles[address] is Role.STORAGE
    assert any(f"NIC {address} is of the rails' model" in note for note in topology.notes)


def test_another_card_with_the_rails_chip_below_a_switch_without_gpu_is_no_rail() -> None:
    storage = switch(0x40, "020000 15b3:1021 15b3:0016 rdma=mlx5_9")
    topology = topology_of(switch(0, "gpu", "nic"), switch(0x20, "gpu", "nic"), storage)
    assert rails(topology) == ["04", "24"]


@pytest.mark.parametrize("flat_first", [False, True])
def test_on_a_partly_switched_machine_the_same_card_is_a_rail_beside_a_gpu_on_a_root_port(
    flat_first: bool,
) -> None:
    base = 0x00 if flat_first else 0x60
    topology = topology_of(
        switch(0x40, "gpu", "nic"), on_root_port(base, "gpu"), on_root_port(base + 8, "nic")
    )
    alone = f"0000:{base + 9:02x}:00.0"
    assert topology.roles[alone] is Role.RAIL
    by_source = {pair.source: (pair.nics, pair.pcie_switch) for pair in topology.pairs}
    assert by_source == {
        Source.SYSFS: (("0000:44:00.0",), "0000:41:00.0"),
        Source.NUMA: ((alone,), None),
    }
    assert any(alone in note for note in topology.notes)


def test_on_a_switched_machine_a_card_on_a_root_port_is_no_rail() -> None:
    assert rails(topology_of(switch(0x40, "gpu", "nic"), on_root_port(0, "nic"))) == ["44"]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 2), st.permutations(["nic", "nvme"]), st.sampled_from(["", "dpu", "lx"])),
        min_size=2,
        max_size=4,
    ),
    st.sampled_from(["", "nic", "dpu", "nvme nvme nic", "nvme nvme dpu"]),
    st.booleans(),
    st.data(),
)
def test_removing_a_gpu_changes_no_other_nics_role_or_rail(
    units: list[tuple[int, list[str], str]], elsewhere: str, unreadable: bool, data: st.DataObject
) -> None:
    parts = [
        switch(0x10 + 0x10 * index, *(["gpu"] * gpus), *nics, *([beside] if beside else []))
        for index, (gpus, nics, beside) in enumerate(units)
    ]
    if " " in elsewhere:
        parts.append(switch(0x80, *elsewhere.split()))
    elif elsewhere:
        parts.append(on_root_port(0x80, elsewhere))
    inventory = inventory_of(synthetic("\n".join(parts)))
    gone = data.draw(st.sampled_from([gpu.address for gpu in inventory.gpus]))
    functions = {a: f for a, f in inventory.functions.items() if unreadable or a != gone}
    gpus = tuple(gpu for gpu in inventory.gpus if gpu.address != gone)
    before, after = analyze(inventory), analyze(replace(inventory, functions=functions, gpus=gpus))
    assert after.roles == before.roles
    numbers = {nic.address: before.rails.get(nic.address) for nic in inventory.nics}
    assert {nic.address: after.rails.get(nic.address) for nic in inventory.nics} == numbers
    assert len(set(numbers.values()) - {None}) == len(units)


@pytest.mark.parametrize("other", ["dpu", "lx"])
def test_two_north_south_cards_outvote_no_rail_on_their_switch(other: str) -> None:
    assert rails(topology_of(switch(0, "gpu", other, other, "nic"))) == ["06"]


SILENT = "020000 15b3:1021 15b3:0041 driver={0}"


@pytest.mark.parametrize("driver", ["-", "vfio-pci"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_rail_without_its_driver_keeps_its_number_and_its_gpu(driver: str, place: int) -> None:
    nics = [SILENT.format(driver) if index == place else "nic" for index in range(3)]
    topology = topology_of(*(switch(0x20 * index, "gpu", nic) for index, nic in enumerate(nics)))
    assert rails(topology) == ["04", "24", "44"]
    assert [pair.nics[0][5:7] for pair in topology.pairs] == ["04", "24", "44"]


def test_a_rail_without_its_driver_costs_the_gpu_beside_it_nothing() -> None:
    """Else the two would have one NIC between them, and neither a pair."""
    topology = topology_of(
        switch(0, "gpu", "nic", "gpu", SILENT.format("-")), switch(0x20, "gpu", "nic", "gpu", "nic")
    )
    assert [(pair.gpus[0][5:7], pair.nics[0][5:7]) for pair in topology.pairs] == [
        ("03", "04"), ("05", "06"), ("23", "24"), ("25", "26")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "beside",
    [
        ("nic", SILENT.format("-")),  # on top of the usual number
        ("nic", "020000 15b3:1021 15b3:0016 driver=-"),
        ("ethernet driver=-",),  # another card
        (SILENT.format("mlx5_core"),),  # has its driver, and no RDMA
    ],
)
def test_what_has_no_rdma_is_no_rail_otherwise(beside: tuple[str, ...]) -> None:
    topology = topology_of(switch(0, "gpu", "nic"), switch(0x20, "gpu", *beside), switch(0x40, "gpu", "nic"))
    assert rails(topology) == ["04", *(["24"] if "nic" in beside else []), "44"]
