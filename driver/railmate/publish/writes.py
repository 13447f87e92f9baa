"""Which slices are written, and what of them a server kept. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from railmate.kube.client import Object

#: What was sent of a slice, and what the server answered where it added to it: a newer server's defaults, a webhook's
#: fields. By the slice's name.
Answers = Mapping[str, tuple[Object, Object]]
_NO_ANSWERS: Answers = {}


class WritePlan:
    """Names of slices to delete, update and create, and of the one of them that must be the last, if any;
    ``generation`` is None when nothing is to be done."""

    def __init__(self) -> None:
        self.last = ""
        self.delete: set[str] = set()
        self.update: set[str] = set()
        self.create: set[str] = set()
        self.generation: int | None = None


def plan_writes(existing: list[Object], desired: list[Object], answers: Answers = _NO_ANSWERS) -> WritePlan:
    """What to write. Pure. A slice that is as the server answered to the same wish is not written again.

    A pool's generation tells the scheduler which slices belong together: it stays when exactly one
    slice changes in place, else it is raised and all slices are written (KEP-4381, ResourcePool). Taints
    need not change together, so slices that differ in nothing else do not count: while all slices are being
    written, no device of the node can be allocated. Nor need one slice of devices and one of counters, as when a GPU
    is lost or comes back, if one after the other leaves a pool that is whole at any time.
    """
    plan = WritePlan()
    wanted = {item["metadata"]["name"]: item for item in desired}
    stored = {item["metadata"]["name"]: item for item in existing}
    highest = max((item["spec"]["pool"]["generation"] for item in existing), default=0)
    plan.delete = stored.keys() - wanted.keys()
    plan.create = wanted.keys() - stored.keys()
    kept = wanted.keys() & stored.keys()
    changed = {name for name in kept if not is_kept(stored[name], wanted[name], answers.get(name))}
    mixed = len({stored[name]["spec"]["pool"]["generation"] for name in kept}) > 1
    if not (plan.delete or plan.create or changed or mixed):
        return plan
    together = {
        name
        for name in changed
        if not is_kept(
            _untainted(stored[name]),
            _untainted(wanted[name]),
            tuple(_untainted(one) for one in answers[name]) if name in answers else None,
        )
    }
    last = _last(stored, wanted, together) if len(together) > 1 else ""
    if plan.create or plan.delete or mixed or last is None:
        plan.generation = highest + 1
        plan.update = set(kept)
    else:
        plan.generation = highest
        plan.update = changed
        plan.last = last
    return plan


def _last(
    stored: Mapping[str, Object], wanted: Mapping[str, Object], together: Collection[str]
) -> str | None:
    """Of one slice of devices and one of counters that change, the one to be written after the other: no device may
    consume a counter that is not there. None for other slices, and where counters go and others come."""
    devices = [n for n in together if stored[n]["spec"].get("devices") and wanted[n]["spec"].get("devices")]
    counters = [n for n in together if _counters(stored[n]) and _counters(wanted[n])]
    if (len(devices), len(counters), len(together)) != (1, 1, 2):
        return None
    before, after = _counters(stored[counters[0]]), _counters(wanted[counters[0]])
    if after <= before:
        return counters[0]
    return devices[0] if before <= after else None


def _counters(item: Object) -> set[tuple[str, str, str]]:
    return {
        (one["name"], counter, str(body["value"]))
        for one in item["spec"].get("sharedCounters") or ()
        for counter, body in one["counters"].items()
    }


def is_kept(stored: Object, wanted: Object, answer: tuple[Object, ...] | None = None) -> bool:
    """Equal but for the generation, which the plan decides; or ``wanted`` is what was sent, and ``stored`` what the
    server made of it. Order of devices counts: first fit walks it."""
    there, wish = _comparable(stored), _comparable(wanted)
    return there == wish or (answer is not None and (wish, there) == tuple(map(_comparable, answer)))


def _untainted(item: Object) -> Object:
    return {**item, "spec": without_fields(item["spec"], {"taints"})}


def _comparable(item: Object) -> tuple[Any, ...]:
    spec = {key: value for key, value in item["spec"].items() if value not in (None, [], {})}
    pool = dict(spec.pop("pool"))
    pool.pop("generation", None)
    owners = [(owner["name"], owner["uid"]) for owner in item["metadata"].get("ownerReferences", [])]
    return spec, pool, owners


def without_fields(value: Any, names: Collection[str]) -> Any:
    """A copy without fields of these names at any depth."""
    if isinstance(value, dict):
        return {key: without_fields(one, names) for key, one in value.items() if key not in names}
    if isinstance(value, list):
        return [without_fields(one, names) for one in value]
    return value


def dropped_fields(sent: Any, stored: Any) -> set[str]:
    """Names of fields that were sent and are not in what the server stored, at any depth."""
    lost: set[str] = set()
    if isinstance(sent, dict) and isinstance(stored, dict):
        for key, value in sent.items():
            if key not in stored and value not in (None, [], {}):
                lost.add(key)
            else:
                lost |= dropped_fields(value, stored.get(key))
    elif isinstance(sent, list) and isinstance(stored, list):
        for one, other in zip(sent, stored, strict=False):
            lost |= dropped_fields(one, other)
    return lost
