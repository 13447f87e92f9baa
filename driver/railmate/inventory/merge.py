"""What is known of hardware that a pod holds survives the look at the machine while it is away.

A netdev (and in exclusive mode an RDMA device) that is in a pod's namespace is absent from the host's sysfs.
What is published of it must not change for that. Pure.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from railmate.inventory.address import order
from railmate.inventory.model import Gpu, GpuVendor, Inventory, PciFunction

_GPU_FACTS = ("uuid", "product", "architecture", "driver_version", "memory_bytes")


def keep_facts(old: Inventory, new: Inventory) -> Inventory:
    """``new``, with what cannot change and was not answered this time.

    A port whose link is down keeps the speed it last had: that it is down is the health's to tell. A GPU keeps what
    its vendor's library had said: the library can be slow or away for a moment.
    """
    functions = {}
    for address, function in new.functions.items():
        before = old.functions.get(address)
        functions[address] = _with_speed(before, function) if before else function
    known = {gpu.address: gpu for gpu in old.gpus}
    return replace(
        new,
        functions=functions,
        gpus=tuple(
            _with_facts(known.get(gpu.address), replace(gpu, function=functions[gpu.address]))
            for gpu in new.gpus
        ),
        nics=tuple(replace(nic, function=functions[nic.address]) for nic in new.nics),
    )


def _with_speed(old: PciFunction, new: PciFunction) -> PciFunction:
    speeds = {netdev.name: netdev.speed for netdev in old.netdevs}
    netdevs = tuple(
        replace(netdev, speed=speeds.get(netdev.name)) if netdev.speed is None else netdev
        for netdev in new.netdevs
    )
    return new if netdevs == new.netdevs else replace(new, netdevs=netdevs)


def _with_facts(old: Gpu | None, new: Gpu) -> Gpu:
    if old is None or (old.uuid and new.uuid and old.uuid != new.uuid):
        return new  # another GPU sits in this place now
    missing = [name for name in _GPU_FACTS if getattr(new, name) is None]
    if new.vendor is GpuVendor.NVIDIA and new.compute_capability is None:
        # NVML says that of every GPU it can be asked about, so it was silent: a GPU in parts is not whole for that
        missing += ["partition_mode", "partitions", "compute_capability"]
    return replace(new, **{name: getattr(old, name) for name in missing})


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
