"""All pods of a workload, placed one after the other: how many fit now, where, and what keeps the next one out.

Pods of one template ask for the same, and what a node gives to them depends on that node alone. So the order in which
the scheduler takes nodes changes where they go, not how many fit. It may change that where templates differ, or where
nodes share a device or pods a claim; then a gang that was not placed whole is no certain no.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from railmate.explain.capacity import consumption
from railmate.explain.cel import Selectors
from railmate.explain.changes import Change
from railmate.explain.model import Allocated, Claim, Request
from railmate.explain.problem import AllocationError
from railmate.explain.search import Deadline, Search, TooLargeError
from railmate.explain.sorts import Site
from railmate.explain.verdict import (
    FITS,
    NOT_LOOKED_AT,
    TOO_LARGE,
    Judging,
    NodeVerdict,
    Placed,
    Verdict,
    Wish,
    World,
    judge,
    placed_by,
    placed_like,
)

#: Pods that one claim may be reserved for (k8s.io/api resource/v1, ResourceClaimReservedForMaxSize).
MAX_PODS_OF_A_CLAIM = 256
#: Shares of the time: for one pod of each template, and of what is left then for placing them all.
_FOR_ONE, _FOR_SEATS = 0.4, 0.6
#: Outcomes that are neither yes nor no.
_UNKNOWN = (NOT_LOOKED_AT, TOO_LARGE)


@dataclass(frozen=True)
class Batch:
    """So many pods of one template, of which each has the same wish."""

    title: str
    count: int
    wish: Wish

    @property
    def crowded(self) -> bool:
        """Whether these are more pods than may share a claim, in whatever order."""
        return bool(self.wish.shared) and self.count > MAX_PODS_OF_A_CLAIM

    @property
    def most(self) -> int:
        """How many of the pods may have a seat at all."""
        return MAX_PODS_OF_A_CLAIM if self.crowded else self.count


@dataclass(frozen=True)
class Seat:
    """A pod's place. ``claims``: its own, as they are then."""

    node: str
    devices: tuple[Placed, ...]
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class BatchVerdict:
    """``one``: of one pod, as things are. ``following``: of the first without a seat when the others have theirs.
    ``by_order``: another order of pods or nodes may find seats for more."""

    batch: Batch
    one: Verdict
    seats: tuple[Seat, ...]
    following: Verdict | None = None
    by_order: bool = False

    @property
    def fits(self) -> bool | None:
        """Whether all pods do; None where it is not certain."""
        if self.one.stopped or self.batch.crowded:
            return False
        if len(self.seats) == self.batch.count:
            return True
        without = self.following or self.one
        if without.stopped or self.one.fits is False:
            return False
        return None if self.by_order or without.fits is not False else False


def judge_gang(
    world: World,
    batches: Sequence[Batch],
    seconds: float = 2.0,
    selectors: Selectors | None = None,
    now: Callable[[], float] = time.monotonic,
) -> list[BatchVerdict]:
    """The pods that ask for most are placed first, and where most is taken already, so that whole nodes stay free.
    Raises UsageError as ``judge`` does."""
    deadline = Deadline.after(seconds, now)
    selectors = selectors or Selectors()
    judged = []
    for number, batch in enumerate(batches):
        judging = Judging(world, batch.wish, selectors)
        judged.append((judging, judging.outcomes(deadline.share(_FOR_ONE / (len(batches) - number)))))
    told: dict[int, BatchVerdict] = {}
    seated: list[Seat] = []
    order = sorted(range(len(batches)), key=lambda number: -_size(judged[number][1]))
    for place, number in enumerate(order):
        batch, (judging, found) = batches[number], judged[number]
        others = frozenset[str]().union(*(one.wish.shared for one in batches if one is not batch))
        till = deadline.share(1 / (len(batches) - place))
        seating = _Seating(world, selectors, till.share(_FOR_SEATS), len(seated))
        if not seated:
            seats = seating.seats(judging, found, batch.wish, batch.most)
        else:
            seats = seating.seats_beside(seated, batch.wish, batch.most)
        by_order, following = seating.by_order, None
        if seated and len(seats) < batch.most:
            alone = _Seating(world, selectors, till.share(_FOR_SEATS), 0)
            whole = len(alone.seats(judging, found, batch.wish, batch.most)) == batch.most
            by_order = whole or alone.by_order or alone.cut_short
        # a pod of another template may get other devices for a claim than the first of these
        by_order = by_order or any(claim.title in others for claim in batch.wish.open_claims)
        seated += seats
        one = judging.verdict(judging.explained(found, till.share(0.5)))
        if seated and len(seats) < batch.most:
            wish = replace(_met(batch.wish, seated), title="the next of them")
            following = judge(_beside(world, seated), wish, max(0.0, till.at - now()), selectors, now)
            following = _without_advice_to_end(following, seated)
        told[number] = BatchVerdict(batch, one, tuple(seats), following, by_order)
    return [told[number] for number in range(len(batches))]


