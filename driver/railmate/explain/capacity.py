"""What a request consumes of a device's capacity, and whether it is there.

Rule: structured/internal/incubating/consumable_capacity.go, without the gate DRAFractionalCapacityRange.
"""

from __future__ import annotations

from collections.abc import Mapping

from railmate.explain.model import Capacity, Device
from railmate.explain.quantity import Number

_MAX_INT = 2**63 - 1


class CapacityError(Exception):
    """Not this device but the request is wrong: the allocation ends."""


def fits(device: Device, asked: Mapping[str, Number] | None, used: Mapping[str, Number]) -> bool:
    """Whether the request fits beside what is used. Raises CapacityError."""
    if asked and any(name not in device.capacity for name in asked):
        return False
    amounts = consumption(device, asked)
    for name, capacity in device.capacity.items():
        amount = amounts[name]
        if _violates(amount, capacity):
            return False
        if used.get(name, 0) + amount > capacity.value:
            return False
    return True


def consumption(device: Device, asked: Mapping[str, Number] | None) -> dict[str, Number]:
    """Every capacity of the device and what a share with this request takes of it. Raises CapacityError."""
    amounts = {}
    for name, capacity in device.capacity.items():
        amount = _rounded((asked or {}).get(name), capacity)
        if amount < 0:
            raise CapacityError(f'capacity "{name}": capacity value is negative')
        amounts[name] = amount
    return amounts


def _rounded(asked: Number | None, capacity: Capacity) -> Number:
    policy = capacity.policy
    if asked is None:
        return capacity.value if policy is None or policy.default is None else policy.default
    if policy is None:
        return asked
    if policy.has_range and policy.minimum is not None:
        if asked < policy.minimum:
            return policy.minimum
        if policy.step is None:
            return asked
        if asked > _MAX_INT:
            raise CapacityError("a capacity request exceeds MaxInt64")
        # whole numbers: Quantity.Value rounds up
        start, step = _whole(policy.minimum), _whole(policy.step)
        steps = -(-(_whole(asked) - start) // step)
        return start + steps * step
    for value in policy.values:
        if asked <= value:
            return value
    return asked


def _violates(amount: Number, capacity: Capacity) -> bool:
    policy = capacity.policy
    if policy is None or (policy.default is not None and amount == policy.default):
        return False
    if policy.has_range:
        if policy.maximum is not None and amount > policy.maximum:
            return True
        if policy.step is not None and policy.minimum is not None:
            return (_whole(amount) - _whole(policy.minimum)) % _whole(policy.step) != 0
        return False
    return bool(policy.values) and amount not in policy.values


def _whole(value: Number) -> int:
    return -(-value.numerator // value.denominator)
