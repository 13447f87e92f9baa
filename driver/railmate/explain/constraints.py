"""matchAttribute and distinctAttribute while devices come and go.

Rule: matchAttributeConstraint and distinctAttributeConstraint of structured/internal/incubating, without the gate
DRAListTypeAttributes: a list never equals anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from railmate.explain.model import Attribute, Claim, Constraint, Device, Request, RequestSlot

_SCALARS = frozenset({"string", "int", "bool", "version"})


class ConstraintState:
    """One constraint of a claim, and the devices that the attempt has given it so far."""

    def __init__(self, rule: Constraint, devices: Sequence[Device]) -> None:
        self.rule = rule
        self._values = [device.attribute(rule.attribute) for device in devices]
        self._taken: list[Attribute] = []

    def add(self, slot: RequestSlot, request: Request, device: int) -> bool:
        """False, and nothing changed, when the device may not join."""
        if not self.rule.covers(slot, request):
            return True
        value = self._values[device]
        if value is None or not self._allows(value):
            return False
        self._taken.append(value)
        return True

    def remove(self, slot: RequestSlot, request: Request, device: int) -> None:
        """Undoes the latest ``add`` that was true."""
        if self.rule.covers(slot, request):
            self._taken.pop()

    def _allows(self, value: Attribute) -> bool:
        if not self._taken:
            return True
        if value[0] not in _SCALARS:
            return False
        return value not in self._taken if self.rule.distinct else value == self._taken[0]

    def key(self) -> object:
        """What further devices depend on."""
        if self.rule.distinct:
            return frozenset(self._taken)
        return self._taken[0] if self._taken else None

    def fixed(self) -> Attribute | None:
        """The value that a matchAttribute has come to, None while nothing is taken."""
        return self._taken[0] if self._taken else None

    def value_of(self, device: int) -> Attribute | None:
        return self._values[device]


def states_of(claim: Claim, devices: Sequence[Device]) -> list[ConstraintState]:
    return [ConstraintState(rule, devices) for rule in claim.constraints]
