"""NCCL's class where it is not nvidia-smi's."""

from __future__ import annotations

from harness.synthetic import inventory_of, synthetic
from railmate.topology.analyze import analyze


def classes(tree: str) -> list[tuple[str, str]]:
    """(nvidia-smi's, NCCL's) of every path."""
    topology = analyze(inventory_of(synthetic(tree)))
    return [(str(path.distance), str(path.nccl_distance)) for path in topology.paths]


SWITCH = """
    {host}
      00:01.0 port
        01:00.0 port
          02:00.0 port
            03:00.0 gpu
          02:01.0 port
            04:00.0 nic rdma=mlx5_0
"""


def test_one_switch_is_pix_to_both() -> None:
    assert classes(SWITCH.format(host="pci0000:00")) == [("PIX", "PIX")]


def test_phb_takes_in_node_and_an_unknown_node_is_a_node() -> None:
    tree = "pci0000:00 numa={0}\n  00:00.0 gpu\npci0000:80 numa={0}\n  80:00.0 nic rdma=mlx5_0"
    assert classes(tree.format(0)) == [("NODE", "PHB")]
    assert classes(tree.format(-1)) == [("SYS", "PHB")]
    apart = "pci0000:00 numa=0\n  00:00.0 gpu\npci0000:80 numa=-1\n  80:00.0 nic rdma=mlx5_0"
    assert classes(apart) == [("SYS", "SYS")]


def test_a_lone_bridge_breaks_the_count_by_two() -> None:
    """Root port, bridge, device: NCCL takes the root port for a switch. Two GPUs' NICs on one root port show it."""
    tree = """
    pci0000:00 numa=0
      00:01.0 port
        01:00.0 port
          02:00.0 gpu
          02:00.1 nic rdma=mlx5_0
      00:02.0 port
        03:00.0 nic rdma=mlx5_1
    """
    assert classes(tree) == [("PIX", "PIX"), ("PHB", "PHB")]
    deeper = """
    pci0000:00 numa=0
      00:01.0 port
        01:00.0 port
          02:00.0 port
            03:00.0 port
              04:00.0 gpu
          02:01.0 port
            05:00.0 nic rdma=mlx5_0
    """
    # the GPU's chain is 02:00.0, 00:01.0 and the NIC's 01:00.0: nothing in common
    assert classes(deeper) == [("PXB", "PHB")]


def test_a_domain_of_more_than_four_digits_is_no_address_to_nccl() -> None:
    assert classes(SWITCH.format(host="pci10000:00 numa=0")) == [("PIX", "PHB")]


def two_levels(upper: str, lower: str, third: bool = False) -> str:
    more = (
        f"""
                08:00.0 {lower}
                  09:00.0 {lower}
                    0a:00.0 gpu"""
        if third
        else """
                0a:00.0 gpu"""
    )
    return f"""
    pci0000:00
      00:01.0 port
        01:00.0 {upper}
          02:00.0 {upper}
            03:00.0 {lower}
              04:00.0 {lower}{more}
          02:01.0 {upper}
            05:00.0 {lower}
              06:00.0 {lower}
                07:00.0 nic rdma=mlx5_0
    """


def test_both_levels_of_a_broadcom_chip_are_one_to_nccl_and_two_to_nvidia_smi() -> None:
    assert classes(two_levels("gen4", "gen4")) == [("PXB", "PIX")]
    assert classes(two_levels("gen5upper", "gen5lower")) == [("PXB", "PIX")]
    assert classes(two_levels("port", "port")) == [("PXB", "PXB")]
    assert classes(two_levels("gen5lower", "gen5upper")) == [("PXB", "PXB")]


def test_a_third_level_stays_a_switch() -> None:
    assert classes(two_levels("gen4", "gen4", third=True)) == [("PXB", "PXB")]


def test_a_grace_gpu_reaches_the_nics_of_its_processor_by_c2c() -> None:
    tree = """
    pci0000:00 numa=0
      00:01.0 port
        03:00.0 nic rdma=mlx5_0
    pci0008:00 numa=0
      00:01.0 port
        06:00.0 gb200
    pci0018:00 numa=1
      00:01.0 port
        06:00.0 gb200
    """
    assert classes(tree) == [("NODE", "P2C"), ("SYS", "SYS")]
