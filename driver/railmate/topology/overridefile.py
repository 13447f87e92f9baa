"""Reading an override from a file: railmate's own YAML, or an NCCL topology XML."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from railmate.errors import UsageError
from railmate.strictyaml import parse, read
from railmate.topology.ncclfile import NcclFileError, parse_nccl_topology
from railmate_api.override import (
    OverrideError,
    RoleRule,
    TopologyOverride,
    decode_override,
    parse_role,
)

_NEXT = "Write YAML with the fields of kind TopologyOverride, or give an NCCL topology XML."


def load_override(path: Path) -> TopologyOverride:
    """What the file says. Raises UsageError, which names the file, the line, the cause and the next step."""
    text = read(path, "--override")
    if _is_xml(text):
        try:
            return parse_nccl_topology(text)
        except NcclFileError as error:
            raise UsageError(f"{path}: {error}. Correct the NCCL topology file.") from None
    return _own(path, text)


def _is_xml(text: bytes) -> bool:
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return text.decode("utf-16", "replace").lstrip().startswith("<")
    return text.lstrip(codecs.BOM_UTF8 + b" \t\r\n").startswith(b"<")


def with_roles(override: TopologyOverride | None, rules: Iterable[str]) -> TopologyOverride | None:
    """``override`` with the command line's role rules before its own. Raises UsageError."""
    parsed: list[RoleRule] = []
    for rule in rules:
        try:
            parsed.append(parse_role(rule))
        except OverrideError as error:
            raise UsageError(f"--role {error}.") from None
    if not parsed:
        return override
    override = override or TopologyOverride()
    return replace(override, roles=(*parsed, *override.roles))


def _own(path: Path, text: bytes) -> TopologyOverride:
    document = parse(path, text, _NEXT)
    try:
        return decode_override(document.document)
    except OverrideError as error:
        line = document.line_of(error.place)
        raise UsageError(
            f"{path}: line {line}: {error}. The fields are those of kind TopologyOverride."
        ) from None
