"""Machines of which addresses, roles and shape are published but no device tree.

Trees are made from that: addresses of GPUs and NICs, what shares a switch and which private bridges
there are is published; addresses of bridges in between are made up. Nothing here was read from a
machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.machines import Machine
from harness.synthetic import synthetic


class _Builder:
    """Lines of a machine's tree."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._rdma = 0

    def host(self, domain: int, bus: int, numa: int) -> None:
        self.lines.append(f"pci{domain:04x}:{bus:02x} numa={numa}")
        self._host_bus = bus
        self._ports = 0

    def root_port(self) -> None:
        self._ports += 1
        self.lines.append(f"  {self._host_bus:02x}:{self._ports:02x}.1 port")

    def device(self, depth: int, address: str, word: str, more: str = "") -> None:
        if word in _RDMA:
            more = f"rdma=mlx5_{self._rdma} {more}"
            self._rdma += 1
        self.lines.append(f"{'  ' * depth}{address} {word} {more}".rstrip())

    def machine(self) -> Machine:
        return synthetic("\n".join(self.lines))


_RDMA = {"nic", "efa", "bnxt", "cx4", "cx4lx", "lx", "vf", "management", "dpu"}
Groups = Sequence[tuple[int, Sequence[str], Sequence[str]]]  # NUMA node, GPUs' buses, NICs' buses


def one_switch_each(
    groups: Groups, gpu: str, nic: str, switch: str = "port", management: Sequence[str] = ()
) -> Machine:
    """A host bridge with one switch for each group, devices straight below (AWS p5, p6-b200).

    ``management``: buses of NVSwitch management functions, which go below the third group's switch.
    """
    tree = _Builder()
    for index, (numa, gpus, nics) in enumerate(groups):
        tree.host(0, index * 2, numa)
        tree.root_port()
        upstream, inner = 0xE0 + 2 * index, 0xE1 + 2 * index
        tree.device(2, f"{upstream:02x}:00.0", switch)
        below = [(bus, nic) for bus in nics] + [(bus, gpu) for bus in gpus]
        if index == 2:
            below += [(bus, "management") for bus in management]
        for port, (bus, word) in enumerate(sorted(below)):
            tree.device(3, f"{inner:02x}:{port:02x}.0", switch)
            tree.device(4, f"{bus}:00.0", word)
    return tree.machine()


def behind_private_bridges(
    pairs: Sequence[tuple[int, str, str]],
    gpu: str,
    nic: str,
    switch: str,
    bridge: str,
    extra: Sequence[str] = (),
) -> Machine:
    """A switch for each GPU and NIC, the GPU behind one more that serves it alone (Turin H200, MI300X, MI350).

    ``pairs``: NUMA node, GPU's bus, NIC's bus. ``extra``: lines of further devices below a root port each.
    """
    tree = _Builder()
    buses = iter(_free_buses({bus for _, *held in pairs for bus in held}))
    for numa, gpu_bus, nic_bus in pairs:
        tree.host(0, next(buses), numa)
        tree.root_port()
        upstream, inner, private, behind = (next(buses) for _ in range(4))
        tree.device(2, f"{upstream:02x}:00.0", switch)
        tree.device(3, f"{inner:02x}:00.0", switch)
        tree.device(4, f"{nic_bus}:00.0", nic)
        tree.device(3, f"{inner:02x}:01.0", switch)
        tree.device(4, f"{private:02x}:00.0", bridge)
        tree.device(5, f"{behind:02x}:00.0", bridge)
        tree.device(6, f"{gpu_bus}:00.0", gpu)
    for index, line in enumerate(extra):
        if index == 0:
            tree.host(0, next(buses), 0)
        tree.root_port()
        address, word = line.split()
        tree.device(2, address, word)
    return tree.machine()


def _free_buses(taken: set[str]) -> list[int]:
    return [bus for bus in range(0x100) if f"{bus:02x}" not in taken | {"61", "91"}]


def oci_h100() -> Machine:
    """Two-level Gen5 switches: the upper level, a lower one for the two-port NIC and one for the GPU."""
    pairs = _OCI
    tree = _Builder()
    buses = iter(_free_buses({bus for _, *held in pairs for bus in held}))
    for numa, gpu, nic in pairs:
        tree.host(0, next(buses), numa)
        tree.root_port()
        upper, inner = next(buses), next(buses)
        tree.device(2, f"{upper:02x}:00.0", "gen5upper")
        for port, (bus, word) in enumerate(((nic, "nic"), (gpu, "gpu"))):
            lower, ports = next(buses), next(buses)
            tree.device(3, f"{inner:02x}:{port:02x}.0", "gen5upper")
            tree.device(4, f"{lower:02x}:00.0", "gen5lower")
            tree.device(5, f"{ports:02x}:00.0", "gen5lower")
            tree.device(6, f"{bus}:00.0", word)
            if word == "nic":
                tree.device(6, f"{bus}:00.1", word)
    return tree.machine()


