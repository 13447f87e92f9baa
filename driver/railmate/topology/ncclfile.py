"""NCCL topology files (``NCCL_TOPO_FILE``), as clouds hand them out, read as an override.

The format: ``<system>`` holds ``<cpu numaid>``, that holds ``<pci busid>``, nested. A ``<pci>`` with
others inside is a switch, one with a ``<gpu>`` or ``<nic>``, or with nothing inside, is a device.
Invented switch addresses (``ffff:ff:01.0``) are usual. Of a NIC's functions NCCL keeps function 0,
which stands for the card. Link speeds are not read: files for virtual machines make them up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from xml.parsers import expat

from railmate.topology.switches import lower_of_two, upper_of_two
from railmate_api.override import OverrideSwitch, TopologyOverride

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
_BRIDGE_CLASS = "0x0604"
_MAX_DEPTH, _MAX_ELEMENTS = 64, 20000  # a machine has some hundred
_KNOWN = {"system", "cpu", "pci"}


class NcclFileError(Exception):
    """What is wrong with the file, with the line."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {problem}")


@dataclass
class _Element:
    tag: str
    attributes: dict[str, str]
    line: int
    children: list[_Element] = field(default_factory=list)


def parse_nccl_topology(text: bytes) -> TopologyOverride:
    """The switches and NUMA nodes of an NCCL topology file. Raises NcclFileError.

    A document type is refused, and with it entities, which could be made to grow without end or to
    read other files; NCCL's files have none.
    """
    root = _read(text)
    if root.tag != "system":
        raise NcclFileError(root.line, f"holds <{root.tag}>, an NCCL topology file holds <system>")
    reading = _Reading()
    for cpu in root.children:
        if cpu.tag != "cpu":
            continue  # a merged file of several hosts has more, none of it about this tree
        numa = _numa(cpu)
        for child in cpu.children:
            reading.pci(child, numa, None, None)
    if not reading.seen:
        raise NcclFileError(
            root.line, "<system> holds no <cpu> with <pci> inside, so it says nothing of any device"
        )
    return TopologyOverride(switches=tuple(reading.switches()), numa_nodes=reading.numa_nodes)


class _Reading:
    def __init__(self) -> None:
        self.seen: dict[str, int] = {}  # address -> line
        self.numa_nodes: dict[str, int] = {}
        self._parents: dict[str, str | None] = {}
        self._devices: dict[str, list[str]] = {}

    def pci(self, element: _Element, numa: int, switch: str | None, may_take_in: str | None) -> None:
        """One ``<pci>`` and what is inside. ``may_take_in``: the switch above is the upper level of a chip
        of that generation, whose lower level is the same switch."""
        if element.tag != "pci":
            return
        address = self._address(element)
        inside = [child for child in element.children if child.tag == "pci"]
        is_device = any(child.tag in ("gpu", "nic") for child in element.children)
        is_bridge = element.attributes.get("class", "").lower().startswith(_BRIDGE_CLASS)
        if is_device or not (inside or is_bridge):
            self.numa_nodes[address] = numa
            if switch is not None:
                self._devices[switch].append(address)
            for child in inside:
                self.pci(child, numa, switch, None)
            return
        ids = _ids(element)
        if may_take_in is not None and lower_of_two(*ids) == may_take_in:
            for child in inside:
                self.pci(child, numa, switch, None)
            return
        self._parents[address] = switch
        self._devices[address] = []
        for child in inside:
            self.pci(child, numa, address, upper_of_two(*ids))

    def switches(self) -> list[OverrideSwitch]:
        return [
            OverrideSwitch(one, tuple(self._devices[one]), parent) for one, parent in self._parents.items()
        ]

    def _address(self, element: _Element) -> str:
        address = element.attributes.get("busid", "").lower()
        if not _ADDRESS.fullmatch(address):
            raise NcclFileError(
                element.line, f"<pci busid={address!r}> has no PCI address; busid must be dddd:bb:dd.f"
            )
        if address in self.seen:
            raise NcclFileError(
                element.line,
                f"<pci busid={address!r}> is there already, at line {self.seen[address]}; each once",
            )
        self.seen[address] = element.line
        return address


def _numa(cpu: _Element) -> int:
    text = cpu.attributes.get("numaid", "")
    if not re.fullmatch(r"-1|\d{1,5}", text):
        raise NcclFileError(
            cpu.line, f"<cpu numaid={text!r}> must have a NUMA node's number as numaid, or -1"
        )
    return int(text)


def _ids(element: _Element) -> tuple[int, int, int, int]:
    """Vendor, device and both of the subsystem; 0 for what is not there or no number, which never folds."""

    def number(name: str) -> int:
        text = element.attributes.get(name, "")
        return int(text, 16) if re.fullmatch(r"(0x)?[0-9a-fA-F]{1,4}", text) else 0

    return number("vendor"), number("device"), number("subsystem_vendor"), number("subsystem_device")


def _read(text: bytes) -> _Element:
    parser = expat.ParserCreate()
    stack: list[_Element] = []
    roots: list[_Element] = []
    count = 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if count > _MAX_ELEMENTS or len(stack) >= _MAX_DEPTH:
            raise NcclFileError(
                parser.CurrentLineNumber,
                f"more than {_MAX_ELEMENTS} elements or {_MAX_DEPTH} levels; no machine's topology is that big",
            )
        element = _Element(tag, attributes, parser.CurrentLineNumber)
        (stack[-1].children if stack else roots).append(element)
        stack.append(element)

    def end(_tag: str) -> None:
        stack.pop()

    def refuse(*_arguments: object) -> None:
        raise NcclFileError(
            parser.CurrentLineNumber,
            "has a document type or entities, which are refused; take the DOCTYPE out",
        )

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refuse
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        raise NcclFileError(
            error.lineno, f"is no well-formed XML ({expat.errors.messages[error.code]})"
        ) from None
    return roots[0]
