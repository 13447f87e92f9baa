"""Rules between the fields of one object, declared beside the fields as ``RULES`` of the dataclass.

As with the fields, one declaration serves the decoder, the admission policy and, where JSON schema has words for it,
the schema. A rule looks at what is written, so it also judges what is made of several configs (``broken_by``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard


@dataclass(frozen=True, slots=True)
class _OfField:
    """A rule whose breach is told at the field ``name``."""

    name: str

    @property
    def at(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Needs(_OfField):
    """``name`` says something only beside ``other``."""

    other: str

    @property
    def expected(self) -> str:
        return f"needs {self.other} beside it"

    def broken_by(self, value: Mapping[str, Any]) -> bool:
        return self.name in value and self.other not in value


@dataclass(frozen=True, slots=True)
class AtMost(_OfField):
    """The whole number ``name`` must not be above ``other``. Not in the JSON schema, which cannot compare."""

    other: str

    @property
    def expected(self) -> str:
        return f"must not be above {self.other}"

    def broken_by(self, value: Mapping[str, Any]) -> bool:
        low, high = value.get(self.name), value.get(self.other)
        return _is_int64(low) and _is_int64(high) and low > high


@dataclass(frozen=True, slots=True)
class AtLeastOne:
    """An object that has none of ``names`` says nothing."""

    names: tuple[str, ...]

    @property
    def at(self) -> str:
        return ""

    @property
    def expected(self) -> str:
        return f"must have at least one of {', '.join(self.names)}"

    def broken_by(self, value: Mapping[str, Any]) -> bool:
        return not any(name in value for name in self.names)


@dataclass(frozen=True, slots=True)
class Excludes(_OfField):
    """``name`` and any of ``others`` contradict each other."""

    others: tuple[str, ...]

    @property
    def expected(self) -> str:
        return f"cannot be beside {', '.join(self.others)}"

    def broken_by(self, value: Mapping[str, Any]) -> bool:
        return self.name in value and any(name in value for name in self.others)


Rule = Needs | AtMost | AtLeastOne | Excludes


def rules(of: type[Any]) -> tuple[Rule, ...]:
    """The rules of a dataclass of settings."""
    declared: tuple[Rule, ...] = getattr(of, "RULES", ())
    return declared


def _is_int64(value: Any) -> TypeGuard[int]:
    """What the API server reads as a whole number; larger ones are floats to it, and wrong anyway."""
    return type(value) is int and -(2**63) <= value < 2**63
