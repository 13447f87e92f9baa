"""The vocabulary in which the config's fields are declared, and the strict decoder that follows from it.

A config object is a frozen dataclass whose fields are made by ``setting``; rules between its fields are its ``RULES``
(``railmate_api.rules``). That declaration is the one source of the decoder (here), of the JSON schema
(``railmate_api.schema``) and of the check at admission (``railmate_api.admission``), so the three cannot disagree.
Rules that all of them follow:

- Only what is declared is allowed; ``null`` is a wrong type, not an absent field.
- A number is an integer if it is written as one: ``9000.0`` is none (the API server's JSON reader agrees).
- Lengths count Unicode code points. Patterns match the whole text and keep to what Python, RE2 (the API server) and
  ECMA 262 (JSON schema) read alike: classes, groups, repetition; no look-around, no ``\\d``, ``\\w`` or ``\\s``.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from railmate_api.rules import rules

_METADATA = "railmate.dev/setting"
#: Unknown fields of one object that are named one by one; past that only their number is told.
UNKNOWN_NAMED = 8
#: Characters of a user's text that a message repeats.
SHOWN = 40

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Text:
    """A string of ``minimum`` to ``maximum`` characters. ``words`` says what the pattern allows."""

    pattern: str
    words: str
    maximum: int
    minimum: int = 1
    reserved: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        other = f", other than {', '.join(self.reserved)}" if self.reserved else ""
        length = f"{self.minimum} to {self.maximum}" if self.minimum != self.maximum else f"{self.maximum}"
        return f"must be {length} {self.words}{other}"


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number; both ends are allowed and lie within 64 bits. ``unit`` as it reads after a number."""

    minimum: int
    maximum: int
    unit: str = ""

    @property
    def expected(self) -> str:
        return f"must be a whole number from {self.minimum} to {self.maximum} {self.unit}".rstrip()


@dataclass(frozen=True, slots=True)
class Boolean:
    """True or false."""

    expected: str = "must be true or false"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    values: tuple[str, ...]

    @property
    def expected(self) -> str:
        return f"must be one of {', '.join(self.values)}"


@dataclass(frozen=True, slots=True)
class Address:
    """An IPv4 or IPv6 address without zone; no IPv4-mapped IPv6 (Kubernetes' CEL library refuses it too)."""

    expected: str = "must be an IPv4 or IPv6 address"


@dataclass(frozen=True, slots=True)
class Network:
    """An address with its prefix length, as in ``10.0.0.5/24``; bits past the prefix may be set."""

    expected: str = "must be an IPv4 or IPv6 address with a prefix length, like 10.0.0.5/24"


@dataclass(frozen=True, slots=True)
class Items:
    """A list of ``minimum`` to ``maximum`` values of one type."""

    item: Type
    maximum: int
    minimum: int = 0

    @property
    def expected(self) -> str:
        return f"must be a list of {self.minimum} to {self.maximum} entries"


@dataclass(frozen=True, slots=True)
class Group:
    """An object with the settings of a dataclass. One that is ``open`` is somebody else's: its further fields are
    passed on as they are, so it stays a mapping."""

    of: type[Any]
    open: bool = False
    expected: str = "must be an object"


@dataclass(frozen=True, slots=True)
class Table:
    """An object whose names the user chooses, with values of one type."""

    name: Text
    value: Type
    maximum: int

    @property
    def expected(self) -> str:
        return f"must be an object of 0 to {self.maximum} fields"

    @property
    def expected_names(self) -> str:
        """What is said of a wrong name."""
        return f"has a name that is none: each {self.name.expected}"


Type = Text | Integer | Boolean | Choice | Address | Network | Items | Group | Table


@dataclass(frozen=True, slots=True)
class Setting:
    """One declared field. ``unset``: what happens without it, a sentence; "" when it is required."""

    name: str
    type: Type
    meaning: str
    unset: str
    required: bool


def setting(name: str, type: Type, meaning: str, *, unset: str = "", required: bool = False) -> Any:
    """A dataclass field that is the config field ``name``; None when the user did not write it.

    ``meaning`` and ``unset`` are sentences for the documentation; the range is added from the type.
    """
    declared = Setting(name, type, meaning, unset, required)
    if required:
        return dataclasses.field(metadata={_METADATA: declared})
    return dataclasses.field(default=None, metadata={_METADATA: declared})


