"""Reads the ``pci`` part of a machine's file (tests/machines/README.md)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from harness.facts import GpuFacts, Machine, digest, guid_of, make_vpd, netdev, numbered, rdma_device
from railmate.inventory.address import is_address, is_host_bridge, order
from railmate.inventory.gpus import vendor_of
from railmate.inventory.model import GpuVendor, PciFunction


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
        functions=numbered(functions, models),
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
        functions[address] = _with_class_words(functions[address], words)
        if "pf" in words:
            functions[address] = replace(functions[address], physical_function=words["pf"])
            vfs.setdefault(words["pf"], {})[int(words["vf"])] = address
    for pf, by_index in vfs.items():
        functions[pf] = replace(functions[pf], virtual_functions=tuple(by_index[i] for i in sorted(by_index)))
    return replace(machine, functions=numbered(functions, facts.get("models") or {}))


def _with_class_words(function: PciFunction, words: Mapping[str, str]) -> PciFunction:
    """The function with what its words say of its netdevs and RDMA devices; ``-`` is unknown."""
    netdevs, devices = function.netdevs, function.rdma_devices

    def known(word: str) -> str | None:
        return None if words[word] == "-" else words[word]

    if "rate" in words:
        rate = None if words["rate"] == "-" else int(words["rate"])
        netdevs = tuple(replace(one, speed=rate * 1000 if rate else None) for one in netdevs)
        devices = tuple(replace(one, rate=rate) for one in devices)
    if "state" in words:
        devices = tuple(replace(one, state=known("state")) for one in devices)
    if "link" in words:
        devices = tuple(replace(one, link_layer=known("link")) for one in devices)
    if "card" in words:
        guid = guid_of(words["card"])
        devices = tuple(replace(one, sys_image_guid=guid) for one in devices)
    if "bond" in words:
        netdevs = tuple(
            replace(one, master=words["bond"] if i == 0 else None) for i, one in enumerate(netdevs)
        )
    if "port" in words:
        ports = [None if port == "-" else port for port in words["port"].split(",")]
        netdevs = tuple(replace(one, port_name=port) for one, port in zip(netdevs, ports, strict=True))
    return replace(function, netdevs=netdevs, rdma_devices=devices)


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
    sub_vendor, sub_device = (0, 0) if subsystem in ("-", "?") else (int(i, 16) for i in subsystem.split(":"))
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
        subsystem_known=subsystem != "?",
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
            minor = words[address].get("minor", str(ordinal))
            gpus[address] = GpuFacts(vendor, product, None if minor == "-" else int(minor), uuid)
        else:
            uuid = digest(machine, address, "uuid")[:16]
            drm = words[address].get("drm", f"renderD{128 + ordinal},card{ordinal}")
            gpus[address] = GpuFacts(
                vendor, product, None, uuid, tuple(node for node in drm.split(",") if node != "-")
            )
    return gpus
