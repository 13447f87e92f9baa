"""The allocator's search: depth first over claims, requests and devices, the first complete solution counts.

Rule: allocateOne and allocateDevice of structured/internal/incubating/allocator_incubating.go, with the same order, so
that a solution is the very one that the scheduler takes. The scheduler tries every combination, which is exponential
where the answer is no. Here three things are left out that cannot change the answer: a choice that is like one which
failed already (``symmetry``), a rest of the requests that failed already in a like state, and a request with fewer
devices left than it needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from railmate.explain.bounds import Bounds
from railmate.explain.capacity import CapacityError, consumption, fits
from railmate.explain.constraints import states_of
from railmate.explain.model import MAX_RESULTS
from railmate.explain.problem import AllocationError, NodeCounter, Option, Problem
from railmate.explain.quantity import Number
from railmate.explain.symmetry import Cells

#: What a step of the search ends with; EXCEEDED: the rest needs more devices than a claim holds.
_DONE, _FAILED, _EXCEEDED = "done", "failed", "exceeded"
#: Steps after which the clock is looked at: milliseconds, also where a node has a thousand devices.
_STEPS_BETWEEN_LOOKS = 16


class TooLargeError(Exception):
    """The time was over before the search was."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of a clock, in seconds."""

    at: float
    now: Callable[[], float] = time.monotonic

    @classmethod
    def after(cls, seconds: float, now: Callable[[], float] = time.monotonic) -> Deadline:
        return cls(now() + seconds, now)

    def share(self, part: float) -> Deadline:
        """When this part of the time that is left is over."""
        return Deadline.after(max(0.0, self.at - self.now()) * part, self.now)

    def passed(self) -> bool:
        return self.now() > self.at


@dataclass(frozen=True, slots=True)
class Grant:
    """A device (its number in the problem) for a request."""

    claim: int
    request: str
    device: int