def ibm_h100_vm() -> Machine:
    """A guest: one QEMU switch for each GPU and the VF beside it."""
    tree = _Builder()
    for index, (numa, gpu, nic) in enumerate(_IBM):
        tree.host(0, int(nic, 16) - 3, numa)
        tree.lines.append(f"  {int(nic, 16) - 3:02x}:01.0 qemuport")
        tree.device(2, f"{int(nic, 16) - 2:02x}:00.0", "x3130")
        tree.device(3, f"{int(nic, 16) - 1:02x}:00.0", "x3130")
        tree.device(4, f"{nic}:00.0", "vf", f"net=enp{index}")
        tree.device(3, f"{int(nic, 16) - 1:02x}:01.0", "x3130")
        tree.device(4, f"{gpu}:00.0", "gpu")
    return tree.machine()


def tioga() -> Machine:
    """MI250X: of each NIC's two GPUs one is on its host bridge, the other on one of its own; one NUMA node."""
    tree = _Builder()
    for numa, beside, apart, nic in _TIOGA:
        tree.host(0, int(nic, 16) - 1, numa)
        tree.root_port()
        tree.device(2, f"{nic}:00.0", "slingshot", f"net=hsn{numa}")
        tree.root_port()
        tree.device(2, f"{beside}:00.0", "mi250x")
        tree.host(0, int(apart, 16) - 1, numa)
        tree.root_port()
        tree.device(2, f"{apart}:00.0", "mi250x")
    return tree.machine()


def aurora() -> Machine:
    """NEC SX-Aurora A300-8: four vector engines and a ConnectX-4 below each of two switches, one NUMA node."""
    tree = _Builder()
    for bus, upstream, engines, nic in (
        (0x17, 0x18, ("1b", "1c", "1d", "1e"), "1a"),
        (0x3A, 0x3B, ("3d", "3f", "40", "41"), "3e"),
    ):
        tree.host(0, bus, 0)
        tree.root_port()
        tree.device(2, f"{upstream:02x}:00.0", "port")
        for port, device in enumerate(sorted((*engines, nic))):
            tree.device(3, f"{upstream + 1:02x}:{port:02x}.0", "port")
            tree.device(4, f"{device}:00.0", "cx4" if device == nic else "ve")
    return tree.machine()


def hygon() -> Machine:
    """Eight DCUs: four to a switch with one two-port NIC, one of them on the NIC's own sub-switch.

    Published: the NICs 42:00, c0:00 and 91:00 (10G) and the DCUs 45 and bf; the others' buses are made up.
    """
    tree = _Builder()
    for host, nic, near, others in (
        (0x30, "42", "45", ("31", "35", "39")),
        (0xA0, "c0", "bf", ("a1", "a5", "a9")),
    ):
        top, sub, private = host + 0x0E, int(nic, 16) - 6, int(nic, 16) + 4
        tree.host(0, host, int(host > 0x80))
        tree.root_port()
        tree.device(2, f"{top - 4:02x}:00.0", "port")
        tree.device(3, f"{top - 3:02x}:00.0", "port")
        tree.device(4, f"{sub:02x}:00.0", "port")
        tree.device(5, f"{sub + 1:02x}:00.0", "port")
        tree.device(6, f"{nic}:00.0", "cx4")
        tree.device(6, f"{nic}:00.1", "cx4")
        tree.device(5, f"{sub + 1:02x}:01.0", "port")
        _behind(tree, 6, private, near)
        for port, other in enumerate(others, 1):
            tree.device(3, f"{top - 3:02x}:{port:02x}.0", "port")
            _behind(tree, 4, private + 2 * port, other)
    tree.host(0, 0x90, 1)
    tree.root_port()
    tree.device(2, "91:00.0", "cx4lx")
    return tree.machine()


def _behind(tree: _Builder, depth: int, bus: int, gpu: str) -> None:
    """A GPU behind a bridge that serves it alone."""
    tree.device(depth, f"{bus:02x}:00.0", "dcubridge")
    tree.device(depth + 1, f"{bus + 1:02x}:00.0", "dcubridge")
    tree.device(depth + 2, f"{gpu}:00.0", "dcu")


