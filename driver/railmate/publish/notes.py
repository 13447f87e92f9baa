"""Sentences for people: which hardware of a machine is not offered, or not as a pair, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

NO_DRIVERS = "no PCI function here has a driver, so drivers are unknown and every device is taken as usable"


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


def not_shared(reasons: Mapping[str, str]) -> Iterator[str]:
    """Physical functions that an administrator wants shared. ``reasons``: address to why they are not."""
    for reason, addresses in _by_value(reasons.items()).items():
        one = len(addresses) == 1
        yield f"NIC{'' if one else 's'} {', '.join(addresses)} {'is' if one else 'are'} not shared: {reason}"


def shared_only(addresses: Sequence[str]) -> Iterator[str]:
    """Shared physical functions that without sharing would be offered whole."""
    if addresses:
        one = len(addresses) == 1
        yield (
            f"NIC{'' if one else 's'} {', '.join(addresses)} {'has' if one else 'have'} no VFs and "
            f"{'is' if one else 'are'} shared, so {'it is' if one else 'they are'} not offered whole, alone or in pairs"
        )


def still_shared(addresses: Sequence[str]) -> Iterator[str]:
    """Ports that are not shared any more, and that pods still have shares of."""
    if addresses:
        one = len(addresses) == 1
        yield (
            f"NIC{'' if one else 's'} {', '.join(addresses)} {'is' if one else 'are'} no longer shared, but pods still "
            f"have shares of {'it' if one else 'them'}: until those pods end {'it is' if one else 'they are'} offered "
            "neither shared nor whole"
        )


def handed_out(resource: str) -> str:
    """Why a GPU is left to a device plugin on the same node."""
    return (
        f"a device plugin on this node hands out {resource}, and a GPU must have one giver. Take the device plugin "
        "from the node, or, where it hands out other GPUs, start railmate with --device-plugins=ignore"
    )


def halves(gpus: Sequence[str]) -> Iterator[str]:
    """GPUs whose pair lacks a NIC that may be offered."""
    if gpus:
        one = len(gpus) == 1
        yield (
            f"GPU{'' if one else 's'} {', '.join(gpus)} {'is' if one else 'are'} offered without a pair device: "
            f"a NIC of {'its pair' if one else 'each pair'} is not offered or has no VF left"
        )


def few_vfs(gpus: Sequence[str], nics: Sequence[str]) -> str:
    """GPUs that share a NIC with VFs, but not one for each."""
    one = len(nics) == 1
    return (
        f"GPUs {', '.join(gpus)} share NIC{'' if one else 's'} {', '.join(nics)} and are offered as a group only: with "
        f"{len(gpus)} usable VFs or more on {'it' if one else 'each'}, each GPU would have a pair device too"
    )


def too_long(devices_without: Mapping[str, int], limit: int) -> Iterator[str]:
    """``devices_without``: attribute to the number of devices that had to leave it out."""
    for attribute, count in devices_without.items():
        devices = "1 device" if count == 1 else f"{count} devices"
        yield (
            f"attribute {attribute} is left out of {devices} as published: too long, {limit} bytes are the API's limit"
        )


def _by_value(items: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for key, value in items:
        result.setdefault(value, []).append(key)
    return result
