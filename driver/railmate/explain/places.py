"""Whether something is on, or for, a node: node selectors and pods' wishes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from railmate.explain.model import Node, NodePlace


def is_at(place: NodePlace, node: Node) -> bool:
    """Rule: NodeMatches of the allocator."""
    if place.node:
        return place.node == node.name
    return place.every_node or (place.selector is not None and selector_matches(place.selector, node))


def selector_matches(selector: Mapping[str, Any], node: Node) -> bool:
    """A v1.NodeSelector: one of its terms must hold; a term without a requirement holds nowhere."""
    return any(_term_matches(term, node) for term in selector.get("nodeSelectorTerms") or ())


def _term_matches(term: Mapping[str, Any], node: Node) -> bool:
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not fields:
        return False
    return all(_holds(one, node.labels) for one in expressions) and all(
        _holds(one, {"metadata.name": node.name}) for one in fields
    )


def _holds(requirement: Mapping[str, Any], values: Mapping[str, str]) -> bool:
    value, wanted = values.get(requirement["key"]), list(requirement.get("values") or ())
    match requirement["operator"]:
        case "In":
            return value in wanted
        case "NotIn":
            return value not in wanted
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            try:
                have, limit = int(value or ""), int(wanted[0])
            except (ValueError, IndexError):
                return False
            return have > limit if operator == "Gt" else have < limit
    return False
