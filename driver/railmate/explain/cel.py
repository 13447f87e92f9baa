"""CEL selectors as the scheduler evaluates them, by Google's engine (the package cel-expr-python).

Rule: k8s.io/dynamic-resource-allocation/cel. A domain that a device lacks reads as an empty map, an attribute that it
lacks is an error, and an error ends the scheduling of the pod on all nodes. The engine is imported when the first
expression is compiled: it has 50 MB, and nothing else in railmate needs it.

Quantities and versions are maps with one entry for the engine; Kubernetes' functions on them are in ``celfunctions``.
Not there: ip(), cidr(), url(), format, two-variable comprehensions and the newer list functions. An expression that
uses them is refused with UsageError, never guessed at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from railmate.errors import UsageError
from railmate.explain.model import Device

#: A selector's answer for a device: a bool, or the error's text.
Answer = bool | str

_LITERAL = re.compile(r""""((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)\'""")
#: ``"domain" in device.attributes``: the one place where an absent domain must not read as an empty map.
_PRESENCE = re.compile(r"(\bin\s+device\s*\.\s*)(attributes|capacity)\b(?!\s*[.\[])")
_PRESENT = {"attributes": "attributesPresent", "capacity": "capacityPresent"}


class Selectors:
    """Compiles and evaluates expressions, and remembers both. Not for several threads."""

    def __init__(self) -> None:
        self._environment: Any = None
        self._compiled: dict[str, Any] = {}
        self._domains: set[str] = set()
        self._inputs: dict[Device, Any] = {}
        self._answers: dict[tuple[str, Device], Answer] = {}

    def check(self, expression: str) -> None:
        """Raises UsageError for an expression that does not compile here, or when the engine is not installed."""
        if expression in self._compiled:
            return
        if self._environment is None:
            self._environment = _new_environment()
        rewritten = _PRESENCE.sub(lambda found: found[1] + _PRESENT[found[2]], expression)
        try:
            self._compiled[expression] = self._environment.compile(rewritten)
        except Exception as error:  # the engine raises RuntimeError, and others for input that is no text
            cause = " ".join(str(error).split("\n")[0].split())
            raise UsageError(
                f"selector {expression!r} cannot be evaluated here: {cause}. If the API server takes it, it uses a CEL "
                "function that railmate does not have; leave the selector out to see the rest."
            ) from None
        domains = {first or second for first, second in _LITERAL.findall(expression)}
        if not domains <= self._domains:
            self._domains |= domains
            self._inputs.clear()

    def matches(self, expression: str, device: Device) -> Answer:
        """Raises UsageError as ``check`` does."""
        device = device.original
        key = (expression, device)
        if (answer := self._answers.get(key)) is None:
            self.check(expression)
            answer = self._answers[key] = self._evaluate(expression, device)
        return answer

    def _evaluate(self, expression: str, device: Device) -> Answer:
        if (activation := self._inputs.get(device)) is None:
            activation = self._environment.Activation({"device": _device_value(device, self._domains)})
            self._inputs[device] = activation
        try:
            value = self._compiled[expression].eval(activation)
            content, kind = value.value(), value.type().name()
        except Exception as error:
            return _plain(str(error))
        if isinstance(content, bool):
            return content
        if kind == "*error*" or "error" in kind.lower():
            return _plain(str(content))
        return f"the result is of type {kind.lower()}, not bool"


def clauses(expression: str) -> list[str]:
    """An expression's parts that are joined by && at its top level; the expression itself where there are none."""
    parts, start, depth, quote, position = [], 0, 0, "", 0
    while position < len(expression):
        char = expression[position]
        if quote:
            if char == "\\":
                position += 1
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif (
            depth == 0
            and expression.startswith(("||", "?"), position)
            and expression[position - 1 : position] != "."
        ):
            return [expression.strip()]  # && binds tighter: these are no clauses of the whole
        elif depth == 0 and expression.startswith("&&", position):
            parts.append(expression[start:position].strip())
            start = position + 2
            position += 1
        position += 1
    parts.append(expression[start:].strip())
    return parts


def _plain(text: str) -> str:
    """The engine's words in the scheduler's."""
    missing = re.search(r'Key not found in map : "?([^"]*)"?', text)
    return f"no such key: {missing[1]}" if missing else " ".join(text.split())


def _device_value(device: Device, domains: set[str]) -> dict[str, Any]:
    attributes: dict[str, dict[str, Any]] = {}
    for name, (kind, value) in device.attributes.items():
        domain, bare = _split(name, device.driver)
        attributes.setdefault(domain, {})[bare] = _attribute_value(kind, value)
    capacity: dict[str, dict[str, Any]] = {}
    for name, held in device.capacity.items():
        domain, bare = _split(name, device.driver)
        capacity.setdefault(domain, {})[bare] = {"quantity": str(held.value)}
    defaults: Mapping[str, dict[str, Any]] = {domain: {} for domain in (*domains, device.driver)}
    return {
        "driver": device.driver,
        "allowMultipleAllocations": device.shareable,
        "attributes": {**defaults, **attributes},
        "capacity": {**defaults, **capacity},
        "attributesPresent": attributes,
        "capacityPresent": capacity,
    }


def _split(name: str, driver: str) -> tuple[str, str]:
    domain, slash, bare = name.partition("/")
    return (domain, bare) if slash else (driver, name)


def _attribute_value(kind: str, value: Any) -> Any:
    if kind == "version":
        return {"version": value}
    if kind == "versions":
        return [{"version": one} for one in value]
    return list(value) if isinstance(value, tuple) else value


def _new_environment() -> Any:
    try:
        from cel_expr_python import cel
        from cel_expr_python.ext import ext_bindings, ext_optional, ext_strings
    except ImportError as error:
        raise UsageError(
            f"the CEL engine is not installed ({error}). Install it with: pip install 'railmate[explain]'"
        ) from error
    from railmate.explain.celfunctions import declarations

    return cel.NewEnv(
        variables={"device": cel.Type.DYN},
        extensions=[ext_bindings.ExtBindings(), ext_optional.ExtOptional(), ext_strings.ExtStrings()],
        functions=declarations(cel),
    )