def settings(of: type[Any]) -> dict[str, Setting]:
    """Attribute name -> declaration, in the order of the class."""
    return {field.name: field.metadata[_METADATA] for field in dataclasses.fields(of)}


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a value: where (``routes[2].gateway``, "" for the whole), and what is allowed there."""

    at: str
    rule: str
    found: str = ""

    def __str__(self) -> str:
        text = f"{self.at or 'parameters'} {self.rule}"
        return f"{text}, not {self.found}" if self.found else text


def problems(type_: Type, value: Any, at: str = "") -> list[Problem]:
    """All that is wrong with a decoded JSON value; empty when it may be converted."""
    match type_:
        case Group() if isinstance(value, Mapping):
            return object_problems(type_.of, value, at, tuple(value) if type_.open else ())
        case Table() if isinstance(value, Mapping) and len(value) <= type_.maximum:
            return [p for name, one in value.items() for p in _table_problems(type_, name, one, at)]
        case Items() if isinstance(value, list) and type_.minimum <= len(value) <= type_.maximum:
            return [p for i, item in enumerate(value) for p in problems(type_.item, item, f"{at}[{i}]")]
        case Text() | Integer() | Boolean() | Choice() | Address() | Network() if _allowed(type_, value):
            return []
    return [Problem(at, type_.expected, shown(value))]


def object_problems(
    of: type[Any], value: Mapping[str, Any], at: str, beside: tuple[str, ...] = ()
) -> list[Problem]:
    """As `problems`, for an object that also has the fields ``beside``, which were checked elsewhere."""
    declared = {one.name: one for one in settings(of).values()}
    found = [Problem(at, rule) for rule in _unknown(value, (*beside, *declared))]
    for name, one in declared.items():
        path = f"{at}.{name}" if at else name
        if name in value:
            found += problems(one.type, value[name], path)
        elif one.required:
            found.append(Problem(path, "is missing"))
    return found + rule_problems(of, value, at)


def rule_problems(of: type[Any], value: Mapping[str, Any], at: str = "") -> list[Problem]:
    """The rules between the fields that ``value`` breaks."""
    broken = [one for one in rules(of) if one.broken_by(value)]
    return [Problem(".".join(part for part in (at, one.at) if part), one.expected) for one in broken]


def said(settings_object: Any) -> dict[str, Any]:
    """What a dataclass of settings says, by the names of the fields; for the rules between them."""
    declared = settings(type(settings_object)).items()
    given = {one.name: getattr(settings_object, attribute) for attribute, one in declared}
    return {name: value for name, value in given.items() if value is not None}


def convert(type_: Type, value: Any) -> Any:
    """The value as the program uses it: dataclasses for objects, tuples for lists. It must have no problems."""
    match type_:
        case Group():
            return dict(value) if type_.open else build(type_.of, value)
        case Table():
            return {name: convert(type_.value, one) for name, one in value.items()}
        case Items():
            return tuple(convert(type_.item, item) for item in value)
    return value


def build(of: type[T], value: Mapping[str, Any]) -> T:
    """The dataclass from an object without problems."""
    given = {a: convert(one.type, value[one.name]) for a, one in settings(of).items() if one.name in value}
    return of(**given)


def merge(base: T, over: T) -> T:
    """``over`` where it says something, ``base`` where it does not. A list or an object replaces as a whole."""
    said = {
        field.name: getattr(over, field.name)
        for field in dataclasses.fields(over)  # type: ignore[arg-type]
        if getattr(over, field.name) is not None
    }
    return dataclasses.replace(base, **said)  # type: ignore[type-var]


def unknown_rule(names: str, known: tuple[str, ...]) -> str:
    return f"has no field {names}; it has: {', '.join(sorted(known))}"


def too_many_rule(known: tuple[str, ...]) -> str:
    return f"has more than {UNKNOWN_NAMED} fields too many; it has: {', '.join(sorted(known))}"


def shown(value: Any) -> str:
    """A value in a message: one line, and no longer than a glance."""
    match value:
        case Mapping():
            return "an object"
        case list() | tuple():
            return f"a list of {len(value)}" if value else "an empty list"
        case bool() | None:
            return json.dumps(value)
        case int() | float() if abs(value) < 2**63:
            return str(value)
        case str():
            return json.dumps(value if len(value) <= SHOWN else value[:SHOWN] + "...")
    return f"this {type(value).__name__}"


def _table_problems(type_: Table, name: str, value: Any, at: str) -> list[Problem]:
    if not _allowed(type_.name, name):
        return [Problem(at, type_.expected_names, shown(name))]
    return problems(type_.value, value, f"{at}.{name}")


def _unknown(value: Mapping[str, Any], known: tuple[str, ...]) -> list[str]:
    if len(value) > len(known) + UNKNOWN_NAMED:
        return [too_many_rule(known)]
    return [unknown_rule(shown(name), known) for name in value if name not in known]


def _allowed(type_: Text | Integer | Boolean | Choice | Address | Network, value: Any) -> bool:
    match type_:
        case Boolean():
            return isinstance(value, bool)
        case Integer():
            return type(value) is int and type_.minimum <= value <= type_.maximum
    if not isinstance(value, str):
        return False
    match type_:
        case Text():
            fits = type_.minimum <= len(value) <= type_.maximum
            return fits and value not in type_.reserved and bool(re.fullmatch(type_.pattern, value))
        case Choice():
            return value in type_.values
        case Address():
            return _is_address(value)
    address, slash, bits = value.partition("/")
    # Go's netip.ParsePrefix: plain decimal digits without leading zeros.
    if not slash or not _is_address(address) or not re.fullmatch("0|[1-9][0-9]{0,2}", bits):
        return False
    return int(bits) <= ipaddress.ip_address(address).max_prefixlen


def _is_address(value: str) -> bool:
    """As Kubernetes' CEL function isIP: no zone, no IPv4-mapped IPv6, no leading zeros in IPv4."""
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        return False
    return "%" not in value and not (address.version == 6 and address.ipv4_mapped)
