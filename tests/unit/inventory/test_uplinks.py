"""Which netdevs carry the node's own traffic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from railmate.inventory.model import Inventory
from railmate.inventory.uplinks import uplink_functions, uplink_names

HEAD = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
ZERO = "0" * 32


def v4(name: str, destination: str = "00000000", flags: str = "0003", mask: str = "00000000") -> str:
    return f"{name}\t{destination}\t0101A8C0\t{flags}\t0\t0\t100\t{mask}\t0\t0\t0\n"


def v6(name: str, destination: str = ZERO, length: str = "00", flags: str = "00000003") -> str:
    return f"{destination} {length} {ZERO} 00 {ZERO} 00000400 00000001 00000000 {flags} {name:>8}\n"


class Node:
    def __init__(self, root: Path) -> None:
        self.proc, self.net = root / "proc", root / "class"
        self.proc.mkdir()
        self.net.mkdir()
        (self.proc / "route").write_text(HEAD)
        (self.proc / "ipv6_route").write_text("")

    def stack(self, upper: str, *lowers: str) -> None:
        (self.net / upper).mkdir(exist_ok=True)
        for lower in lowers:
            (self.net / lower).mkdir(exist_ok=True)
            (self.net / upper / f"lower_{lower}").symlink_to(f"../{lower}")

    def names(self) -> frozenset[str]:
        return uplink_names(self.proc, self.net)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_default_routes_of_both_families_count(node: Node) -> None:
    (node.proc / "route").write_text(HEAD + v4("eth0") + v4("eth1", "0000A8C0", "0001", "0000FFFF"))
    (node.proc / "ipv6_route").write_text(v6("eth2") + v6("eth3", "fe80" + "0" * 28, "40"))
    assert node.names() == {"eth0", "eth2"}


def test_all_of_several_default_routes_count(node: Node) -> None:
    (node.proc / "route").write_text(HEAD + v4("eth0") + v4("eth1"))
    assert node.names() == {"eth0", "eth1"}


def test_route_that_is_not_up_or_rejects_does_not_count(node: Node) -> None:
    (node.proc / "route").write_text(HEAD + v4("eth0", flags="0002"))
    (node.proc / "ipv6_route").write_text(v6("lo", flags="00200200") + v6("eth1", flags="00200201"))
    assert node.names() == frozenset()


def test_half_a_default_route_is_none(node: Node) -> None:
    """0.0.0.0/1 is how VPNs lead everything away; it says nothing about the port below."""
    (node.proc / "route").write_text(HEAD + v4("tun0", mask="00000080"))
    assert node.names() == frozenset()


def test_what_an_uplink_stands_on_counts_down_to_the_ports(node: Node) -> None:
    (node.proc / "route").write_text(HEAD + v4("br0"))
    node.stack("br0", "bond0.7")
    node.stack("bond0.7", "bond0")
    node.stack("bond0", "eth0", "eth1")
    assert node.names() == {"br0", "bond0.7", "bond0", "eth0", "eth1"}


def test_links_in_a_circle_end(node: Node) -> None:
    (node.proc / "route").write_text(HEAD + v4("a"))
    node.stack("a", "b")
    node.stack("b", "a")
    assert node.names() == {"a", "b"}


def test_node_without_routes_has_no_uplink(tmp_path: Path) -> None:
    assert uplink_names(tmp_path / "none", tmp_path / "none") == frozenset()


@pytest.mark.parametrize("text", ["", "\n", "nonsense", HEAD + "short\n", HEAD + "\n\n"])
def test_table_that_makes_no_sense_is_no_reason_to_stop(node: Node, text: str) -> None:
    (node.proc / "route").write_text(text)
    (node.proc / "ipv6_route").write_text(text)
    assert node.names() == frozenset()


def test_route_whose_flags_make_no_sense_still_protects_its_netdev(node: Node) -> None:
    (node.proc / "route").write_text(HEAD + v4("eth0", flags="zz"))
    assert node.names() == {"eth0"}


def test_table_that_cannot_be_read_is_warned_of(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    (node.proc / "route").unlink()
    (node.proc / "route").mkdir()
    node.names()
    assert "uplink" in caplog.text


def test_uplink_port_takes_its_vfs_along(scanned: Callable[[str, int], Inventory]) -> None:
    inventory = scanned("dgx-a100", 4)
    hit = uplink_functions(inventory, ["enp12s0np0"])
    assert hit == {"0000:0c:00.0", *inventory.functions["0000:0c:00.0"].virtual_functions}


def test_uplink_vf_is_hit_alone(scanned: Callable[[str, int], Inventory]) -> None:
    assert uplink_functions(scanned("dgx-a100", 4), ["enp12s0v1"]) == {"0000:0c:00.2"}


def test_uplink_that_is_no_pci_nic_hits_nothing(scanned: Callable[[str, int], Inventory]) -> None:
    assert uplink_functions(scanned("dgx-a100", 4), ["wlan0", "bond0"]) == frozenset()
