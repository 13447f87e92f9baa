"""What is offered to a server that knows no counters: each piece of hardware under one name. Pure.

A GPU that is published alone and in its pair would be given out twice there: the server drops the counters and says
nothing (feature gate DRAPartitionableDevices, off in Kubernetes 1.34 and 1.35).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from enum import StrEnum

from railmate.publish.model import Offer, overlap
from railmate_api import attributes as names


class Preference(StrEnum):
    """Which of several names hardware keeps."""

    PAIRS = "pairs"  # pairs, then groups, then what is in neither
    PARTS = "parts"  # GPUs and NICs alone, to be joined by matchAttribute


_ORDER = {
    Preference.PAIRS: (
        names.KIND_HELD,
        names.KIND_PAIR,
        names.KIND_GROUP,
        names.KIND_GPU,
        names.KIND_GPU_PARTITION,
        names.KIND_RDMA_VF,
        names.KIND_RDMA_SHARED,
        names.KIND_NODE,
    ),
    Preference.PARTS: (
        names.KIND_HELD,
        names.KIND_GPU,
        names.KIND_GPU_PARTITION,
        names.KIND_RDMA_VF,
        names.KIND_RDMA_SHARED,
        names.KIND_PAIR,
        names.KIND_GROUP,
        names.KIND_NODE,
    ),
}
_WORDS = {
    names.KIND_PAIR: ("pair", "pairs"),
    names.KIND_GROUP: ("group", "groups"),
    names.KIND_HELD: ("held device", "held devices"),
    names.KIND_NODE: ("whole node", "whole nodes"),
    names.KIND_GPU: ("GPU alone", "GPUs alone"),
    names.KIND_GPU_PARTITION: ("part of a GPU", "parts of GPUs"),
    names.KIND_RDMA_VF: ("NIC alone", "NICs alone"),
    names.KIND_RDMA_SHARED: ("shared NIC", "shared NICs"),
}


def without_counters(offer: Offer, preference: Preference) -> Offer:
    """Devices of which no two share hardware, in their order, and no counters."""
    order = _ORDER[preference]
    taken: set[str] = set()
    kept: set[str] = set()
    for device in sorted(offer.devices, key=lambda one: order.index(one.kind)):
        if not overlap(device.parts, taken):
            taken |= device.parts
            kept.add(device.name)
    return Offer(
        tuple(replace(device, consumes=()) for device in offer.devices if device.name in kept),
        sections=offer.sections,
        notes=offer.notes,
    )


def lost(offer: Offer, reduced: Offer) -> str:
    """In words, what of ``offer`` is not in ``reduced``: ``8 GPUs alone, 2 groups``."""
    counts = Counter(device.kind for device in offer.devices)
    counts.subtract(device.kind for device in reduced.devices)
    return ", ".join(f"{count} {_WORDS[kind][count > 1]}" for kind, count in counts.items() if count)
