"""When the rest of an attempt cannot succeed whatever is chosen: what each request has left is too little."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from railmate.explain.constraints import ConstraintState
from railmate.explain.model import Attribute
from railmate.explain.problem import Option, Problem

#: The devices that an option of a claim could still take.
Usable = Callable[[int, Option], list[int]]


class Bounds:
    def __init__(
        self, problem: Problem, constraints: Sequence[Sequence[ConstraintState]], usable: Usable
    ) -> None:
        self._problem = problem
        self._constraints = constraints
        self._usable = usable
        # Nothing is foreseen past a request that may end the search with an error: the scheduler gets there, and tells.
        self._raising = {
            (number, position)
            for number, position, options in self._from(0, 0)
            if any(self._may_raise(number, position, one) for one in options)
        }

    def hopeless(self, claim: int, slot: int) -> bool:
        """Whether the requests from this one on (of a claim of which nothing after it is chosen) cannot be met."""
        left: dict[int, list[tuple[int, tuple[Option, ...], list[list[int]]]]] = {}
        together: Counter[tuple[int, ...]] = Counter()  # devices to how many of them single requests want
        for number, position, options in self._from(claim, slot):
            if (number, position) in self._raising:
                break
            devices = [self._usable(number, one) for one in options]
            if all(len(had) < one.wanted for had, one in zip(devices, options, strict=True)):
                return True
            left.setdefault(number, []).append((position, options, devices))
            if len(options) == 1 and not options[0].request.admin_access and options[0].everything is None:
                together[tuple(devices[0])] += options[0].wanted
        if any(
            wanted > len(devices) and not self._shareable(devices) for devices, wanted in together.items()
        ):
            return True
        return any(self._no_common_value(number, slots) for number, slots in left.items())

    def _shareable(self, devices: tuple[int, ...]) -> bool:
        return any(self._problem.devices[device].shareable for device in devices)

    def _no_common_value(
        self, claim: int, slots: list[tuple[int, tuple[Option, ...], list[list[int]]]]
    ) -> bool:
        """Whether some matchAttribute has no value for which all its requests have enough devices."""
        for constraint in self._constraints[claim]:
            if constraint.rule.distinct:
                continue
            possible: set[Attribute] | None = None
            for position, options, devices in slots:
                slot = self._problem.claims[claim].slots[position]
                if not all(constraint.rule.covers(slot, one.request) for one in options):
                    continue
                values: set[Attribute] = set()
                for option, had in zip(options, devices, strict=True):
                    counts = Counter(constraint.value_of(device) for device in had)
                    values |= {v for v, count in counts.items() if v is not None and count >= option.wanted}
                possible = values if possible is None else possible & values
                if not possible:
                    return True
            if possible is not None and (fixed := constraint.fixed()) is not None and fixed not in possible:
                return True
        return False

    def _from(self, claim: int, slot: int) -> Iterator[tuple[int, int, tuple[Option, ...]]]:
        for number in range(claim, len(self._problem.options)):
            for position, options in enumerate(self._problem.options[number]):
                if number > claim or position >= slot:
                    yield number, position, options

    def _may_raise(self, claim: int, slot: int, option: Option) -> bool:
        """A selector's error; or a constraint that keeps one of "all" devices out, which is an error and not a no."""
        body = self._problem.claims[claim]
        covered = any(rule.covers(body.slots[slot], option.request) for rule in body.constraints)
        return option.has_errors or (covered and option.everything is not None)
