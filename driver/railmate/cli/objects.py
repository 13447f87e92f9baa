"""Kubernetes objects from files, for the commands that look at them."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from railmate.errors import UsageError
from railmate_api.attributes import DRIVER_NAME

if TYPE_CHECKING:
    from railmate.explain.verdict import World

Object = dict[str, Any]


def read_objects(path: Path) -> list[Object]:
    """The objects of a YAML or JSON file; Lists are taken apart. Raises UsageError."""
    import yaml

    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
        if text.startswith("{"):  # the usual reader of YAML takes a hundred times as long for the same
            with contextlib.suppress(json.JSONDecodeError):
                return list(_flat(path, [json.loads(text)]))
        documents = list(yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        words = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise UsageError(f"{path}: cannot be read as YAML or JSON ({words}).") from error
    return list(_flat(path, documents))


def _flat(path: Path, documents: Iterable[Any]) -> Iterator[Object]:
    for one in documents:
        if one is None:
            continue
        if not isinstance(one, dict) or not isinstance(one.get("metadata", {}), dict):
            raise UsageError(
                f"{path}: holds something that is no Kubernetes object. Save it with kubectl get -o yaml."
            )
        if isinstance(one.get("items"), list):
            kind = str(one.get("kind", "List")).removesuffix("List")
            yield from _flat(
                path, ({"kind": kind, **item} if isinstance(item, dict) else item for item in one["items"])
            )
        elif not one.get("kind"):
            raise UsageError(f"{path}: holds an object without a kind. Save it with kubectl get -o yaml.")
        else:
            yield one


def _named(classes: str, driver: str) -> str:
    """As the chart does: the attributes' domain stays."""
    return classes.replace(f'device.driver == "{DRIVER_NAME}"', f'device.driver == "{driver}"')


def world_of(objects: Iterable[Object], driver: str = DRIVER_NAME) -> World:
    """Without a DeviceClass among them railmate's own are taken, for a driver of this name; without Nodes those that
    the slices name."""
    import yaml

    from railmate.explain.model import Node
    from railmate.explain.parse import Seen, parse_claim, parse_class, parse_node, parse_slice
    from railmate.explain.pools import node_names
    from railmate.explain.verdict import World

    by_kind: dict[str, list[Object]] = {}
    for one in objects:
        by_kind.setdefault(str(one["kind"]), []).append(one)
    seen: Seen = {}
    slices = tuple(parse_slice(one, seen) for one in by_kind.get("ResourceSlice", ()))
    shipped = files("railmate_api") / "deviceclasses.yaml"
    classes = by_kind.get("DeviceClass") or list(yaml.safe_load_all(_named(shipped.read_text(), driver)))
    nodes = {node.name: node for node in map(parse_node, by_kind.get("Node", ()))}
    if not nodes:
        nodes = {name: Node(name, {"kubernetes.io/hostname": name}) for name in node_names(slices)}
    return World(
        slices,
        {one.name: one for one in map(parse_class, classes)},
        tuple(map(parse_claim, by_kind.get("ResourceClaim", ()))),
        tuple(nodes[name] for name in sorted(nodes)),
    )
