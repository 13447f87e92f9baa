"""One node as a self-contained SVG: switches, the GPUs and NICs below each, and the pairs in colour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from railmate.inventory.model import Gpu, Inventory, Nic
from railmate.topology.model import MachineClass, Pair, Role, Source, Topology
from railmate.topology.render.names import View, device_name, product, short
from railmate.topology.switches import Switches
from railmate.topology.tree import place

# Okabe and Ito's colours, darkened where white text or thin lines need it: told apart by everyone.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a8457f", "#b07d00", "#2f8fc4", "#7a5195", "#5b6b2f")
_INK, _SOFT, _LINE, _PANEL = "#1f2933", "#5f6c7b", "#c4ccd6", "#f4f6f9"

_FONTS = "-apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif"

_MARGIN = 24
_GAP = 16  # between panels, and between pairs in one
_BOX = 112  # width of a device
_GPU_HEIGHT, _NIC_HEIGHT = 50, 50
_LINK = 46  # height of the line between GPU and NIC
_HEAD = 54  # a panel's title
_PAD = 14
_BAR = 26  # height of the bar that stands for the processors
_BUS = 34  # from the line of host bridges down to a panel
_WIDTH_LIMIT = 1140
_OTHER = 136  # width of a NIC that is no rail: its role is written out
_LETTER = 7  # usual width of a letter in a panel's subtitle
_PANEL_LEAST = 176  # room for a panel's title


@dataclass
class _Panel:
    """A switch, or what stands in for one, with its pairs and the devices that are in none."""

    title: str
    subtitle: str
    switch: str | None = None
    above: tuple[str, ...] = ()  # the switches between it and the processor, the nearest last
    parent: str | None = (
        None  # the nearest of them that has a panel; without one it hangs below the processors
    )
    pairs: list[Pair] = field(default_factory=list)
    lone: list[Gpu] = field(default_factory=list)

    def columns(self) -> int:
        return sum(len(pair.gpus) for pair in self.pairs) + len(self.lone)

    def inner(self) -> int:
        blocks = len(self.pairs) + len(self.lone)
        return self.columns() * _BOX + (self.columns() - blocks) * 6 + max(blocks - 1, 0) * _GAP

    def width(self) -> int:
        return max(self.inner(), _PANEL_LEAST, len(self.subtitle) * _LETTER) + 2 * _PAD

    def height(self) -> int:
        nics = max((len(pair.nics) for pair in self.pairs), default=0)
        return _HEAD + _GPU_HEIGHT + (_LINK + nics * _NIC_HEIGHT + (nics - 1) * 6 if nics else 0) + _PAD


@dataclass(frozen=True)
class _Bus:
    """The left end of the processors' bar."""

    x: int
    y: int


def picture(inventory: Inventory, topology: Topology) -> str:
    view = View(inventory, topology)
    drawing = _Drawing(view)
    return drawing.svg()


