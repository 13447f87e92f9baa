"""Config values, right and nearly right, made from the declarations of their fields (hypothesis)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis import strategies as st

from railmate_api.attributes import CONFIG_API_VERSION
from railmate_api.config import INTERFACE_NAME
from railmate_api.fields import (
    Address,
    Boolean,
    Choice,
    Group,
    Integer,
    Items,
    Network,
    Table,
    Text,
    Type,
    problems,
    setting,
    settings,
)
from railmate_api.rules import AtLeastOne, AtMost, Excludes, Needs, Rule

_NAME = Text("[a-z][a-z0-9-]*", "lower-case letters, digits, '-'", 12)


@dataclass(frozen=True)
class Route:
    """A route."""

    to: str = setting("to", Network(), "Destination.", required=True)
    via: str | None = setting("via", Address(), "Gateway.", unset="on the link")
    metric: int | None = setting("metric", Integer(0, 2**32 - 1), "Priority.", unset="0")


@dataclass(frozen=True)
class Ipam:
    """Address management."""

    type: str = setting("type", Choice(("host-local", "whereabouts")), "Plugin.", required=True)
    ranges: tuple[str, ...] | None = setting("ranges", Items(Network(), 4, 1), "Ranges.", unset="none")


@dataclass(frozen=True)
class Plugin:
    """Somebody else's object, of which only one field is known."""

    type: str = setting("type", Choice(("host-local", "whereabouts")), "Plugin.", required=True)


@dataclass(frozen=True)
class Selector:
    """An object that must say something, and the same of two numbers."""

    RULES: ClassVar[tuple[Rule, ...]] = (AtLeastOne(("source", "low", "high")), AtMost("low", "high"))

    source: str | None = setting("source", Network(), "Source.", unset="any")
    low: int | None = setting("low", Integer(0, 9), "From.", unset="0")
    high: int | None = setting("high", Integer(0, 9), "To.", unset="9")


