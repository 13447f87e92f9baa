"""Config that users write into claims, templates and DeviceClasses (opaque parameters).

``apiVersion: railmate.dev/v1alpha1``, decoded strictly: an unknown kind, an unknown field or a value
of the wrong type is an error that names the field. Class config comes first, claim config wins.

The dataclasses here are the table of all fields. Decoder, JSON schema and the admission policy are derived from
it; after a change run ``python -m railmate_api.schema`` and ``python -m railmate_api.admission``
(their files are named there, and a unit test tells when they are out of date).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from railmate_api import fields
from railmate_api.attributes import CONFIG_API_VERSION, CONFIG_KIND_RDMA_VF
from railmate_api.fields import Problem, Text, setting

#: Fields of every config, whatever its kind.
TYPE_FIELDS: Final = ("apiVersion", "kind")

#: Kernel include/uapi/linux/if.h: IFNAMSIZ is 16 with the closing NUL. dev_valid_name() refuses "/", ":", white space,
#: "." and ".."; the pattern is a narrower, safe set. lo and eth0 are taken in every pod.
INTERFACE_NAME: Final = Text(
    pattern="[A-Za-z0-9_][A-Za-z0-9_.-]*",
    words="letters, digits, '_', '-', '.', the first a letter, digit or '_'",
    maximum=15,
    reserved=("eth0", "lo"),
)


class ConfigError(ValueError):
    """The config cannot be used; the message names each wrong field and says what is allowed."""


@dataclass(frozen=True, slots=True)
class RdmaVfConfig:
    """How a virtual function appears in the pod. Applies to rdma-vf devices and to the NIC half of pairs."""

    interface_name: str | None = setting(
        "interfaceName",
        INTERFACE_NAME,
        "The netdev's name in the pod. With several virtual functions in one request the name gets the function's "
        "ordinal within the request appended from the second one on: rail, rail1.",
        unset="net1, net2 and so on, in the order of the claim's requests",
    )


#: Kind -> the class that declares its fields.
KINDS: Final[Mapping[str, type[Any]]] = {CONFIG_KIND_RDMA_VF: RdmaVfConfig}


def decode(parameters: Mapping[str, Any]) -> RdmaVfConfig:
    """Decode one opaque ``parameters`` object.

    Raises ConfigError for anything that is not exactly a known kind with known fields.
    """
    found = problems(parameters)
    if found:
        raise ConfigError("; ".join(str(problem) for problem in found))
    return fields.build(RdmaVfConfig, parameters)


def problems(parameters: Any, kinds: Mapping[str, type[Any]] = KINDS) -> list[Problem]:
    """All that is wrong with one opaque ``parameters`` object."""
    if not isinstance(parameters, Mapping):
        return [Problem("", "must be an object", fields.shown(parameters))]
    for name, allowed in zip(TYPE_FIELDS, ((CONFIG_API_VERSION,), tuple(kinds)), strict=True):
        value = parameters.get(name)
        if not isinstance(value, str) or value not in allowed:
            seen = fields.shown(value) if name in parameters else "left out"
            return [Problem(name, f"must be {' or '.join(allowed)}", seen)]
    return fields.object_problems(kinds[parameters["kind"]], parameters, "", TYPE_FIELDS)


def merge(configs: Sequence[RdmaVfConfig]) -> RdmaVfConfig:
    """One config from several, given in the order of ``status.allocation.devices.config``."""
    merged = RdmaVfConfig()
    for config in configs:
        merged = fields.merge(merged, config)
    return merged
