"""The picture of machines whose switches hang below each other, or need several rows."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from harness.synthetic import inventory_of, synthetic
from railmate.topology.analyze import analyze
from railmate.topology.render.picture import picture

SVG = "{http://www.w3.org/2000/svg}"
LINE = "#c4ccd6"  # between switches and processors


class Drawn:
    def __init__(self, tree: str) -> None:
        inventory = inventory_of(synthetic(tree))
        root = ElementTree.fromstring(picture(inventory, analyze(inventory)))
        self.texts = [element.text or "" for element in root.iter(f"{SVG}text")]
        lines = [path.attrib["d"] for path in root.iter(f"{SVG}path") if path.attrib["stroke"] == LINE]
        points = [re.fullmatch(r"M(\d+) (\d+) L(\d+) (\d+)", line) for line in lines]
        ends = [tuple(map(int, match.groups())) for match in points if match]
        self.down = [(x, y, y2) for x, y, x2, y2 in ends if x == x2]
        self.across = [(y, x, x2) for x, y, x2, y2 in ends if y == y2]
        self.trunks = [line for line, match in zip(lines, points, strict=True) if match is None]

    def subtitle(self, switch: str) -> str:
        return self.texts[self.texts.index(f"PCIe switch {switch}") + 1]


def chained(switches: int) -> str:
    """Each switch has a GPU, a NIC and the next switch below it."""
    tree, indent = ["pci0000:00 numa=0", "  00:01.0 port"], " " * 4
    for n in range(switches):
        bus = 2 * n + 1
        tree += [
            f"{indent}{bus:02x}:00.0 port",
            f"{indent}  {bus + 1:02x}:00.0 port",
            f"{indent}    {0x80 + 2 * n:02x}:00.0 gpu",
            f"{indent}  {bus + 1:02x}:01.0 port",
            f"{indent}    {0x81 + 2 * n:02x}:00.0 nic rdma=mlx5_{n}",
            f"{indent}  {bus + 1:02x}:02.0 port",
        ]
        indent += " " * 4
    return "\n".join(tree)


def separate(switches: int) -> str:
    """Each switch has a root port of its own."""
    tree = ["pci0000:00 numa=0"]
    for n in range(switches):
        bus = 8 * n + 8
        tree += [
            f"  00:{n + 1:02x}.0 port",
            f"    {bus:02x}:00.0 port",
            f"      {bus + 1:02x}:00.0 port",
            f"        {bus + 2:02x}:00.0 gpu",
            f"      {bus + 1:02x}:01.0 port",
            f"        {bus + 3:02x}:00.0 nic rdma=mlx5_{n}",
        ]
    return "\n".join(tree)


def test_only_the_first_of_chained_switches_hangs_on_the_processors() -> None:
    drawn = Drawn(chained(3))
    assert len(drawn.down) == 1
    assert len(drawn.across) == 2, "each other one hangs on its neighbour"
    assert [drawn.subtitle(switch) for switch in ("01:00.0", "03:00.0", "05:00.0")] == [
        "NUMA node 0",
        "NUMA node 0 · below 01:00.0",
        "NUMA node 0 · below 03:00.0",
    ]


def test_a_chain_that_goes_on_in_the_next_row_is_not_tied_to_the_processors_there() -> None:
    drawn = Drawn(chained(8))
    assert len(drawn.down) == 1
    assert not drawn.trunks
    assert drawn.subtitle("0f:00.0") == "NUMA node 0 · below 0d:00.0"


def test_switches_in_several_rows_hang_on_one_bar() -> None:
    drawn = Drawn(separate(8))
    assert drawn.texts.count("processors and memory") == 1
    assert len(drawn.down) == 8
    (trunk,) = drawn.trunks
    assert len({y for _, y, _ in drawn.down}) == 2
    assert f"V{max(y for _, y, _ in drawn.down)} " in trunk, "the second row's lines begin at the trunk"
    assert not any("below" in text for text in drawn.texts)


def test_a_switch_with_nothing_but_switches_below_is_named_by_those() -> None:
    tree = ["pci0000:00 numa=0", "  00:01.0 port", "    01:00.0 port"]
    for n in range(2):
        bus = 8 * n + 8
        tree += [
            f"      02:0{n}.0 port",
            f"        {bus:02x}:00.0 port",
            f"          {bus + 1:02x}:00.0 port",
            f"            {bus + 2:02x}:00.0 gpu",
            f"          {bus + 1:02x}:01.0 port",
            f"            {bus + 3:02x}:00.0 nic rdma=mlx5_{n}",
        ]
    drawn = Drawn("\n".join(tree))
    assert drawn.subtitle("08:00.0") == drawn.subtitle("10:00.0") == "NUMA node 0 · below 01:00.0"
    assert len(drawn.down) == 2
