"""Every node of a cluster judged for one pod's claims, within a time that people wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from railmate.explain.cel import Selectors
from railmate.explain.changes import SIBLINGS, Change, Trial
from railmate.explain.model import Claim, Device, DeviceClass, Node, Slice
from railmate.explain.places import selector_matches
from railmate.explain.pools import gather_pools
from railmate.explain.problem import AllocationError, Problem
from railmate.explain.reads import attributes_read
from railmate.explain.reasons import Reason, Reasoning
from railmate.explain.search import Deadline, Grant, Search, TooLargeError
from railmate.explain.sorts import Site, Sites, by_sort

FITS, NO, ERROR, TOO_LARGE, EXCLUDED, NOT_LOOKED_AT = (
    "fits", "no", "error", "too large to prove", "excluded", "not looked at",
)  # fmt: skip
#: The share of the time that one node may take, so that one hard node does not hide the others.
_SHARE = 0.5
#: The share of the time for yes or no, so that there is some left for one reason.
_FOR_OUTCOMES = 0.75


@dataclass(frozen=True)
class World:
    """What the scheduler knows. ``claims``: all of the cluster that are allocated."""

    slices: tuple[Slice, ...] = ()
    classes: Mapping[str, DeviceClass] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Wish:
    """A pod as far as devices and their node go. ``claims`` in the pod's order; those with an allocation are met.

    ``obstacle``: why a node is out for the pod itself (its selectors, taints), "" for none. ``shared``: titles of the
    claims that are not made for this pod, but are the same for all pods made of its template.
    """

    title: str
    claims: tuple[Claim, ...]
    obstacle: Callable[[Node], str] = lambda node: ""
    shared: frozenset[str] = frozenset()

    @property
    def open_claims(self) -> tuple[Claim, ...]:
        """Those that are not allocated yet."""
        return tuple(claim for claim in self.claims if claim.allocation is None)


@dataclass(frozen=True)
class Placed:
    """One device for a request."""

    claim: str
    request: str
    device: Device


@dataclass(frozen=True)
class NodeVerdict:
    node: str
    outcome: str
    devices: tuple[Placed, ...] = ()
    reason: Reason | None = None
    changes: tuple[Change, ...] = ()
    detail: str = ""  # of an error, an exclusion, a pool that cannot be used


@dataclass(frozen=True)
class Verdict:
    """``stopped``: the scheduler ends with this error and gives the pod up on all nodes, also on those that fit."""

    wish: Wish
    nodes: tuple[NodeVerdict, ...]

    @property
    def fits(self) -> bool | None:
        """None where it is not certain: no node fits of those that were looked at, and others were not."""
        if self.stopped:
            return False
        if any(one.outcome == FITS for one in self.nodes):
            return True
        return None if self.uncertain else False

    @property
    def uncertain(self) -> tuple[NodeVerdict, ...]:
        """Nodes of which neither yes nor no is known."""
        return tuple(one for one in self.nodes if one.outcome in (NOT_LOOKED_AT, TOO_LARGE))

    @property
    def stopped(self) -> str:
        return next((one.detail for one in self.nodes if one.outcome == ERROR), "")

    def nearest(self) -> tuple[NodeVerdict, Change] | None:
        """The change that asks least, and where."""
        offers = [(one, change) for one in self.nodes for change in one.changes]
        return min(offers, key=lambda offer: (offer[1].distance, offer[0].node), default=None)


def judge(
    world: World,
    wish: Wish,
    seconds: float = 2.0,
    selectors: Selectors | None = None,
    now: Callable[[], float] = time.monotonic,
    why: bool = True,
) -> Verdict:
    """First which nodes fit, then for the others why not, both as far as the time goes; a node that it does not
    reach says so. Without ``why`` only the first. Raises UsageError for a selector that cannot be evaluated here."""
    deadline = Deadline.after(seconds, now)
    judging = Judging(world, wish, selectors or Selectors())
    found = judging.outcomes(deadline.share(_FOR_OUTCOMES) if why else deadline)
    return judging.verdict(judging.explained(found, deadline) if why else found)


class Judging:
    """Nodes of one sort are judged once."""

    def __init__(self, world: World, wish: Wish, selectors: Selectors) -> None:
        self._world, self._wish, self._selectors = world, wish, selectors
        self._claims = wish.open_claims
        self._met = tuple(claim for claim in wish.claims if claim.allocation is not None)
        others = tuple(claim for claim in world.claims if claim.allocation is not None)
        self._sites = Sites(world.slices, others, _reads(self._claims, world.classes))
        self._judged: list[tuple[Site, Trial, Problem]] = []
        self._like: dict[Hashable, list[Site]] = {}
        self.sites: list[Site] = []  # nodes that the pod itself does not exclude, as far as the time went

    def outcomes(self, deadline: Deadline) -> dict[str, NodeVerdict]:
        found: dict[str, NodeVerdict] = {}
        for node in self._world.nodes:
            if deadline.passed():
                found[node.name] = NodeVerdict(node.name, NOT_LOOKED_AT)
            elif why := self._obstacle(node):
                found[node.name] = NodeVerdict(node.name, EXCLUDED, detail=why)
            else:
                self.sites.append(self._sites.site(node))
        for group in by_sort(self.sites):
            for number, site in enumerate(group):
                verdict = found[site.node.name] = self._node(site, deadline)
                if verdict.outcome in (FITS, NO, TOO_LARGE) and not verdict.detail:
                    for other in group[number + 1 :]:
                        found[other.node.name] = _moved(verdict, site, other)
                    self._like[site.sort] = group[number:]
                    break  # all of the group; what has words about a pool is found node by node
        return found

    def verdict(self, found: Mapping[str, NodeVerdict]) -> Verdict:
        return Verdict(self._wish, tuple(found[node.name] for node in self._world.nodes))

    def _node(self, site: Site, deadline: Deadline) -> NodeVerdict:
        node = site.node
        if deadline.passed():
            return NodeVerdict(node.name, NOT_LOOKED_AT)
        trial = self.trial(site)
        trouble = "; ".join(f"pool {pool.name} is {pool.problem}" for pool in trial.pools if pool.problem)
        try:
            problem = trial.problem(self._claims, site.claims)
            self._judged.append((site, trial, problem))
            grants = Search(problem, deadline.share(_SHARE)).solve()
        except AllocationError as error:
            return NodeVerdict(node.name, ERROR, detail=str(error))
        except TooLargeError:
            return NodeVerdict(node.name, TOO_LARGE, detail=trouble)
        if grants is None:
            return NodeVerdict(node.name, NO, detail=trouble)
        return NodeVerdict(node.name, FITS, placed_by(problem, grants), detail=trouble)

    def explained(self, found: Mapping[str, NodeVerdict], deadline: Deadline) -> dict[str, NodeVerdict]:
        told = dict(found)
        for site, trial, problem in self._judged:
            if found[site.node.name].outcome != NO:
                continue
            by_holders: dict[Hashable, list[Site]] = {}
            for one in self._like.get(site.sort, [site]):
                by_holders.setdefault(one.holders, []).append(one)
            for first, *rest in by_holders.values():
                if first is not site:
                    trial = self.trial(first)
                    problem = trial.problem(self._claims, first.claims)
                reasoned = self._reasoned(found[first.node.name], trial, problem, deadline)
                told[first.node.name] = reasoned
                for other in rest:
                    told[other.node.name] = _moved(reasoned, first, other)
        return told

    def trial(self, site: Site) -> Trial:
        pools = gather_pools(site.slices, site.node)
        return Trial(site.node, pools, self._world.classes, site.claims, self._selectors)

    def _reasoned(
        self, verdict: NodeVerdict, trial: Trial, problem: Problem, deadline: Deadline
    ) -> NodeVerdict:
        reasoning = Reasoning(
            problem, trial.node, trial.classes, trial.others, trial.selectors, deadline.share(_SHARE)
        )
        changes: list[Change] = []
        try:
            verdict = replace(verdict, reason=reasoning.reason())
            for change in trial.changes(self._claims, deadline.share(_SHARE)):
                changes.append(change)
        except TooLargeError:
            pass  # what is known by now is told
        return replace(verdict, changes=tuple(sorted(changes, key=lambda one: one.distance)))

    def _obstacle(self, node: Node) -> str:
        for claim in self._met:
            if claim.node_selector is not None and not selector_matches(claim.node_selector, node):
                return f"claim {claim.title} is allocated elsewhere"
        return self._wish.obstacle(node)


def placed_by(problem: Problem, grants: Sequence[Grant]) -> tuple[Placed, ...]:
    return tuple(
        Placed(problem.claims[one.claim].title, one.request, problem.devices[one.device]) for one in grants
    )


def _reads(claims: Sequence[Claim], classes: Mapping[str, DeviceClass]) -> frozenset[str] | None:
    """The attributes that decide, for the claims as they are and with any change that is tried."""
    requests = [request for claim in claims for slot in claim.slots for request in slot.alternatives]
    named = {one.class_name for one in requests} | {SIBLINGS.get(one.class_name, "") for one in requests}
    expressions = [text for one in requests for text in one.selectors]
    expressions += [text for name in named & classes.keys() for text in classes[name].selectors]
    read = attributes_read(expressions)
    matched = {rule.attribute.rpartition("/")[2] for claim in claims for rule in claim.constraints}
    return None if read is None else read | matched


def placed_like(placed: tuple[Placed, ...], site: Site, other: Site) -> tuple[Placed, ...]:
    """What is placed on a site, on another of its sort."""
    devices = other.devices_like([one.device for one in placed], site) if placed else []
    return tuple(replace(one, device=device) for one, device in zip(placed, devices, strict=True))


def _moved(verdict: NodeVerdict, site: Site, other: Site) -> NodeVerdict:
    """A site's verdict for another of its sort, by that one's devices and claims."""
    placed = placed_like(verdict.devices, site, other)
    if verdict.reason is None and not verdict.changes:
        return NodeVerdict(other.node.name, verdict.outcome, placed)
    claims = other.claims_like(site)
    reason = verdict.reason and verdict.reason.with_claims(claims)
    changes = tuple(one.with_claims(claims) for one in verdict.changes)
    return NodeVerdict(other.node.name, verdict.outcome, placed, reason, changes)
