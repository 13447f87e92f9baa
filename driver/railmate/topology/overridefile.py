"""Reading an override from a file: railmate's own YAML, or an NCCL topology XML."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from railmate.errors import UsageError
from railmate.topology.ncclfile import NcclFileError, parse_nccl_topology
from railmate_api.override import (
    OverrideError,
    RoleRule,
    TopologyOverride,
    decode_override,
    parse_role,
)

_LARGEST = 1 << 20  # bytes; the largest published topology file has some 60 kB


def load_override(path: Path) -> TopologyOverride:
    """What the file says. Raises UsageError, which names the file, the line, the cause and the next step."""
    try:
        with path.open("rb") as handle:
            text = handle.read(_LARGEST + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). Give --override a file.") from None
    if len(text) > _LARGEST:
        raise UsageError(
            f"{path}: is larger than {_LARGEST >> 20} MiB, so it is no topology. Give --override another file."
        )
    if text.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        try:
            return parse_nccl_topology(text)
        except NcclFileError as error:
            raise UsageError(f"{path}: {error}. Correct the NCCL topology file.") from None
    return _own(path, text)


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


class _Loader(yaml.SafeLoader):
    """Safe, and with whole numbers, booleans and null as its only scalars beside text.

    YAML 1.1 takes 0000:07:00.0 for a number in base 60 and 0000 for an octal one; here both are text.
    """

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 - PyYAML's own way to say it


_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"-?(0|[1-9][0-9]*)$"), list("-0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(true|false)$"), list("tf"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(~|null|)$"), ["~", "n", ""])


def _own(path: Path, text: bytes) -> TopologyOverride:
    next_step = "The fields are those of kind TopologyOverride."
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                raise UsageError(f"{path}: is empty. {next_step}")
            _refuse_repeats(path, node)
            document = loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise UsageError(
            f"{path}: {line}{error.problem or error.context}. Write YAML, or give an NCCL topology XML."
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise UsageError(
            f"{path}: is no YAML text ({problem}). Write YAML, or give an NCCL topology XML."
        ) from None
    try:
        return decode_override(document)
    except OverrideError as error:
        line_number = _line_of(node, error.place)
        raise UsageError(f"{path}: line {line_number}: {error}. {next_step}") from None


def _refuse_repeats(path: Path, root: yaml.Node) -> None:
    """A key twice in one object would lose the first without a word; an alias could nest an object in itself."""
    waiting: list[tuple[yaml.Node, str]] = [(root, "")]
    seen: set[int] = set()
    while waiting:
        node, above = waiting.pop()
        if isinstance(node, yaml.ScalarNode):
            continue
        if id(node) in seen:
            line = node.start_mark.line + 1
            raise UsageError(f"{path}: line {line}: is used by an alias (*), which is refused. Write it out.")
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += [(child, above) for child in node.value]
            continue
        keys: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise UsageError(f"{path}: line {key.start_mark.line + 1}: a key must be text. Write it out.")
            place = f"{above}.{key.value}" if above else key.value
            if key.value in keys:
                line = key.start_mark.line + 1
                raise UsageError(f"{path}: line {line}: {place} is there twice. Take one of them out.")
            keys.add(key.value)
            waiting.append((value, place))


def _line_of(root: yaml.Node, place: tuple[str | int, ...]) -> int:
    """The line of a field, or of the nearest thing around it that the file holds."""
    node, line = root, root.start_mark.line
    for part in place:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line
        elif isinstance(node, yaml.MappingNode):
            held = {key.value: (key, value) for key, value in node.value}
            if part not in held:
                break
            key, node = held[part]
            line = key.start_mark.line
        else:
            break
    return int(line) + 1
