"""Layouts of machines that people run, made from what their vendors and operators say of them.

Nothing here was read from a machine: which GPU and NIC share a switch, how many NICs of which sort there
are and what they are for is known; bus numbers and bridges in between are made up. What is published with
addresses is in harness.known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from harness.machines import Machine
from harness.synthetic import synthetic


class Tree:
    """Lines of a machine's tree; buses count up."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._bus = 0
        self._port = 0
        self._counts: dict[str, int] = {}

    def host(self, numa: int = 0, domain: int = 0, bus: int | None = None) -> None:
        self._bus = self._bus + 1 if bus is None else bus
        self._port = 0
        self._host = self._bus
        self.lines.append(f"pci{domain:04x}:{self._bus:02x} numa={numa}")

    def root_port(self, *devices: str, port: str = "port") -> None:
        """Functions of one card below a root port of their own."""
        self._port += 1
        self.lines.append(f"  {self._host:02x}:{self._port:02x}.0 {port}")
        self._card(2, devices)

    def switch(
        self, *cards: str | Sequence[str], upper: str = "port", lower: str = "", bridge: str = ""
    ) -> None:
        """A switch on a root port, with a card a port; ``lower``: a chip that shows two levels, the second
        once for each two cards. ``bridge``: the switch that serves a GPU alone. An empty card is an empty port."""
        self._port += 1
        self.lines.append(f"  {self._host:02x}:{self._port:02x}.0 port")
        self.lines.append(f"    {self._next():02x}:00.0 {upper}")
        inner = self._next()
        if not lower:
            for number, card in enumerate(cards):
                self._below(3, f"{inner:02x}:{number:02x}.0 {upper}", card, bridge)
            return
        for number in range(0, len(cards), 2):
            self.lines.append(f"      {inner:02x}:{number:02x}.0 {upper}")
            self.lines.append(f"        {self._next():02x}:00.0 {lower}")
            ports = self._next()
            for offset, card in enumerate(cards[number : number + 2]):
                self._below(5, f"{ports:02x}:{offset:02x}.0 {lower}", card, bridge)

    def _below(self, depth: int, port: str, card: str | Sequence[str], bridge: str) -> None:
        self.lines.append(f"{'  ' * depth}{port}")
        functions = (card,) if isinstance(card, str) else card
        if bridge and functions[0].split()[:1] and functions[0].split()[0] in _GPUS:
            self.lines.append(f"{'  ' * (depth + 1)}{self._next():02x}:00.0 {bridge}")
            self.lines.append(f"{'  ' * (depth + 2)}{self._next():02x}:00.0 {bridge}")
            depth += 2
        self._card(depth + 1, functions)

    def _card(self, depth: int, functions: Sequence[str]) -> None:
        bus = self._next() if any(functions) else 0
        for number, function in enumerate(functions):
            if function:
                self.lines.append(f"{'  ' * depth}{bus:02x}:00.{number} {self._named(function)}")

    def _named(self, function: str) -> str:
        """``nic`` -> ``nic rdma=mlx5_0 net=eth0``; ``nic -``: as it stands."""
        word, *more = function.split()
        prefix = _RDMA.get(word)
        if prefix is None or more[:1] == ["-"]:
            return " ".join([word, *(one for one in more if one != "-")])
        number = self._counts[prefix] = self._counts.get(prefix, -1) + 1
        names = [] if any(one.startswith("rdma=") for one in more) else [f"rdma={prefix}{number}"]
        if not any(one.startswith("net=") for one in more):
            names.append(f"net=eth{sum(self._counts.values()) + len(self._counts) - 1}")
        return " ".join([word, *names, *more])

    def _next(self) -> int:
        self._bus += 1
        return self._bus

    def machine(self) -> Machine:
        return synthetic("\n".join(self.lines))


_GPUS = {"gpu", "h200", "b300", "mi300x", "l40s", "max1550", "gaudi"}
_MLX = ("nic", "dualcx7", "cx6", "cx6dx", "cx8", "dpu", "supernic", "lx", "vf", "ibvf", "cx4", "management")
_RDMA = {**dict.fromkeys(_MLX, "mlx5_"), "thor2": "bnxt_re", "pollara": "ionic_", "bnxt": "bnxt_re"}


