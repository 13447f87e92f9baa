"""Sentences for people: which hardware of a machine is not offered, or not as a pair, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from railmate.topology.model import Pair
from railmate_api import attributes as names


def left_out(what: str, reasons: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each reason. ``reasons``: address to why it is not offered."""
    for reason, addresses in _by_value(reasons.items()).items():
        one = len(addresses) == 1
        yield (
            f"{what}{'' if one else 's'} {', '.join(addresses)} {'is' if one else 'are'} not offered: {reason}"
        )


def vfs_left_out(parent: str, reasons: Mapping[str, str]) -> Iterator[str]:
    """The same for the VFs of one physical function, counted: there may be many."""
    for reason, addresses in _by_value(reasons.items()).items():
        one = len(addresses) == 1
        yield (
            f"{len(addresses)} VF{'' if one else 's'} of rail NIC {parent} {'is' if one else 'are'} not offered: "
            f"{reason}"
        )


def group(pair: Pair, with_vfs: bool) -> str:
    """Why there is no pair device where GPUs share their NICs. ``with_vfs``: VFs of these NICs are offered."""
    one = len(pair.nics) == 1
    said = (
        f"{len(pair.gpus)} GPUs share NIC{'' if one else 's'} {', '.join(pair.nics)}: "
        "no pair device is offered for them"
    )
    if not with_vfs:
        return f"{said}, nor a VF, as {'it has' if one else 'they have'} none that a pod can use"
    common = names.PCIE_SWITCH if pair.pcie_switch else names.NUMA_NODE
    return f"{said}; ask for a GPU and a VF with matchAttribute {common}"


def halves(gpus: Sequence[str]) -> Iterator[str]:
    """GPUs whose pair lacks a NIC that may be offered."""
    if gpus:
        one = len(gpus) == 1
        yield (
            f"GPU{'' if one else 's'} {', '.join(gpus)} {'is' if one else 'are'} offered without a pair device: "
            f"a NIC of {'its pair' if one else 'each pair'} is not offered or has no VF left"
        )


def too_long(devices_without: Mapping[str, int], limit: int) -> Iterator[str]:
    """``devices_without``: attribute to the number of devices that had to leave it out."""
    for attribute, count in devices_without.items():
        devices = "1 device" if count == 1 else f"{count} devices"
        yield f"attribute {attribute} is left out of {devices}: too long, {limit} bytes are the API's limit"


def _by_value(items: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for key, value in items:
        result.setdefault(value, []).append(key)
    return result
