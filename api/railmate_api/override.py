"""The override file: what an administrator knows of a machine that sysfs does not tell, or tells wrongly.

``apiVersion: railmate.dev/v1alpha1, kind: TopologyOverride``, decoded strictly. What it says wins over
sysfs; what it leaves out stays as sysfs has it. Each type's fields carry their meaning, which
``json_schema`` hands on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from railmate_api.attributes import CONFIG_API_VERSION

OVERRIDE_KIND = "TopologyOverride"
ROLES = ("rail", "management", "storage", "other")

_ADDRESS = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[01][0-9a-fA-F]\.[0-7]"
_MODEL = r"[0-9a-fA-F]{4}:[0-9a-fA-F]{4}"
# A switch's id becomes the pcieSwitch attribute and, with "switch-" before it, a counter set's name: a DNS label.
_SWITCH_ID = rf"(?:{_ADDRESS}|[a-z0-9](?:[a-z0-9-]{{0,54}}[a-z0-9])?)"
_NAME_PATTERN = r"[A-Za-z0-9_.*?\[\]!-]{1,64}"
_MAX_NUMBER = 65535

Value = TypeVar("Value")
Place = tuple[str | int, ...]


class OverrideError(ValueError):
    """An override that cannot be used. ``place`` leads to the field: ``("switches", 2, "devices", 0)``."""

    def __init__(self, place: Place, problem: str) -> None:
        self.place = place
        super().__init__(f"{place_text(place)}: {problem}" if place else problem)


def place_text(place: Place) -> str:
    """``switches[2].devices[0]``."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@dataclass(frozen=True, slots=True)
class OverrideSwitch:
    """A PCIe switch and the devices below it."""

    id: str = field(
        metadata={
            "description": "The switch's name, published as pcieSwitch: the address of its upstream port, or a "
            "name of lower-case letters, digits and - (56 at most). Unique in the file."
        }
    )
    devices: tuple[str, ...] = field(
        default=(),
        metadata={
            "description": "Addresses (dddd:bb:dd.f) of the GPUs and NICs directly below. Function 0 of a card stands "
            "for all its functions, a physical function for its VFs."
        },
    )
    parent: str | None = field(
        default=None,
        metadata={"description": "The id of the switch above, where switches are cascaded."},
    )


@dataclass(frozen=True, slots=True)
class RoleRule:
    """Which NICs have a role. Exactly one of ``address``, ``model`` and ``name`` is set."""

    role: str = field(metadata={"description": "What the NICs are for.", "enum": ROLES})
    address: str | None = field(
        default=None, metadata={"description": "The NIC's address.", "pattern": _ADDRESS}
    )
    model: str | None = field(
        default=None,
        metadata={"description": "PCI vendor and device, as in 15b3:a2dc.", "pattern": _MODEL},
    )
    name: str | None = field(
        default=None,
        metadata={
            "description": "A pattern (*, ?, [abc]) for the name of a netdev or RDMA device of the physical function.",
            "pattern": _NAME_PATTERN,
        },
    )


@dataclass(frozen=True, slots=True)
class OverridePair:
    """GPUs and the NICs that are theirs."""

    gpus: tuple[str, ...] = field(
        metadata={"description": "Addresses of one GPU, or of several that share the NICs."}
    )
    nics: tuple[str, ...] = field(metadata={"description": "Addresses of physical functions."})


@dataclass(frozen=True, slots=True)
class TopologyOverride:
    switches: tuple[OverrideSwitch, ...] = field(
        default=(),
        metadata={
            "description": "PCIe switches. A device that is named here has these switches and no other."
        },
    )
    numa_nodes: Mapping[str, int] = field(
        default_factory=dict,
        metadata={"description": "NUMA node by address; -1: unknown."},
    )
    roles: tuple[RoleRule, ...] = field(
        default=(),
        metadata={
            "description": "Roles of NICs; the first rule that fits counts. Only a rule by address makes a rail of an "
            "NVSwitch management function."
        },
    )
    rails: Mapping[str, int] = field(
        default_factory=dict,
        metadata={"description": "Rail ordinal by address; a GPU has its first NIC's unless it is named."},
    )
    pairs: tuple[OverridePair, ...] = field(
        default=(),
        metadata={"description": "Pairs that are set; what is not named is matched as usual."},
    )


# names in files that differ from the attributes' here
_FILE_NAMES = {"numa_nodes": "numaNodes"}