class _Seating:
    """Finds seats for pods of one template. ``by_order``: with another order there might be more of them.
    ``cut_short``: with more time there might."""

    def __init__(self, world: World, selectors: Selectors, deadline: Deadline, seated: int) -> None:
        self._world, self._selectors, self._deadline = world, selectors, deadline
        self._seated = seated  # pods of the gang
        self._wide: list[Claim] = []  # of the gang, with devices that other nodes could have as well
        self.by_order = self.cut_short = False

    def seats(self, judging: Judging, found: Mapping[str, NodeVerdict], wish: Wish, count: int) -> list[Seat]:
        if not any(claim.title in wish.shared for claim in wish.open_claims):
            return list(self._own(judging, found, wish, count))
        first = list(self._own(judging, found, wish, min(count, 1)))
        if not first:
            return first
        # the first pod's node is everybody's
        self.by_order |= sum(one.outcome in (FITS, *_UNKNOWN) for one in found.values()) > 1
        return first + self.seats_beside(first, wish, count - 1)

    def seats_beside(self, seated: Sequence[Seat], wish: Wish, count: int) -> list[Seat]:
        wish = _met(wish, seated)
        judging = Judging(_beside(self._world, seated), wish, self._selectors)
        return self.seats(judging, judging.outcomes(self._deadline), wish, count)

    def _own(
        self, judging: Judging, found: Mapping[str, NodeVerdict], wish: Wish, count: int
    ) -> Iterator[Seat]:
        self.cut_short |= any(one.outcome in _UNKNOWN for one in found.values())
        groups: dict[Hashable, list[Site]] = {}
        for site in judging.sites:
            if found[site.node.name].outcome == FITS:
                groups.setdefault(site.sort, []).append(site)
        left = count
        for group in sorted(groups.values(), key=lambda group: -group[0].busy):
            like, pods = group[0], list[tuple[Placed, ...]]()
            for number, site in enumerate(group):
                if left == 0:
                    return
                if number == 0 or self._wide:
                    like = site
                    first = () if self._wide else (found[site.node.name].devices,)
                    pods = self._fill(judging, site, wish, left, first)
                for devices in pods[:left]:
                    left -= 1
                    yield self._seat(site, wish, placed_like(devices, like, site))

    def _fill(
        self, judging: Judging, site: Site, wish: Wish, most: int, first: Sequence[tuple[Placed, ...]]
    ) -> list[tuple[Placed, ...]]:
        """The devices of each pod that the site takes, one after the other. ``first``: those that are known."""
        pods = list(first)
        if len(pods) < most and self._deadline.passed():  # preparing a search takes time as well
            self.cut_short = True
            return pods
        trial = judging.trial(site)
        others = [*site.claims, *self._wide]
        others += [claim for devices in pods for claim in _held(wish, devices)]
        try:
            while len(pods) < most:
                problem = trial.problem(wish.open_claims, others)
                grants = Search(problem, self._deadline).solve()
                if grants is None:
                    break
                pods.append(placed_by(problem, grants))
                others += _held(wish, pods[-1])
        except (AllocationError, TooLargeError):
            self.cut_short = True  # so many for certain; of the next one it is told what is known
        return pods

    def _seat(self, site: Site, wish: Wish, devices: tuple[Placed, ...]) -> Seat:
        self._seated += 1
        here = {"key": "metadata.name", "operator": "In", "values": [site.node.name]}
        selector = {"nodeSelectorTerms": [{"matchFields": [here]}]}
        claims = []
        for claim in _held(wish, devices):
            if claim.title not in wish.shared:
                claim = replace(claim, name=f"{claim.name} of pod {self._seated} of the gang")
            pools = {one.device[:2] for one in claim.allocation or ()}
            if not pools.isdisjoint(site.pools):
                claim = replace(claim, node_selector=selector)
            claims.append(claim)
            if not pools <= set(site.pools):
                self._wide.append(claim)
                self.by_order = True
        return Seat(site.node.name, devices, tuple(claims))


def _held(wish: Wish, devices: Sequence[Placed]) -> list[Claim]:
    """A pod's claims when they have these devices."""
    held = []
    for claim in wish.open_claims:
        requests = {one.name: one for slot in claim.slots for one in slot.alternatives}
        results = (_allocated(one, requests[one.request]) for one in devices if one.claim == claim.title)
        held.append(replace(claim, allocation=tuple(results)))
    return held


def _allocated(placed: Placed, request: Request) -> Allocated:
    device = placed.device
    if not device.shareable or request.admin_access:
        return Allocated(placed.request, device.id, request.admin_access)
    return Allocated(placed.request, device.id, False, "gang", consumption(device, request.capacity))


def _size(found: Mapping[str, NodeVerdict]) -> int:
    """How much one pod takes where it fits: of a whole node as one device, what it consists of."""
    fitting = next((one for one in found.values() if one.outcome == FITS), None)
    return sum(max(1, len(one.device.consumes)) for one in fitting.devices) if fitting else 0


def _beside(world: World, seated: Sequence[Seat]) -> World:
    return replace(world, claims=(*world.claims, *(claim for seat in seated for claim in seat.claims)))


def _met(wish: Wish, seated: Sequence[Seat]) -> Wish:
    """The same when the shared claims are allocated to pods before."""
    allocated = {claim.title: claim for seat in seated for claim in seat.claims if claim.title in wish.shared}
    return replace(wish, claims=tuple(allocated.get(claim.title, claim) for claim in wish.claims))


def _without_advice_to_end(verdict: Verdict, seated: Sequence[Seat]) -> Verdict:
    """Nobody ends a pod of the gang for another one of it."""
    own = {claim.title for seat in seated for claim in seat.claims}
    nodes = {seat.node for seat in seated}

    def helps(change: Change, node: str) -> bool:
        return (
            change.value not in own
            if change.kind == "release"
            else change.kind != "empty" or node not in nodes
        )

    return replace(
        verdict,
        nodes=tuple(
            replace(one, changes=tuple(change for change in one.changes if helps(change, one.node)))
            for one in verdict.nodes
        ),
    )
