"""Where no switch tells, GPUs and NICs are matched over the whole node: even loads, then nearness."""

from __future__ import annotations

import pytest

from harness.machines import MACHINES, load_machine
from harness.synthetic import inventory_of, on_root_port, switch, synthetic
from railmate.topology.analyze import analyze
from railmate.topology.model import Distance, Pair, Source, Topology
from railmate_api.override import OverrideSwitch, RoleRule, TopologyOverride


def topology_of(*parts: str) -> Topology:
    return analyze(inventory_of(synthetic("\n".join(parts))))


def short(pair: Pair) -> tuple[list[str], list[str]]:
    return [gpu[5:7] for gpu in pair.gpus], [nic[5:7] for nic in pair.nics]


def flat(gpu_nodes: list[int], nic_nodes: list[int]) -> Topology:
    """GPUs at buses 11, 13 and so on, NICs at 91, 93 and so on, each on a host bridge of its own."""
    gpus = [on_root_port(0x10 + 2 * i, "gpu", node) for i, node in enumerate(gpu_nodes)]
    return topology_of(*gpus, *(on_root_port(0x90 + 2 * i, "nic", node) for i, node in enumerate(nic_nodes)))


@pytest.mark.parametrize(
    ("gpu_nodes", "nic_nodes", "sizes"),
    [
        (list(range(8)), [1, 6], [(4, 1)] * 2),  # NPS4
        ([0, 0, 1, 1, 2, 2, 3, 3], [2], [(8, 1)]),
        ([0, 1], [0, 0], [(1, 1)] * 2),
        ([0, 1], [0], [(2, 1)]),
        ([0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1], [(1, 2)] * 4),
        ([0, 0, 0, 1], [0, 1], [(2, 1)] * 2),
    ],
)
def test_every_gpu_has_its_even_share_of_the_nics(
    gpu_nodes: list[int], nic_nodes: list[int], sizes: list[tuple[int, int]]
) -> None:
    topology = flat(gpu_nodes, nic_nodes)
    assert [(len(pair.gpus), len(pair.nics)) for pair in topology.pairs] == sizes
    assert {pair.source for pair in topology.pairs} == {Source.NUMA}
    assert sum(len(pair.gpus) for pair in topology.pairs) == len(gpu_nodes)
    assert not any("in no pair" in note for note in topology.notes)


def test_the_near_ones_come_first() -> None:
    topology = flat([0, 1, 1, 0], [1, 0])
    assert [short(pair) for pair in topology.pairs] == [(["11", "17"], ["93"]), (["13", "15"], ["91"])]
    assert {pair.distance for pair in topology.pairs} == {Distance.NODE}
    assert not any("SYS" in note for note in topology.notes)


def test_gpus_without_a_nic_on_their_numa_node_are_named() -> None:
    topology = flat([0, 1], [0, 0])
    assert [short(pair) for pair in topology.pairs] == [(["11"], ["91"]), (["13"], ["93"])]
    assert [pair.distance for pair in topology.pairs] == [Distance.NODE, Distance.SYS]
    assert any("left for GPU 0000:13:00.0 (distance SYS)" in note for note in topology.notes)


BESIDE_A_SWITCH = [
    # a root port each, one host bridge
    "pci0000:80 numa=1\n  80:01.0 port\n    81:00.0 gpu\n  80:02.0 port\n    82:00.0 nic rdma=mlx5_9",
    # the same without NUMA
    "pci0000:80 numa=-1\n  80:01.0 port\n    81:00.0 gpu\n  80:02.0 port\n    82:00.0 nic rdma=mlx5_9",
]


@pytest.mark.parametrize("rest", BESIDE_A_SWITCH)
@pytest.mark.parametrize("domain", ["0000", "10000"])  # a VMD's
def test_what_shares_no_switch_is_matched_by_host_bridge_beside_what_does(rest: str, domain: str) -> None:
    topology = topology_of(switch(0x10, "gpu", "nic", domain=domain), rest)
    pairs = {pair.gpus[0]: pair for pair in topology.pairs}
    by_switch, by_bridge = pairs[f"{domain}:13:00.0"], pairs["0000:81:00.0"]
    assert (by_switch.nics, by_switch.source) == ((f"{domain}:14:00.0",), Source.SYSFS)
    assert (by_bridge.nics, by_bridge.source) == (("0000:82:00.0",), Source.NUMA)
    assert (by_bridge.pcie_switch, by_bridge.distance) == (None, Distance.PHB)
    assert "0000:81:00.0" not in topology.switches
    assert any("0000:81:00.0" in note and "by host bridge" in note for note in topology.notes)


def test_what_shares_no_switch_takes_nothing_from_what_does() -> None:
    topology = topology_of(switch(0x10, "gpu", "nic", "nic", numa=0), on_root_port(0x80, "gpu", numa=0))
    assert [short(pair) for pair in topology.pairs] == [(["13"], ["14", "15"])]
    assert any("GPU 0000:81:00.0 is in no pair" in note for note in topology.notes)


def test_a_rail_whose_gpu_is_lost_goes_to_no_other_socket() -> None:
    topology = topology_of(
        switch(0x10, "", "nic", numa=0),
        switch(0x40, "gpu", "nic", numa=0),
        switch(0x80, "gpu", "dpu", numa=1),
    )
    assert [short(pair) for pair in topology.pairs] == [(["43"], ["44"])]


def test_an_override_of_one_switch_leaves_the_others_pairs_as_sysfs_has_them() -> None:
    machine = inventory_of(load_machine(MACHINES / "aws-p4d.yaml"))
    plain = analyze(machine)
    one = OverrideSwitch("s0", ("0000:10:1c.0", "0000:10:1d.0", "0000:10:1b.0"))
    topology = analyze(machine, TopologyOverride(switches=(one,)))
    assert topology.roles == plain.roles
    assert topology.pairs[1:] == plain.pairs[1:]
    assert (topology.pairs[0].gpus, topology.pairs[0].nics) == (plain.pairs[0].gpus, plain.pairs[0].nics)
    assert (topology.pairs[0].pcie_switch, topology.pairs[0].source) == ("s0", Source.OVERRIDE)
    storage = RoleRule("storage", address="0000:20:1b.0")
    topology = analyze(machine, TopologyOverride(switches=(one,), roles=(storage,)))
    assert topology.pairs[1:] == plain.pairs[2:], "no NIC of the other socket is given away"


def test_an_override_of_one_switch_takes_no_rail_of_another_model_from_the_rest() -> None:
    machine = inventory_of(
        synthetic("""
            pci0000:10 numa=0
              10:1b.0 nic rdma=mlx5_0
              10:1c.0 gpu
            pci0000:20 numa=1
              20:1b.0 cx6 rdma=mlx5_1
              20:1c.0 gpu
        """)
    )
    one = OverrideSwitch("s0", ("0000:10:1b.0", "0000:10:1c.0"))
    topology = analyze(machine, TopologyOverride(switches=(one,)))
    assert [(short(pair), pair.source) for pair in topology.pairs] == [
        ((["10"], ["10"]), Source.OVERRIDE),
        ((["20"], ["20"]), Source.NUMA),
    ]
