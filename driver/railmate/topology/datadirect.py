"""Data-direct functions of GB200 and GB300: a NIC's second PCI function, next to a GPU.

The NIC itself sits at the processor, its DMA function (15b3:2100) on the GPU's host bridge. Both
carry the same identifier in their vital product data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from railmate.inventory.model import PciFunction
from railmate.inventory.vpd import keyword
from railmate.topology.nickinds import DATA_DIRECT, model
from railmate.topology.tree import Place

_IDENTIFIER = "V3"


def dma_functions(functions: Iterable[PciFunction]) -> Mapping[str, str]:
    """Address of a NIC -> address of its DMA function. Identifiers that are not unique tie nothing."""
    dma: dict[str, list[str]] = {}
    nics: dict[str, list[str]] = {}
    for function in functions:
        identifier = keyword(function.vpd, _IDENTIFIER) if function.vpd else None
        if identifier is not None and function.physical_function is None:
            side = dma if model(function) == DATA_DIRECT else nics
            side.setdefault(identifier, []).append(function.address)
    return {
        nic: dma[identifier][0]
        for identifier, addresses in nics.items()
        if len(dma.get(identifier, ())) == 1
        for nic in addresses
    }


def useful_dma_functions(
    functions: Mapping[str, PciFunction], places: Mapping[str, Place], gpus: Iterable[str]
) -> Mapping[str, str]:
    """Those that tell something: on a host bridge that a GPU is on too."""
    gpu_bridges = {places[gpu].host_bridge for gpu in gpus}
    tied = dma_functions(functions.values())
    return {nic: dma for nic, dma in tied.items() if places[dma].host_bridge in gpu_bridges}
