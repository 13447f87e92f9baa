"""Machines to schedule on: those of tests/machines and the synthesised ones, with what is right for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from harness import known
from harness.machines import MACHINES, Machine, load_machine, with_vfs
from harness.synthetic import inventory_of, synthetic
from railmate.inventory.model import Inventory, Partition
from railmate.publish.devices import OfferOptions, build_offer
from railmate.publish.model import Offer
from railmate.topology.analyze import analyze

#: Every driver of the GPUs and NICs below is bound, and VFs can be made of the NICs that have them in the field.
MODELS: Mapping[str, Any] = {
    "15b3:1021": {"driver": "mlx5_core", "vfs": 128, "vf": "15b3:101e", "rate": 400},
    "15b3:101e": {"driver": "mlx5_core", "rate": 400},
    "15b3:1013": {"driver": "mlx5_core", "rate": 100},
    "14e4:1760": {"driver": "bnxt_en", "rate": 400},
    "1d0f:efa2": {"driver": "efa", "rate": 100},
    "10de:2330": {"driver": "nvidia"},
    "10de:2941": {"driver": "nvidia"},
    "10de:31c2": {"driver": "nvidia"},
    "1002:74a1": {"driver": "amdgpu"},
    "1002:75a0": {"driver": "amdgpu"},
    "1002:7408": {"driver": "amdgpu"},
    "1bcf:001c": {"driver": "ve_drv"},
    "1d94:6210": {"driver": "hydcu"},
}


@dataclass(frozen=True)
class Case:
    """A machine that is scheduled on. ``right``: a GPU's address to the NICs (physical functions) that are right."""

    name: str
    inventory: Inventory
    right: Mapping[str, frozenset[str]]
    options: OfferOptions = field(default_factory=OfferOptions)

    @cached_property
    def offer(self) -> Offer:
        return build_offer(self.inventory, analyze(self.inventory), self.options)


def recorded(name: str, vfs: int, **options: Any) -> Case:
    """A machine whose tree was read from it, with the answers of its file."""
    machine = load_machine(MACHINES / f"{name}.yaml", vfs)
    right = {gpu: frozenset(nics) for gpu, nics in machine.expected["best"].items()}
    return Case(f"{name}-{vfs}vf", inventory_of(bound(machine)), right, OfferOptions(**options))


def built(name: str, machine: Machine, right: Mapping[str, str], vfs: int = 0) -> Case:
    """A machine of which the shape is published. ``right``: a GPU's bus to its NICs' buses."""
    machine = bound(machine)
    if vfs:
        rails = [
            a for a, f in machine.functions.items() if f.rdma_devices and a[5:7] in " ".join(right.values())
        ]
        machine = with_vfs(machine, rails, vfs, MODELS)
    by_bus: dict[str, list[str]] = {}
    for address, function in machine.functions.items():
        if function.physical_function is None:
            by_bus.setdefault(address[5:7], []).append(address)
    answers = {
        address: frozenset(nic for bus in nics.split() for nic in by_bus[bus])
        for gpu, nics in right.items()
        for address in by_bus[gpu]
    }
    return Case(f"{name}-{vfs}vf" if vfs else name, inventory_of(machine), answers)


def bound(machine: Machine) -> Machine:
    """With the kernel drivers and rates of MODELS where the machine's facts name none, and EFA as it shows itself."""
    functions = {}
    for address, function in machine.functions.items():
        model = MODELS.get(f"{function.vendor:04x}:{function.device:04x}", {})
        driver, rdma = function.driver or model.get("driver"), function.rdma_devices
        if driver == "efa":  # neither Ethernet nor InfiniBand
            rdma = tuple(replace(device, link_layer=None) for device in rdma)
        functions[address] = replace(
            function,
            rdma_devices=rdma,
            driver=driver,
            max_virtual_functions=max(function.max_virtual_functions, model.get("vfs", 0)),
        )
    return replace(machine, functions=functions)


def big(switches: int, gpus: int, nics: int) -> Machine:
    """``gpus`` GPUs and ``nics`` NICs below each of ``switches``, each switch on a host bridge of its own."""
    tree: list[str] = []
    for s in range(switches):
        base = s * 0x10
        tree += [f"pci{s:04x}:00 numa={s * 2 // switches}", "  00:01.1 port", "    01:00.0 gen5lower"]
        for port, (word, bus) in enumerate(
            [("gpu", 0x10 + g) for g in range(gpus)] + [("nic", 0x40 + n) for n in range(nics)]
        ):
            more = f" rdma=mlx5_{base + bus - 0x40} net=s{s}n{bus - 0x40}" if word == "nic" else ""
            tree += [f"      02:{port:02x}.0 gen5lower", f"        {bus:02x}:00.0 {word}{more}"]
    return synthetic("\n".join(tree), MODELS)


def four_nics(vfs: int) -> Case:
    """Eight GPUs and four NICs, as machines with H100s are often bought: two GPUs and their NIC below each switch."""
    machine = bound(big(switches=4, gpus=2, nics=1))
    nic_of = {gpu: f"{gpu[:4]}:40:00.0" for gpu in machine.gpus}
    if vfs:
        machine = with_vfs(machine, dict.fromkeys(nic_of.values()), vfs, MODELS)
    right = {gpu: frozenset([nic]) for gpu, nic in nic_of.items()}
    return Case(f"four-nics-{vfs}vf" if vfs else "four-nics", inventory_of(machine), right)


