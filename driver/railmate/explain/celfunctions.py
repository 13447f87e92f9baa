"""The functions that Kubernetes adds to CEL, as far as selectors of devices use them.

Sources: k8s.io/apiserver/pkg/cel/library (quantity, semverlib, regex, lists), cel-go/ext (sets). The engine picks an
overload of a member by the value's type at run time, so each is declared for every concrete type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from railmate.errors import UsageError
from railmate.explain.quantity import Number, parse_quantity

_SEMVER = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
    r"(?:-((?:0|[1-9]\d*|\d*[A-Za-z-][0-9A-Za-z-]*)(?:\.(?:0|[1-9]\d*|\d*[A-Za-z-][0-9A-Za-z-]*))*))?"
    r"(?:\+[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*)?"
)
Boxed = Mapping[str, Any]


def declarations(cel: Any) -> list[Any]:
    """All of them, for NewEnv of the engine's module."""
    kinds = cel.Type
    box = kinds.Map(kinds.STRING, kinds.STRING)
    types = {"box": box, "map": kinds.MAP, "str": kinds.STRING, "int": kinds.INT, "bool": kinds.BOOL}
    types |= {"list": kinds.LIST, "dyn": kinds.DYN, "double": kinds.DOUBLE}
    by_name: dict[str, list[Any]] = {}
    for name, member, parameters, answer, function in _table():
        overload = cel.Overload(
            f"railmate_{name}_{'_'.join(parameters)}",
            return_type=types[answer],
            parameters=[types[one] for one in parameters],
            is_member=member,
            impl=function,
        )
        by_name.setdefault(name, []).append(overload)
    return [cel.FunctionDecl(name, overloads) for name, overloads in by_name.items()]


def _table() -> Iterator[tuple[str, bool, tuple[str, ...], str, Callable[..., Any]]]:
    """Name, whether it is a member, parameters (the receiver first), result, implementation."""
    yield "quantity", False, ("str",), "box", lambda text: _quantity(parse_quantity(text))
    yield "isQuantity", False, ("str",), "bool", _is_quantity
    yield "semver", False, ("str",), "box", _semver
    yield "semver", False, ("str", "bool"), "box", _semver
    yield "isSemver", False, ("str",), "bool", _is_semver
    yield "isSemver", False, ("str", "bool"), "bool", _is_semver
    # quantities and versions are both maps here, and share what both have
    yield "compareTo", True, ("map", "map"), "int", _compare
    yield "isGreaterThan", True, ("map", "map"), "bool", lambda a, b: _compare(a, b) > 0
    yield "isLessThan", True, ("map", "map"), "bool", lambda a, b: _compare(a, b) < 0
    yield "major", True, ("map",), "int", lambda version: _version_key(version)[0]
    yield "minor", True, ("map",), "int", lambda version: _version_key(version)[1]
    yield "patch", True, ("map",), "int", lambda version: _version_key(version)[2]
    yield "sign", True, ("map",), "int", lambda a: (_number(a) > 0) - (_number(a) < 0)
    yield "isInteger", True, ("map",), "bool", lambda a: Fraction(_number(a)).denominator == 1
    yield "asInteger", True, ("map",), "int", _as_integer
    yield "asApproximateFloat", True, ("map",), "double", lambda a: float(_number(a))
    for name, sign in (("add", 1), ("sub", -1)):
        yield name, True, ("map", "map"), "box", _sum(sign)
        yield name, True, ("map", "int"), "box", _sum(sign)
    yield "find", True, ("str", "str"), "str", lambda text, pattern: _first(re.search(pattern, text))
    for kind in ("str", "int", "bool", "map"):
        for other in ("str", "int", "bool", "map"):
            yield "includes", True, (kind, other), "bool", _same if kind == other else lambda a, b: False
    for other in ("str", "int", "bool", "map"):
        yield "includes", True, ("list", other), "bool", lambda held, one: any(_same(x, one) for x in held)
    yield "sets.contains", False, ("list", "list"), "bool", lambda a, b: all(x in a for x in b)
    yield "sets.intersects", False, ("list", "list"), "bool", lambda a, b: any(x in a for x in b)
    yield "sets.equivalent", False, ("list", "list"), "bool", _equivalent


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _equivalent(a: list[Any], b: list[Any]) -> bool:
    return all(x in a for x in b) and all(x in b for x in a)


def _first(found: re.Match[str] | None) -> str:
    return found[0] if found else ""


def _quantity(value: Number) -> dict[str, str]:
    return {"quantity": str(value)}


def _is_quantity(text: str) -> bool:
    try:
        parse_quantity(text)
    except UsageError:
        return False
    return True


def _number(box: Boxed) -> Number:
    if "quantity" not in box:
        raise ValueError("not a quantity")
    return Fraction(str(box["quantity"]))


def _as_integer(box: Boxed) -> int:
    value = Fraction(_number(box))
    if value.denominator != 1:
        raise ValueError("cannot convert value to integer")
    return value.numerator


def _sum(sign: int) -> Callable[[Boxed, Any], dict[str, str]]:
    def add(a: Boxed, b: Any) -> dict[str, str]:
        return _quantity(_number(a) + sign * (b if isinstance(b, int) else _number(b)))

    return add


def _normal(text: str, normalize: bool) -> str:
    if not normalize:
        return text
    core, rest = re.match(r"v?([^-+]*)(.*)", text, re.S).groups()  # type: ignore[union-attr]
    numbers = [number.lstrip("0") or "0" if number.isdigit() else number for number in core.split(".")]
    return ".".join(numbers + ["0"] * (3 - len(numbers))) + rest


def _is_semver(text: str, normalize: bool = False) -> bool:
    return _SEMVER.fullmatch(_normal(text, normalize)) is not None


def _semver(text: str, normalize: bool = False) -> dict[str, str]:
    if not _is_semver(text, normalize):
        raise ValueError(f"{text!r} is no semantic version")
    return {"version": _normal(text, normalize)}


def _version_key(box: Boxed) -> tuple[int, int, int, tuple[Any, ...]]:
    found = _SEMVER.fullmatch(str(box.get("version", "")))
    if found is None:
        raise ValueError("not a semantic version")
    pre = found[4]
    # without a pre-release is above any; numbers are below words, fewer fields below more (semver.org, section 11)
    order = (
        (1,) if pre is None else (0, *((0, int(f), "") if f.isdigit() else (1, 0, f) for f in pre.split(".")))
    )
    return int(found[1]), int(found[2]), int(found[3]), order


def _compare(a: Boxed, b: Boxed) -> int:
    if "version" in a or "version" in b:
        x, y = _version_key(a), _version_key(b)
        return (x > y) - (x < y)
    m, n = _number(a), _number(b)
    return (m > n) - (m < n)
