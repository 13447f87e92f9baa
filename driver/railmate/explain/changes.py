"""Changes of what is asked for, or of what is taken, each of which would let the node take the claims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from railmate.explain.cel import Selectors
from railmate.explain.model import (
    ALL,
    BLOCKING_EFFECTS,
    Claim,
    DeviceClass,
    Node,
    Request,
    Taint,
    Taken,
    Toleration,
)
from railmate.explain.pools import Pool
from railmate.explain.problem import AllocationError, Answered, Problem, prepare
from railmate.explain.search import Deadline, Search
from railmate_api import attributes as names

#: How far a change is from what was asked, by kind: the nearest come first.
_FAR = {
    "constraint": 1,
    "count": 2,
    "release": 3,
    "class": 4,
    "toleration": 5,
    "selector": 6,
    "request": 8,
    "empty": 9,
}
_ENOUGH = 3
#: Classes that give the same shape of device: where a machine has no switch its pairs are of the other class.
SIBLINGS = {names.CLASS_PAIR: names.CLASS_PAIR_NUMA, names.CLASS_PAIR_NUMA: names.CLASS_PAIR}


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a kind.

    constraint (without the ``value``-th), count (``value`` in place of it), release (of claim ``value``), class
    (``value`` in place of it), toleration (of taint ``value``), selector (without the ``value``-th), request (without
    it), empty (all claims of the node released). ``claim`` is the title of the claim that is changed.
    """

    kind: str
    sentence: str
    claim: str = ""
    request: str = ""
    value: str = ""
    distance: float = 0

    def with_claims(self, claims: Mapping[str, Claim]) -> Change:
        """The same on another node, where other claims hold the like; by the titles of those on this one."""
        if self.kind != "release":
            return self
        claim = claims[self.value]
        return replace(self, sentence=_after(claim), value=claim.title)


def _after(claim: Claim) -> str:
    pods = ", ".join(f"{claim.namespace}/{pod}" for pod in claim.users)
    return f"after pod {pods} ends" if pods else f"after claim {claim.title} is released"


@dataclass(frozen=True)
class Trial:
    """A node, and what is tried there."""

    node: Node
    pools: Sequence[Pool]
    classes: Mapping[str, DeviceClass]
    others: Sequence[Claim]
    selectors: Selectors
    answered: Answered = field(default_factory=dict)

    def problem(self, claims: Sequence[Claim], others: Sequence[Claim]) -> Problem:
        """Raises what ``prepare`` raises."""
        taken = Taken.by(tuple(others))
        return prepare(claims, self.node, self.pools, self.classes, taken, self.selectors, self.answered)

    def works(self, claims: Sequence[Claim], others: Sequence[Claim], deadline: Deadline) -> bool:
        """Raises TooLargeError."""
        try:
            return Search(self.problem(claims, others), deadline).solve() is not None
        except AllocationError:
            return False

    def changes(self, claims: Sequence[Claim], deadline: Deadline) -> Iterator[Change]:
        """Those that work, nearest kinds first. Raises TooLargeError."""
        found = 0
        for change, changed, others in self._candidates(claims, deadline):
            if found >= _ENOUGH and change.kind in ("request", "empty"):
                return
            if change.kind == "count" or self.works(changed, others, deadline):
                found += 1
                yield change

    def _candidates(
        self, claims: Sequence[Claim], deadline: Deadline
    ) -> Iterator[tuple[Change, Sequence[Claim], Sequence[Claim]]]:
        yield from ((c, changed, self.others) for c, changed in _without_constraint(claims))
        yield from ((c, changed, self.others) for c, changed in self._fewer(claims, deadline))
        near = self._near()
        for claim in near:
            rest = [one for one in self.others if one is not claim]
            yield _change("release", _after(claim), value=claim.title), claims, rest
        yield from ((c, changed, self.others) for c, changed in _other_class(claims, self.classes))
        yield from ((c, changed, self.others) for c, changed in self._tolerating(claims))
        yield from ((c, changed, self.others) for c, changed in _without_selector(claims))
        yield from ((c, changed, self.others) for c, changed in _without_request(claims))
        if near:
            rest = [one for one in self.others if one not in near]
            yield _change("empty", f"when all {len(near)} claims on this node are released"), claims, rest

    def _near(self) -> list[Claim]:
        """Other claims that hold something of this node's pools."""
        here = {(pool.driver, pool.name) for pool in self.pools}
        return [
            claim
            for claim in self.others
            if any(one.device[:2] in here and not one.admin_access for one in claim.allocation or ())
        ]

    def _fewer(self, claims: Sequence[Claim], deadline: Deadline) -> Iterator[tuple[Change, Sequence[Claim]]]:
        """The largest count of a request that fits, by bisection: what fits with more fits with fewer."""
        for index, claim in enumerate(claims):
            for position, slot in enumerate(claim.slots):
                (request, *more) = slot.alternatives
                if more or slot.prioritized or request.mode == ALL or request.count < 2:
                    continue
                low, high = 0, request.count - 1
                while low < high:
                    middle = (low + high + 1) // 2
                    tried = _with_request(claims, index, position, replace(request, count=middle))
                    low, high = (
                        (middle, high) if self.works(tried, self.others, deadline) else (low, middle - 1)
                    )
                if low:
                    sentence = (
                        f"{low} instead of {request.count} {request.class_name} in request {request.name}"
                    )
                    change = _change(
                        "count",
                        sentence,
                        claim.title,
                        request.name,
                        str(low),
                        (request.count - low) / request.count,
                    )
                    yield change, _with_request(claims, index, position, replace(request, count=low))

    def _tolerating(self, claims: Sequence[Claim]) -> Iterator[tuple[Change, Sequence[Claim]]]:
        taints = {
            taint
            for pool in self.pools
            for device in pool.devices
            for taint in device.taints
            if taint.effect in BLOCKING_EFFECTS
        }
        for taint in sorted(taints, key=str):
            for index, position, request in _requests(claims):
                tolerant = replace(request, tolerations=(*request.tolerations, _toleration(taint)))
                sentence = f"if request {request.name} tolerates the taint {taint}: what it gets may not work"
                yield (
                    _change("toleration", sentence, claims[index].title, request.name, str(taint)),
                    _with_request(claims, index, position, tolerant),
                )


