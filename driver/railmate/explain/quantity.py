"""Kubernetes quantities as exact numbers (k8s.io/apimachinery/pkg/api/resource)."""

from __future__ import annotations

import re
from fractions import Fraction

from railmate.errors import UsageError

Number = int | Fraction

_FORM = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d+)|([KMGTPE]i|[numkMGTPE]?))")
_SUFFIX: dict[str, Fraction] = {
    "": Fraction(1),
    **{suffix: Fraction(1, 1000**power) for power, suffix in enumerate(("m", "u", "n"), 1)},
    **{suffix: Fraction(1000**power) for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), 1)},
    **{suffix: Fraction(1024**power) for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
}


def parse_quantity(text: object) -> Number:
    """``"80Gi"``, ``"1500m"`` or ``2`` as a number; an int wherever it is whole. Raises UsageError.

    As the API does, what is finer than a nano is rounded up.
    """
    found = _FORM.fullmatch(str(text))
    if found is None:
        raise UsageError(f"{text!r} is no quantity, like 2, 80Gi or 500m")
    digits, exponent, suffix = found.groups()
    value = Fraction(digits)
    value *= Fraction(10) ** int(exponent[1:]) if exponent else _SUFFIX[suffix]
    if value.denominator != 1:
        nanos = value * 10**9
        value = Fraction(-(-nanos.numerator // nanos.denominator), 10**9)
    return value.numerator if value.denominator == 1 else value