def decode_override(document: Any) -> TopologyOverride:
    """Decodes a document of the override's kind. Raises OverrideError, which leads to the field."""
    held = _object(document, (), {"apiVersion", "kind", *map(_file_name, fields(TopologyOverride))})
    if held.get("apiVersion") != CONFIG_API_VERSION:
        raise OverrideError(
            ("apiVersion",), f"is {held.get('apiVersion')!r}, this version reads {CONFIG_API_VERSION!r}"
        )
    if held.get("kind") != OVERRIDE_KIND:
        raise OverrideError(("kind",), f"is {held.get('kind')!r}, this version reads {OVERRIDE_KIND!r}")
    override = TopologyOverride(
        switches=_list(held, "switches", (), _switch),
        numa_nodes=_numbers(held, "numaNodes", -1),
        roles=_list(held, "roles", (), _role),
        rails=_numbers(held, "rails", 0),
        pairs=_list(held, "pairs", (), _pair),
    )
    check_override(override)
    return override


def parse_role(text: str) -> RoleRule:
    """A rule as a command line has it: ``0000:82:00.0=storage``, ``15b3:a2dc=other``, ``enp5*=management``.

    Raises OverrideError.
    """
    what, equals, role = text.rpartition("=")
    if not equals or not what:
        raise OverrideError(
            (), f"{text!r} is no role rule; write ADDRESS=ROLE, VENDOR:DEVICE=ROLE or NAME=ROLE"
        )
    if role not in ROLES:
        raise OverrideError((), f"{text!r}: the role must be one of {', '.join(ROLES)}")
    if re.fullmatch(_ADDRESS, what):
        return RoleRule(role, address=what.lower())
    if re.fullmatch(_MODEL, what):
        return RoleRule(role, model=what.lower())
    if re.fullmatch(_NAME_PATTERN, what):
        return RoleRule(role, name=what)
    raise OverrideError(
        (), f"{text!r}: {what!r} is no PCI address (dddd:bb:dd.f), no vendor:device and no name pattern"
    )


def check_override(override: TopologyOverride) -> None:
    """What the parts must be among themselves. Raises OverrideError."""
    parents: dict[str, str | None] = {}
    labels: dict[str, str] = {}
    for index, switch in enumerate(override.switches):
        label = re.sub("[:.]", "-", switch.id)  # as it is part of a counter set's name
        if label in labels:
            problem = "is used twice" if switch.id in parents else f"is too like {labels[label]!r}"
            raise OverrideError(("switches", index, "id"), f"{switch.id!r} {problem}; ids are unique")
        parents[switch.id], labels[label] = switch.parent, switch.id
    for index, switch in enumerate(override.switches):
        seen, above = {switch.id}, switch.parent
        while above is not None:
            if above not in parents:
                raise OverrideError(("switches", index, "parent"), f"{above!r} is no switch of this file")
            if above in seen:
                raise OverrideError(
                    ("switches", index, "parent"), f"{above!r} is above and below {switch.id!r}"
                )
            seen.add(above)
            above = parents[above]
    _once(
        [
            (("switches", i, "devices", j), a)
            for i, s in enumerate(override.switches)
            for j, a in enumerate(s.devices)
        ]
    )
    for key in ("gpus", "nics"):
        named = [
            (("pairs", i, key, j), a)
            for i, p in enumerate(override.pairs)
            for j, a in enumerate(getattr(p, key))
        ]
        _once(named)


def _once(named: Sequence[tuple[Place, str]]) -> None:
    first: dict[str, Place] = {}
    for place, address in named:
        if address in first:
            raise OverrideError(place, f"{address} is named already in {place_text(first[address])}")
        first[address] = place


def _file_name(one: Any) -> str:
    return _FILE_NAMES.get(one.name, one.name)


