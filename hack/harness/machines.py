"""Machines as facts: tests/machines/*.yaml read into objects, with VFs added where asked for.

The format is described in tests/machines/README.md. A machine is held as the inventory's own
``PciFunction`` objects: what a scan of its sysfs tree should find again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from railmate.inventory.address import card, is_address, is_host_bridge, order
from railmate.inventory.gpus import SHARED_NODES, vendor_of
from railmate.inventory.model import GpuVendor, Netdev, PciFunction, RdmaDevice

MACHINES = Path(__file__).resolve().parents[2] / "tests" / "machines"
DEMO_MACHINE = MACHINES / "dgx-a100.yaml"
DEMO_VFS_PER_RAIL = 4
_RDMA_MTU, _ETHERNET_MTU = 9000, 1500
_AUXILIARY = {
    "mlx5_core": "mlx5_core.rdma",
    "bnxt_en": "bnxt_en.rdma",
    "mana": "mana.rdma",
    "ice": "ice.roce",
}


class FactsError(Exception):
    """A machine's file does not follow its format; the message names file and line."""


@dataclass(frozen=True)
class GpuFacts:
    """What the vendor's driver says of a GPU."""

    vendor: GpuVendor
    product: str | None = None
    minor: int | None = None  # NVIDIA
    uuid: str | None = None
    drm: tuple[str, ...] = ()  # ("renderD128", "card0") of other vendors


@dataclass(frozen=True)
class Machine:
    name: str
    functions: Mapping[str, PciFunction]  # by address, in PCI order
    gpus: Mapping[str, GpuFacts] = field(default_factory=dict)
    nvidia_driver: str | None = None
    expected: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rails(self) -> list[str]:
        """Addresses of the NICs that the facts call rails."""
        roles = zip(self.expected.get("nics", ()), self.expected.get("roles", ()), strict=True)
        return [address for address, role in roles if role == "rail"]


@dataclass(frozen=True)
class NetdevFacts:
    """A netdev that something must stand in for: its name, and the function it belongs to."""

    name: str
    mac: str
    mtu: int
    owner: str  # address of the function
    physical_function: str | None  # address of the PF when the owner is a VF


def load_machine(path: Path, vfs_per_rail: int = 0) -> Machine:
    """Reads a machine. With ``vfs_per_rail`` every rail gets that many VFs, as its driver would make them.

    Ports that get VFs are put in Ethernet mode and get a netdev: what stands in for a VF's netdev
    is an Ethernet device, whatever the machine's owner had set the port to.
    Raises FactsError for a file that does not follow the format.
    """
    facts = yaml.safe_load(path.read_text())
    try:
        machine = parse_machine(facts)
    except (KeyError, TypeError, ValueError) as error:
        raise FactsError(
            f"{path}: {error!r}. The format is described in {path.parent / 'README.md'}"
        ) from error
    return with_vfs(machine, machine.rails, vfs_per_rail, facts["models"]) if vfs_per_rail else machine


def parse_machine(facts: Mapping[str, Any]) -> Machine:
    name, models = facts["machine"], facts.get("models") or {}
    functions = {}
    words: dict[str, dict[str, str]] = {}
    for address, path, fields, inherited_numa in _tree(facts["pci"]):
        class_code, identity, subsystem, *rest = fields
        words[address] = dict(word.split("=", 1) for word in rest)
        functions[address] = _function(
            name, address, path, (class_code, identity, subsystem), words[address], models, inherited_numa
        )
    functions = dict(sorted(functions.items(), key=lambda item: order(item[0])))
    machine = Machine(
        name=name,
        functions=_numbered(functions, models),
        gpus=_gpus(name, functions, words, models),
        nvidia_driver=facts.get("nvidiaDriver"),
        expected=facts.get("expected") or {},
    )
    return _with_recorded_words(machine, facts)


