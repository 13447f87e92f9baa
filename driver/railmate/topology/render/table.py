"""The default view: a matrix like ``nvidia-smi topo -m``, then what the columns are, and the pairs."""

from __future__ import annotations

from collections.abc import Sequence

from railmate.inventory.model import Inventory
from railmate.topology.model import Topology
from railmate.topology.render.names import View, device_name, product


def table(inventory: Inventory, topology: Topology) -> str:
    view = View(inventory, topology)
    parts = [[f"Machine class: {topology.machine_class}"]]
    if view.inventory.gpus and view.shown_nics:
        parts.append(_matrix(view))
    if view.inventory.gpus:
        parts.append(_gpus(view))
    if view.nics:
        parts.append(_nics(view))
    if topology.pairs:
        parts.append(_pairs(view))
    if topology.notes:
        parts.append(["Notes", *(f"  {note}" for note in topology.notes)])
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _matrix(view: View) -> list[str]:
    paths = {(path.gpu, path.nic): path for path in view.topology.paths}
    rows: list[list[str]] = [["", *(view.names[nic.address] for nic in view.shown_nics)]]
    for gpu in view.inventory.gpus:
        pair = view.pair_of.get(gpu.address)
        cells = []
        for nic in view.shown_nics:
            distance = str(paths[gpu.address, nic.address].distance)
            cells.append(f"{distance}*" if pair is not None and nic.address in pair.nics else distance)
        rows.append([view.names[gpu.address], *cells])
    marks = "* this GPU's NIC" if view.topology.pairs else ""
    return ["Distance (PIX, PXB: below one PCIe switch)", *_columns(rows), *([f"  {marks}"] if marks else [])]


def _gpus(view: View) -> list[str]:
    rows = [["GPU", "ADDRESS", "NUMA", "PCIE SWITCH", "RAIL", "PRODUCT"]]
    for gpu in view.inventory.gpus:
        rows.append(
            [
                view.names[gpu.address],
                gpu.address,
                _known(view.topology.numa_nodes.get(gpu.address)),
                _known(view.topology.switches.get(gpu.address)),
                _known(view.topology.rails.get(gpu.address)),
                product(gpu),
            ]
        )
    return _columns(rows)


def _nics(view: View) -> list[str]:
    rows = [["NIC", "ADDRESS", "NUMA", "PCIE SWITCH", "RAIL", "ROLE", "RDMA", "NETDEV", "VFS"]]
    for nic in view.nics:
        function = nic.function
        rows.append(
            [
                view.names.get(nic.address, "-"),
                nic.address,
                _known(view.topology.numa_nodes.get(nic.address)),
                _known(view.topology.switches.get(nic.address)),
                _known(view.topology.rails.get(nic.address)),
                str(view.role(nic)),
                device_name(nic) if function.rdma_devices else "-",
                ",".join(netdev.name for netdev in function.netdevs) or "-",
                f"{len(function.virtual_functions)}/{function.max_virtual_functions}"
                if function.max_virtual_functions
                else "-",
            ]
        )
    return _columns(rows)


def _pairs(view: View) -> list[str]:
    rows = [["PAIR", "", "DISTANCE", "PCIE SWITCH", "SOURCE"]]
    for pair in view.topology.pairs:
        rows.append(
            [
                " ".join(view.names[gpu] for gpu in pair.gpus),
                " ".join(view.names[nic] for nic in pair.nics),
                str(pair.distance),
                _known(pair.pcie_switch),
                str(pair.source),
            ]
        )
    return _columns(rows)


def _known(value: object) -> str:
    return "-" if value is None else str(value)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
