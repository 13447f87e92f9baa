"""Machines that nobody published, written down in a test as a PCIe tree.

The tree is the ``pci`` part of a machine's file (tests/machines/README.md). Models that tests need are
known here by short words, so that a case shows its shape and not its ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.machines import Machine, parse_machine
from railmate.inventory.model import Bond, Gpu, GpuVendor, Inventory, Nic, PciFunction

# word -> class, vendor:device, subsystem
_WORDS = {
    "port": "060400 8086:352a -",  # root and downstream ports, and switches that are no Broadcom's
    "gen4": "060400 1000:c010 1000:a096",  # PEX880xx, either level
    "gen5upper": "060400 1000:c030 1000:0072",  # PEX890xx
    "gen5lower": "060400 1000:c030 1000:1003",
    "qemuport": "060400 1b36:000c -",
    "x3130": "060400 104c:8232 -",
    "gpu": "030200 10de:2330 10de:16c1",
    "h200": "030200 10de:2335 10de:18be",
    "b300": "030200 10de:3182 10de:20e6",
    "l40s": "030200 10de:26b9 10de:1851",
    "gh200": "030200 10de:2342 10de:16eb",
    "gaudi": "120000 1da3:1020 1da3:1020",
    "max1550": "038000 8086:0bd5 8086:0000",
    "cx7bridge": "060400 15b3:1979 -",  # the switch in a ConnectX-7, with a GPU behind it
    "amdbridge": "060400 1022:1500 -",  # the switch that serves one Instinct GPU
    "dcubridge": "060400 1d94:1500 -",
    "mi300x": "120000 1002:74a1 1002:74a1",
    "gb300": "030200 10de:31c2 10de:21f1",
    "gb200": "030200 10de:2941 10de:2046",
    "mi250x": "038000 1002:7408 1002:0b0c",
    "mi350": "120000 1002:75a0 1002:75a0",
    "dcu": "0b4000 1d94:6210 1d94:6210",
    "ve": "0b4000 1bcf:001c 1bcf:001c",
    "efa": "020000 1d0f:efa2 1d0f:efa2",
    "ena": "020000 1d0f:ec20 1d0f:ec20",
    "slingshot": "020000 17db:0501 17db:0200",
    "bnxt": "020000 14e4:1760 14e4:d125",
    "cx4": "020000 15b3:1013 15b3:0001",
    "cx4lx": "020000 15b3:1015 15b3:0001",
    "thor2": "020000 14e4:1760 14e4:1760",
    "pollara": "020000 1dd8:1002 1dd8:5220",
    "cx6": "020700 15b3:101b 15b3:0007",
    "cx6dx": "020000 15b3:101d 15b3:0016",
    "cx8": "020700 15b3:1023 15b3:0074",
    "dualcx7": "020000 15b3:1021 15b3:0046",  # two ports, as storage has it
    "supernic": "020000 15b3:a2dc 15b3:0056",  # BlueField-3 in NIC mode, as a rail
    "dpumanagement": "080100 15b3:c2d5 15b3:0009",  # BlueField's third function
    "gve": "020000 1ae0:0042 1ae0:0058",
    "ibvf": "020700 15b3:101e 15b3:0041",
    "vf": "020000 15b3:101e 15b3:0041",  # passed to a guest, which sees no PF
    "nic": "020000 15b3:1021 15b3:0041",
    "management": "020700 15b3:1021 15b3:0087",
    "dpu": "020000 15b3:a2dc 15b3:0009",
    "lx": "020000 15b3:101f 15b3:0016",
    "dma": "080100 15b3:2100 15b3:0000",
    "ethernet": "020000 8086:1533 -",
    "nvme": "010802 144d:a824 144d:a801",
    "vga": "030000 1a03:2000 1a03:2000",
    "bridge": "060000 8086:09a2 -",
    "vmd": "010400 8086:28c0 -",
}
_E810 = "020000 8086:159b -"
_RATES = {"nic": 400, "bnxt": 400, "dpu": 400, "lx": 25, "cx4": 100}
_MODELS = {
    "15b3:1021": {"driver": "mlx5_core", "vfs": 64, "vf": "15b3:101e"},
    "10de:2330": {"driver": "nvidia"},
}


def synthetic(tree: str, models: Mapping[str, Any] | None = None) -> Machine:
    """A machine from a tree whose second word may be one of the short words above."""
    lines = []
    for line in tree.splitlines():
        words = line.split()
        if len(words) > 1 and words[1] in _WORDS:
            line = line.replace(words[1], _WORDS[words[1]], 1)
        lines.append(line)
    least = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    pci = "\n".join(line[least:] for line in lines)
    return parse_machine({"machine": "synthetic", "models": models or _MODELS, "pci": pci})


def switch(bus: int, *devices: str, port: str = "port", domain: str = "0000", numa: int = 0) -> str:
    """The lines of one switch on a host bridge of its own, with devices at bus+3, bus+4 and so on.

    Function 0 of each is a port's only one; an empty device is a port without any.
    """
    lines = [f"pci{domain}:{bus:02x} numa={numa}", f"  {bus:02x}:01.0 port", f"    {bus + 1:02x}:00.0 {port}"]
    for number, device in enumerate(devices):
        lines.append(f"      {bus + 2:02x}:{number:02x}.0 {port}")
        if device:
            lines.append(f"        {_card(bus + 3 + number, device)}")
    return "\n".join(lines)


def on_root_port(bus: int, device: str, numa: int = 0) -> str:
    return f"pci0000:{bus:02x} numa={numa}\n  {bus:02x}:01.0 port\n    {_card(bus + 1, device)}"


def _card(bus: int, device: str) -> str:
    """A device's line; what has a rate is an RDMA NIC."""
    word, *more = device.split()
    if word == "e810":
        return f"{bus:02x}:00.0 {_E810} rdma=irdma{bus}"
    if word in _RATES and not any("rdma" in one for one in more):
        more = [f"rdma=mlx5_{bus}", *(more or [f"rate={_RATES[word]}"])]
    return " ".join((f"{bus:02x}:00.0", word, *more))


def inventory_of(machine: Machine) -> Inventory:
    """What a scan of the machine's tree finds, without writing the tree."""
    gpus = []
    for address, facts in machine.gpus.items():
        if facts.vendor is GpuVendor.NVIDIA:
            nodes: tuple[str, ...] = () if facts.minor is None else (f"nvidia{facts.minor}",)
        else:
            nodes = tuple(f"dri/{node}" for node in facts.drm)
        gpus.append(Gpu(machine.functions[address], facts.vendor, nodes, index=facts.minor, uuid=facts.uuid))
    nics = []
    for function in machine.functions.values():
        if function.class_code >> 16 == 0x02 or function.netdevs or function.rdma_devices:
            pf = machine.functions.get(function.physical_function or "")
            nics.append(Nic(function, pf.virtual_functions.index(function.address) if pf else None))
    return Inventory(machine.functions, tuple(gpus), tuple(nics), _bonds(machine))


def _bonds(machine: Machine) -> tuple[Bond, ...]:
    members: dict[str, list[tuple[str, PciFunction]]] = {}
    for function in machine.functions.values():
        for netdev in function.netdevs:
            if netdev.master is not None:
                members.setdefault(netdev.master, []).append((netdev.name, function))
    return tuple(
        Bond(
            name,
            tuple(netdev for netdev, _ in held),
            tuple(function.address for _, function in held),
            tuple(device.name for _, function in held for device in function.rdma_devices),
        )
        for name, held in sorted(members.items())
    )
