"""The vocabulary of config fields: what is decoded, what is refused, and in which words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from component.config_values import KINDS, EveryType, Ipam, Route, objects, parameter_lists, values
from railmate_api import config, fields
from railmate_api.attributes import CONFIG_API_VERSION

#: How long a machine takes to make a value says nothing about the value.
BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
HEAD = {"apiVersion": CONFIG_API_VERSION, "kind": "EveryType"}


def said(**given_fields: Any) -> list[str]:
    return [str(problem) for problem in config.problems(HEAD | given_fields, KINDS)]


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("name", "a b", "name must be 1 to 15 letters"),
        ("mac", "00:11:22:33:44:5", "mac must be 17 hex digits in pairs"),
        ("mac", "00:11:22:33:44:5G", "mac must be 17 hex digits in pairs"),
        ("mtu", 67, "mtu must be a whole number from 68 to 65535 bytes, not 67"),
        ("mtu", 65536, "mtu must be"),
        ("mtu", 9000.0, "mtu must be a whole number"),
        ("mtu", "9000", "mtu must be a whole number"),
        ("mtu", True, "mtu must be a whole number"),
        ("mtu", None, "mtu must be a whole number from 68 to 65535 bytes, not null"),
        ("trust", "true", 'trust must be true or false, not "true"'),
        ("trust", 1, "trust must be true or false"),
        ("link", "Auto", "link must be one of auto, enable, disable"),
        ("link", [], "link must be one of auto, enable, disable, not an empty list"),
        ("gateway", "10.0.0.256", "gateway must be an IPv4 or IPv6 address"),
        ("gateway", "fe80::1%eth0", "gateway must be"),
        ("gateway", "::ffff:10.0.0.1", "gateway must be"),
        ("addresses", ["10.0.0.1"], "addresses[0] must be an IPv4 or IPv6 address with a prefix length"),
        ("addresses", ["10.0.0.1/8", "10.0.0.1/33"], "addresses[1] must be"),
        ("addresses", ["10.0.0.1/255.0.0.0"], "addresses[0] must be"),
        ("addresses", ["10.0.0.1/08"], "addresses[0] must be"),
        ("addresses", "10.0.0.1/8", "addresses must be a list of 0 to 64 entries"),
        ("addresses", {}, "addresses must be a list of 0 to 64 entries, not an object"),
        ("addresses", ["10.0.0.1/8"] * 65, "addresses must be a list of 0 to 64 entries, not a list of 65"),
        ("routes", [{"to": "10.0.0.0/8"}, {"to": 5}], "routes[1].to must be"),
        ("routes", [{"via": "10.0.0.1"}], "routes[0].to is missing"),
        ("routes", [{"to": "10.0.0.0/8", "gw": 1}], 'routes[0] has no field "gw"; it has: metric, to, via'),
        ("routes", [None], "routes[0] must be an object, not null"),
        ("matrix", [[1], [2, 10]], "matrix[1][1] must be a whole number from 0 to 9"),
        ("ipam", {"type": "dhcp"}, "ipam.type must be one of host-local, whereabouts"),
        ("ipam", {"type": "host-local", "ranges": []}, "ipam.ranges must be a list of 1 to 4 entries"),
        ("plugin", {"subnet": "x"}, "plugin.type is missing"),
        ("offset", 5, "offset needs mtu beside it"),
        ("selectors", [{}], "selectors[0] must have at least one of source, low, high"),
        ("selectors", [{"low": 5, "high": 4}], "selectors[0].low must not be above high"),
        (
            "features",
            {"A": True},
            "features has a name that is none: each must be 1 to 12 lower-case letters",
        ),
        ("features", {"a": 1}, "features.a must be true or false, not 1"),
        ("features", {f"a{n}": True for n in range(7)}, "features must be an object of 0 to 6 fields"),
        ("places", {"a": ["::1", "x"]}, "places.a[1] must be an IPv4 or IPv6 address"),
    ],
)
def test_wrong_value_is_named_with_what_is_allowed(name: str, value: Any, rule: str) -> None:
    (problem,) = said(**{name: value})
    assert problem.startswith(rule)


def test_numbers_past_64_bits_are_no_whole_numbers() -> None:
    assert [problem.split(",")[0] for problem in said(offset=2**63, mtu=9000)] == [
        "offset must be a whole number from -9007199254740992 to 9007199254740992"
    ]


def test_an_open_object_keeps_what_is_not_ours() -> None:
    built = fields.build(EveryType, {"plugin": {"type": "host-local", "ranges": [[{"subnet": "x"}]]}})
    assert built.plugin == {"type": "host-local", "ranges": [[{"subnet": "x"}]]}


def test_rules_are_judged_again_after_a_merge() -> None:
    merged = fields.merge(EveryType(mtu=100), EveryType(offset=200))
    assert [str(one) for one in fields.rule_problems(EveryType, fields.said(merged))] == [
        "offset must not be above mtu"
    ]


def test_all_that_is_wrong_is_told_at_once() -> None:
    found = said(mtu=1, trust=2, routes=[{}], nothing=3)
    assert [text.split()[0] for text in found] == ["parameters", "mtu", "trust", "routes[0].to"]


def test_many_unknown_fields_are_one_problem() -> None:
    assert len(said(**{f"f{n}": 1 for n in range(30)})) == 1


def test_good_values_become_dataclasses_and_tuples() -> None:
    given_fields = {
        "name": "rail0",
        "mac": "02:00:00:00:00:01",
        "mtu": 9000,
        "addresses": ["10.0.0.5/24", "2001:db8::5/64"],
        "routes": [{"to": "10.1.0.0/16", "via": "10.0.0.1"}],
        "matrix": [[1, 2], []],
        "ipam": {"type": "host-local"},
    }
    assert said(**given_fields) == []
    assert fields.build(EveryType, given_fields) == EveryType(
        name="rail0",
        mac="02:00:00:00:00:01",
        mtu=9000,
        addresses=("10.0.0.5/24", "2001:db8::5/64"),
        routes=(Route("10.1.0.0/16", "10.0.0.1"),),
        matrix=((1, 2), ()),
        ipam=Ipam("host-local"),
    )


def test_merge_takes_each_field_from_the_last_that_has_it_also_zero_and_false() -> None:
    base = EveryType(mtu=9000, trust=True, offset=5, routes=(Route("10.0.0.0/8"),))
    over = EveryType(trust=False, offset=0, routes=())
    assert fields.merge(base, over) == EveryType(mtu=9000, trust=False, offset=0, routes=())
    assert base.trust is True


@BUSY
@given(parameter_lists())
def test_whatever_is_sent_is_built_or_told_in_single_lines(parameters: list[dict[str, Any]]) -> None:
    for one in parameters:
        found = config.problems(one, KINDS)
        if found:
            assert all("\n" not in str(problem) and len(str(problem)) < 500 for problem in found)
        else:
            kind = KINDS[one["kind"]]
            body = {k: v for k, v in one.items() if k not in config.TYPE_FIELDS}
            assert isinstance(fields.build(kind, body), kind)


@BUSY
@given(st.one_of(values(fields.Group(EveryType)), objects(EveryType)))
def test_kind_and_version_come_first(value: Any) -> None:
    (problem,) = config.problems(value | {"kind": "Other"} if isinstance(value, dict) else value, KINDS)
    assert problem.at in ("", *config.TYPE_FIELDS)


@pytest.mark.parametrize("kind", [*config.KINDS.values(), *KINDS.values()])
def test_every_field_can_be_left_out_or_is_required(kind: type[Any]) -> None:
    for field in dataclasses.fields(kind):
        one = fields.settings(kind)[field.name]
        assert one.required == (field.default is dataclasses.MISSING)
        assert one.required or one.unset
