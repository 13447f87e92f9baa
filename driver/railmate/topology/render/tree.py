"""The PCIe tree for a terminal: branches that lead to GPUs and NICs, ports in a row on one line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from railmate.inventory.address import order
from railmate.inventory.model import Gpu, Inventory, Nic
from railmate.topology.model import Topology
from railmate.topology.render.names import View, device_name, product, short

_PROSE = 110  # columns of a sentence where no terminal sets fewer
_DEEPER = "    "  # before what goes on below


@dataclass
class _Node:
    label: str
    children: dict[str, _Node] = field(default_factory=dict)
    text: str = ""  # what the device is, on leaves


def tree(inventory: Inventory, topology: Topology, width: int) -> str:
    """What does not fit into ``width`` columns goes on below, so nothing of it is lost; only where a branch
    leaves no room for a word are lines cut."""
    view = View(inventory, topology)
    switches = set(topology.switches.values())
    root = _Node("")
    devices: list[Gpu | Nic] = [*inventory.gpus, *view.nics]
    for device in sorted(devices, key=lambda one: order(one.address)):
        node = root
        for part in device.function.path:
            label = f"{short(part)} [switch]" if part in switches else short(part)
            node = node.children.setdefault(part, _Node(label))
        node.text = _gpu(device, view) if isinstance(device, Gpu) else _nic(device, view)
    lines: list[str] = []
    for host in root.children.values():
        _write(host, "", "", width, lines)
    return f"Machine class: {topology.machine_class}\n" + _cut(lines, width) + _notes(topology.notes, width)


def _notes(notes: Iterable[str], width: int) -> str:
    wrapped = [line for note in notes for line in textwrap.wrap(note, min(max(width, 20), _PROSE))]
    return "".join(f"{line}\n" for line in ([""] if wrapped else []) + wrapped)


def _cut(lines: list[str], width: int) -> str:
    return "".join((line if len(line) <= width else line[: width - 1] + "…") + "\n" for line in lines)


def _write(node: _Node, lead: str, below: str, width: int, lines: list[str]) -> None:
    labels = [node.label]
    while len(node.children) == 1 and not node.text:
        (node,) = node.children.values()
        labels.append(node.label)
    children = list(node.children.values())
    line = lead + " ─ ".join(labels)
    if node.text and len(line) + 2 + len(node.text) <= width:
        lines.append(f"{line}  {node.text}")
    else:
        lines += _wrapped(labels, " ─ ", lead, below + _DEEPER, width)
        lines += _wrapped(node.text.split(), " ", below + _DEEPER, below + _DEEPER, width)
    for index, child in enumerate(children):
        last = index == len(children) - 1
        _write(child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "), width, lines)


def _wrapped(words: Iterable[str], joint: str, first: str, others: str, width: int) -> Iterator[str]:
    """``words`` in lines of ``width`` columns, the first after ``first``, the others after ``others``."""
    line, is_empty = first, True
    for word in words:
        if not is_empty and len(line) + len(joint) + len(word) + len(joint.rstrip()) > width:
            yield line + joint.rstrip()
            line, is_empty = others, True
        line += word if is_empty else joint + word
        is_empty = False
    if not is_empty:
        yield line


def _gpu(gpu: Gpu, view: View) -> str:
    pair = view.pair_of.get(gpu.address)
    partner = " + ".join(view.names[nic] for nic in pair.nics) if pair else ""
    return f"{view.names[gpu.address]} {product(gpu)}" + (f"  ({pair.distance} {partner})" if pair else "")


def _nic(nic: Nic, view: View) -> str:
    words = [view.names.get(nic.address, "NIC"), device_name(nic)]
    words += [netdev.name for netdev in nic.function.netdevs if nic.function.rdma_devices]
    rail = view.topology.rails.get(nic.address)
    words.append(f"[rail {rail}]" if rail is not None else f"[{view.role(nic)}]")
    vfs = list(view.vfs(nic))
    if vfs:
        words.append(f"{len(vfs)} VFs {short(vfs[0].address)}…{short(vfs[-1].address)}")
    return " ".join(word for word in words if word)
