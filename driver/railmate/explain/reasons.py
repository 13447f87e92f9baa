"""Why a node cannot take a pod's claims: the first request that fails, and what leaves it too few devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from railmate.errors import UsageError
from railmate.explain.capacity import fits
from railmate.explain.cel import Selectors, clauses
from railmate.explain.model import Claim, Device, DeviceClass, DeviceId, Node
from railmate.explain.places import is_at
from railmate.explain.problem import AllocationError, Option, Problem, blocking_taint, first_requests
from railmate.explain.search import Deadline, Search


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a device, or the counters that it would consume."""

    device: str
    claim: str
    pods: tuple[str, ...]

    @classmethod
    def of(cls, device: str, claim: Claim) -> Holder:
        return cls(device, claim.title, tuple(f"{claim.namespace}/{pod}" for pod in claim.users))

    def __str__(self) -> str:
        return f"{self.device}: {', '.join(f'pod {pod}' for pod in self.pods) or f'claim {self.claim}'}"


@dataclass(frozen=True, slots=True)
class Stage:
    """A condition that devices have to meet, and how many are left after it and all before it."""

    kind: str  # class, selector, node, taint, allocated, counters, capacity
    condition: str
    left: int
    lost: tuple[str, ...]  # names of the devices that it took out


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why one request, or one alternative of it, cannot be met."""

    request: str
    class_name: str
    wanted: int
    kind: str  # a stage's, or "constraint", "earlier", "none"
    sentence: str
    stages: tuple[Stage, ...]
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class Reason:
    """The first request that fails with all before it; several shortages where it has alternatives."""

    claim: str
    request: str
    shortages: tuple[Shortage, ...]

    def with_claims(self, claims: Mapping[str, Claim]) -> Reason:
        """The same on another node, where other claims hold the like; by the titles of those on this one."""
        shortages = (
            replace(one, holders=tuple(Holder.of(held.device, claims[held.claim]) for held in one.holders))
            for one in self.shortages
        )
        return replace(self, shortages=tuple(shortages))


@dataclass(frozen=True)
class Reasoning:
    """What explaining needs beside the problem."""

    problem: Problem
    node: Node
    classes: Mapping[str, DeviceClass]
    others: Sequence[Claim]
    selectors: Selectors
    deadline: Deadline

    def reason(self) -> Reason | None:
        """None where there is no reason to give: the requests one by one can all be met, or the scheduler would end
        with an error where it is asked for the first ones alone.

        Raises TooLargeError.
        """
        for claim, slots in enumerate(self.problem.options):
            for slot, options in enumerate(slots):
                part = first_requests(self.problem, claim, slot)
                try:
                    met = Search(part, self.deadline).solve() is not None
                except AllocationError:
                    return None
                if not met:
                    body = self.problem.claims[claim]
                    shortages = tuple(self._shortage(part, claim, slot, one) for one in options)
                    return Reason(body.title, body.slots[slot].name, shortages)
        return None

    # --- one request
    def _shortage(self, part: Problem, claim: int, slot: int, option: Option) -> Shortage:
        request = option.request
        wanted = option.wanted if option.everything is None else max(option.wanted, 1)
        stages = []
        left = list(self.problem.devices)
        held: set[DeviceId] = set()  # allocated, under this name or another
        for kind, condition, holds in self._conditions(option):
            kept = [device for device in left if holds(device)]
            lost = tuple(device.name for device in left if not holds(device))
            stages.append(Stage(kind, condition, len(kept), lost))
            short = len(kept) < wanted or (bool(lost) and option.everything is not None and kind in _BUSY)
            if kind in ("allocated", "counters"):
                held |= {device.id for device in left if not holds(device)}
            if short:
                holders = tuple(self._holders(held)) if kind in ("allocated", "counters") else ()
                before = sum(len(one.lost) for one in stages if one.kind == "allocated")
                sentence = _sentence(kind, condition, wanted, len(kept), len(left), before, self.problem)
                return Shortage(
                    request.name, request.class_name, wanted, kind, sentence, tuple(stages), holders
                )
            left = kept
        kind, sentence = self._joint(part, claim, wanted, len(left))
        return Shortage(request.name, request.class_name, wanted, kind, sentence, tuple(stages))

    def _joint(self, part: Problem, claim: int, wanted: int, left: int) -> tuple[str, str]:
        """Each device would do; together with what else is asked for they do not."""
        body = part.claims[claim]
        for index, constraint in enumerate(body.constraints):
            fewer = replace(body, constraints=body.constraints[:index] + body.constraints[index + 1 :])
            claims = (*part.claims[:claim], fewer, *part.claims[claim + 1 :])
            try:
                met = Search(replace(part, claims=claims), self.deadline).solve() is not None
            except AllocationError:
                continue
            if met:
                return "constraint", (
                    f"{left} would do, but no choice of {wanted} keeps constraint {constraint}"
                    f"{' with the requests before it' if len(body.slots) > 1 else ''}"
                )
        return "earlier", f"{left} would do alone, but not {wanted} beside the requests before it"

    def _conditions(self, option: Option) -> Iterator[tuple[str, str, Callable[[Device], bool]]]:
        """What a device has to meet, in the order in which it is told."""
        request = option.request
        device_class = self.classes[request.class_name]
        sources = [("class", f"class {device_class.name}", e) for e in device_class.selectors]
        sources += [("selector", "selector", e) for e in request.selectors]
        for kind, where, expression in sources:
            for clause in self._clauses(expression):
                yield kind, f"{where}: {clause}", self._matcher(clause)
        yield "node", "on this node", lambda d: d.place is None or is_at(d.place, self.node)
        yield "taint", "no taint", lambda d: blocking_taint(d, request) is None
        if not request.admin_access:
            yield "allocated", "not allocated", lambda d: d.id not in self.problem.taken.devices
        yield "counters", "its hardware not allocated under another name", self._counters_free
        used = self.problem.taken.consumed
        yield "capacity", "enough capacity", lambda d: fits(d, request.capacity, used.get(d.id, {}))

    def _clauses(self, expression: str) -> list[str]:
        """Parts of an expression; the whole of it where a part cannot stand alone."""
        parts = clauses(expression)
        try:
            for part in parts:
                self.selectors.check(part)
        except UsageError:
            return [expression]
        return parts

    def _matcher(self, clause: str) -> Callable[[Device], bool]:
        return lambda device: self.selectors.matches(clause, device) is True

    def _counters_free(self, device: Device) -> bool:
        if not device.consumes or (device.shareable and device.id in self.problem.taken.shared):
            return True
        pool = self._pool(device)
        if pool in self.problem.overdrawn:
            return False
        return all(self.problem.available[pool, name] >= amount for name, amount in device.consumes)

    def _pool(self, device: Device) -> int:
        pools = self.problem.pools
        return next(n for n, pool in enumerate(pools) if (pool.driver, pool.name) == device.id[:2])

    # --- who
    def _holders(self, gone: set[DeviceId]) -> Iterator[Holder]:
        """The claims that have these devices, or others that consume the same counters."""
        bodies = {
            device.id: device for pool in self.problem.pools for device in (*pool.devices, *pool.elsewhere)
        }
        counters = {(d[:2], name) for d in gone for name, _ in bodies[d].consumes}
        for claim in self.others:
            for one in claim.allocation or ():
                body = bodies.get(one.device)
                if body is None or one.admin_access:
                    continue
                if one.device in gone or any((one.device[:2], name) in counters for name, _ in body.consumes):
                    yield Holder.of(body.name, claim)


_BUSY = frozenset({"taint", "allocated", "counters", "capacity"})


def _sentence(
    kind: str, condition: str, wanted: int, kept: int, before: int, allocated: int, problem: Problem
) -> str:
    if kind in ("class", "selector"):
        return f"{kept} of {before} devices meet {condition}; {wanted} wanted"
    if kind == "node":
        return f"{kept} of {before} devices are usable from this node; {wanted} wanted"
    if kind == "taint":
        return f"{before - kept} of {before} devices are tainted; {kept} left, {wanted} wanted"
    if kind == "allocated":
        return f"{before - kept} of {before} devices are allocated; {kept} left, {wanted} wanted"
    if kind == "capacity":
        return f"{kept} of {before} devices have the capacity left; {wanted} wanted"
    if problem.overdrawn:
        return (
            "more is allocated than the pool's counters have, so nothing that consumes counters is given out: "
            f"{kept} of {before} left, {wanted} wanted"
        )
    under_this = (
        f"{allocated} of {before + allocated} devices are allocated, and of the others " if allocated else ""
    )
    return (
        f"{under_this}{before - kept} of {before} devices have their GPU or NIC allocated under another name; {kept} "
        f"left, {wanted} wanted"
    )