def _object(value: Any, place: Place, allowed: set[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise OverrideError(place, f"must be an object, not {_kind(value)}")
    for name in value:
        if name not in allowed:
            raise OverrideError(
                (*place, str(name)), f"is no known field; known are {', '.join(sorted(allowed))}"
            )
    return value


def _list(
    held: Mapping[str, Any], name: str, place: Place, item: Callable[[Any, Place], Value]
) -> tuple[Value, ...]:
    value = held.get(name)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise OverrideError((*place, name), f"must be a list, not {_kind(value)}")
    return tuple(item(one, (*place, name, index)) for index, one in enumerate(value))


def _numbers(held: Mapping[str, Any], name: str, least: int) -> dict[str, int]:
    value = held.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise OverrideError((name,), f"must be an object of addresses, not {_kind(value)}")
    result = {}
    for address, number in value.items():
        place = (name, str(address))
        if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= _MAX_NUMBER:
            raise OverrideError(place, f"must be a whole number from {least} to {_MAX_NUMBER}, is {number!r}")
        result[_address(address, place)] = number
    return result


def _switch(value: Any, place: Place) -> OverrideSwitch:
    held = _object(value, place, {"id", "devices", "parent"})
    parent = held.get("parent")
    return OverrideSwitch(
        id=_switch_id(held.get("id"), (*place, "id")),
        devices=_list(held, "devices", place, _address),
        parent=None if parent is None else _switch_id(parent, (*place, "parent")),
    )


def _switch_id(value: Any, place: Place) -> str:
    text = _matching(
        value, place, _SWITCH_ID, "an address or a name of lower-case letters, digits and - (56 at most)"
    )
    return text.lower() if re.fullmatch(_ADDRESS, text) else text


def _role(value: Any, place: Place) -> RoleRule:
    held = _object(value, place, {"role", "address", "model", "name"})
    role = held.get("role")
    if role not in ROLES:
        raise OverrideError((*place, "role"), f"must be one of {', '.join(ROLES)}, is {role!r}")
    given = [key for key in ("address", "model", "name") if held.get(key) is not None]
    if len(given) != 1:
        raise OverrideError(place, "needs exactly one of address, model and name")
    if given == ["address"]:
        return RoleRule(role, address=_address(held["address"], (*place, "address")))
    if given == ["model"]:
        text = _matching(
            held["model"], (*place, "model"), _MODEL, "a PCI vendor and device, such as 15b3:a2dc"
        )
        return RoleRule(role, model=text.lower())
    return RoleRule(
        role, name=_matching(held["name"], (*place, "name"), _NAME_PATTERN, "a pattern for device names")
    )


def _pair(value: Any, place: Place) -> OverridePair:
    held = _object(value, place, {"gpus", "nics"})
    pair = OverridePair(_list(held, "gpus", place, _address), _list(held, "nics", place, _address))
    if not pair.gpus or not pair.nics:
        raise OverrideError(place, "needs at least one address in gpus and one in nics")
    return pair


def _address(value: Any, place: Place) -> str:
    return _matching(value, place, _ADDRESS, "a PCI address (dddd:bb:dd.f, such as 0000:07:00.0)").lower()


def _matching(value: Any, place: Place, pattern: str, what: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise OverrideError(place, f"must be {what}, is {value!r}")
    return value


def _kind(value: Any) -> str:
    return {"NoneType": "empty", "str": "text", "int": "a number", "dict": "an object", "list": "a list"}.get(
        type(value).__name__, type(value).__name__
    )


def json_schema() -> dict[str, Any]:
    """The JSON schema of the override file (draft 2020-12)."""
    address = {"type": "string", "pattern": f"^{_ADDRESS}$"}
    addresses = {"type": "array", "items": address}
    switch_id = {"type": "string", "pattern": f"^{_SWITCH_ID}$"}

    def numbers(least: int) -> dict[str, Any]:
        number = {"type": "integer", "minimum": least, "maximum": _MAX_NUMBER}
        return {"type": "object", "propertyNames": address, "additionalProperties": number}

    def described(kind: Any, required: list[str], **shapes: Mapping[str, Any]) -> dict[str, Any]:
        properties = {
            _file_name(one): {**shapes[one.name], "description": one.metadata["description"]}
            for one in fields(kind)
        }
        return {
            "type": "object",
            "additionalProperties": False,
            "required": required,
            "properties": properties,
        }

    switch = described(OverrideSwitch, ["id"], id=switch_id, devices=addresses, parent=switch_id)
    role = described(
        RoleRule,
        ["role"],
        role={"enum": list(ROLES)},
        address=address,
        model={"type": "string", "pattern": f"^{_MODEL}$"},
        name={"type": "string", "pattern": f"^{_NAME_PATTERN}$"},
    )
    role["oneOf"] = [{"required": [key]} for key in ("address", "model", "name")]
    some = {**addresses, "minItems": 1}
    pair = described(OverridePair, ["gpus", "nics"], gpus=some, nics=some)
    schema = described(
        TopologyOverride,
        ["apiVersion", "kind"],
        switches={"type": "array", "items": switch},
        numa_nodes=numbers(-1),
        roles={"type": "array", "items": role},
        rails=numbers(0),
        pairs={"type": "array", "items": pair},
    )
    schema["properties"] = {
        "apiVersion": {"const": CONFIG_API_VERSION},
        "kind": {"const": OVERRIDE_KIND},
        **schema["properties"],
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": OVERRIDE_KIND, **schema}


if __name__ == "__main__":  # python -m railmate_api.override > api/schema/topologyoverride.v1alpha1.json
    print(json.dumps(json_schema(), indent=2))
