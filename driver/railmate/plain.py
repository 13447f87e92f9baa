"""Dataclasses from decoded JSON, by their annotations: for records that the driver itself has written.

Fields that a class does not know are ignored and missing ones take their defaults, so that a record of another
version can be read; a value of another type is an error.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache, partial
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Reader = Callable[[Any], Any]


def read(cls: type[T], value: Any) -> T:
    """Raises TypeError or ValueError that names the field."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{cls.__name__} is no object")
    readers: dict[str, Reader] = _readers(cls)  # type: ignore[arg-type]
    return cls(**{name: one(value[name]) for name, one in readers.items() if name in value})


@cache
def _readers(cls: Any) -> dict[str, Reader]:
    hints = get_type_hints(cls)
    return {
        one.name: _reader(hints[one.name], f"{cls.__name__}.{one.name}") for one in dataclasses.fields(cls)
    }


def _reader(hint: Any, where: str) -> Reader:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin in (types.UnionType, Union):
        (other,) = [one for one in arguments if one is not type(None)]
        inner = _reader(other, where)
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        return partial(_tuple, _reader(arguments[0], where), where)
    if origin is Mapping:
        return partial(_mapping, _reader(arguments[1], where), where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return partial(read, hint)
    if issubclass(hint, Enum):
        return hint
    return partial(_plain, hint, where)


def _tuple(inner: Reader, where: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{where} is no list")
    return tuple(inner(one) for one in value)


def _mapping(inner: Reader, where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{where} is no object")
    return {str(name): inner(one) for name, one in value.items()}


def _plain(wanted: type, where: str, value: Any) -> Any:
    if type(value) is not wanted:
        raise TypeError(f"{where} is no {wanted.__name__}")
    return value