def hgx_h100_four_switches(storage: str = "dualcx7") -> Machine:
    """HGX H100 on four PEX89104: two GPUs, two ConnectX-7 and two drives each. Storage: two dual-port cards, each
    with four drives below a switch of its own; one dual-port card on a root port is the host's network."""
    tree = Tree()
    for socket in (0, 1):
        for _ in range(2):
            tree.host(socket)
            tree.switch("gpu", "nic", "gpu", "nic", "nvme", "nvme", upper="gen5upper", lower="gen5lower")
        tree.host(socket)
        tree.switch((storage, storage), "nvme", "nvme", "nvme", "nvme", upper="gen5upper", lower="gen5lower")
    tree.host(0)
    tree.root_port("cx6dx", "cx6dx")
    return tree.machine()


def dgx_h200() -> Machine:
    """DGX H200: each GPU behind its rail's own bridge, two dual-port ConnectX-7 for storage on root ports."""
    tree = Tree()
    for socket in (0, 1):
        for _ in range(4):
            tree.host(socket)
            tree.switch("nic", "h200", upper="cx7bridge", bridge="cx7bridge")
        tree.host(socket)
        tree.root_port("dualcx7", "dualcx7")
    return tree.machine()


def gcp_a3_mega() -> Machine:
    """Two H100 and two gVNICs to a switch, and one gVNIC for the host: TCPX, no RDMA."""
    tree = Tree()
    tree.host(0)
    tree.root_port("gve net=enp0s12")
    for index in range(4):
        tree.host(index // 2)
        tree.switch("gpu", "gpu", f"gve net=gpu{2 * index}", f"gve net=gpu{2 * index + 1}")
    return tree.machine()


def azure_nd_h100_v5() -> Machine:
    """GPUs and InfiniBand VFs in domains that the hypervisor makes up, no PF, no bridge; MANA for its own network."""
    lines = []
    for index, domain in enumerate((1, 2, 3, 8, 9, 0xA, 0xB, 0xC)):
        lines += [f"pci{domain:04x}:00 numa={index // 4}", "  00:00.0 gpu"]
    for index in range(8):
        lines += [
            f"pci{0x101 + index:04x}:00 numa={index // 4}",
            f"  00:00.0 ibvf rdma=mlx5_{index} net=ib{index}",
        ]
    lines += ["pci7870:00 numa=0", "  00:00.0 020000 1414:00ba 1414:00b9 rdma=mana_0 net=eth0"]
    return synthetic("\n".join(lines))


def xe9680_mi300x() -> Machine:
    """Dell XE9680 with MI300X: two GPUs, each behind a bridge of its own, and two Thor2 to a PEX89104; a BlueField for
    north-south traffic beside the fifth GPU."""
    tree = Tree()
    for index in range(4):
        tree.host(index // 2)
        beside = ("dpu", "dpumanagement") if index == 2 else ""
        cards = ("mi300x", "thor2", "mi300x", "thor2", beside, "nvme")
        tree.switch(*cards, upper="gen5upper", lower="gen5lower", bridge="amdbridge")
    tree.host(1)
    tree.root_port("lx", "lx")
    return tree.machine()


def l40s_flat() -> Machine:
    """Eight L40S and two ConnectX-7, all on root ports: PHB and NODE, no switch."""
    tree = Tree()
    for socket in (0, 1):
        for _ in range(4):
            tree.host(socket)
            tree.root_port("l40s")
        tree.host(socket)
        tree.root_port("nic")
    return tree.machine()


def l40s_switched() -> Machine:
    """Four L40S and one two-port ConnectX-7 to a PEX88096."""
    tree = Tree()
    for socket in (0, 1):
        tree.host(socket)
        tree.switch("l40s", "l40s", "l40s", "l40s", ("nic", "nic"), upper="gen4", lower="gen4")
    return tree.machine()


def supermicro_bluefield(rail: str = "nic", beside: str = "dpu") -> Machine:
    """A rail for each GPU, two to a switch; two BlueField-3 for north-south traffic, on the first and third switch."""
    tree = Tree()
    for index in range(4):
        tree.host(index // 2)
        dpu = (beside, beside, "dpumanagement") if index % 2 == 0 else ""
        tree.switch(dpu, "gpu", rail, "gpu", rail, "nvme", upper="gen5upper", lower="gen5lower")
    return tree.machine()


def gh200() -> Machine:
    """Grace Hopper: one GPU and one NIC, in domains of their own."""
    tree = Tree()
    tree.host(0, domain=0, bus=0)
    tree.root_port("nic")
    tree.host(0, domain=9, bus=0)
    tree.root_port("gh200")
    return tree.machine()


def gaudi() -> Machine:
    """Eight Gaudi, which have ports of their own; two ConnectX-6 of the host, each below a switch with four of them."""
    tree = Tree()
    for socket in (0, 1):
        tree.host(socket)
        tree.switch("gaudi", "gaudi", "gaudi", "gaudi", "cx6")
    return tree.machine()


def intel_max() -> Machine:
    """Four Max 1550, each behind the switch on its own card, two NICs on root ports."""
    tree = Tree()
    for socket in (0, 1):
        for _ in range(2):
            tree.host(socket)
            tree.switch("max1550")
        tree.host(socket)
        tree.root_port("nic")
    return tree.machine()


def guest_with_passed_through_pair() -> Machine:
    """QEMU: a GPU and a VF as functions of one device below one emulated root port, and again."""
    tree = Tree()
    tree.host(0, bus=0)
    tree.root_port("gpu", "vf", port="qemuport")
    tree.root_port("gpu", "vf", port="qemuport")
    return tree.machine()


def socket_direct() -> Machine:
    """Two sockets, two GPUs each, and one socket-direct card: a PCI device on each socket, one system image GUID."""
    tree = Tree()
    for socket in (0, 1):
        tree.host(socket, domain=socket)
        tree.switch("gpu", "gpu", "nic card=c0")
    for socket in (0, 1):
        tree.host(socket, domain=socket + 2)
        tree.switch("gpu", "gpu", "nic card=c1")
    return tree.machine()


def switchdev() -> Machine:
    """Two rails in switchdev mode: each PF has the representors of its VFs beside its own netdev."""
    tree = Tree()
    for index in range(2):
        tree.host(index)
        names, ports = f"uplink{index},a{index}rep0,a{index}rep1", "p0,pf0vf0,pf0vf1"
        tree.switch("gpu", f"nic net={names} port={ports}")
    return tree.machine()


def rdma_lag() -> Machine:
    """Two GPUs and two dual-port cards to a switch, the ports of a card bonded: one RDMA device for both (RoCE LAG)."""
    tree = Tree()
    bond = 0
    for index in range(4):
        tree.host(index // 2)
        cards = []
        for _ in range(2):
            ports = (f"nic rdma=mlx5_bond_{bond} net=b{bond}p0", f"nic - net=b{bond}p1")
            cards.append(tuple(f"{port} bond=bond{bond}" for port in ports))
            bond += 1
        tree.switch("gpu", cards[0], "gpu", cards[1])
    return tree.machine()


def bond_across_cards() -> Machine:
    """One GPU to a switch with two cards, whose netdevs one bond holds; both cards have an RDMA device of their own."""
    tree = Tree()
    for index in range(2):
        tree.host(index)
        tree.switch("gpu", f"nic net=x{index}a bond=bond{index}", f"nic net=x{index}b bond=bond{index}")
    return tree.machine()


def hgx_b300(tied: Sequence[int] = ()) -> Machine:
    """HGX B300: each GPU on the switch of its ConnectX-8. ``tied``: NICs with a data-direct function beside another
    GPU, as the storage's ConnectX-7 has one too. A dual-port BlueField serves the host."""
    tree = Tree()
    for index in range(8):
        tree.host(index // 4)
        rail = "cx8" + (f" vpd.V3=CARD{index}" if index in tied else "")
        tree.switch("b300", rail, upper="cx7bridge")
        if (index + 1) % 8 in tied:
            tree.root_port(f"dma vpd.V3=CARD{(index + 1) % 8}")
        if index == 5:
            tree.root_port("dma vpd.V3=STORAGE")
    tree.host(0)
    tree.root_port("dpu", "dpu", "dpumanagement")
    tree.host(1)
    tree.switch("nic vpd.V3=STORAGE", "nvme", "nvme")
    return tree.machine()


LAYOUTS: Mapping[str, Callable[[], Machine]] = {
    make.__name__: make
    for make in (
        hgx_h100_four_switches,
        dgx_h200,
        gcp_a3_mega,
        azure_nd_h100_v5,
        xe9680_mi300x,
        l40s_flat,
        l40s_switched,
        supermicro_bluefield,
        gh200,
        gaudi,
        intel_max,
        guest_with_passed_through_pair,
        socket_direct,
        switchdev,
        rdma_lag,
        bond_across_cards,
        hgx_b300,
    )
}
