"""Fragmentation: what of each node's GPUs and NICs can still go out together, and how large an ask fits now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from railmate.explain.model import BLOCKING_EFFECTS, CounterId, Device, Node, Slice, Taken
from railmate.explain.pools import Pool, gather_pools
from railmate.explain.quantity import Number
from railmate.explain.verdict import World
from railmate_api import attributes as names

_JOINED = (names.KIND_PAIR, names.KIND_GROUP, names.KIND_NODE)


@dataclass(frozen=True, slots=True)
class NodeState:
    """Of one node, the devices of railmate's pools.

    ``stranded_gpus``: free GPUs of which no pair or group is free, so that they can only go out without a NIC.
    ``idle_nics``: NICs (one for each pair) that are free while the pair's GPU is not.
    ``largest_switch``: the most pairs of one PCIe switch that a claim gets now; ``largest_node``: of the node. Of a
    node without pairs, whose GPUs come in groups, the same of groups.
    """

    node: str
    pairs: int
    free_pairs: int
    groups: int
    free_groups: int
    gpus: int
    free_gpus: int
    stranded_gpus: int
    idle_nics: int
    largest_switch: int
    largest_node: int
    unhealthy: int  # devices with a taint that keeps new claims away
    note: str = ""


def cluster_state(world: World, driver: str = names.DRIVER_NAME) -> list[NodeState]:
    """Nodes that have a pool of the driver, in their order."""
    taken = Taken.by(world.claims)
    states = []
    by_node: dict[str, list[Slice]] = {}
    for one in world.slices:
        if one.driver == driver:
            by_node.setdefault(one.place.node if one.place is not None else "", []).append(one)
    for node in world.nodes:
        pools = gather_pools([*by_node.get("", ()), *by_node.get(node.name, ())], node)
        if pools:
            states.append(_state(node, pools, taken))
    return states


def _state(node: Node, pools: Iterable[Pool], taken: Taken) -> NodeState:
    total: Counter[str] = Counter()
    free: Counter[str] = Counter()
    by_switch: Counter[tuple[str, object]] = Counter()
    stranded = idle = unhealthy = 0
    notes = ["cordoned"] if node.unschedulable else []
    for pool in pools:
        if pool.problem:
            notes.append(f"pool {pool.name} is {pool.problem}")
        view = _PoolView(pool, taken)
        for device in pool.devices:
            kind = _kind(device)
            total[kind] += 1
            unhealthy += _tainted(device)
            if view.is_free(device):
                free[kind] += 1
                if kind in (names.KIND_PAIR, names.KIND_GROUP):
                    by_switch[kind, device.attribute(names.PCIE_SWITCH)] += 1
                stranded += kind == names.KIND_GPU and not view.has_free_company(device)
            elif kind == names.KIND_PAIR:
                idle += view.has_idle_nic(device)
    asked = names.KIND_PAIR if total[names.KIND_PAIR] else names.KIND_GROUP
    on_switch = (count for (kind, switch), count in by_switch.items() if kind == asked and switch is not None)
    pairs, groups, gpus = names.KIND_PAIR, names.KIND_GROUP, names.KIND_GPU
    return NodeState(
        node=node.name,
        pairs=total[pairs],
        free_pairs=free[pairs],
        groups=total[groups],
        free_groups=free[groups],
        gpus=total[gpus],
        free_gpus=free[gpus],
        stranded_gpus=stranded,
        idle_nics=idle,
        largest_switch=max(on_switch, default=0),
        largest_node=free[asked],
        unhealthy=unhealthy,
        note="; ".join(notes),
    )


class _PoolView:
    """A pool with what is taken of it."""

    def __init__(self, pool: Pool, taken: Taken) -> None:
        self._pool, self._taken = pool, taken
        self._left: dict[CounterId, Number] = dict(pool.counters)
        self._with_nics: set[CounterId] = set()  # of GPUs that went out with their NICs
        for device in (*pool.devices, *pool.elsewhere):
            if device.id in taken.devices or device.id in taken.shared:
                for counter, amount in device.consumes:
                    self._left[counter] -= amount
                if _kind(device) in _JOINED:
                    self._with_nics.update(counter for counter, _ in device.consumes)
        self._overdrawn = any(value < 0 for value in self._left.values())
        self._gpu_counters = {c for d in pool.devices if _kind(d) == names.KIND_GPU for c, _ in d.consumes}

    def is_free(self, device: Device) -> bool:
        if device.id in self._taken.devices or _tainted(device):
            return False
        return not device.consumes or (not self._overdrawn and self._has(device, None))

    def has_free_company(self, gpu: Device) -> bool:
        """Whether a pair or group with this GPU is free."""
        own = {counter for counter, _ in gpu.consumes}
        return bool(own) and any(
            _kind(device) in _JOINED and own <= {c for c, _ in device.consumes} and self.is_free(device)
            for device in self._pool.devices
        )

    def has_idle_nic(self, pair: Device) -> bool:
        """Of a pair that is not free: whether that is for its GPU alone."""
        if pair.id in self._taken.devices or _tainted(pair):
            return False
        if any(counter in self._with_nics for counter, _ in pair.consumes):
            return False
        return self._has(pair, False) and not self._has(pair, True)

    def _has(self, device: Device, of_gpu: bool | None) -> bool:
        return all(
            self._left[counter] >= amount
            for counter, amount in device.consumes
            if of_gpu is None or (counter in self._gpu_counters) == of_gpu
        )


def _kind(device: Device) -> str:
    value = device.attribute(names.KIND)
    return str(value[1]) if value is not None else ""


def _tainted(device: Device) -> bool:
    return any(taint.effect in BLOCKING_EFFECTS for taint in device.taints)
