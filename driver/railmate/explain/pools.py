"""Which pools of devices a node can use, in the order in which the scheduler walks them.

Rule: structured/internal/incubating/pools_incubating.go. Pools by driver and name, those with binding conditions last;
slices by name; devices by position. A pool is usable when all slices of its newest generation are there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from railmate.explain.model import CounterId, Device, Node, Slice
from railmate.explain.places import is_at
from railmate.explain.quantity import Number

PoolId = tuple[str, str]


@dataclass(frozen=True, eq=False)
class Pool:
    """``problem``: why nothing can be had of it. ``elsewhere``: its devices that this node cannot use."""

    driver: str
    name: str
    devices: tuple[Device, ...] = ()
    elsewhere: tuple[Device, ...] = ()
    counters: Mapping[CounterId, Number] = field(default_factory=dict)
    problem: str = ""
    invalid: bool = False


def node_names(slices: Iterable[Slice]) -> list[str]:
    """Nodes that slices name, sorted."""
    names = {one.place.node for one in slices if one.place is not None}
    names |= {device.place.node for one in slices for device in one.devices if device.place is not None}
    return sorted(names - {""})


def gather_pools(slices: Sequence[Slice], node: Node) -> list[Pool]:
    everything: dict[PoolId, list[Slice]] = defaultdict(list)
    for one in slices:
        if not one.unsupported:
            everything[one.driver, one.pool].append(one)
    hidden = {(one.driver, one.pool) for one in slices if one.unsupported}
    pools = []
    for (driver, name), members in everything.items():
        near = [one for one in members if _is_near(one, node)]
        if not near:
            continue
        generation = max(one.generation for one in near)
        near = [one for one in near if one.generation == generation]
        wanted = near[0].slice_count
        if len(near) != wanted:
            if any(one.generation > generation for one in members):
                continue  # obsolete: the newer generation has nothing for this node
            members = [one for one in members if one.generation == generation]
            if len(members) != wanted:
                why = f"{len(members)} of {wanted} slices of generation {generation} are there"
                if (driver, name) in hidden:
                    why += "; others use compatibility groups"
                pools.append(Pool(driver, name, problem=f"incomplete: {why}"))
                continue
        else:
            members = near
        pools.append(_build(driver, name, near, members))
    pools.sort(key=lambda pool: (any(d.binds_later for d in pool.devices), pool.driver, pool.name))
    return pools


def _is_near(one: Slice, node: Node) -> bool:
    if one.place is not None:
        return is_at(one.place, node)
    return any(device.place is not None and is_at(device.place, node) for device in one.devices)


def _build(driver: str, name: str, near: Sequence[Slice], members: Sequence[Slice]) -> Pool:
    near_names = {one.name for one in near}
    far = [one for one in members if one.name not in near_names]
    devices = tuple(device for one in sorted(near, key=lambda one: one.name) for device in one.devices)
    elsewhere = tuple(device for one in far if not one.counters for device in one.devices)
    counters: dict[CounterId, Number] = {}
    sets: set[str] = set()
    problem = ""
    names: set[str] = set()
    for device in devices:
        if device.name in names:
            problem = problem or f"duplicate device name {device.name}"
        names.add(device.name)
    for one in (*near, *far):
        for counter_set, content in one.counters.items():
            if counter_set in sets:
                problem = problem or f"duplicate counter set name {counter_set}"
            sets.add(counter_set)
            counters |= {(counter_set, counter): value for counter, value in content.items()}
    for device in (*devices, *elsewhere):
        for counter_id, _ in device.consumes:
            if counter_id not in counters:
                problem = (
                    problem
                    or f"device {device.name} consumes a counter that is not there: {'/'.join(counter_id)}"
                )
    if problem:
        return Pool(driver, name, problem=f"invalid: {problem}", invalid=True)
    return Pool(driver, name, devices, elsewhere, counters)
