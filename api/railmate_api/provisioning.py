"""The provisioning file: how many virtual functions the NICs of a node are to have, and of which kind.

``apiVersion: railmate.dev/v1alpha1, kind: VfProvisioning``, decoded strictly by the same table of fields as the
config in claims (``railmate_api.fields``). ``python -m railmate_api.provisioning`` prints the JSON schema, which is
kept in ``api/schema/vfprovisioning.v1alpha1.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from railmate_api import fields, schema
from railmate_api.attributes import CONFIG_API_VERSION
from railmate_api.fields import Choice, Group, Integer, Items, Problem, Text, setting
from railmate_api.override import ROLES
from railmate_api.rules import AtLeastOne, Rule

PROVISIONING_KIND: Final = "VfProvisioning"

_HEX = "[0-9a-fA-F]"
_ADDRESS = Text(
    pattern=f"{_HEX}{{4,8}}:{_HEX}{{2}}:[01]{_HEX}[.][0-7]",
    words="characters of a PCI address, such as 0000:0c:00.0",
    minimum=12,
    maximum=16,
)
_MODEL = Text(pattern=f"{_HEX}{{4}}:{_HEX}{{4}}", words="characters, such as 15b3:1021", minimum=9, maximum=9)
_VENDOR = Text(pattern=f"{_HEX}{{4}}", words="hexadecimal digits, such as 15b3", minimum=4, maximum=4)
_NAME = Text(
    pattern=r"[A-Za-z0-9_.*?\[\]!-]*",
    words="characters of a name or a pattern (*, ?, [abc])",
    maximum=64,
)

#: sriov_totalvfs is a 16-bit field (PCI Express Base Specification, SR-IOV capability), VF indices of netlink are
#: the kernel's int; no NIC on the market has more than this.
MOST_VFS: Final = 4095


class ProvisioningError(ValueError):
    """The file cannot be used; the message names each wrong field and says what is allowed."""


@dataclass(frozen=True, slots=True)
class PfSelector:
    """Which physical functions a rule is for: those for which everything that is given holds."""

    RULES: ClassVar[tuple[Rule, ...]] = (AtLeastOne(("address", "name", "vendor", "model", "role")),)

    address: str | None = setting(
        "address", _ADDRESS, "The physical function's PCI address.", unset="any address"
    )
    name: str | None = setting(
        "name",
        _NAME,
        "A pattern for the name of the physical function's netdev or RDMA device.",
        unset="any name",
    )
    vendor: str | None = setting("vendor", _VENDOR, "The PCI vendor.", unset="any vendor")
    model: str | None = setting("model", _MODEL, "PCI vendor and device.", unset="any model")
    role: str | None = setting(
        "role",
        Choice(ROLES),
        "The NIC's role as `railmate topology` shows it.",
        unset="any role but management, which only an address or the role itself selects",
    )


@dataclass(frozen=True, slots=True)
class PfRule:
    """What the selected physical functions get."""

    select: PfSelector = setting(
        "select", Group(PfSelector), "Which physical functions; at least one field.", required=True
    )
    vfs: int = setting(
        "vfs",
        Integer(0, MOST_VFS, "virtual functions"),
        "How many virtual functions each of them gets; 0 leaves none.",
        required=True,
    )
    mtu: int | None = setting(
        "mtu",
        Integer(68, 65535, "bytes"),
        "The MTU of the physical function and of its virtual functions. It waits for those in use.",
        unset="as the kernel has it",
    )
    eswitch: str | None = setting(
        "eswitch",
        Choice(("legacy", "switchdev")),
        "The mode of the NIC's embedded switch. It is changed only while there are no virtual functions; "
        "a NIC without devlink is legacy.",
        unset="as the NIC has it",
    )


@dataclass(frozen=True, slots=True)
class VfProvisioning:
    """The first rule that fits a physical function counts; one that none fits is left as it is."""

    rules: tuple[PfRule, ...] = setting(
        "rules", Items(Group(PfRule), maximum=64, minimum=1), "What which NICs get.", required=True
    )


def decode_provisioning(document: Any) -> VfProvisioning:
    """Raises ProvisioningError for anything that is not exactly a VfProvisioning with known fields."""
    found = problems(document)
    if found:
        raise ProvisioningError("; ".join(str(problem) for problem in found))
    return fields.build(VfProvisioning, document)


def problems(document: Any) -> list[Problem]:
    """All that is wrong with a file's content."""
    if not isinstance(document, Mapping):
        return [Problem("the document", "must be an object", fields.shown(document))]
    for name, wanted in (("apiVersion", CONFIG_API_VERSION), ("kind", PROVISIONING_KIND)):
        if document.get(name) != wanted:
            seen = fields.shown(document[name]) if name in document else "left out"
            return [Problem(name, f"must be {wanted}", seen)]
    return fields.object_problems(VfProvisioning, document, "", ("apiVersion", "kind"))


def json_schema() -> dict[str, Any]:
    """The JSON schema of the file (draft 2020-12)."""
    about: dict[str, Any] = {
        "apiVersion": {"const": CONFIG_API_VERSION, "description": "Version of the file."},
        "kind": {"const": PROVISIONING_KIND, "description": "What the file is."},
    }
    body = schema.object_schema(VfProvisioning, about)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": PROVISIONING_KIND, **body}


if __name__ == "__main__":  # python -m railmate_api.provisioning > api/schema/vfprovisioning.v1alpha1.json
    print(json.dumps(json_schema(), indent=2))
