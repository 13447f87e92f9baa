"""The JSON schema of the config, for editors and manifest checkers.

``python -m railmate_api.schema > api/schema/config.v1alpha1.json`` writes the file anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from railmate_api import config, fields
from railmate_api.attributes import CONFIG_API_VERSION
from railmate_api.fields import (
    Address,
    Boolean,
    Choice,
    Group,
    Integer,
    Items,
    Network,
    Setting,
    Table,
    Text,
    Type,
)
from railmate_api.rules import AtLeastOne, Excludes, Needs, rules

#: The schema checks the rough form; whether it is a real prefix is for admission and the driver.
_NETWORK = "^[0-9A-Fa-f.:]+/[0-9]{1,3}$"


def schema(kinds: Mapping[str, type[Any]] = config.KINDS) -> dict[str, Any]:
    """JSON schema (draft 2020-12) of one opaque ``parameters`` object."""
    definitions: dict[str, Any] = {}
    for kind, of in kinds.items():
        about = {
            "apiVersion": {"const": CONFIG_API_VERSION, "description": "Version of the config."},
            "kind": {"const": kind, "description": "What is configured."},
        }
        definitions[kind] = object_schema(of, about)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"railmate config, {CONFIG_API_VERSION}",
        "description": "Opaque parameters for railmate in a ResourceClaim, ResourceClaimTemplate or DeviceClass.",
        "oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds],
        "$defs": definitions,
    }


def description(one: Setting) -> str:
    """Meaning, range with unit, and what happens without the field."""
    rule = one.type.expected
    unset = "Required." if one.required else f"Left out: {one.unset}."
    return f"{one.meaning} {rule[0].upper()}{rule[1:]}. {unset}"


def type_schema(type_: Type) -> dict[str, Any]:
    match type_:
        case Text():
            body: dict[str, Any] = {
                "type": "string",
                "minLength": type_.minimum,
                "maxLength": type_.maximum,
                "pattern": f"^(?:{type_.pattern})$",
            }
            return body | ({"not": {"enum": list(type_.reserved)}} if type_.reserved else {})
        case Integer():
            return {"type": "integer", "minimum": type_.minimum, "maximum": type_.maximum}
        case Boolean():
            return {"type": "boolean"}
        case Choice():
            return {"type": "string", "enum": list(type_.values)}
        case Address():
            return {"type": "string", "anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]}
        case Network():
            return {"type": "string", "pattern": _NETWORK}
        case Items():
            size = {"minItems": type_.minimum, "maxItems": type_.maximum}
            return {"type": "array", "items": type_schema(type_.item), **size}
        case Group():
            return object_schema(type_.of, {}) | ({"additionalProperties": True} if type_.open else {})
        case Table():
            return {
                "type": "object",
                "propertyNames": type_schema(type_.name),
                "additionalProperties": type_schema(type_.value),
                "maxProperties": type_.maximum,
            }


def object_schema(of: type[Any], about: dict[str, Any]) -> dict[str, Any]:
    declared = fields.settings(of).values()
    sentences = [" ".join((of.__doc__ or "").split()), *rule_sentences(of)]
    return {
        "type": "object",
        "description": " ".join(sentences),
        "additionalProperties": False,
        "required": [*about, *(one.name for one in declared if one.required)],
        "properties": about | {one.name: _property(one) for one in declared},
        **_rules(of),
    }


def _property(one: Setting) -> dict[str, Any]:
    body = type_schema(one.type)
    about = (description(one), body.pop("description", ""))  # an object has a text of its own
    return {"description": " ".join(text for text in about if text), **body}


def rule_sentences(of: type[Any]) -> list[str]:
    """The rules between the fields, for people; some of them have no form in JSON schema."""
    return [f"{one.at or 'It'} {one.expected}." for one in rules(of)]


def _rules(of: type[Any]) -> dict[str, Any]:
    needed: dict[str, list[str]] = {}
    choices: list[dict[str, Any]] = []
    for one in rules(of):
        match one:
            case Needs():
                needed.setdefault(one.name, []).append(one.other)
            case AtLeastOne():
                choices.append({"anyOf": [{"required": [name]} for name in one.names]})
            case Excludes():
                choices += [{"not": {"required": [one.name, other]}} for other in one.others]
    return ({"dependentRequired": needed} if needed else {}) | ({"allOf": choices} if choices else {})


def text() -> str:
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    print(text(), end="")
