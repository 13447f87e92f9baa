"""Nonsense, made from something sensible and a seed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from railmate_api.attributes import CONFIG_API_VERSION, CONFIG_KIND_RDMA_VF
from railmate_api.config import KINDS
from railmate_api.fields import Choice, Group, Items, Table, Type, problems
from railmate_api.fields import settings as declared
from railmate_api.rules import Excludes, rules
from unit.claims.claims_world import uid

#: What a field holds that nobody thought of.
ODD: Sequence[Any] = (
    None, True, False, 0, -1, 1.5, 2**70, float("inf"), "", " ", ".", "..", "../x", "a/b", "*", "\0", "ü" * 300,
    "x" * 5000, [], {}, [[]], [None], {"": None}, {"a": {"b": []}}, ["a", 1, {}], "0000:07:00.0", uid(2),
)  # fmt: skip


#: Something for each type of a config's fields.
_SAMPLES: Sequence[Any] = (
    True,
    1,
    1500,
    "aa",
    "02:00:00:00:00:01",
    "10.0.0.1",
    "10.0.0.0/8",
    "802.1Q",
    "stable",
)

#: What is no record of anything; the second and third are nested too deep for a parser.
NO_JSON = (b"", b"[" * 100_000, b'{"a":' * 20_000, b"\xff\xfe", b"null", b"1e999", b"NaN", b"\xef\xbb\xbf{}")


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Gives the test ``seed``, so often."""
    settled = settings(
        max_examples=examples,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    return lambda test: settled(given(seed=st.integers(0, 2**63))(test))


def whole_config(kind: str = CONFIG_KIND_RDMA_VF, without: Collection[str] = ()) -> dict[str, Any]:
    """A config with every field there is but those that exclude others, so that a new one is fuzzed without anybody's
    doing."""
    exclusive = {rule.name for rule in rules(KINDS[kind]) if isinstance(rule, Excludes)}
    fields = _sample(Group(KINDS[kind]))
    return {"apiVersion": CONFIG_API_VERSION, "kind": kind} | {
        name: value for name, value in fields.items() if name not in exclusive | set(without)
    }


def _sample(type_: Type) -> Any:
    """A value that is allowed, with all fields where it has some."""
    match type_:
        case Group():
            return {one.name: _sample(one.type) for one in declared(type_.of).values()}
        case Items():
            return [_sample(type_.item)]
        case Table():
            return {_sample(type_.name): _sample(type_.value)}
        case Choice():
            return type_.values[0]
    return next(value for value in _SAMPLES if not problems(type_, value))


def mutated(value: Any, chance: random.Random) -> Any:
    """The value with one to three things in it replaced, removed, doubled or put elsewhere."""
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        holders = [one for one in _walk(value) if one]
        if not holders:
            return chance.choice(ODD)
        holder = chance.choice(holders)
        key: Any = chance.choice(list(holder)) if isinstance(holder, dict) else chance.randrange(len(holder))
        action = chance.randrange(4)
        if action == 0:
            del holder[key]
        elif action == 1:
            holder[key] = [holder[key], copy.deepcopy(holder[key])]
        elif action == 2:
            holder[key] = copy.deepcopy(chance.choice(holders))
        else:
            holder[key] = copy.deepcopy(chance.choice(ODD))
    return value


def _walk(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)):
        yield value
        for part in value.values() if isinstance(value, dict) else value:
            yield from _walk(part)


def damaged(data: bytes, chance: random.Random) -> bytes:
    """What a disk or a wire makes of bytes."""
    action, place = chance.randrange(7), chance.randrange(len(data) + 1)
    if action == 0:
        return data[:place]
    if action == 1:
        return data[:place] + bytes(chance.randrange(256) for _ in range(8)) + data[place + 8 :]
    if action == 2:
        return data[:place] + data[chance.randrange(len(data) + 1) :]
    if action == 3:
        return b"\0" * len(data)
    if action == 4:
        return data + data
    if action == 5:
        return bytes(chance.randrange(256) for _ in range(chance.randrange(64)))
    return chance.choice(NO_JSON)