@dataclass
class Search:
    """One search; ``solve`` once."""

    problem: Problem
    deadline: Deadline
    grants: list[Grant] = field(default_factory=list)
    steps: int = 0

    def solve(self) -> list[Grant] | None:
        """The scheduler's allocation, or None when there is none.

        Raises AllocationError where the scheduler ends with an error, TooLargeError when the deadline passes.
        """
        self._cells: Cells | None = None  # made when something fails for the first time
        self._constraints = [states_of(claim, self.problem.devices) for claim in self.problem.claims]
        self._held: dict[int, tuple[int, ...]] = {}  # device -> claims that hold it in this attempt
        self._shares: dict[int, list[dict[str, Number]]] = {}
        devices, pools = self.problem.devices, self.problem.pool_of
        self._allocated = [body.id in self.problem.taken.devices for body in devices]
        self._needs = [
            [((pool, name), amount) for name, amount in body.consumes]
            for body, pool in zip(devices, pools, strict=True)
        ]
        self._used: dict[NodeCounter, Number] = dict.fromkeys(self.problem.available, 0)
        self._counts = [0] * len(self.problem.claims)
        self._failures: dict[object, str] = {}
        self._bounds = Bounds(self.problem, self._constraints, self._usable)
        try:
            done = self._slot(0, 0) == _DONE
        except RecursionError:  # hundreds of devices in dozens of claims
            raise TooLargeError from None
        return list(self.grants) if done else None

    # --- the recursion
    def _slot(self, claim: int, slot: int) -> str:
        """All that is left from a claim's request on."""
        self._tick()
        if claim == len(self.problem.claims):
            return _DONE
        if slot == len(self.problem.options[claim]):
            ended = self._slot(claim + 1, 0)
            return _FAILED if ended == _EXCEEDED else ended
        if self._failures and (known := self._failures.get(self._state(claim, slot))) is not None:
            return known
        if self._bounds.hopeless(claim, slot):
            return _FAILED
        ended = self._alternatives(claim, slot)
        if ended != _DONE:
            self._failures[self._state(claim, slot)] = ended
        return ended

    def _alternatives(self, claim: int, slot: int) -> str:
        alternatives = self.problem.options[claim][slot]
        if not self.problem.claims[claim].slots[slot].prioritized:
            return self._devices(claim, slot, alternatives[0], 0, 0)
        all_exceeded = True
        for option in alternatives:
            ended = self._devices(claim, slot, option, 0, 0)
            if ended == _DONE:
                return ended
            all_exceeded = all_exceeded and ended == _EXCEEDED
        return _EXCEEDED if all_exceeded else _FAILED

    def _devices(self, claim: int, slot: int, option: Option, had: int, start: int) -> str:
        """The option's devices from the ``had``-th on, none before position ``start``."""
        self._tick()
        if option.everything is not None and not option.everything:
            return _FAILED
        if had >= option.wanted:
            return self._slot(claim, slot + 1)
        if option.wanted - had > MAX_RESULTS - self._counts[claim]:
            return _EXCEEDED
        if option.everything is not None:
            device = option.everything[had]
            if not self._take(claim, slot, option, device, must=True):
                return _FAILED
            ended = self._devices(claim, slot, option, had + 1, 0)
            if ended != _DONE:
                self._give_back(claim, slot, option, device)
            return ended
        return self._choices(claim, slot, option, had, start)

    def _choices(self, claim: int, slot: int, option: Option, had: int, start: int) -> str:
        if not option.has_errors and len(self._usable(claim, option, start)) < option.wanted - had:
            return _FAILED
        tried: set[object] = set()
        for device in range(start, len(self.problem.devices)):
            if self._in_use(claim, option, device):
                continue
            answer = option.answers[device]
            if answer is not True:
                if answer is False:
                    continue
                raise AllocationError(self._selector_error(claim, option, device, str(answer)))
            if tried and not tried.isdisjoint(self._alike().likeness(self, device)):
                continue
            if not self._fits(claim, option, device):
                continue
            if not self._take(claim, slot, option, device):
                continue
            ended = self._devices(claim, slot, option, had + 1, device + 1)
            if ended == _DONE:
                return ended
            self._give_back(claim, slot, option, device)
            if ended == _EXCEEDED:
                return ended
            tried.update(self._alike().likeness(self, device))
        return _FAILED

    def _usable(self, claim: int, option: Option, start: int = 0) -> list[int]:
        """What the option could still take, constraints left aside."""
        if option.everything is not None:
            return list(option.everything)
        return [
            device
            for device in option.candidates
            if device >= start and not self._in_use(claim, option, device) and self._counters_left(device)
        ]

    # --- one device
    def _in_use(self, claim: int, option: Option, device: int) -> bool:
        if option.request.admin_access:
            return claim in self._held.get(device, ())
        return self._allocated[device] or bool(self._held.get(device))

    def _counters_left(self, device: int) -> bool:
        needs = self._needs[device]
        if not needs or self._counters_counted(device):
            return True
        if self.problem.pool_of[device] in self.problem.overdrawn:
            return False
        available, used = self.problem.available, self._used
        return all(available[counter] - used[counter] >= amount for counter, amount in needs)

    def _counters_counted(self, device: int) -> bool:
        """A further share of a device consumes no counters again."""
        body, taken = self.problem.devices[device], self.problem.taken
        return body.shareable and (
            bool(self._shares.get(device)) or body.id in taken.shared or body.id in taken.consumed
        )

    def _fits(self, claim: int, option: Option, device: int) -> bool:
        body = self.problem.devices[device]
        if not body.capacity and not option.request.capacity:
            return True
        used = dict(self.problem.taken.consumed.get(body.id, {}))
        for share in self._shares.get(device, ()):
            for name, amount in share.items():
                used[name] = used.get(name, 0) + amount
        try:
            return fits(body, option.request.capacity, used)
        except CapacityError as error:
            where = f"claim {self.problem.claims[claim].title}, request {option.request.name}"
            raise AllocationError(f"{where}, device {body.name}: {error}") from error

    def _take(self, claim: int, slot: int, option: Option, device: int, must: bool = False) -> bool:
        body = self.problem.devices[device]
        if option.request.admin_access:
            if not body.shareable and self._in_use(claim, option, device):
                return False
        elif self._in_use(claim, option, device):
            return False
        if not self._counters_left(device) or not option.tolerated[device]:
            return False
        place = self.problem.claims[claim].slots[slot]
        for position, constraint in enumerate(self._constraints[claim]):
            if not constraint.add(place, option.request, device):
                for earlier in self._constraints[claim][:position]:
                    earlier.remove(place, option.request, device)
                if must:
                    raise AllocationError(
                        f"claim {self.problem.claims[claim].title}, request {option.request.name} asks for all "
                        f"devices, and {constraint.rule} keeps device {body.name} out"
                    )
                return False
        if must and not self._fits(claim, option, device):
            for constraint in self._constraints[claim]:
                constraint.remove(place, option.request, device)
            return False
        self._count_counters(device, 1)
        if body.shareable:
            self._shares.setdefault(device, []).append(consumption(body, option.request.capacity))
        else:
            self._held[device] = (*self._held.get(device, ()), claim)
        if self._cells is not None:
            self._cells.touch(device)
        self._counts[claim] += 1
        self.grants.append(Grant(claim, option.request.name, device))
        return True

    def _give_back(self, claim: int, slot: int, option: Option, device: int) -> None:
        body = self.problem.devices[device]
        place = self.problem.claims[claim].slots[slot]
        if body.shareable:
            self._shares[device].pop()
        else:
            self._held[device] = self._held[device][:-1]
        self._count_counters(device, -1)
        if self._cells is not None:
            self._cells.release(device)
        self._counts[claim] -= 1
        self.grants.pop()
        for constraint in self._constraints[claim]:
            constraint.remove(place, option.request, device)

    def _count_counters(self, device: int, sign: int) -> None:
        """Call before a share is noted and after it is dropped."""
        if self._counters_counted(device):
            return
        for counter, amount in self._needs[device]:
            self._used[counter] += sign * amount

    # --- what is alike
    def _state(self, claim: int, slot: int) -> Hashable:
        """The same for two attempts whose rest, from this request on, has the same answer."""
        constraints = (constraint.key() for constraint in self._constraints[claim])
        return (claim, slot, self._counts[claim], self._alike().state(self), *constraints)

    def _alike(self) -> Cells:
        if self._cells is None:
            self._cells = Cells(self.problem)
            for grant in self.grants:
                self._cells.touch(grant.device)
        return self._cells

    def mark(self, device: int) -> Hashable:
        """What this attempt has done with a device."""
        shares = self._shares.get(device)
        return (
            self._held.get(device, ()),
            tuple(tuple(sorted(one.items())) for one in shares) if shares else (),
        )

    def _selector_error(self, claim: int, option: Option, device: int, answer: str) -> str:
        body = self.problem.devices[device]
        return (
            f"claim {self.problem.claims[claim].title}, request {option.request.name}: a selector fails on device "
            f"{body.name} of driver {body.driver}, pool {body.pool}: {answer}"
        )

    def _tick(self) -> None:
        # asking a clock takes as long as a step
        if self.steps % _STEPS_BETWEEN_LOOKS == 0 and self.deadline.passed():
            raise TooLargeError
        self.steps += 1