def _with_recorded_words(machine: Machine, facts: Mapping[str, Any]) -> Machine:
    """What only recordings say: the VFs that were there, and rates that are not the model's."""
    functions = dict(machine.functions)
    vfs: dict[str, dict[int, str]] = {}
    for address, _, fields, _ in _tree(facts["pci"]):
        words = dict(word.split("=", 1) for word in fields[3:])
        if "rate" in words:
            functions[address] = _with_rate(functions[address], int(words["rate"]))
        if "pf" in words:
            functions[address] = replace(functions[address], physical_function=words["pf"])
            vfs.setdefault(words["pf"], {})[int(words["vf"])] = address
    for pf, by_index in vfs.items():
        functions[pf] = replace(functions[pf], virtual_functions=tuple(by_index[i] for i in sorted(by_index)))
    return replace(machine, functions=_numbered(functions, facts.get("models") or {}))


def _with_rate(function: PciFunction, rate: int) -> PciFunction:
    return replace(
        function,
        netdevs=tuple(replace(netdev, speed=rate * 1000) for netdev in function.netdevs),
        rdma_devices=tuple(replace(device, rate=rate) for device in function.rdma_devices),
    )


def _tree(text: str) -> Iterable[tuple[str, tuple[str, ...], list[str], int | None]]:
    """(address, path, words, NUMA node) of each function of the indented tree."""
    stack: list[tuple[str, int | None]] = []  # component and NUMA node, by depth
    domain = "0000"
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        depth, odd = divmod(len(line) - len(line.lstrip()), 2)
        if odd or depth > len(stack):
            raise ValueError(f"bad indentation: {line!r}")
        del stack[depth:]
        first, *fields = line.split()
        given = next((int(word[5:]) for word in fields if word.startswith("numa=")), None)
        numa = given if given is not None else (stack[-1][1] if stack else None)
        if is_host_bridge(first) or not re.match(
            r"[0-9a-f]{2}:", first
        ):  # a host bridge, or what holds one (VMBus)
            stack.append((first, numa))
            continue
        domain = next(part for part, _ in reversed(stack) if is_host_bridge(part))[3:].partition(":")[0]
        address = f"{domain}:{first}"
        if not is_address(address):
            raise ValueError(f"no PCI address: {line!r}")
        stack.append((address, numa))
        yield address, tuple(part for part, _ in stack), fields, numa


def _function(
    machine: str,
    address: str,
    path: tuple[str, ...],
    identity: tuple[str, str, str],
    words: Mapping[str, str],
    models: Mapping[str, Mapping[str, Any]],
    numa: int | None,
) -> PciFunction:
    class_code, ids, subsystem = identity
    model = models.get(ids, {})
    vendor, device = (int(part, 16) for part in ids.split(":"))
    sub_vendor, sub_device = (0, 0) if subsystem == "-" else (int(part, 16) for part in subsystem.split(":"))
    driver = words.get("driver", model.get("driver"))
    ethernet = int(class_code, 16) >> 8 != 0x0207
    rate = model.get("rate")
    rdma = tuple(
        rdma_device(machine, f"{address}/{name}", name, "Ethernet" if ethernet else "InfiniBand", rate)
        for name in _list(words, "rdma")
    )
    netdevs = tuple(
        netdev(machine, name, bool(rdma), rate, words.get("mac"), ethernet) for name in _list(words, "net")
    )
    keywords = {key[4:]: value for key, value in words.items() if key.startswith("vpd.")}
    return PciFunction(
        address=address,
        path=path,
        class_code=int(class_code, 16),
        vendor=vendor,
        device=device,
        subsystem_vendor=sub_vendor,
        subsystem_device=sub_device,
        numa_node=None if numa == -1 else numa,
        driver=None if driver == "-" else driver,
        max_virtual_functions=int(words.get("vfs", model.get("vfs", 0))),
        netdevs=netdevs,
        rdma_devices=rdma,
        vpd=make_vpd({"SN": digest(machine, address, "serial")[:12].upper(), **keywords})
        if keywords
        else None,
    )


def _list(words: Mapping[str, str], key: str) -> list[str]:
    return [name for name in words.get(key, "").split(",") if name]


def digest(*parts: str) -> str:
    """Hexadecimal digits that stand in for what is unique to a device; the same in every run."""
    return hashlib.sha256("/".join(parts).encode()).hexdigest()


