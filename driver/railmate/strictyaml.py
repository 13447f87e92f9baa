"""YAML files that administrators write, read without YAML's surprises, and with the line of every field."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from railmate.errors import UsageError

#: Bytes. No file that people write by hand is larger.
LARGEST = 1 << 20

Place = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """What a file says: plain dicts, lists, texts, integers, booleans and None."""

    document: Any
    _root: yaml.Node

    def line_of(self, place: Place) -> int:
        """The line of a field, or of the nearest thing around it that the file holds."""
        node, line = self._root, self._root.start_mark.line
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


def read(path: Path, flag: str) -> bytes:
    """The file's bytes. Raises UsageError; ``flag`` is the option that names the file."""
    try:
        with path.open("rb") as handle:
            text = handle.read(LARGEST + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). Give {flag} a file.") from None
    if len(text) > LARGEST:
        raise UsageError(f"{path}: is larger than {LARGEST >> 20} MiB. Give {flag} another file.")
    return text


def load(path: Path, flag: str, next_step: str) -> Document:
    """The document in a file. Raises UsageError, which names the file, the line, the cause and ``next_step``."""
    return parse(path, read(path, flag), next_step)


def parse(path: Path, text: bytes, next_step: str) -> Document:
    """As ``load``, of a text that was read from ``path``."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                raise UsageError(f"{path}: is empty. {next_step}")
            _refuse_repeats(path, node)
            return Document(loader.construct_document(node), node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise UsageError(f"{path}: {line}{error.problem or error.context}. {next_step}") from None
    except RecursionError:
        raise UsageError(f"{path}: is nested too deeply to be read. {next_step}") from None
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise UsageError(f"{path}: is no YAML text ({problem}). {next_step}") from None


class _Loader(yaml.SafeLoader):
    """Safe, and with whole numbers, booleans and null as its only scalars beside text.

    YAML 1.1 takes 0000:07:00.0 for a number in base 60 and 0000 for an octal one; here both are text.
    """

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 - PyYAML's own way to say it


_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"-?(0|[1-9][0-9]*)$"), list("-0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(true|false)$"), list("tf"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(~|null|)$"), ["~", "n", ""])


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
