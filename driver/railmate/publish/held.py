"""Devices that pods hold and that the machine as it is now would not be offered with. Pure.

The scheduler counts what an allocated device consumes only while the device is published. Were it to vanish (other
settings, another matching), its GPU and VF would be free under other names; were it then to come back, their counters
would be below zero, and for one such counter the scheduler refuses every device of the pool that consumes any
(checkAvailableCounters in k8s.io/dynamic-resource-allocation). So it stays published until it is given back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from railmate.publish.model import OfferedDevice
from railmate_api import attributes as names

#: The section of the pool that they are published in.
SECTION = "held"


def still_held(held: Iterable[OfferedDevice], offered: Collection[str]) -> list[OfferedDevice]:
    """Those of ``held`` whose name is not offered, as devices that no class picks.

    Of ``held`` count name, GPUs, NICs and partition.
    """
    return [
        OfferedDevice(
            one.name,
            names.KIND_HELD,
            {names.KIND: names.KIND_HELD},
            gpus=one.gpus,
            nics=one.nics,
            partition=one.partition,
            section=SECTION,
        )
        for one in sorted(held, key=lambda one: one.name)
        if one.name not in offered
    ]
