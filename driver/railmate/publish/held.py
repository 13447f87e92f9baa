"""Devices that pods hold and that the machine as it is now would not be offered with. Pure.

The scheduler counts what an allocated device consumes only while the device is published. Were it to vanish (other
settings, another matching), its GPU and VF would be free under other names; were it then to come back, their counters
would be below zero, and for one such counter the scheduler refuses every device of the pool that consumes any
(checkAvailableCounters in k8s.io/dynamic-resource-allocation). So it stays published until it is given back.

A shared port that pods have shares of is counted in the same way, and stays one that several claims have: a claim that
was given a share before must never be taken for one that has the whole port.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from railmate.publish.model import OfferedDevice
from railmate_api import attributes as names

#: The section of the pool that they are published in.
SECTION = "held"


def still_held(held: Iterable[OfferedDevice], offered: Collection[str]) -> list[OfferedDevice]:
    """Those of ``held`` whose name is not offered, as devices that no class picks.

    Of ``held`` count name, GPUs, NICs, partition, and of a shared port how many shares pods have.
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
            sub_interfaces=one.sub_interfaces,
        )
        for one in sorted(held, key=lambda one: one.name)
        if one.name not in offered
    ]


def shared_in_use(held: Iterable[OfferedDevice]) -> frozenset[str]:
    """Addresses of ports that pods have shares of. Such a port must not leave the node, whatever the settings say."""
    return frozenset(nic for one in held if one.sub_interfaces for nic in one.nics)
