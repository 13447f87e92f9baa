"""A small machine as ResourceSlices, and claims on it, for the explainer's tests."""

from __future__ import annotations

import time
from typing import Any

from railmate.explain.cel import Selectors
from railmate.explain.model import Claim, Node
from railmate.explain.parse import parse_claim, parse_class, parse_slice
from railmate.explain.verdict import NodeVerdict, Verdict, Wish, World, judge

SWITCH = "railmate.dev/pcieSwitch"
KIND = 'device.driver == "railmate.dev" && device.attributes["railmate.dev"].?kind.orValue("") == "{}"'
CLASSES = {name: [KIND.format(name)] for name in ("gpu", "rdma-vf", "pair")}


def device(name: str, kind: str, switch: int, *counters: str, **more: Any) -> dict[str, Any]:
    attributes = {"railmate.dev/kind": {"string": kind}, SWITCH: {"string": f"s{switch}"}}
    body: dict[str, Any] = {"name": name, "attributes": attributes}
    if counters:
        held = {counter: {"value": "1"} for counter in counters}
        body["consumesCounters"] = [{"counterSet": f"switch-{switch}", "counters": held}]
    return body | more


def machine(node: str = "n1", switches: int = 2, gpus: int = 2, vfs: int = 2) -> list[dict[str, Any]]:
    """``gpus`` pairs and GPUs a switch, and ``vfs`` VFs that are in no pair."""
    sets, pairs, alone, lone = [], [], [], []
    for switch in range(switches):
        counters: dict[str, Any] = {}
        for gpu in range(gpus):
            name, counter = f"{switch}-{gpu}", f"gpu-{gpu}"
            counters[counter] = counters[f"vf-{gpu}"] = {"value": "1"}
            pairs.append(device(f"pair-{name}", "pair", switch, counter, f"vf-{gpu}"))
            alone.append(device(f"gpu-{name}", "gpu", switch, counter))
            lone.append(device(f"vf-{name}", "rdma-vf", switch, f"vf-{gpu}"))
        lone += [device(f"vf-{switch}-x{n}", "rdma-vf", switch) for n in range(vfs)]
        sets.append({"name": f"switch-{switch}", "counters": counters})
    return slices(node, {"sharedCounters": sets}, {"devices": pairs + alone + lone})


def slices(node: str, *parts: dict[str, Any], driver: str = "railmate.dev") -> list[dict[str, Any]]:
    pool = {"name": node, "generation": 1, "resourceSliceCount": len(parts)}
    return [
        {
            "kind": "ResourceSlice",
            "metadata": {"name": f"{index:05x}-{driver}-{node}"},
            "spec": {"driver": driver, "nodeName": node, "pool": pool, **part},
        }
        for index, part in enumerate(parts)
    ]


def request(name: str, device_class: str, count: int = 1, *selectors: str, **more: Any) -> dict[str, Any]:
    exactly: dict[str, Any] = {"deviceClassName": device_class, "count": count, **more}
    if selectors:
        exactly["selectors"] = [{"cel": {"expression": one}} for one in selectors]
    return {"name": name, "exactly": exactly}


def claim(*requests: dict[str, Any], match: str | None = None, name: str = "wanted") -> dict[str, Any]:
    devices: dict[str, Any] = {"requests": list(requests)}
    if match:
        devices["constraints"] = [{"matchAttribute": match}]
    return {
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "team"},
        "spec": {"devices": devices},
    }


def held(name: str, *devices: str, pool: str = "n1", pod: str = "") -> dict[str, Any]:
    """A claim that has these devices."""
    results = [{"request": "r", "driver": "railmate.dev", "pool": pool, "device": one} for one in devices]
    users = [{"resource": "pods", "name": pod, "uid": "u"}] if pod else []
    status = {"allocation": {"devices": {"results": results}}, "reservedFor": users}
    return claim(request("r", "gpu"), name=name) | {"status": status}


def verdict(
    published: list[dict[str, Any]],
    *wanted: dict[str, Any],
    taken: tuple[dict[str, Any], ...] = (),
    classes: dict[str, list[str]] | None = None,
    seconds: float = 2.0,
) -> Verdict:
    bodies = {
        name: {
            "metadata": {"name": name},
            "spec": {"selectors": [{"cel": {"expression": e}} for e in expressions]},
        }
        for name, expressions in (CLASSES | (classes or {})).items()
    }
    parsed = tuple(map(parse_slice, published))
    nodes = sorted({one.place.node for one in parsed if one.place is not None and one.place.node})
    world = World(
        parsed,
        {name: parse_class(body) for name, body in bodies.items()},
        tuple(map(parse_claim, taken)),
        tuple(Node(name) for name in nodes),
    )
    claims: tuple[Claim, ...] = tuple(map(parse_claim, wanted))
    return judge(world, Wish("pod", claims), seconds, Selectors(), time.process_time)


def on_node(*args: Any, **keywords: Any) -> NodeVerdict:
    """The verdict on the one node."""
    (one,) = verdict(*args, **keywords).nodes
    return one


def names(one: NodeVerdict) -> list[str]:
    return [placed.device.name for placed in one.devices]