def _toleration(taint: Taint) -> Toleration:
    return Toleration(taint.key, "Equal", taint.value, taint.effect)


def _change(
    kind: str, sentence: str, claim: str = "", request: str = "", value: str = "", more: float = 0
) -> Change:
    return Change(kind, sentence, claim, request, value, _FAR[kind] + more)


def _requests(claims: Sequence[Claim]) -> Iterator[tuple[int, int, Request]]:
    """Requests without alternatives, by claim and position."""
    for index, claim in enumerate(claims):
        for position, slot in enumerate(claim.slots):
            if not slot.prioritized:
                yield index, position, slot.alternatives[0]


def _with_request(claims: Sequence[Claim], index: int, position: int, request: Request) -> Sequence[Claim]:
    slots = list(claims[index].slots)
    slots[position] = replace(slots[position], alternatives=(request,))
    return [*claims[:index], replace(claims[index], slots=tuple(slots)), *claims[index + 1 :]]


def _without_constraint(claims: Sequence[Claim]) -> Iterator[tuple[Change, Sequence[Claim]]]:
    for index, claim in enumerate(claims):
        for position, constraint in enumerate(claim.constraints):
            rest = claim.constraints[:position] + claim.constraints[position + 1 :]
            what = constraint.attribute.partition("/")[2] or constraint.attribute
            word = "the same" if constraint.distinct else "any"
            sentence = f"{word} {what}: without constraint {constraint} of claim {claim.title}"
            change = _change("constraint", sentence, claim.title, value=str(position))
            yield change, [*claims[:index], replace(claim, constraints=rest), *claims[index + 1 :]]


def _other_class(
    claims: Sequence[Claim], classes: Mapping[str, DeviceClass]
) -> Iterator[tuple[Change, Sequence[Claim]]]:
    for index, position, request in _requests(claims):
        other = SIBLINGS.get(request.class_name, "")
        if other in classes:
            sentence = f"class {other} instead of {request.class_name} in request {request.name}"
            change = _change("class", sentence, claims[index].title, request.name, other)
            yield change, _with_request(claims, index, position, replace(request, class_name=other))


def _without_selector(claims: Sequence[Claim]) -> Iterator[tuple[Change, Sequence[Claim]]]:
    for index, position, request in _requests(claims):
        for number, expression in enumerate(request.selectors):
            rest = request.selectors[:number] + request.selectors[number + 1 :]
            sentence = f"without the selector {expression} of request {request.name}"
            change = _change("selector", sentence, claims[index].title, request.name, str(number))
            yield change, _with_request(claims, index, position, replace(request, selectors=rest))


def _without_request(claims: Sequence[Claim]) -> Iterator[tuple[Change, Sequence[Claim]]]:
    for index, claim in enumerate(claims):
        if len(claim.slots) < 2:
            continue
        for position, slot in enumerate(claim.slots):
            rest = claim.slots[:position] + claim.slots[position + 1 :]
            sentence = f"without request {slot.name} of claim {claim.title}"
            change = _change("request", sentence, claim.title, slot.name)
            yield change, [*claims[:index], replace(claim, slots=rest), *claims[index + 1 :]]