def mac_address(machine: str, name: str) -> str:
    """A locally administered unicast address."""
    digits = digest(machine, name, "mac")
    return ":".join(["02", *(digits[i : i + 2] for i in range(0, 10, 2))])


def rdma_device(machine: str, owner: str, name: str, link_layer: str, rate: int | None) -> RdmaDevice:
    digits = "02" + digest(machine, owner, "guid")[:14]
    guid = ":".join(digits[i : i + 4] for i in range(0, 16, 4))
    return RdmaDevice(name=name, link_layer=link_layer, state="ACTIVE", rate=rate, node_guid=guid)


def netdev(
    machine: str, name: str, rdma: bool, rate: int | None, mac: str | None = None, ethernet: bool = True
) -> Netdev:
    return Netdev(
        name=name,
        mac=mac or mac_address(machine, name),
        mtu=_RDMA_MTU if rdma else _ETHERNET_MTU,
        speed=rate * 1000 if rate else None,
        operstate="up",
        link_type="ether" if ethernet else "infiniband",
    )


def make_vpd(keywords: Mapping[str, str]) -> bytes:
    """Vital product data with one read-only part (PCI Local Bus 3.0, appendix I)."""
    body = b"".join(key.encode() + bytes([len(value)]) + value.encode() for key, value in keywords.items())
    body += b"RV\x01" + b"\0"
    return b"\x90" + len(body).to_bytes(2, "little") + body + b"\x78"


def _gpus(
    machine: str,
    functions: Mapping[str, PciFunction],
    words: Mapping[str, Mapping[str, str]],
    models: Mapping[str, Mapping[str, Any]],
) -> dict[str, GpuFacts]:
    gpus: dict[str, GpuFacts] = {}
    for address, function in functions.items():
        vendor = vendor_of(function)
        if vendor is None:
            continue
        product = models.get(f"{function.vendor:04x}:{function.device:04x}", {}).get("product")
        ordinal = len(gpus)
        if vendor is GpuVendor.NVIDIA:
            d = digest(machine, address, "uuid")
            uuid = f"GPU-{d[:8]}-{d[8:12]}-{d[12:16]}-{d[16:20]}-{d[20:32]}"
            minor = int(words[address].get("minor", ordinal))
            gpus[address] = GpuFacts(vendor, product, minor, uuid)
        else:
            uuid = digest(machine, address, "uuid")[:16]
            gpus[address] = GpuFacts(
                vendor, product, None, uuid, (f"renderD{128 + ordinal}", f"card{ordinal}")
            )
    return gpus


def _numbered(
    functions: Mapping[str, PciFunction], models: Mapping[str, Mapping[str, Any]]
) -> dict[str, PciFunction]:
    """RDMA devices with their character devices, numbered as drivers come up: PFs, then VFs."""
    result = dict(functions)
    verbs = mads = auxiliary = 0
    for address in sorted(functions, key=lambda a: (functions[a].physical_function is not None, order(a))):
        function = functions[address]
        mad = models.get(f"{function.vendor:04x}:{function.device:04x}", {}).get("mad", True)
        devices = []
        for device in function.rdma_devices:
            nodes = {"uverbs": (f"uverbs{verbs}",)}
            verbs += 1
            if mad:
                nodes.update(umad=(f"umad{mads}",), issm=(f"issm{mads}",))
                mads += 1
            devices.append(replace(device, **nodes))  # type: ignore[arg-type]
        extra: tuple[str, ...] = ()
        if devices and function.driver in _AUXILIARY:
            extra = (f"{_AUXILIARY[function.driver]}.{auxiliary}",)
            auxiliary += 1
        result[address] = replace(function, rdma_devices=tuple(devices), auxiliary=extra)
    return result


