"""Every node of a cluster judged for one pod's claims, within a time that people wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from railmate.explain.cel import Selectors
from railmate.explain.changes import Change, Trial
from railmate.explain.model import Claim, Device, DeviceClass, Node, Slice
from railmate.explain.places import selector_matches
from railmate.explain.pools import gather_pools
from railmate.explain.problem import AllocationError, Problem
from railmate.explain.reasons import Reason, Reasoning
from railmate.explain.search import Deadline, Search, TooLargeError

FITS, NO, ERROR, TOO_LARGE, EXCLUDED, NOT_LOOKED_AT = (
    "fits", "no", "error", "too large to prove", "excluded", "not looked at",
)  # fmt: skip
#: The share of the time that one node may take, so that one hard node does not hide the others.
_SHARE = 0.5


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

    ``obstacle``: why a node is out for the pod itself (its selectors, taints), "" for none.
    """

    title: str
    claims: tuple[Claim, ...]
    obstacle: Callable[[Node], str] = lambda node: ""


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
    def fits(self) -> bool:
        return any(one.outcome == FITS for one in self.nodes) and not self.stopped

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
    judging = _Judging(world, wish, selectors or Selectors())
    first = [judging.node(node, deadline) for node in world.nodes]
    return Verdict(wish, tuple(judging.explained(one, deadline) if why else one for one in first))


class _Judging:
    def __init__(self, world: World, wish: Wish, selectors: Selectors) -> None:
        self._world, self._wish, self._selectors = world, wish, selectors
        self._claims = tuple(claim for claim in wish.claims if claim.allocation is None)
        self._met = tuple(claim for claim in wish.claims if claim.allocation is not None)
        self._by_node: dict[str, list[Slice]] = {}
        self._anywhere: list[Slice] = []
        for one in world.slices:
            if one.place is not None and one.place.node:
                self._by_node.setdefault(one.place.node, []).append(one)
            else:
                self._anywhere.append(one)
        self._others = tuple(claim for claim in world.claims if claim.allocation is not None)
        self._problems: dict[str, tuple[Trial, Problem]] = {}

    def node(self, node: Node, deadline: Deadline) -> NodeVerdict:
        if deadline.passed():
            return NodeVerdict(node.name, NOT_LOOKED_AT)
        if why := self._obstacle(node):
            return NodeVerdict(node.name, EXCLUDED, detail=why)
        slices = [*self._by_node.get(node.name, ()), *self._anywhere]
        trial = Trial(node, gather_pools(slices, node), self._world.classes, self._others, self._selectors)
        trouble = "; ".join(f"pool {pool.name} is {pool.problem}" for pool in trial.pools if pool.problem)
        try:
            problem = trial.problem(self._claims, self._others)
            self._problems[node.name] = trial, problem
            grants = Search(problem, deadline.share(_SHARE)).solve()
        except AllocationError as error:
            return NodeVerdict(node.name, ERROR, detail=str(error))
        except TooLargeError:
            return NodeVerdict(node.name, TOO_LARGE, detail=trouble)
        if grants is None:
            return NodeVerdict(node.name, NO, detail=trouble)
        placed = tuple(
            Placed(self._claims[one.claim].title, one.request, problem.devices[one.device]) for one in grants
        )
        return NodeVerdict(node.name, FITS, placed, detail=trouble)

    def explained(self, verdict: NodeVerdict, deadline: Deadline) -> NodeVerdict:
        if verdict.outcome != NO:
            return verdict
        trial, problem = self._problems[verdict.node]
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