@dataclass(frozen=True)
class EveryType:
    """A config with a field of each type, types within types, and rules between the fields."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Needs("offset", "mtu"),
        AtMost("offset", "mtu"),
        Excludes("alone", ("name", "trust", "link")),
    )

    name: str | None = setting("name", INTERFACE_NAME, "A name.", unset="none")
    mac: str | None = setting(
        "mac", Text("(?:[0-9a-f]{2}:){5}[0-9a-f]{2}", "hex digits in pairs", 17, 17), "MAC.", unset="none"
    )
    mtu: int | None = setting("mtu", Integer(68, 65535, "bytes"), "MTU.", unset="the PF's")
    offset: int | None = setting("offset", Integer(-(2**53), 2**53), "Any.", unset="0")
    trust: bool | None = setting("trust", Boolean(), "Trust.", unset="false")
    link: str | None = setting("link", Choice(("auto", "enable", "disable")), "State.", unset="auto")
    alone: bool | None = setting("alone", Boolean(), "Nothing else.", unset="false")
    gateway: str | None = setting("gateway", Address(), "Gateway.", unset="none")
    addresses: tuple[str, ...] | None = setting("addresses", Items(Network(), 64), "Addresses.", unset="none")
    routes: tuple[Route, ...] | None = setting("routes", Items(Group(Route), 64), "Routes.", unset="none")
    matrix: Any = setting("matrix", Items(Items(Integer(0, 9), 8), 8), "Nested lists.", unset="none")
    ipam: Ipam | None = setting("ipam", Group(Ipam), "IPAM.", unset="none")
    plugin: Any = setting("plugin", Group(Plugin, open=True), "Passed on.", unset="none")
    selectors: Any = setting("selectors", Items(Group(Selector), 4), "Choices.", unset="none")
    features: Any = setting("features", Table(_NAME, Boolean(), 6), "By name.", unset="none")
    places: Any = setting("places", Table(_NAME, Items(Address(), 2), 3), "Lists by name.", unset="none")


@dataclass(frozen=True)
class NothingToSay:
    """A second kind, without fields."""


KINDS: Mapping[str, type[Any]] = {"EveryType": EveryType, "NothingToSay": NothingToSay}

_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_JUNK: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        [None, True, False, "", [], {}, [None], [1], {"to": 1}, 10**25, -(2**63) - 1, 2**63, "true", -0.0]
    ),
    st.integers(-(10**25), 10**25),
    _FLOATS,
    st.text(max_size=4),
)
_ODD_ADDRESSES = st.sampled_from(
    ["", "1.2.3", "1.2.3.04", "1.2.3.4 ", "1.2.3.256", "::ffff:1.2.3.4", "::ffff:102:304", "::1.2.3.4", "fe80::1%eth0",
     "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8", "1::2::3", "12345::", ":::", "2001:DB8::A", "١.2.3.4", "0x1.2.3.4"]
)  # fmt: skip
_ODD_BITS = st.sampled_from(["", "00", "024", "+8", " 8", "8 ", "255.0.0.0", "-1", "1e1", "٨"])


def mostly(usual: st.SearchStrategy[Any], rare: st.SearchStrategy[Any], times: int) -> st.SearchStrategy[Any]:
    """The usual one so many times as often as the rare one (one_of drops repeated ones)."""
    return st.sampled_from([usual] * times + [rare]).flatmap(lambda chosen: chosen)


def values(type_: Type) -> st.SearchStrategy[Any]:
    """Mostly right ones, those next to right, and some of any other type."""
    return mostly(_near(type_), _JUNK, 9)


def addresses() -> st.SearchStrategy[str]:
    odd = _ODD_ADDRESSES | st.from_regex("[0-9a-f:.]{0,12}", fullmatch=True)
    return mostly(st.ip_addresses().map(str), odd, 4)


def _near(type_: Type) -> st.SearchStrategy[Any]:
    match type_:
        case Text():
            shaped = st.from_regex(type_.pattern, fullmatch=True)
            loose = st.text("aZ09_.-/ :\n%é", max_size=type_.maximum + 2)
            return mostly(shaped, st.one_of(loose, *map(st.just, type_.reserved)), 3)
        case Integer():
            edges = st.sampled_from([type_.minimum - 1, type_.minimum, type_.maximum, type_.maximum + 1])
            inside = st.integers(type_.minimum, type_.maximum)
            return mostly(inside, edges | st.integers(-(2**40), 2**40).map(float), 3)
        case Boolean():
            return st.booleans()
        case Choice():
            return st.sampled_from([*type_.values * 3, type_.values[0].upper(), ""])
        case Address():
            return addresses()
        case Network():
            bits = mostly(st.integers(0, 32), st.integers(33, 130) | _ODD_BITS, 4)
            return st.builds(lambda a, b: f"{a}/{b}", addresses(), bits)
        case Items():
            return st.lists(values(type_.item), max_size=min(type_.maximum + 1, 3))
        case Group():
            return objects(type_.of)
        case Table():
            names = mostly(
                _near(type_.name).filter(lambda name: isinstance(name, str)), st.text(max_size=4), 9
            )
            return st.dictionaries(names, values(type_.value), max_size=min(type_.maximum + 1, 3))


def edges(type_: Type) -> list[Any]:
    """Values on both sides of every limit of a type."""
    match type_:
        case Text():
            sizes = {max(type_.minimum - 1, 0), type_.minimum, type_.maximum, type_.maximum + 1}
            return [
                *("a" * size for size in sorted(sizes)),
                *type_.reserved,
                "net1\n",
                "-a",
                "02:00:00:00:00:01",
                1,
            ]
        case Integer():
            low, high = type_.minimum, type_.maximum
            return [low - 1, low, high, high + 1, float(low), True, str(low), None]
        case Boolean():
            return [True, False, 0, "true", None]
        case Choice():
            return [*type_.values, type_.values[0].upper(), "", 1, None]
        case Address():
            return ["10.0.0.1", "::", "10.0.0.1/8", "::ffff:1.2.3.4", "fe80::1%eth0", "1.2.3.04", "", 1]
        case Network():
            return [
                "10.0.0.1/0",
                "10.0.0.1/32",
                "10.0.0.1/33",
                "::/128",
                "::/129",
                "::/08",
                "10.0.0.1",
                "/8",
                1,
            ]
        case Items():
            inner = edges(type_.item)
            sizes = {max(type_.minimum - 1, 0), type_.minimum, type_.maximum, type_.maximum + 1}
            good = next(value for value in inner if not problems(type_.item, value))
            return [*([good] * size for size in sorted(sizes)), *([good, value] for value in inner), {}, "ab"]
        case Table():
            good = next(value for value in edges(type_.value) if not problems(type_.value, value))
            sizes = (0, type_.maximum, type_.maximum + 1)
            tables = [{f"n{n}": good for n in range(size)} for size in sizes]
            return [
                *tables,
                *({name: good, "other": good} for name in edges(type_.name) if isinstance(name, str)),
                *({"one": value} for value in edges(type_.value)),
                [],
                "a",
            ]
        case Group():
            declared = settings(type_.of).values()
            needed = {one.name: edges(one.type)[0] for one in declared if one.required}
            each = [needed | {one.name: value} for one in declared for value in edges(one.type)]
            return [
                needed,
                {},
                {**needed, "odd": 1},
                {**needed, **{f"f{n}": 1 for n in range(30)}},
                *each,
                [],
                1,
            ]


def objects(of: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any of the fields, now and then a field that there is not."""
    declared = {one.name: one for one in settings(of).values()}
    required = [name for name, one in declared.items() if one.required]
    many = st.just({f"f{n}": None for n in range(30)})
    extra = mostly(st.just({}), st.dictionaries(st.text(max_size=50), st.none(), max_size=2) | many, 9)

    def with_fields(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({name: values(declared[name].type) for name in names})

    some = st.lists(st.sampled_from(list(declared)), max_size=3, unique=True) if declared else st.just([])
    chosen = mostly(some.map(lambda names: list(dict.fromkeys([*names, *required]))), some, 4)
    return st.builds(lambda a, b: {**b, **a}, chosen.flatmap(with_fields), extra)


def parameter_lists(kinds: Mapping[str, type[Any]] = KINDS) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Config objects for one claim."""

    def one(kind: str) -> st.SearchStrategy[dict[str, Any]]:
        head = st.just({"apiVersion": CONFIG_API_VERSION, "kind": kind})
        odd = st.fixed_dictionaries({}, optional={"apiVersion": _JUNK, "kind": _JUNK | st.just(kind.lower())})
        return st.builds(lambda a, b: {**b, **a}, mostly(head, odd, 9), objects(kinds[kind]))

    single = mostly(one(next(iter(kinds))), st.sampled_from(list(kinds)).flatmap(one), 3)
    return st.lists(single, min_size=1, max_size=5).filter(_fits)


def _fits(parameters: list[dict[str, Any]]) -> bool:
    """Within the API server's 10 KiB a config, with room for its own spelling of characters."""
    return all(len(repr(one)) < 3000 for one in parameters)
