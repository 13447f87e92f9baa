"""A machine's facts from its sysfs, as one file that a person can send and a test can read.

The format is that of tests/machines (README.md there). What could identify the machine or its owner is
not written, or replaced by the same stand-in wherever it occurs: MACs, GUIDs, UUIDs and serials are left
out (who reads the file makes up new ones), names that hold one or that somebody chose are numbered.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from railmate.inventory.address import card, is_address, is_host_bridge, order
from railmate.inventory.model import Gpu, GpuVendor, Inventory, PciFunction
from railmate.inventory.reader import Reader
from railmate.inventory.scan import scan
from railmate.inventory.vpd import keyword

_MACHINE = "recorded"
# Names by a device's place (systemd.net-naming-scheme(7); rdma-core's rdma_rename), and those that drivers
# and clouds number. All others may hold a MAC or GUID, or somebody's words.
_PLACE = (
    r"(o\d{1,5}|(P[0-9a-f]{1,8})?(p\d{1,5})?s\d{1,5})(f\d{1,3})?"  # on board; domain, bus, slot, function
    r"(n[a-z]{1,3}\d{1,5}|d\d{1,5})?(v\d{1,5}|r\d{1,5})?"  # port; VF or representor
)
_COUNTED = r"\d{1,4}(v\d{1,4})?"
_USUAL_NETDEV = re.compile(rf"(en|ib|sl){_PLACE}|(eth|ib|hsn|hsi|rdma|rail|net|bond|efa){_COUNTED}")
_USUAL_RDMA = re.compile(
    rf"(roce|ib|iw|rdma|opa){_PLACE}"
    rf"|(mlx[45]_|mlx5_bond_|bnxt_re|irdma|efa_|hfi1_|hns_|erdma_|mana_|rdma|rxe|siw|ib){_COUNTED}"
)
# phys_port_name as devlink makes it: port, PF, VF, subfunction, of a controller (c1pf0sf88) or split (p1s0)
_USUAL_PORT = re.compile(r"(c\d{1,3})?(p\d{1,3}(s\d{1,3})?|pf\d{1,3}((vf|sf)\d{1,5})?)")
_INFINIBAND_CLASS = 0x0207
_PRODUCT_FILES = ("sys_vendor", "product_name")
_MANAGEMENT = b"SW_MNG"
_MANAGEMENT_WORD = "vpd.VU=SMDL=SW_MNG"
_VPD_IDENTIFIER = "V3"  # what ties a data-direct function to its NIC


def record(sysfs_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> str:
    """The YAML text. Raises UsageError when there is no PCI tree at ``sysfs_root``."""
    inventory = scan(sysfs_root, proc_root)
    return _Recording(inventory, os.fspath(sysfs_root).rstrip("/")).text()


class _StandIns:
    """Numbered stand-ins: equal things get equal ones."""

    def __init__(self, prefix: str, usual: re.Pattern[str] | None = None) -> None:
        self._prefix, self._usual = prefix, usual
        self._known: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        if self._usual is not None and self._usual.fullmatch(name):
            return name
        return self._known.setdefault(name, f"{self._prefix}{len(self._known)}")


class _Recording:
    def __init__(self, inventory: Inventory, sysfs: str) -> None:
        self._inventory, self._sysfs = inventory, sysfs
        self._functions = inventory.functions
        self._models: dict[str, dict[str, Any]] = {}
        self._netdev, self._rdma = _StandIns("netdev", _USUAL_NETDEV), _StandIns("rdmadev", _USUAL_RDMA)
        self._identifier, self._component = _StandIns("identifier"), _StandIns("component")
        self._ordinals = {gpu.address: (place, gpu) for place, gpu in enumerate(inventory.gpus)}
        self._vf_indices = {nic.address: nic.vf_index for nic in inventory.nics}
        self._bonds = {address: bond for bond in inventory.bonds for address in bond.functions}
        self._bond, self._card = _StandIns("bond"), _StandIns("card")
        self._split_cards = _split_cards(inventory)

    def text(self) -> str:
        import yaml  # 20 ms, and only this command needs it

        self._models = self._models_of()
        head: dict[str, Any] = {"machine": _MACHINE, "about": self._about()}
        version = next((g.driver_version for g in self._inventory.gpus if g.vendor is GpuVendor.NVIDIA), None)
        if version:
            head["nvidiaDriver"] = version
        head["models"] = self._models
        lines = [f"  {line}\n" for line in self._tree()]
        return (
            yaml.safe_dump(head, sort_keys=False, default_flow_style=None, width=110)
            + "pci: |\n"
            + "".join(lines)
        )

    def _about(self) -> str:
        reader = Reader()
        directory = f"{self._sysfs}/class/dmi/id"
        paths = [f"{directory}/{name}" for name in _PRODUCT_FILES]
        words = [reader.word(path) for path in paths if os.path.isfile(path)]
        what = " ".join(word for word in words if word) or "a machine"
        odd = len(self._inventory.warnings)
        more = f"; warnings while it was read: {odd}" if odd else ""
        return f"{what}, recorded by railmate; personal data replaced{more}"

    # --- models: what most functions of one vendor:device have in common
    def _models_of(self) -> dict[str, dict[str, Any]]:
        by_model: dict[str, list[PciFunction]] = {}
        for function in self._functions.values():
            by_model.setdefault(_model(function), []).append(function)
        models = {name: self._model_of(held) for name, held in sorted(by_model.items())}
        return {name: facts for name, facts in models.items() if facts}

    def _model_of(self, functions: list[PciFunction]) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "driver": _usual(_driver(function) for function in functions),
            "product": _usual(
                self._ordinals[f.address][1].product for f in functions if f.address in self._ordinals
            ),
            "vfs": _usual(f.max_virtual_functions for f in functions) or None,
            "vf": next((vf for f in functions if (vf := self._vf_model(f))), None),
            "rate": _usual(_rate(function) for function in functions),
        }
        devices = [device for function in functions for device in function.rdma_devices]
        if devices and not any(device.umad for device in devices):
            facts["mad"] = False
        return {name: value for name, value in facts.items() if value is not None}

    def _vf_model(self, function: PciFunction) -> str | None:
        if function.virtual_functions:
            return _model(self._functions[function.virtual_functions[0]])
        path = f"{self._sysfs}/bus/pci/devices/{function.address}/sriov_vf_device"
        if not function.max_virtual_functions or not os.path.isfile(path):
            return None
        device = Reader().number(path, 16, range(1 << 16))
        return None if device is None else f"{function.vendor:04x}:{device:04x}"

    # --- the tree
    def _tree(self) -> Iterator[str]:
        root: dict[str, Any] = {}
        for function in self._functions.values():
            if not any(is_host_bridge(part) for part in function.path):
                yield f"# {function.address}: has no host bridge, left out"
                continue
            below = root
            for part in function.path:
                below = below.setdefault(part, {})
        yield from self._lines(root, 0, None)

    def _lines(self, below: Mapping[str, Any], depth: int, inherited: int | None) -> Iterator[str]:
        for part in sorted(below, key=_place):
            children = below[part]
            function = self._functions.get(part) if is_address(part) else None
            numa = inherited
            if function is not None:
                numa = -1 if function.numa_node is None else function.numa_node
                words = [part.partition(":")[2], *self._words(function)]
            elif is_address(part):  # a bridge whose own files could not be read
                words = [part.partition(":")[2], "060400", "0000:0000", "-"]
            else:
                words = [part if is_host_bridge(part) or not _LONG.search(part) else self._component(part)]
                numa = self._first_numa(children, inherited)
            if numa is not None and numa != inherited:
                words.append(f"numa={numa}")
            yield "  " * depth + " ".join(words)
            yield from self._lines(children, depth + 1, numa)

    def _first_numa(self, children: Mapping[str, Any], inherited: int | None) -> int | None:
        """A host bridge has no files of its own; what is below it mostly has one node."""
        held = [self._functions[part] for part in children if part in self._functions]
        nodes = Counter(-1 if function.numa_node is None else function.numa_node for function in held)
        return nodes.most_common(1)[0][0] if nodes else inherited

    def _words(self, function: PciFunction) -> Iterator[str]:
        model = self._models.get(_model(function), {})
        yield f"{function.class_code:06x}"
        yield _model(function)
        subsystem = (function.subsystem_vendor, function.subsystem_device)
        yield (
            f"{subsystem[0]:04x}:{subsystem[1]:04x}"
            if any(subsystem)
            else "-"
            if function.subsystem_known
            else "?"
        )
        names = [self._rdma(device.name) for device in function.rdma_devices]
        if function.has_rdma and not names:  # it is in another network namespace just now
            names = [self._rdma(f"away/{function.address}")]
        if names:
            yield f"rdma={','.join(names)}"
        if function.netdevs:
            yield f"net={','.join(self._netdev(netdev.name) for netdev in function.netdevs)}"
        if function.max_virtual_functions != model.get("vfs", 0):
            yield f"vfs={function.max_virtual_functions}"
        if function.physical_function is not None:
            yield f"pf={function.physical_function}"
            yield f"vf={self._vf_index(function)}"
        if _driver(function) != model.get("driver"):
            yield f"driver={_driver(function) or '-'}"
        if (names or function.netdevs) and _rate(function) != model.get("rate"):
            yield f"rate={_rate(function) or '-'}"
        yield from self._device_words(function)
        if function.address in self._ordinals:
            yield from self._gpu_words(*self._ordinals[function.address])
        yield from self._vpd_words(function)

    def _device_words(self, function: PciFunction) -> Iterator[str]:
        """What decides something of its first RDMA device and its netdevs, where it is not the usual."""
        if function.rdma_devices:
            first = function.rdma_devices[0]
            usual_layer = "InfiniBand" if function.class_code >> 8 == _INFINIBAND_CLASS else "Ethernet"
            if first.state != "ACTIVE":
                yield f"state={first.state or '-'}"
            if first.link_layer != usual_layer:
                yield f"link={first.link_layer or '-'}"
            if first.sys_image_guid in self._split_cards:
                yield f"card={self._card(first.sys_image_guid or '')}"
        if function.address in self._bonds:
            yield f"bond={self._bond(self._bonds[function.address].name)}"
        if any(netdev.port_name for netdev in function.netdevs):
            yield f"port={','.join(_port(netdev.port_name) for netdev in function.netdevs)}"

    def _vf_index(self, function: PciFunction) -> int:
        index = self._vf_indices.get(function.address)
        if index is None:  # no NIC's VF
            siblings = self._functions[function.physical_function or ""].virtual_functions
            index = siblings.index(function.address)
        return index

    @staticmethod
    def _gpu_words(ordinal: int, gpu: Gpu) -> Iterator[str]:
        if gpu.vendor is GpuVendor.NVIDIA:
            if gpu.index != ordinal:
                yield f"minor={'-' if gpu.index is None else gpu.index}"
            return
        nodes = [node.removeprefix("dri/") for node in gpu.device_nodes if node.startswith("dri/")]
        if nodes != [f"renderD{128 + ordinal}", f"card{ordinal}"]:
            yield f"drm={','.join(nodes) or '-'}"

    def _vpd_words(self, function: PciFunction) -> Iterator[str]:
        """What decides something, and nothing else: vital product data hold serial and part numbers."""
        if function.vpd is None:
            return
        identifier = keyword(function.vpd, _VPD_IDENTIFIER)
        if identifier is not None:
            yield f"vpd.{_VPD_IDENTIFIER}={self._identifier(identifier)}"
        if _MANAGEMENT in function.vpd:
            yield _MANAGEMENT_WORD
        elif not function.subsystem_known and any(keyword(function.vpd, name) for name in ("PN", "SN")):
            yield "vpd.PN=part"  # that it has one tells it from NVSwitch management


def _split_cards(inventory: Inventory) -> frozenset[str]:
    """System image GUIDs that several PCI devices have."""
    held: dict[str, set[str]] = {}
    for nic in inventory.nics:
        for device in nic.function.rdma_devices:
            if device.sys_image_guid is not None and not nic.is_vf:
                held.setdefault(device.sys_image_guid, set()).add(card(nic.address))
    return frozenset(guid for guid, cards in held.items() if len(cards) > 1)


def _port(name: str | None) -> str:
    return name if name and _USUAL_PORT.fullmatch(name) else "-"


_LONG = re.compile(r"[0-9a-fA-F]{8}-|[^\w:.-]")  # VMBus devices are named by GUIDs


def _place(part: str) -> tuple[int, tuple[int, ...], str]:
    """Addresses in PCI order, before them what else is on a path by name."""
    return (1, order(part), "") if is_address(part) else (0, (), part)


def _model(function: PciFunction) -> str:
    return f"{function.vendor:04x}:{function.device:04x}"


def _driver(function: PciFunction) -> str | None:
    return re.sub(r"[^\w.-]", "_", function.driver) if function.driver else None


def _rate(function: PciFunction) -> int | None:
    """Gbit/s: the RDMA device's, else the netdev's."""
    rates = [device.rate for device in function.rdma_devices if device.rate]
    rates += [netdev.speed // 1000 for netdev in function.netdevs if netdev.speed and not rates]
    return max(rates, default=None) or None


def _usual(values: Iterable[Any]) -> Any:
    """The value that most have, of those that have one; of equally many the first."""
    counts = Counter(value for value in values if value is not None)
    return counts.most_common(1)[0][0] if counts else None
