"""Sentences for people: which hardware of a machine is not offered, or not as a pair, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized

NO_DRIVERS = "no PCI function here has a driver, so drivers are unknown and every device is taken as usable"


def left_out(what: str, reasons: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each reason. ``reasons``: address to why it is not offered."""
    for reason, addresses in _by_value(reasons.items()).items():
        yield f"{_named(what, addresses)} {_are(addresses)} not offered: {reason}"


def vfs_left_out(parent: str, reasons: Mapping[str, str]) -> Iterator[str]:
    """The same for the VFs of one physical function, counted: there may be many."""
    for reason, addresses in _by_value(reasons.items()).items():
        vfs = f"{len(addresses)} {_form(addresses, 'VF', 'VFs')}"
        yield f"{vfs} of rail NIC {parent} {_are(addresses)} not offered: {reason}"


def not_shared(reasons: Mapping[str, str]) -> Iterator[str]:
    """Physical functions that an administrator wants shared. ``reasons``: address to why they are not."""
    for reason, addresses in _by_value(reasons.items()).items():
        yield f"{_named('NIC', addresses)} {_are(addresses)} not shared: {reason}"


def shared_only(addresses: Sequence[str]) -> Iterator[str]:
    """Shared physical functions that without sharing would be offered whole."""
    if addresses:
        yield (
            f"{_named('NIC', addresses)} {_form(addresses, 'has', 'have')} no VFs and {_are(addresses)} shared, so "
            f"{_form(addresses, 'it is', 'they are')} not offered whole, alone or in pairs"
        )


def still_shared(addresses: Sequence[str]) -> Iterator[str]:
    """Ports that are not shared any more, and that pods still have shares of."""
    if addresses:
        yield (
            f"{_named('NIC', addresses)} {_are(addresses)} no longer shared, but pods still have shares of "
            f"{_form(addresses, 'it', 'them')}: until those pods end {_form(addresses, 'it is', 'they are')} offered "
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
        yield (
            f"{_named('GPU', gpus)} {_are(gpus)} offered without a pair device: "
            f"a NIC of {_form(gpus, 'its', 'each')} pair is not offered or has no VF left"
        )


def few_vfs(gpus: Sequence[str], nics: Sequence[str]) -> str:
    """GPUs that share a NIC with VFs, but not one for each."""
    return (
        f"GPUs {', '.join(gpus)} share {_named('NIC', nics)} and are offered as a group only: with {len(gpus)} usable "
        f"VFs or more on {_form(nics, 'it', 'each')}, each GPU would have a pair device too"
    )


def too_long(devices_without: Mapping[str, int], limit: int) -> Iterator[str]:
    """``devices_without``: attribute to the number of devices that had to leave it out."""
    for attribute, count in devices_without.items():
        devices = "1 device" if count == 1 else f"{count} devices"
        yield (
            f"attribute {attribute} is left out of {devices} as published: too long, {limit} bytes are the API's limit"
        )


def _form(things: Sized, one: str, more: str) -> str:
    """``one`` where it is one thing, ``more`` where there are several."""
    return one if len(things) == 1 else more


def _named(noun: str, names: Sequence[str]) -> str:
    return f"{_form(names, noun, noun + 's')} {', '.join(names)}"


def _are(things: Sized) -> str:
    return _form(things, "is", "are")


def _by_value(items: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for key, value in items:
        result.setdefault(value, []).append(key)
    return result
