"""One node and the claims of one pod, prepared for the search: every device numbered, every selector answered.

Rule: structured/internal/incubating/allocator_incubating.go, up to the first call of allocateOne.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from railmate.explain.capacity import CapacityError, fits
from railmate.explain.cel import Answer, Selectors
from railmate.explain.model import (
    ALL,
    BLOCKING_EFFECTS,
    MAX_RESULTS,
    Claim,
    CounterId,
    Device,
    DeviceClass,
    Node,
    Request,
    Taint,
    Taken,
)
from railmate.explain.places import is_at
from railmate.explain.pools import Pool
from railmate.explain.quantity import Number

#: A counter of the node: its pool's number and its name in the pool.
NodeCounter = tuple[int, CounterId]
#: What selectors have answered for the devices of one node, by a request's class and selectors.
Answered = dict[tuple[str, tuple[str, ...]], Sequence[Answer]]


class AllocationError(Exception):
    """Not "no" but an error: the scheduler gives the pod up on every node and tries again later."""


@dataclass(frozen=True, eq=False)
class Option:
    """A request, or an alternative of one, against the node's devices.

    ``answers``: for each device whether the selectors of class and request take it, or the error.
    ``tolerated``: for each device whether no taint keeps it from this request.
    ``wanted``: how many devices; for mode All, ``everything`` names them. ``candidates``: devices that selectors and
    taints allow.
    """

    request: Request
    answers: Sequence[Answer]
    tolerated: Sequence[bool]
    wanted: int
    everything: tuple[int, ...] | None = None
    has_errors: bool = False
    candidates: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Problem:
    claims: tuple[Claim, ...]
    pools: tuple[Pool, ...]
    devices: tuple[Device, ...]  # of usable pools, in the order of the search
    pool_of: tuple[int, ...]
    options: tuple[tuple[tuple[Option, ...], ...], ...]  # claim, slot, alternative
    taken: Taken
    available: Mapping[NodeCounter, Number]  # less what allocated devices consume
    overdrawn: frozenset[int]  # pools in which a counter is below zero: nothing with counters goes out


def first_requests(problem: Problem, claim: int, slot: int) -> Problem:
    """The same without any request after this one."""
    cut = problem.claims[claim]
    claims = (*problem.claims[:claim], replace(cut, slots=cut.slots[: slot + 1]))
    options = (*problem.options[:claim], problem.options[claim][: slot + 1])
    return replace(problem, claims=claims, options=options)


def blocking_taint(device: Device, request: Request) -> Taint | None:
    """The first taint that keeps the device from the request."""
    for taint in device.taints:
        if taint.effect in BLOCKING_EFFECTS and not any(t.tolerates(taint) for t in request.tolerations):
            return taint
    return None


def prepare(
    claims: Sequence[Claim],
    node: Node,
    pools: Sequence[Pool],
    classes: Mapping[str, DeviceClass],
    taken: Taken,
    selectors: Selectors,
    answered: Answered | None = None,
) -> Problem:
    """``answered``: one dict for all problems of the same node, pools and classes, of which a claim has many when
    changes are tried. Raises AllocationError, and UsageError for a selector that cannot be evaluated here."""
    answered = {} if answered is None else answered
    usable = [(number, pool) for number, pool in enumerate(pools) if not pool.problem]
    devices = tuple(device for _, pool in usable for device in pool.devices)
    pool_of = tuple(number for number, pool in usable for _ in pool.devices)

    def option(claim: Claim, request: Request) -> Option:
        return _option(claim, request, node, pools, devices, classes, selectors, answered)

    options = tuple(_slots(claim, option) for claim in claims)
    available, overdrawn = _available(pools, taken)
    return Problem(tuple(claims), tuple(pools), devices, pool_of, options, taken, available, overdrawn)


def _slots(claim: Claim, option: Callable[[Claim, Request], Option]) -> tuple[tuple[Option, ...], ...]:
    slots, total = [], 0
    for slot in claim.slots:
        alternatives = tuple(option(claim, request) for request in slot.alternatives)
        fewest = min(one.wanted for one in alternatives)
        if fewest > MAX_RESULTS - total:
            raise AllocationError(
                f"claim {claim.title}, request {slot.name}: {total + fewest} devices or more, and a claim holds "
                f"{MAX_RESULTS}"
            )
        total += fewest
        slots.append(alternatives)
    return tuple(slots)


def _option(
    claim: Claim,
    request: Request,
    node: Node,
    pools: Sequence[Pool],
    devices: Sequence[Device],
    classes: Mapping[str, DeviceClass],
    selectors: Selectors,
    answered: Answered,
) -> Option:
    where = f"claim {claim.title}, request {request.name}"
    device_class = classes.get(request.class_name)
    if device_class is None:
        raise AllocationError(f"{where}: there is no DeviceClass {request.class_name}")
    asked = (request.class_name, request.selectors)
    if (answers := answered.get(asked)) is None:
        answers = [selectable(device, device_class, request, node, selectors) for device in devices]
        answered[asked] = answers
    has_errors = any(isinstance(answer, str) for answer in answers)
    tolerated = [blocking_taint(device, request) is None for device in devices]
    if request.mode != ALL:
        numbers = range(len(devices))
        candidates = tuple(number for number in numbers if answers[number] is True and tolerated[number])
        return Option(request, answers, tolerated, request.count, None, has_errors, candidates)
    for pool in pools:
        if pool.problem:
            raise AllocationError(f"{where} asks for all devices, but pool {pool.name} is {pool.problem}")
    everything = []
    for index, (device, answer) in enumerate(zip(devices, answers, strict=True)):
        if isinstance(answer, str):
            raise AllocationError(f"{where}: a selector fails on device {device.name}: {answer}")
        try:
            if answer and fits(device, request.capacity, {}):
                everything.append(index)
        except CapacityError as error:
            raise AllocationError(f"{where}, device {device.name}: {error}") from error
    return Option(request, answers, tolerated, len(everything), tuple(everything), False)


def selectable(
    device: Device, device_class: DeviceClass, request: Request, node: Node, selectors: Selectors
) -> Answer:
    """The class's selectors, then the request's, then the node of the device: the first that is not true."""
    for expression in (*device_class.selectors, *request.selectors):
        answer = selectors.matches(expression, device)
        if answer is not True:
            return answer
    return device.place is None or is_at(device.place, node)


def _available(pools: Sequence[Pool], taken: Taken) -> tuple[dict[NodeCounter, Number], frozenset[int]]:
    available: dict[NodeCounter, Number] = {}
    for number, pool in enumerate(pools):
        available |= {(number, counter): value for counter, value in pool.counters.items()}
        for device in (*pool.devices, *pool.elsewhere):
            if device.id in taken.devices or device.id in taken.shared or device.id in taken.consumed:
                for counter, amount in device.consumes:
                    available[number, counter] -= amount
    return available, frozenset(number for (number, _), value in available.items() if value < 0)