def grace(gpu: str, functions: int, data_direct: bool, numa: bool = True) -> Machine:
    """GB200 or GB300: four GPUs and four NICs, each in a domain of its own.

    With ``data_direct`` a DMA function (15b3:2100) sits on each GPU's host bridge and carries its NIC's V3.
    """
    tree = _Builder()
    for index, domain in enumerate((0x0, 0x2, 0x10, 0x12)):
        tree.host(domain, 0, index // 2 if numa else -1)
        tree.root_port()
        for function in range(functions):
            more = f"vpd.V3=CARD{index}" if data_direct else ""
            tree.device(2, f"03:00.{function}", "nic", more)
    for index, domain in enumerate((0x8, 0x9, 0x18, 0x19)):
        tree.host(domain, 0, index // 2 if numa else -1)
        tree.root_port()
        tree.device(2, "06:00.0", gpu)
        if data_direct:
            tree.root_port()
            # crossed within a processor, so that NUMA node and order alone give another answer
            tree.device(2, "07:00.0", "dma", f"vpd.V3=CARD{index ^ 1}")
    return tree.machine()


P5: Groups = [
    (index // 4, [gpu], nics.split())
    for index, (gpu, nics) in enumerate(
        [
            ("53", "4f 50 51 52"),
            ("64", "60 61 62 63"),
            ("75", "71 72 73 74"),
            ("86", "82 83 84 85"),
            ("97", "93 94 95 96"),
            ("a8", "a4 a5 a6 a7"),
            ("b9", "b5 b6 b7 b8"),
            ("ca", "c6 c7 c8 c9"),
        ]
    )
]
P6_B200: Groups = [
    (0, ["51", "52"], ["4f", "50"]),
    (0, ["62", "63"], ["60", "61"]),
    (1, ["75", "76"], ["71", "72"]),
    (1, ["86", "87"], ["84", "85"]),
]
TURIN = [(1, "06", "03"), (2, "16", "13"), (6, "96", "93"), (7, "e6", "e3")]
MI300X = [
    (index // 4, gpu, nic)
    for index, (gpu, nic) in enumerate(
        pair.split("-") for pair in ["0c-07", "15-10", "1e-19", "69-64", "9f-9a", "af-aa", "bf-ba", "df-da"]
    )
]
MI350 = [
    (index // 4, gpu, nic)
    for index, (gpu, nic) in enumerate(
        pair.split("-") for pair in ["08-03", "18-13", "68-63", "78-73", "88-83", "98-93", "e8-e3", "f9-f3"]
    )
]
_OCI = [
    (index // 4, gpu, nic)
    for index, (gpu, nic) in enumerate(
        pair.split("-") for pair in ["0f-0c", "2d-2a", "44-41", "5b-58", "89-86", "a8-a5", "c0-bd", "d8-d5"]
    )
]
_IBM = [
    (index // 4, gpu, nic)
    for index, (gpu, nic) in enumerate(
        pair.split("-") for pair in ["a4-a3", "ae-ad", "b8-b7", "c2-c1", "cc-cb", "d6-d5", "e0-df", "ea-e9"]
    )
]
# NUMA node, the GPU on the NIC's host bridge, the one that is not, the NIC
_TIOGA = [(0, "d6", "d1", "d5"), (1, "de", "d9", "dd"), (2, "ce", "c9", "cd"), (3, "c6", "c1", "c5")]

KNOWN: Mapping[str, Machine] = {
    "p5": one_switch_each(P5, "gpu", "efa"),
    "p6-b200": one_switch_each(P6_B200, "gpu", "efa", management=("73", "74")),
    "turin": behind_private_bridges(TURIN, "gpu", "nic", "cx7bridge", "cx7bridge", extra=["61:00.0 lx"]),
    "mi300x": behind_private_bridges(MI300X, "mi300x", "nic", "gen5lower", "amdbridge"),
    "mi350": behind_private_bridges(MI350, "mi350", "bnxt", "gen5lower", "amdbridge"),
    "oci-h100": oci_h100(),
    "ibm-h100-vm": ibm_h100_vm(),
    "tioga": tioga(),
    "aurora": aurora(),
    "hygon": hygon(),
    "gb200": grace("gb200", functions=2, data_direct=False),
    "gb300-data-direct": grace("gb300", functions=1, data_direct=True),
}
