"""The pods of a workload, of whatever kind: its pod templates, and how many pods of each run at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from railmate.explain.parse import guarded

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """``title``: of one pod; ``together``: of all ``count`` that run at a time."""

    title: str
    together: str
    count: int
    pod: Object


def pods_of(item: Object) -> list[PodTemplate]:
    """Of a Pod itself; several of a JobSet, none of what makes no pods. Of a DaemonSet one pod, on however
    many nodes it runs. Raises UsageError for a number that is none."""
    return guarded(str(item.get("kind") or "object"), item, _pods_of)


def _pods_of(item: Object) -> list[PodTemplate]:
    metadata = item.get("metadata") or {}
    kind, name = str(item.get("kind") or "object"), str(metadata.get("name") or "?")
    namespace = str(metadata.get("namespace") or "default")
    if kind == "Pod":
        title = f"pod {namespace}/{name}"
        return [PodTemplate(title, title, 1, item)]
    found = []
    templates = list(_templates(item.get("spec") or {}, "", 1))
    for where, count, template in templates:
        together = f"{kind} {namespace}/{name}" + (f", {where}" if where and len(templates) > 1 else "")
        pod = {"metadata": {"name": name, "namespace": namespace}, "spec": template["spec"]}
        title = f"one pod of {together}"
        if kind == "DaemonSet":
            title += " (it makes one for each node, and only one is looked at)"
        found.append(PodTemplate(title, together, count, pod))
    return found


def _templates(body: Any, where: str, count: int) -> Iterator[tuple[str, int, Object]]:
    """Whatever looks like a PodTemplateSpec, however deep: JobSet, LeaderWorkerSet and MPIJob differ in that."""
    if isinstance(body, list):
        for number, one in enumerate(body):
            name = one.get("name", number) if isinstance(one, dict) else number
            yield from _templates(one, f"{where}/{name}".strip("/"), count)
    elif isinstance(body, dict):
        spec = body.get("spec")
        if isinstance(spec, dict) and isinstance(spec.get("containers"), list):
            yield where, count, body
            return
        for key, one in body.items():
            inner = (
                where if key in ("spec", "template", "replicatedJobs", "jobTemplate") else f"{where}/{key}"
            )
            if isinstance(one, dict | list):
                yield from _templates(one, inner.strip("/"), count * _times(body, key))


def _times(body: Object, key: str) -> int:
    """How often what is below the key is there: Deployment, JobSet and MPIJob say replicas (a RayCluster also
    the hosts of each), a Job parallelism, and a LeaderWorkerSet the size of a group, of which one is the leader."""
    times = _number(body, "replicas", 1) * _number(body, "numOfHosts", 1)
    if key == "template" and ("parallelism" in body or "completions" in body):
        # a Job runs no more pods than it has to complete; without parallelism one at a time
        parallelism = _number(body, "parallelism", 1)
        times *= min(parallelism, _number(body, "completions", parallelism))
    if key == "workerTemplate":
        times *= max(0, _number(body, "size", 1) - (body.get("leaderTemplate") is not None))
    return times


def _number(body: Object, key: str, otherwise: int) -> int:
    value = body.get(key)
    if value is None:
        return otherwise
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{key} {value!r} is no number of pods")
    return value