def with_vfs(
    machine: Machine, rails: Iterable[str], count: int, models: Mapping[str, Mapping[str, Any]]
) -> Machine:
    """The machine with ``count`` VFs on each of ``rails`` (addresses of physical functions).

    VFs take the routing ids after the card's last physical function, PF after PF (PCIe 6.0, 9.3.3.8
    and following: First VF Offset, VF Stride 1), and sit on the PF's bus in sysfs.
    """
    functions = dict(machine.functions)
    for address in rails:
        pf = functions[address]
        if count > pf.max_virtual_functions:
            raise FactsError(
                f"{machine.name}: {address} takes {pf.max_virtual_functions} VFs at most, asked for {count}"
            )
        model = models.get(f"{pf.vendor:04x}:{pf.device:04x}", {})
        vendor, device = (int(part, 16) for part in model["vf"].split(":"))
        rate = model.get("rate")
        if not pf.netdevs or any(device.link_layer != "Ethernet" for device in pf.rdma_devices):
            pf = replace(
                pf,
                class_code=0x020000,
                netdevs=(netdev(machine.name, _slot_name(address) + "np0", True, rate),),
                rdma_devices=tuple(replace(device, link_layer="Ethernet") for device in pf.rdma_devices),
            )
        vfs = []
        for index, vf_address in enumerate(_vf_addresses(pf, functions, count)):
            name = f"{re.sub(r'np[0-9]+$', '', pf.netdevs[0].name)}v{index}"
            if len(name) > 15:
                raise FactsError(f"{machine.name}: {name!r} is longer than an interface's name may be")
            vfs.append(vf_address)
            functions[vf_address] = replace(
                pf,
                address=vf_address,
                path=(*pf.path[:-1], vf_address),
                vendor=vendor,
                device=device,
                physical_function=address,
                virtual_functions=(),
                max_virtual_functions=0,
                netdevs=(netdev(machine.name, name, True, rate),),
                rdma_devices=tuple(
                    rdma_device(machine.name, vf_address, f"{held.name}v{index}", "Ethernet", rate)
                    for held in pf.rdma_devices[:1]
                ),
                vpd=None,
            )
        functions[address] = replace(pf, virtual_functions=tuple(vfs))
    functions = dict(sorted(functions.items(), key=lambda item: order(item[0])))
    return replace(machine, functions=_numbered(functions, models))


def _slot_name(address: str) -> str:
    """systemd's name for an Ethernet device by its place: ``0000:4b:00.0`` -> ``enp75s0``."""
    domain, bus, device, function = order(address)
    return (f"enP{domain}p" if domain else "enp") + f"{bus}s{device}" + (f"f{function}" if function else "")


def _vf_addresses(pf: PciFunction, functions: Mapping[str, PciFunction], count: int) -> list[str]:
    siblings = [
        a for a in functions if card(a) == card(pf.address) and functions[a].physical_function is None
    ]
    domain, bus, device, _ = order(pf.address)
    last = max(order(a)[3] for a in siblings)
    before = sum(functions[a].max_virtual_functions for a in siblings if order(a) < order(pf.address))
    first = (bus << 8 | device << 3 | last) + 1 + before
    ids = range(first, first + count)
    return [f"{domain:04x}:{i >> 8:02x}:{i >> 3 & 31:02x}.{i & 7}" for i in ids]


def list_char_devices(machine: Machine) -> list[str]:
    """Names below /dev of the device nodes that the machine's drivers make."""
    nodes: list[str] = []
    vendors = {gpu.vendor for gpu in machine.gpus.values()}
    for gpu in machine.gpus.values():
        nodes += (
            [f"nvidia{gpu.minor}"] if gpu.vendor is GpuVendor.NVIDIA else [f"dri/{node}" for node in gpu.drm]
        )
    nodes += [node for vendor in sorted(vendors) for node in SHARED_NODES[vendor]]
    rdma = [n for f in machine.functions.values() for device in f.rdma_devices for n in device.char_devices]
    nodes += [f"infiniband/{node}" for node in rdma]
    return nodes + (["infiniband/rdma_cm"] if rdma else [])


def list_netdevs(machine: Machine) -> list[NetdevFacts]:
    """All netdevs of the machine, in PCI order."""
    return [
        NetdevFacts(
            held.name, held.mac or "", held.mtu or _ETHERNET_MTU, function.address, function.physical_function
        )
        for function in machine.functions.values()
        for held in function.netdevs
    ]