class _Drawing:
    def __init__(self, view: View) -> None:
        self.view = view
        self.parts: list[str] = []
        self.colours = {pair: _COLOURS[i % len(_COLOURS)] for i, pair in enumerate(view.topology.pairs)}
        self.nics = {nic.address: nic for nic in view.nics}
        functions = view.inventory.functions
        self._tree = Switches(functions, {address: place(one) for address, one in functions.items()})
        self.gpus = {gpu.address: gpu for gpu in view.inventory.gpus}

    def svg(self) -> str:
        rows = _rows(self._panels())
        content = max(map(_row_width, rows), default=0)
        width = max(content, 520) + 2 * _MARGIN
        y = self._heading(width)
        bus: _Bus | None = None
        for row in rows:
            y, bus = self._row(row, y, width, bus)
        y = self._others(y, width)
        height = y + _MARGIN
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                f'height="{height}" role="img" font-family="{_FONTS}">',
                f"<title>{escape(self._title())}</title>",
                f'<rect width="{width}" height="{height}" rx="12" fill="#ffffff"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )

    # --- what is drawn
    def _title(self) -> str:
        gpus, numbers = len(self.gpus), self.view.topology.rails
        rails = len({numbers.get(nic.address) for nic in self.view.nics if self.view.role(nic) is Role.RAIL})
        products = sorted({product(gpu) for gpu in self.gpus.values()})
        what = f"{gpus} × {products[0]}" if len(products) == 1 else f"{gpus} GPUs"
        return f"{what}, {rails} RDMA {'rail' if rails == 1 else 'rails'}"

    def _panels(self) -> list[_Panel]:
        """Pairs below their switch; without one, below what they do share."""
        panels: dict[str, _Panel] = {}
        for pair in self.view.topology.pairs:
            self._panel(panels, self.gpus[pair.gpus[0]], pair.pcie_switch).pairs.append(pair)
        for gpu in self.gpus.values():
            if gpu.address not in self.view.pair_of:
                switch = self.view.topology.switches.get(gpu.address)
                self._panel(panels, gpu, switch).lone.append(gpu)
        for panel in panels.values():
            panel.parent = next((switch for switch in reversed(panel.above) if switch in panels), None)
            if panel.above:
                panel.subtitle += f" · below {short(panel.parent or panel.above[-1])}"
        return list(panels.values())

    def _panel(self, panels: dict[str, _Panel], gpu: Gpu, switch: str | None) -> _Panel:
        numa = self.view.topology.numa_nodes.get(gpu.address)
        numa_text = "NUMA node unknown" if numa is None else f"NUMA node {numa}"
        if switch is not None:
            chain = self._switches_above(gpu)
            above = chain[: chain.index(switch)] if switch in chain else ()  # an override's is in no chain
            return panels.setdefault(
                switch, _Panel(f"PCIe switch {short(switch)}", numa_text, switch=switch, above=above)
            )
        return panels.setdefault(f"numa {numa}", _Panel(numa_text, "no shared PCIe switch"))

    def _switches_above(self, gpu: Gpu) -> tuple[str, ...]:
        return self._tree.above(place(gpu.function))

    def _heading(self, width: int) -> int:
        self._text(_MARGIN, _MARGIN + 16, self._title(), size=19, weight=600)
        self._text(_MARGIN, _MARGIN + 40, self._words(), size=13, colour=_SOFT)
        return _MARGIN + 62

    def _words(self) -> str:
        """Which class of machine, and what tells its pairs."""
        topology = self.view.topology
        sources = {pair.source for pair in topology.pairs}
        if Source.OVERRIDE in sources:
            tells = "an override tells which GPU and NIC belong together"
        elif topology.machine_class is MachineClass.SWITCHED:
            return "GPU and NIC of a pair meet at a PCIe switch; data never enters the processor"
        elif Source.DATA_DIRECT in sources:
            tells = "a NIC's DMA function beside a GPU tells that they belong together"
        elif topology.switches:
            tells = "the switches are what the hypervisor shows"
        else:
            tells = "no PCIe switch tells which GPU and NIC belong together, pairs are by NUMA node"
        return f"Machine class {topology.machine_class}: {tells}"

    def _row(self, row: Sequence[_Panel], y: int, width: int, bus: _Bus | None) -> tuple[int, _Bus]:
        """One row of panels; returns where the next may begin. The first row has the processors above it, later
        ones hang on a line from there: a second bar would read as a second processor."""
        total = _row_width(row)
        x = (width - total) // 2
        top = y + _BUS
        roots = [x + offset + panel.width() // 2 for panel, offset in _offsets(row) if panel.parent is None]
        if bus is None:
            self._box(x, y, total, _BAR, fill="#e3e8ef", stroke="none", radius=13)
            self._text(
                x + total // 2, y + 17, "processors and memory", size=12, colour=_SOFT, anchor="middle"
            )
            bus = _Bus(x, y + _BAR // 2)
            top += _BAR
            start = y + _BAR
        else:
            start = y + _BUS // 2
            if roots:
                self._path(f"M{bus.x} {bus.y} H{_MARGIN // 2} V{start} H{roots[-1]}", _LINE, 3)
        height = max(panel.height() for panel in row)
        left: str | None = None
        for panel, offset in _offsets(row):
            if panel.parent is None:
                centre = x + offset + panel.width() // 2
                self._line(centre, start, centre, top, _LINE, 3)
            elif panel.parent == left:
                self._line(x + offset - _GAP, top + _HEAD // 2, x + offset, top + _HEAD // 2, _LINE, 3)
            self._draw_panel(panel, x + offset, top, height)
            left = panel.switch
        return top + height + _GAP + 8, bus

    def _draw_panel(self, panel: _Panel, x: int, y: int, height: int) -> None:
        self._box(x, y, panel.width(), height, fill=_PANEL, stroke=_LINE, radius=10)
        self._text(x + _PAD, y + 23, panel.title, size=14, weight=600)
        self._text(x + _PAD, y + 41, panel.subtitle, size=12, colour=_SOFT)
        left = x + (panel.width() - panel.inner()) // 2
        for pair in panel.pairs:
            left = self._draw_pair(pair, left, y + _HEAD) + _GAP
        for gpu in panel.lone:
            self._device(left, y + _HEAD, _BOX, self._gpu_lines(gpu), _SOFT, filled=True)
            left += _BOX + _GAP

    def _draw_pair(self, pair: Pair, x: int, y: int) -> int:
        colour = self.colours[pair]
        width = len(pair.gpus) * _BOX + (len(pair.gpus) - 1) * 6
        centre = x + width // 2
        nic_top = y + _GPU_HEIGHT + _LINK
        bend = y + _GPU_HEIGHT + _LINK // 2
        for index in range(len(pair.gpus)):
            middle = x + index * (_BOX + 6) + _BOX // 2
            self._path(f"M{middle} {y + _GPU_HEIGHT} V{bend} H{centre} V{nic_top}", colour, 5)
        label = 21 + 7 * len(str(pair.distance))
        self._box(centre - label // 2, bend - 10, label, 20, fill="#ffffff", stroke=colour, radius=10)
        self._text(centre, bend + 4, str(pair.distance), size=11, weight=600, colour=colour, anchor="middle")
        for index, address in enumerate(pair.gpus):
            self._device(
                x + index * (_BOX + 6), y, _BOX, self._gpu_lines(self.gpus[address]), colour, filled=True
            )
        for index, address in enumerate(pair.nics):
            nic = self.nics[address]
            self._device(
                x, nic_top + index * (_NIC_HEIGHT + 6), width, self._nic_lines(nic), colour, filled=False
            )
        return x + width

    def _others(self, y: int, width: int) -> int:
        """NICs that belong to no GPU, with what they are for."""
        paired = self.view.pair_of
        others = [nic for nic in self.view.shown_nics if nic.address not in paired]
        if not others:
            return y - _GAP
        rails_among = any(self.view.role(nic) is Role.RAIL for nic in others)
        heading = "In no pair:" if rails_among else "Not rails, never offered:"
        self._text(_MARGIN, y + 10, heading, size=12, weight=600, colour=_SOFT)
        x, y = _MARGIN, y + 20
        for nic in others:
            if x + _OTHER > width - _MARGIN:
                x, y = _MARGIN, y + _NIC_HEIGHT + 6
            lines = [self._nic_lines(nic)[0], f"{short(nic.address)} · {self.view.role(nic)}"]
            self._device(x, y, _OTHER, lines, "#8a96a3", filled=False)
            x += _OTHER + 8
        return y + _NIC_HEIGHT

    def _gpu_lines(self, gpu: Gpu) -> list[str]:
        return [self.view.names[gpu.address], short(gpu.address)]

    def _nic_lines(self, nic: Nic) -> list[str]:
        vfs = len(nic.function.virtual_functions)
        more = f" · {vfs} VFs" if vfs else ""
        return [device_name(nic) or self.view.names.get(nic.address, "NIC"), short(nic.address) + more]

    # --- primitives
    def _device(self, x: int, y: int, width: int, lines: Sequence[str], colour: str, filled: bool) -> None:
        self._box(
            x, y, width, _GPU_HEIGHT, fill=colour if filled else "#ffffff", stroke=colour, radius=7, thick=2
        )
        ink, soft = ("#ffffff", "#ffffff") if filled else (_INK, _SOFT)
        self._text(
            x + width // 2, y + 21, _fit(lines[0], width, 9), size=14, weight=600, colour=ink, anchor="middle"
        )
        self._text(x + width // 2, y + 38, _fit(lines[1], width, 6), size=11, colour=soft, anchor="middle")

    def _box(
        self, x: int, y: int, width: int, height: int, fill: str, stroke: str, radius: int, thick: float = 1.5
    ) -> None:
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="{thick}"/>'
        )

    def _line(self, x1: int, y1: int, x2: int, y2: int, colour: str, thick: int) -> None:
        self._path(f"M{x1} {y1} L{x2} {y2}", colour, thick)

    def _path(self, way: str, colour: str, thick: int) -> None:
        self.parts.append(
            f'<path d="{way}" fill="none" stroke="{colour}" stroke-width="{thick}" stroke-linejoin="round"/>'
        )

    def _text(
        self,
        x: int,
        y: int,
        text: str,
        size: int,
        weight: int = 400,
        colour: str = _INK,
        anchor: str = "start",
    ) -> None:
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}" '
            f'text-anchor="{anchor}">{escape(text)}</text>'
        )


def _fit(text: str, width: int, letter: int) -> str:
    """Cuts text to a box, by the usual width of a letter."""
    most = (width - 8) // letter
    return text if len(text) <= most else text[: most - 1] + "…"


def _row_width(row: Sequence[_Panel]) -> int:
    return sum(panel.width() for panel in row) + _GAP * (len(row) - 1)


def _offsets(row: Sequence[_Panel]) -> Iterator[tuple[_Panel, int]]:
    """Panels with where they begin in their row."""
    offset = 0
    for panel in row:
        yield panel, offset
        offset += panel.width() + _GAP


def _rows(panels: Iterable[_Panel]) -> list[list[_Panel]]:
    """Panels side by side as far as the width goes, rows filled evenly."""
    panels = list(panels)
    if not panels:
        return []
    widest = max(panel.width() for panel in panels) + _GAP
    fit = max(1, _WIDTH_LIMIT // widest)
    count = -(-len(panels) // fit)  # rows needed
    each = -(-len(panels) // count)
    return [panels[i : i + each] for i in range(0, len(panels), each)]
