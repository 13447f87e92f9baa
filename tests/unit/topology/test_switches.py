"""Which switch a device belongs to: folding of two-level chips, private bridges, odd trees."""

from __future__ import annotations

from harness.synthetic import inventory_of, switch, synthetic
from railmate.topology.analyze import analyze
from railmate.topology.model import Distance, Topology


def topology_of(tree: str) -> Topology:
    return analyze(inventory_of(synthetic(tree)))


def shared(topology: Topology) -> dict[tuple[str, str], str | None]:
    return {(path.gpu[5:], path.nic[5:]): path.pcie_switch for path in topology.paths}


TWO_LEVELS = """
    pci0000:00 numa=0
      00:01.0 port
        01:00.0 {upper}
          02:00.0 {upper}
            03:00.0 {lower}
              04:00.0 {lower}
                05:00.0 gpu
              04:01.0 {lower}
                06:00.0 nic rdma=mlx5_0
          02:01.0 {upper}
            07:00.0 {lower}
              08:00.0 {lower}
                09:00.0 gpu
              08:01.0 {lower}
                0a:00.0 nvme
          02:02.0 {upper}
            0b:00.0 {lower}
              0c:00.0 {lower}
                0d:00.0 nic rdma=mlx5_1
"""


def test_a_gen4_chip_that_shows_two_levels_is_one_switch() -> None:
    topology = topology_of(TWO_LEVELS.format(upper="gen4", lower="gen4"))
    assert len(topology.paths) == 4
    assert set(shared(topology).values()) == {"0000:01:00.0"}
    assert set(topology.switches.values()) == {"0000:01:00.0"}
    assert len(topology.switches) == 4


def test_a_gen5_chip_that_shows_two_levels_is_one_switch() -> None:
    topology = topology_of(TWO_LEVELS.format(upper="gen5upper", lower="gen5lower"))
    assert set(shared(topology).values()) == {"0000:01:00.0"}
    assert set(topology.switches.values()) == {"0000:01:00.0"}


def test_levels_of_different_generations_do_not_fold() -> None:
    topology = topology_of(TWO_LEVELS.format(upper="gen4", lower="gen5lower"))
    assert shared(topology)["05:00.0", "06:00.0"] == "0000:03:00.0"
    assert shared(topology)["09:00.0", "06:00.0"] == "0000:01:00.0"


def test_levels_of_other_vendors_do_not_fold() -> None:
    topology = topology_of(TWO_LEVELS.format(upper="port", lower="port"))
    assert shared(topology)["05:00.0", "06:00.0"] == "0000:03:00.0"


def test_a_third_level_is_another_chip() -> None:
    topology = topology_of("""
        pci0000:00
          00:01.0 port
            01:00.0 gen4
              02:00.0 gen4
                03:00.0 gen4
                  04:00.0 gen4
                    05:00.0 gen4
                      06:00.0 gen4
                        07:00.0 gpu
                      06:01.0 gen4
                        08:00.0 nic rdma=mlx5_0
              02:01.0 gen4
                09:00.0 gen4
                  0a:00.0 gen4
                    0b:00.0 gpu
    """)
    assert shared(topology) == {
        ("07:00.0", "08:00.0"): "0000:05:00.0",
        ("0b:00.0", "08:00.0"): "0000:01:00.0",
    }


def test_a_cascade_of_eight_switches_gives_each_pair_its_own() -> None:
    lines, depth, bus = ["pci0000:00", "  00:01.0 port"], 2, 1
    for _ in range(8):
        pad = "  " * depth
        lines.append(f"{pad}{bus:02x}:00.0 port")
        lines += [f"{pad}  {bus + 1:02x}:00.0 port", f"{pad}    {bus + 2:02x}:00.0 gpu"]
        lines += [f"{pad}  {bus + 1:02x}:01.0 port", f"{pad}    {bus + 3:02x}:00.0 nic rdma=mlx5_{bus}"]
        lines.append(f"{pad}  {bus + 1:02x}:02.0 port")
        depth, bus = depth + 2, bus + 4
    topology = topology_of("\n".join(lines))
    assert len(topology.paths) == 64
    assert [pair.pcie_switch for pair in topology.pairs] == [
        f"0000:{bus:02x}:00.0" for bus in range(1, 33, 4)
    ]
    assert {pair.distance for pair in topology.pairs} == {Distance.PIX}


PRIVATE = """
    pci0000:00
      00:01.0 port
        01:00.0 port
          02:00.0 port
            03:00.0 port
              04:00.0 port
                05:00.0 gpu
              04:01.0 port
                06:00.0 nvme
          02:01.0 port
            07:00.0 port
              08:00.0 port
                09:00.0 gpu
          02:02.0 port
            0a:00.0 nic rdma=mlx5_0
          02:03.0 port
            0b:00.0 nic rdma=mlx5_1
"""


