"""Which devices are alike, so that the search need not try them one by one.

A *cell* is a set of devices that share counters (a GPU, its pair). Two cells are alike when device by device every
request answers the same, every constraint sees the same value, and their counters stand the same. Swapping two like
cells that the attempt has treated the same changes no answer; nor does swapping two like devices of one cell.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import Protocol

from railmate.explain.model import Device
from railmate.explain.problem import NodeCounter, Option, Problem
from railmate.explain.quantity import Number


class Marks(Protocol):
    def mark(self, device: int) -> Hashable:
        """What the attempt has done with a device."""


class Cells:
    def __init__(self, problem: Problem) -> None:
        scarce = _scarce_counters(problem)
        self._members = _cells(problem, scarce)
        self._cell = {device: number for number, cell in enumerate(self._members) for device in cell}
        self._touched: Counter[int] = Counter()  # cell -> devices of it in the attempt
        self._numbers: dict[Hashable, int] = {}
        self._sign: list[int] = [0] * len(problem.devices)
        self._kind: list[int] = []
        options = [one for claim in problem.options for slot in claim for one in slot]
        for cell in self._members:
            names: list[NodeCounter] = []
            for device in cell:
                names += [c for c in _counters(problem, device) if c in scarce and c not in names]
            for device in cell:
                self._sign[device] = self._number(_signature(problem, options, device, names))
            self._kind.append(self._number(tuple(self._sign[device] for device in cell)))

    def touch(self, device: int) -> None:
        self._touched[self._cell[device]] += 1

    def release(self, device: int) -> None:
        cell = self._cell[device]
        self._touched[cell] -= 1
        if not self._touched[cell]:
            del self._touched[cell]

    def state(self, marks: Marks) -> Hashable:
        """The same for two attempts that are alike."""
        cells: Counter[Hashable] = Counter()
        for cell in self._touched:
            held = Counter((self._sign[device], marks.mark(device)) for device in self._members[cell])
            cells[self._kind[cell], frozenset(held.items())] += 1
        return frozenset(cells.items())

    def likeness(self, marks: Marks, device: int) -> tuple[Hashable, Hashable]:
        """Two keys; a device that has either in common with another is like it at this point of the attempt."""
        cell = self._cell[device]
        members = self._members[cell]
        held = tuple(marks.mark(one) for one in members) if self._touched.get(cell) else None
        among_cells = (self._kind[cell], held, members.index(device))
        within_cell = (cell, self._sign[device], held and held[members.index(device)])
        return among_cells, within_cell

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def _counters(problem: Problem, device: int) -> list[NodeCounter]:
    return [(problem.pool_of[device], name) for name, _ in problem.devices[device].consumes]


def _scarce_counters(problem: Problem) -> set[NodeCounter]:
    """Counters that not all devices can have at once; the others decide nothing."""
    wanted: dict[NodeCounter, Number] = defaultdict(int)
    for device, body in enumerate(problem.devices):
        for name, amount in body.consumes:
            wanted[problem.pool_of[device], name] += amount
    return {name for name, amount in wanted.items() if amount > problem.available[name]}


def _cells(problem: Problem, scarce: set[NodeCounter]) -> list[list[int]]:
    parent = list(range(len(problem.devices)))

    def root(device: int) -> int:
        while parent[device] != device:
            parent[device] = parent[parent[device]]
            device = parent[device]
        return device

    first: dict[NodeCounter, int] = {}
    for device in range(len(problem.devices)):
        for name in _counters(problem, device):
            if name in scarce:
                parent[root(device)] = root(first.setdefault(name, device))
    cells: dict[int, list[int]] = defaultdict(list)
    for device in range(len(problem.devices)):
        cells[root(device)].append(device)
    return list(cells.values())


def _signature(problem: Problem, options: list[Option], device: int, names: list[NodeCounter]) -> Hashable:
    body = problem.devices[device]
    pool = problem.pool_of[device]
    return (
        tuple((one.answers[device], one.tolerated[device]) for one in options),
        # "all" devices are taken one after the other, and which of them fails first decides between no and error
        tuple(one.everything.index(device) for one in options if one.everything and device in one.everything),
        tuple(body.attribute(rule.attribute) for claim in problem.claims for rule in claim.constraints),
        tuple(
            (names.index((pool, name)), amount, problem.available[pool, name])
            for name, amount in body.consumes
            if (pool, name) in names
        ),
        bool(body.consumes) and pool in problem.overdrawn,
        _standing(problem, body),
        tuple(sorted(body.capacity.items(), key=lambda item: item[0])),
        body.shareable,
    )


def _standing(problem: Problem, body: Device) -> Hashable:
    taken = problem.taken
    return (
        body.id in taken.devices,
        body.id in taken.shared,
        body.id in taken.consumed,
        tuple(sorted(taken.consumed.get(body.id, {}).items())),
    )
