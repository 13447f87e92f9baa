"""Which NICs are rails where a machine has several sorts: better kinds first, then fast ones, wherever they sit."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from harness.synthetic import inventory_of, switch, synthetic
from harness.sysfs import write_tree
from railmate.inventory.scan import scan
from railmate.topology.analyze import analyze
from railmate.topology.model import MachineClass, Role, Source, Topology
from railmate_api.override import RoleRule, TopologyOverride


def topology_of(*parts: str, override: TopologyOverride | None = None) -> Topology:
    return analyze(inventory_of(synthetic("\n".join(parts))), override)


def rails(topology: Topology) -> list[str]:
    return [address[5:7] for address, role in topology.roles.items() if role is Role.RAIL]


def switches_of_gpus(beside: str, rail: str = "nic", domain: str = "0000") -> str:
    """Two sockets: four GPUs below a switch, the first with ``beside`` too, and two NICs on root ports."""
    lines = []
    for socket, bus in enumerate((0x10, 0x80)):
        cards = ["gpu"] * 4 + ([beside] if not socket else [])
        lines.append(switch(bus, *cards, numa=socket, domain=domain))
        for port in range(2):
            at = bus + 0x20 + port
            lines += [f"  {bus:02x}:0{port + 2}.0 port", f"    {at:02x}:00.0 {rail} rdma=r{at} rate=400"]
    return "\n".join(lines)


@pytest.mark.parametrize("beside", ["dpu", "dpu rate=200", "e810", "lx", "cx4", "cx6dx rdma=mlx5_9 rate=100"])
def test_what_serves_the_host_beside_gpus_takes_no_rail_on_a_root_port_out(beside: str) -> None:
    topology = topology_of(switches_of_gpus(beside))
    assert rails(topology) == ["30", "31", "a0", "a1"]
    assert topology.machine_class is MachineClass.FLAT
    assert [(len(pair.gpus), len(pair.nics)) for pair in topology.pairs] == [(2, 1)] * 4
    assert {pair.source for pair in topology.pairs} == {Source.NUMA}
    assert topology.switches == {}
    assert any("--role 0000:17:00.0=rail" in note for note in topology.notes)


def test_a_rule_makes_a_rail_of_the_nic_beside_the_gpus() -> None:
    rule = TopologyOverride(roles=(RoleRule("rail", address="0000:17:00.0"),))
    topology = topology_of(switches_of_gpus("dpu"), override=rule)
    assert topology.machine_class is MachineClass.SWITCHED
    assert "17" in rails(topology)
    assert next(pair for pair in topology.pairs if pair.nics == ("0000:17:00.0",)).pcie_switch


def test_a_slower_card_elsewhere_is_no_reason_to_doubt_the_rails_on_switches() -> None:
    storage = "pci0000:f0\n  f0:01.0 port\n    f1:00.0 cx8 rdma=mlx5_90 rate=800"
    topology = topology_of(switch(0, "gpu", "nic"), switch(0x20, "gpu", "nic"), storage)
    assert rails(topology) == ["04", "24"]
    assert topology.machine_class is MachineClass.SWITCHED


def nic(word: str, rate: int, name: str) -> str:
    return f"{word} rdma={name} rate={rate}"


def four_switches(*cards: tuple[str, int], only_on: range | tuple[int, ...] = range(4)) -> Topology:
    """Two GPUs and the NICs of ``cards`` to a switch; the last of them only on some."""
    parts = []
    for index in range(4):
        held = cards if index in only_on else cards[:-1]
        nics = [nic(word, rate, f"r{index}_{number}") for number, (word, rate) in enumerate(held)]
        parts.append(switch(0x20 * index, "gpu", "gpu", *nics))
    return topology_of(*parts)


TWO_EACH = ["05", "06", "25", "26", "45", "46", "65", "66"]


@pytest.mark.parametrize("storage", [100, 200, 400])
def test_bluefields_one_for_each_gpu_are_the_rails_beside_one_storage_card(storage: int) -> None:
    topology = four_switches(("supernic", 400), ("supernic", 400), ("dualcx7", storage))
    assert rails(topology) == TWO_EACH
    assert [len(pair.nics) for pair in topology.pairs] == [1] * 8


@pytest.mark.parametrize("count", [1, 2])
def test_bluefields_beside_as_many_other_nics_are_for_the_host(count: int) -> None:
    topology = four_switches(("nic", 400), ("nic", 400), *[("dpu", 400)] * count)
    assert rails(topology) == TWO_EACH


def test_bluefield_rails_on_switches_stay_rails_with_storage_cards_on_root_ports() -> None:
    parts = [
        switch(0x20 * i, *["gpu"] * 2, nic("supernic", 400, f"a{i}"), nic("supernic", 400, f"b{i}"))
        for i in range(4)
    ]
    storage = f"pci0000:f0\n  f0:01.0 port\n    f1:00.0 {nic('dualcx7', 200, 'storage')}"
    topology = topology_of(*parts, storage)
    assert rails(topology) == TWO_EACH
    assert topology.machine_class is MachineClass.SWITCHED


@pytest.mark.parametrize("only_on", [(0,), (0, 2), (0, 1, 2), (0, 1, 2, 3)])
def test_slow_nics_of_the_rails_own_make_that_come_on_top_are_no_rails(only_on: tuple[int, ...]) -> None:
    topology = four_switches(("nic", 400), ("nic", 400), ("nic", 200), only_on=only_on)
    assert rails(topology) == TWO_EACH
    assert [len(pair.nics) for pair in topology.pairs] == [1] * 8


def test_a_rail_with_a_bad_cable_is_slow_and_stays_a_rail() -> None:
    parts = [
        switch(0x20 * i, "gpu", "gpu", nic("nic", 400, f"a{i}"), nic("nic", 100 if i == 1 else 400, f"b{i}"))
        for i in range(4)
    ]
    assert rails(topology_of(*parts)) == TWO_EACH


def test_nics_on_top_that_are_as_fast_as_the_rails_are_named() -> None:
    topology = four_switches(("nic", 400), ("nic", 400), ("nic", 400), only_on=(0,))
    assert len(rails(topology)) == 9
    (note,) = topology.notes
    assert "Switch 0000:01:00.0 has 3 rail NICs (0000:05:00.0, 0000:06:00.0, 0000:07:00.0)" in note
    assert "have 2" in note


ATTRIBUTES = ("vendor", "device", "subsystem_vendor", "subsystem_device")


@pytest.mark.parametrize("content", ["zzz\n", None])
@pytest.mark.parametrize(
    "attributes", [held for count in (1, 2, 4) for held in combinations(ATTRIBUTES, count)]
)
def test_nvswitch_management_whose_ids_cannot_be_read_is_no_rail(
    attributes: tuple[str, ...], content: str | None, tmp_path: Path
) -> None:
    """Also where it is the only NIC on its GPU's switch."""
    write_tree(
        synthetic(switch(0, "gpu", "nic") + "\n" + switch(0x20, "gpu", "management rdma=mlx5_99")), tmp_path
    )
    directory = (tmp_path / "sys/bus/pci/devices/0000:24:00.0").resolve()
    for attribute in attributes:
        (directory / attribute).unlink()
        if content is not None:
            (directory / attribute).write_text(content)
    topology = analyze(scan(tmp_path / "sys", tmp_path / "proc"))
    assert rails(topology) == ["04"]
    assert [pair.nics for pair in topology.pairs] == [("0000:04:00.0",)]
