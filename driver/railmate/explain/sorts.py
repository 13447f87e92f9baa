"""Nodes of one sort: whatever a wish asks has the same answer on them, since they differ in names alone.

A large cluster has a thousand nodes of a few sorts. Two nodes are of one when their slices say the same, as far as the
wish can see, and the same devices of them are taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from railmate.explain.model import Claim, Device, DeviceId, Node, Slice, Taken
from railmate.explain.places import is_at
from railmate.explain.pools import PoolId


@dataclass(frozen=True, eq=False)
class Site:
    """A node with what the scheduler sees of it.

    ``claims``: those that hold something there; the n-th of two sites with the same ``holders`` hold the same.
    ``sort``: equal where every answer is. ``holders``: which devices are held together.
    """

    node: Node
    slices: Sequence[Slice]
    claims: tuple[Claim, ...]
    pools: tuple[PoolId, ...]
    sort: Hashable
    holders: Hashable
    busy: int  # devices that are taken

    def devices_like(self, devices: Sequence[Device], site: Site) -> list[Device]:
        """The devices of this node that are to it what ``devices`` are to a site of the same sort."""
        pools = dict(zip(site.pools, self.pools, strict=True))
        own = {device.id: device for one in self.slices for device in one.devices}
        return [own[*pools.get(one.id[:2], one.id[:2]), one.name] for one in devices]

    def claims_like(self, site: Site) -> Mapping[str, Claim]:
        """By the title of each claim of a site with the same holders: the claim that holds the same here."""
        return {theirs.title: ours for theirs, ours in zip(site.claims, self.claims, strict=True)}


class Sites:
    """``reads``: names of the attributes that the wish can see, without their domain; None: all of them."""

    def __init__(
        self, slices: Iterable[Slice], claims: Iterable[Claim], reads: frozenset[str] | None
    ) -> None:
        self._reads = reads
        self._numbers: dict[Hashable, int] = {}
        self._of_device: dict[Device, int] = {}
        self._own: dict[str, list[Slice]] = defaultdict(list)
        self._anywhere: list[Slice] = []
        slices = sorted(slices, key=lambda one: one.name)
        homes: dict[PoolId, set[str]] = defaultdict(set)
        for one in slices:
            homes[one.driver, one.pool].add(one.place.node if one.place is not None else "")
        for one in slices:
            at = homes[one.driver, one.pool]
            if len(at) == 1 and "" not in at:
                self._own[next(iter(at))].append(one)
            else:
                self._anywhere.append(one)
        self._claims: dict[PoolId, dict[int, Claim]] = defaultdict(dict)
        for number, claim in enumerate(claims):
            for held in claim.allocation or ():
                self._claims[held.device[:2]][number] = claim
        self._common = sorted({(one.driver, one.pool) for one in self._anywhere})

    def site(self, node: Node) -> Site:
        own = self._own.get(node.name, [])
        pools = tuple(sorted({(one.driver, one.pool) for one in own}))
        # a pool of all nodes comes before or after the node's own by its name
        known: dict[PoolId, Hashable] = {
            pool: rank for rank, pool in enumerate(sorted({*pools, *self._common}))
        }
        near: dict[int, Claim] = {}
        for pool in (*pools, *self._common):
            near |= self._claims.get(pool, {})
        patterns = [(_pattern(claim, known), number) for number, claim in near.items()]
        patterns.sort(key=lambda one: (repr(one[0]), one[1]))
        claims = tuple(near[number] for _, number in patterns)
        taken = Taken.by(claims)
        newest: dict[PoolId, int] = {}
        for one in own:
            pool = (one.driver, one.pool)
            newest[pool] = max(newest.get(pool, 0), one.generation)
        sort = self._number(
            (
                tuple(self._slice(one, known, newest) for one in own),
                tuple(_reach(one, node) for one in self._anywhere),
                tuple(known[pool] for pool in pools),
                frozenset(_named(one, known) for one in taken.devices),
                frozenset(_named(one, known) for one in taken.shared),
                frozenset(
                    (_named(one, known), frozenset(amounts.items()))
                    for one, amounts in taken.consumed.items()
                ),
            )
        )
        holders = (sort, tuple(pattern for pattern, _ in patterns))
        busy = len(taken.devices) + len(taken.shared)
        return Site(node, [*own, *self._anywhere], claims, pools, sort, holders, busy)

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _slice(self, one: Slice, known: Mapping[PoolId, Hashable], newest: Mapping[PoolId, int]) -> Hashable:
        pool = (one.driver, one.pool)
        return (
            one.driver,
            known[pool],
            newest[pool] - one.generation,
            one.slice_count,
            one.unsupported,
            tuple(map(self._device, one.devices)),
            tuple((name, tuple(counters.items())) for name, counters in one.counters.items()),
        )

    def _device(self, device: Device) -> int:
        device = device.original
        number = self._of_device.get(device)
        if number is None:
            seen = frozenset(
                (name, value)
                for name, value in device.attributes.items()
                if self._reads is None or name.rpartition("/")[2] in self._reads
            )
            content = (device.driver, device.name, seen, frozenset(device.capacity.items()), device.consumes)
            marks = (device.taints, device.shareable, device.binds_later)
            number = self._of_device[device] = self._number((content, marks))
        return number


def _named(device: DeviceId, known: Mapping[PoolId, Hashable]) -> Hashable:
    return (known.get(device[:2], device[:2]), device[2])


def _pattern(claim: Claim, known: Mapping[PoolId, Hashable]) -> Hashable:
    """What a claim holds, but for the names of pools."""
    return tuple(
        (_named(one.device, known), one.admin_access, one.share is None, tuple(sorted(one.consumed.items())))
        for one in claim.allocation or ()
    )


def _reach(one: Slice, node: Node) -> tuple[bool, ...]:
    """Of a slice that is not one node's: whether the node can use it, or which of its devices."""
    return (
        tuple(_at(one, device, node) for device in one.devices)
        if one.place is None
        else (is_at(one.place, node),)
    )


def _at(one: Slice, device: Device, node: Node) -> bool:
    return device.place is not None and is_at(device.place, node)


def by_sort(sites: Iterable[Site]) -> Iterator[list[Site]]:
    """Sites of one sort together, those of which least is taken first: a fit is found soonest there."""
    found: dict[Hashable, list[Site]] = {}
    for one in sites:
        found.setdefault(one.sort, []).append(one)
    yield from sorted(found.values(), key=lambda group: group[0].busy)