def test_a_bridge_that_serves_one_gpu_is_nobodys_switch_whatever_else_is_below() -> None:
    """Counting the NVMe drive beside the first GPU would leave it a switch that the second has not."""
    topology = topology_of(PRIVATE)
    assert topology.switches == dict.fromkeys(
        ("0000:05:00.0", "0000:09:00.0", "0000:0a:00.0", "0000:0b:00.0"), "0000:01:00.0"
    )
    assert [(pair.gpus, pair.nics) for pair in topology.pairs] == [
        (("0000:05:00.0",), ("0000:0a:00.0",)),
        (("0000:09:00.0",), ("0000:0b:00.0",)),
    ]


def test_a_switch_of_gpus_alone_is_nobodys_pcie_switch() -> None:
    topology = topology_of("""
        pci0000:00
          00:01.0 port
            01:00.0 port
              02:00.0 port
                03:00.0 port
                  04:00.0 port
                    05:00.0 gpu
                  04:01.0 port
                    06:00.0 gpu
              02:01.0 port
                07:00.0 nic rdma=mlx5_0
    """)
    assert set(topology.switches.values()) == {"0000:01:00.0"}


def test_two_ports_of_a_card_behind_a_bridge_of_its_own_do_not_make_that_a_switch() -> None:
    topology = topology_of("""
        pci0000:00
          00:01.0 port
            01:00.0 port
              02:00.0 port
                03:00.0 port
                  04:00.0 port
                    05:00.0 nic rdma=mlx5_0
                    05:00.1 nic rdma=mlx5_1
              02:01.0 port
                06:00.0 gpu
    """)
    assert set(topology.switches.values()) == {"0000:01:00.0"}
    assert [pair.nics for pair in topology.pairs] == [("0000:05:00.0", "0000:05:00.1")]
    assert set(topology.rails.values()) == {0}


def test_two_switches_below_one_host_bridge_stay_apart() -> None:
    """resource.kubernetes.io/pcieRoot is the same for all four devices: too coarse here."""
    topology = topology_of("""
        pci0000:00 numa=0
          00:01.0 port
            01:00.0 port
              02:00.0 port
                03:00.0 gpu
              02:01.0 port
                04:00.0 nic rdma=mlx5_0
          00:02.0 port
            05:00.0 port
              06:00.0 port
                07:00.0 gpu
              06:01.0 port
                08:00.0 nic rdma=mlx5_1
    """)
    assert shared(topology) == {
        ("03:00.0", "04:00.0"): "0000:01:00.0",
        ("03:00.0", "08:00.0"): None,
        ("07:00.0", "04:00.0"): None,
        ("07:00.0", "08:00.0"): "0000:05:00.0",
    }
    assert [str(path.distance) for path in topology.paths] == ["PIX", "PHB", "PHB", "PIX"]


def test_a_lone_bridge_makes_no_switch_of_its_root_port() -> None:
    """Counting components two by two, as NCCL does, takes the root port for a switch here."""
    topology = topology_of("""
        pci0000:00 numa=0
          00:01.0 port
            01:00.0 port
              02:00.0 gpu
          00:02.0 port
            03:00.0 nic rdma=mlx5_0
    """)
    assert shared(topology) == {("02:00.0", "03:00.0"): None}
    assert topology.paths[0].distance is Distance.PHB
    assert topology.switches == {}


def test_devices_on_the_bus_of_one_bridge_meet_there() -> None:
    topology = topology_of("""
        pci0000:00
          00:01.0 port
            01:00.0 port
              02:01.0 gpu
              02:02.0 nic rdma=mlx5_0
    """)
    assert shared(topology) == {("02:01.0", "02:02.0"): "0000:01:00.0"}


def test_a_switch_attached_to_the_host_bridge_itself_is_found() -> None:
    """A link ends in one device; several below the first bridge mean that it is no root port."""
    topology = topology_of("""
        pci0000:00
          00:01.0 port
            01:00.0 port
              02:00.0 gpu
            01:01.0 port
              03:00.0 nic rdma=mlx5_0
    """)
    assert shared(topology) == {("02:00.0", "03:00.0"): "0000:00:01.0"}


def test_a_root_port_that_card_functions_share_is_no_switch() -> None:
    topology = topology_of("""
        pci0000:00
          00:01.0 port
            01:00.0 gpu
            01:00.1 nic rdma=mlx5_0
    """)
    assert shared(topology) == {("01:00.0", "01:00.1"): None}


def test_a_vmd_domain_starts_its_own_tree() -> None:
    topology = topology_of("""
        pci0000:5d numa=0
          5d:05.5 vmd
            pci10000:00
              00:02.0 port
                01:00.0 port
                  02:00.0 port
                    03:00.0 gpu
                  02:01.0 port
                    04:00.0 nic rdma=mlx5_0
    """)
    (path,) = topology.paths
    assert (path.gpu, path.nic) == ("10000:03:00.0", "10000:04:00.0")
    assert (path.pcie_switch, path.distance) == ("10000:01:00.0", Distance.PIX)


def test_a_domain_of_32_bits() -> None:
    topology = topology_of(switch(0, "gpu", "nic", domain="8ca3f00d", numa=-1))
    assert topology.paths[0].pcie_switch == "8ca3f00d:01:00.0"
