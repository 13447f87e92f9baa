"""The ValidatingAdmissionPolicy that checks the config when a claim, template or class is made.

Its CEL expressions say about each field what ``railmate_api.fields`` says in Python, and in the same words.
Opaque parameters have no schema in the API server, so they are ``dyn`` in CEL: types are tested at run time.

``python -m railmate_api.admission > driver/chart/files/config-admission.yaml`` writes the file anew. The chart adds
name and binding, and puts its driver name where this text has ``railmate.dev`` beside ``.driver``.

Limits (k8s.io/apiserver pkg/apis/cel): 1,000,000 cost units an expression, 10,000,000 a policy, 5 KiB a message;
past them the object is refused. Each field is a variable of its own, so that each has a limit of its own. Only
functions of Kubernetes 1.32 and older are used; ``cel.bind`` is not among those that a policy has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from railmate_api import config, fields
from railmate_api.attributes import CONFIG_API_VERSION, DRIVER_NAME
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
)
from railmate_api.rules import AtLeastOne, AtMost, Excludes, Needs, Rule, rules

#: resource.k8s.io resource -> where its config list is, as CEL selects it.
PLACES: Mapping[str, tuple[str, ...]] = {
    "resourceclaims": ("spec", "devices", "config"),
    "resourceclaimtemplates": ("spec", "spec", "devices", "config"),
    "deviceclasses": ("spec", "config"),
}
#: Characters of a message that are shown; the API server allows 5 KiB.
_MESSAGE = 3000
_OURS = f'c.?opaque.?driver.orValue("") == "{DRIVER_NAME}"'
_AT = 'variables.place + "[" + string(i) + "].opaque.parameters"'
_NEXT_STEP = ". Correct it (see the JSON schema in api/schema of railmate); a node would refuse to start a pod with it."
_FALLBACK = (
    "a config for this driver breaks more rules than a message holds" + _NEXT_STEP + " "
    "Check its apiVersion, kind and field names first."
)


def policy_spec(kinds: Mapping[str, type[Any]] = config.KINDS) -> dict[str, Any]:
    """``spec`` of the ValidatingAdmissionPolicy."""
    variables = {
        "place": _by_resource({name: quoted(".".join(path)) for name, path in PLACES.items()}),
        "configs": _by_resource({name: _select("object", path) for name, path in PLACES.items()}),
        "type": _type_problems(kinds),
    }
    checks = ["type"]
    for kind, of in kinds.items():
        variables[kind] = _of_kind(kind)
        for name, expression in _field_problems(kind, of):
            variables[name] = expression
            checks.append(name)
    variables["problems"] = _joined([f"variables.{name}" for name in checks])
    cut = f'variables.problems.substring(0, {_MESSAGE}) + "..."'
    return {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "matchPolicy": "Equivalent",
            "resourceRules": [
                # A claim's and a template's spec never change; without UPDATE an old one can still lose its finalizer.
                _rule(["CREATE"], ["resourceclaims", "resourceclaimtemplates"]),
                _rule(["CREATE", "UPDATE"], ["deviceclasses"]),
            ],
        },
        "matchConditions": [
            {
                "name": "has-our-config",
                "expression": f"({_configs_of('object')}).exists(c, {_OURS})",
            },
            # A class from before this policy stays editable in all other respects.
            {
                "name": "config-changed",
                "expression": f"oldObject == null || {_parameters_of('object')} != {_parameters_of('oldObject')}",
            },
        ],
        "variables": [{"name": name, "expression": text} for name, text in variables.items()],
        "validations": [
            {
                "expression": 'variables.problems == ""',
                "messageExpression": f"(size(variables.problems) > {_MESSAGE} ? {cut} : variables.problems) + "
                + quoted(_NEXT_STEP),
                "message": _FALLBACK,
                "reason": "Invalid",
            }
        ],
    }


def problem_text(type_: Type, value: str, at: str, depth: int = 0) -> str:
    """CEL of a string that says all that is wrong with ``value``, "" if nothing is.

    ``value`` and ``at`` (the field's path, a string) are CEL themselves.
    """
    wrong = f"{at} + {quoted(' ' + type_.expected)}"
    i, x = f"i{depth}", f"x{depth}"
    match type_:
        case Items():
            size = f"size({value}) < {type_.minimum} || size({value}) > {type_.maximum}"
            each = problem_text(type_.item, x, f'{at} + "[" + string({i}) + "]"', depth + 1)
            every = f"{value}.transformList({i}, {x}, {each}){_KEEP}"
            return f"(type({value}) != list || {size} ? {wrong} : {every})"
        case Group():
            inside = _joined(
                text for _, text in _members(type_.of, value, at, None if type_.open else (), depth)
            )
            return f"(type({value}) != map ? {wrong} : {inside})"
        case Table():
            k = f"k{depth}"
            each = problem_text(type_.value, f"{value}[{k}]", f'{at} + "." + {k}', depth + 1)
            name = f"{at} + {quoted(' ' + type_.expected_names)}"
            every = f"{value}.map({k}, {_refused(type_.name, k)} ? {name} : {each}){_KEEP}"
            return f"(type({value}) != map || size({value}) > {type_.maximum} ? {wrong} : {every})"
        case _:
            return f'({_refused(type_, value)} ? {wrong} : "")'


def quoted(text: str) -> str:
    """A CEL string literal."""
    return json.dumps(text)


_KEEP = '.filter(m, m != "").join("; ")'


def _refused(type_: Text | Integer | Boolean | Choice | Address | Network, value: str) -> str:
    match type_:
        case Text():
            tests = [
                f"type({value}) != string",
                f"size({value}) < {type_.minimum}",
                f"size({value}) > {type_.maximum}",
                f"!{value}.matches({quoted(f'^(?:{type_.pattern})$')})",
            ]
            return " || ".join([*tests, *([f"{value} in {_list(type_.reserved)}"] if type_.reserved else [])])
        case Integer():
            return f"type({value}) != int || {value} < {type_.minimum} || {value} > {type_.maximum}"
        case Boolean():
            return f"type({value}) != bool"
        case Choice():
            return f"!({value} in {_list(type_.values)})"
        case Address():
            return f"type({value}) != string || !isIP({value})"
        case Network():
            return f"type({value}) != string || !isCIDR({value})"


def _members(
    of: type[Any], value: str, at: str, beside: tuple[str, ...] | None, depth: int
) -> Iterable[tuple[str, str]]:
    """Name and problem text of each member of an object and of each rule between them; first, under "unknown", of
    the fields that are neither declared nor ``beside``. None: any field may be there."""
    if beside is not None:
        yield "unknown", _unknown(of, value, at, beside)
    for one in fields.settings(of).values():
        path = f"{at} + {quoted('.' + one.name)}"
        absent = f"{path} + {quoted(' is missing')}" if one.required else '""'
        text = problem_text(one.type, f"{value}[{quoted(one.name)}]", path, depth)
        yield one.name, f"({quoted(one.name)} in {value} ? {text} : {absent})"
    for number, rule in enumerate(rules(of)):
        said = f".{rule.at} {rule.expected}" if rule.at else f" {rule.expected}"
        yield f"rule{number}", f'({_broken(rule, value)} ? {at} + {quoted(said)} : "")'


def _broken(rule: Rule, value: str) -> str:
    match rule:
        case Needs():
            return f"{quoted(rule.name)} in {value} && !({quoted(rule.other)} in {value})"
        case AtMost():
            low, high = (f"{value}[{quoted(name)}]" for name in (rule.name, rule.other))
            there = f"{quoted(rule.name)} in {value} && {quoted(rule.other)} in {value}"
            return f"{there} && type({low}) == int && type({high}) == int && {low} > {high}"
        case AtLeastOne():
            return " && ".join(f"!({quoted(name)} in {value})" for name in rule.names)
        case Excludes():
            any_other = " || ".join(f"{quoted(name)} in {value}" for name in rule.others)
            return f"{quoted(rule.name)} in {value} && ({any_other})"


def _unknown(of: type[Any], value: str, at: str, beside: tuple[str, ...]) -> str:
    known = (*beside, *(one.name for one in fields.settings(of).values()))
    # As fields.shown: the name in quotes, cut where it is long.
    cut = f'size(k) > {fields.SHOWN} ? k.substring(0, {fields.SHOWN}) + "..." : k'
    before, after = fields.unknown_rule("\n", known).split("\n")
    naming = f"{at} + {quoted(' ' + before)} + strings.quote({cut}) + {quoted(after)}"
    named = f"{value}.map(k, k in {_list(known)} ? {quoted('')} : {naming}){_KEEP}"
    many = f"size({value}) > {len(known) + fields.UNKNOWN_NAMED}"
    return f"({many} ? {at} + {quoted(' ' + fields.too_many_rule(known))} : {named})"


def _type_problems(kinds: Mapping[str, type[Any]]) -> str:
    """Configs that are no object, or of a version or kind that there is not."""
    p = "c.opaque.parameters"
    version = f"{_AT} + {quoted(f'.apiVersion must be {CONFIG_API_VERSION}')}"
    kind = f"{_AT} + {quoted('.kind must be ' + ' or '.join(kinds))}"
    text = (
        f'type({p}) != map ? {_AT} + " must be an object" : '
        f'!({p}.?apiVersion.orValue("") in {_list([CONFIG_API_VERSION])}) ? {version} : '
        f'!({p}.?kind.orValue("") in {_list(kinds)}) ? {kind} : ""'
    )
    return f"variables.configs.transformList(i, c, {_OURS}, {text}){_KEEP}"


def _of_kind(kind: str) -> str:
    """The parameters of one kind; null in the places of all other configs, so that positions stay."""
    p = "c.opaque.parameters"
    ours = f'{_OURS} && type({p}) == map && {p}.?apiVersion.orValue("") == {quoted(CONFIG_API_VERSION)}'
    return f'variables.configs.map(c, {ours} && {p}.?kind.orValue("") == {quoted(kind)} ? {p} : dyn(null))'


def _field_problems(kind: str, of: type[Any]) -> Iterable[tuple[str, str]]:
    for name, text in _members(of, "p", _AT, config.TYPE_FIELDS, 0):
        expression = f"variables.{kind}.transformList(i, p, p != null, {text}){_KEEP}"
        yield f"{kind}_{name}", expression


def _joined(texts: Iterable[str]) -> str:
    return f"[{', '.join(texts)}]{_KEEP}"


def _select(root: str, path: tuple[str, ...]) -> str:
    first, *rest = path
    return f"{root}.{first}" + "".join(f".?{part}" for part in rest) + ".orValue([])"


def _by_resource(texts: Mapping[str, str]) -> str:
    """CEL that picks by the kind of object under admission."""
    *others, (_, last) = texts.items()
    tests = [f"request.resource.resource == {quoted(name)} ? {text}" for name, text in others]
    return " : ".join([*tests, last])


def _configs_of(root: str) -> str:
    return _by_resource({name: _select(root, path) for name, path in PLACES.items()})


def _parameters_of(root: str) -> str:
    """Only these: two entries of the list with equal parts are not equal in the API server's CEL (1.37)."""
    return f"({_configs_of(root)}).filter(c, {_OURS}).map(c, c.opaque.parameters)"


def _list(texts: Iterable[str]) -> str:
    return json.dumps(list(texts))


def _rule(operations: list[str], resources: list[str]) -> dict[str, Any]:
    return {
        "apiGroups": ["resource.k8s.io"],
        "apiVersions": ["v1"],
        "operations": operations,
        "resources": resources,
    }


def text() -> str:
    """The file in the chart."""
    head = "# Made by `python -m railmate_api.admission` from api/railmate_api/config.py; do not edit.\n"
    return head + yaml.safe_dump(policy_spec(), sort_keys=False, width=sys.maxsize)


if __name__ == "__main__":
    print(text(), end="")
