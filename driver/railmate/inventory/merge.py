"""What is known of hardware that a pod holds survives the look at the machine while it is away.

A netdev (and in exclusive mode an RDMA device) that is in a pod's namespace is absent from the host's sysfs.
What is published of it must not change for that. Pure.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from railmate.inventory.address import order
from railmate.inventory.model import Inventory


def keep_held(old: Inventory, new: Inventory, held: Set[str]) -> tuple[Inventory, frozenset[str]]:
    """``new``, with ``old``'s knowledge of the functions in ``held`` (addresses); and those of them that are gone.

    A function that is gone from the machine while a pod uses it stays in the result: it must not vanish silently.
    """
    known = {address for address in held if address in old.functions}
    gone = frozenset(known - new.functions.keys())
    functions = {**new.functions, **{address: old.functions[address] for address in known}}
    gpus = {gpu.address: gpu for gpu in new.gpus} | {g.address: g for g in old.gpus if g.address in known}
    nics = {nic.address: nic for nic in new.nics} | {n.address: n for n in old.nics if n.address in known}
    merged = replace(
        new,
        functions={address: functions[address] for address in sorted(functions, key=order)},
        gpus=tuple(gpus[address] for address in sorted(gpus, key=order)),
        nics=tuple(nics[address] for address in sorted(nics, key=order)),
    )
    return merged, gone