def _one_to_one(pairs: list[tuple[int, str, str]]) -> dict[str, str]:
    return {gpu: nic for _, gpu, nic in pairs}


def _by_group(groups: known.Groups) -> dict[str, str]:
    return {gpu: " ".join(nics) for _, gpus, nics in groups for gpu in gpus}


def grace(name: str, gpu: str, functions: int, data_direct: bool) -> Case:
    """Four GPUs and four NICs, each in a PCI domain of its own. With Data Direct a GPU's NIC is known, else there is
    the NUMA node; the machine crosses the two within a processor."""
    machine = bound(known.grace(gpu, functions, data_direct))
    gpus, nics = ("0008", "0009", "0018", "0019"), ("0000", "0002", "0010", "0012")
    right = {}
    for index, domain in enumerate(gpus):
        near = {index ^ 1} if data_direct else {index, index ^ 1}
        held = frozenset(f"{nics[n]}:03:00.{f}" for n in near for f in range(functions))
        right[f"{domain}:06:00.0"] = held
    return Case(name, inventory_of(machine), right)


@cache
def cases() -> tuple[Case, ...]:
    mi350 = known.behind_private_bridges(known.MI350, "mi350", "bnxt", "gen5lower", "amdbridge")
    turin = known.behind_private_bridges(
        known.TURIN, "gpu", "nic", "cx7bridge", "cx7bridge", extra=["61:00.0 lx"]
    )
    p6_b200 = known.one_switch_each(known.P6_B200, "gpu", "efa", management=("73", "74"))
    aurora = {
        **dict.fromkeys(("1b", "1c", "1d", "1e"), "1a"),
        **dict.fromkeys(("3d", "3f", "40", "41"), "3e"),
    }
    oci = "0f-0c 2d-2a 44-41 5b-58 89-86 a8-a5 c0-bd d8-d5"
    ibm = "a4-a3 ae-ad b8-b7 c2-c1 cc-cb d6-d5 e0-df ea-e9"
    return (
        recorded("dgx-a100", 4),
        recorded("dgx-a100", 0),
        recorded("dgx-a100", 2, switch_groups=True),
        recorded("aws-p5en", 0),
        recorded("aws-p4d", 0),
        recorded("b200-8gpu", 0),
        recorded("lassen-p9", 0),
        recorded("tuolumne-mi300a", 0),
        built("p5", known.one_switch_each(known.P5, "gpu", "efa"), _by_group(known.P5)),
        built("p6-b200", p6_b200, _by_group(known.P6_B200)),
        built("turin", turin, _one_to_one(known.TURIN), vfs=4),
        built("mi350", mi350, _one_to_one(known.MI350)),
        built("oci-h100", known.oci_h100(), dict(pair.split("-") for pair in oci.split())),
        built("ibm-h100-vm", known.ibm_h100_vm(), dict(pair.split("-") for pair in ibm.split())),
        built("aurora", known.aurora(), aurora),
        four_nics(vfs=0),
        four_nics(vfs=4),
        grace("gb200", "gb200", functions=2, data_direct=False),
        grace("gb300", "gb300", functions=1, data_direct=True),
    )


def cut(inventory: Inventory, address: str, mode: str, *parts: Partition) -> Inventory:
    """One of its GPUs in parts."""
    gpus = (
        replace(g, partition_mode=mode, partitions=parts) if g.address == address else g
        for g in inventory.gpus
    )
    return replace(inventory, gpus=tuple(gpus))


MIG = (
    Partition("gi7ci0", "1g.5gb", "MIG-0", 5 << 30, ("nvidia-caps/nvidia-cap66", "nvidia-caps/nvidia-cap67")),
    Partition(
        "gi3ci0", "3g.20gb", "MIG-1", 20 << 30, ("nvidia-caps/nvidia-cap30", "nvidia-caps/nvidia-cap31")
    ),
)
XCP = tuple(Partition(f"xcp{n}", "CPX", f"uuid-{n}", 16 << 30, (f"dri/renderD{n}",)) for n in range(6))


@cache
def cut_up() -> tuple[Case, ...]:
    """Machines of which a GPU is in parts: MIG instances in its place, XCPs beside the whole."""
    found = []
    for name, case, mode, parts in (
        ("mig", recorded("dgx-a100", 4), "MIG", MIG),
        ("xcp", recorded("tuolumne-mi300a", 0), "CPX", XCP),
    ):
        gpu = case.inventory.gpus[-1].address
        found.append(replace(case, name=name, inventory=cut(case.inventory, gpu, mode, *parts)))
    return tuple(found)


def largest_inventory() -> Inventory:
    """8 GPUs, 8 NICs, 128 VFs on each."""
    machine = big(switches=4, gpus=2, nics=2)
    rails = [address for address, function in machine.functions.items() if function.rdma_devices]
    return inventory_of(with_vfs(machine, rails, 128, MODELS))
