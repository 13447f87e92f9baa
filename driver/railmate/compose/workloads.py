"""Skeletons of workloads that use a claim template: what to start from, with the claim already wired."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

Object = dict[str, Any]
_CONTAINER = "main"
_CLAIM = "devices"


@dataclass(frozen=True, slots=True)
class Workload:
    """``nodes``: pods of a gang, one a node. ``gpus``: of one pod; CPU and memory are asked for in proportion, so that
    the scheduler leaves out full nodes before it looks at their devices."""

    name: str
    namespace: str
    image: str
    nodes: int
    gpus: int
    queue: str


def template(name: str, namespace: str, devices: Object) -> Object:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": _metadata(name, namespace),
        "spec": {"spec": {"devices": devices}},
    }


def _metadata(name: str, namespace: str, labels: dict[str, str] | None = None) -> Object:
    metadata: Object = {"name": name}
    if namespace:
        metadata["namespace"] = namespace
    return metadata | ({"labels": labels} if labels else {})


def _pod_spec(about: Workload) -> Object:
    container = {
        "name": _CONTAINER,
        "image": about.image,
        "resources": {
            "requests": {"cpu": str(4 * max(about.gpus, 1)), "memory": f"{16 * max(about.gpus, 1)}Gi"},
            "claims": [{"name": _CLAIM}],
        },
    }
    return {
        "restartPolicy": "Never",
        "containers": [container],
        "resourceClaims": [{"name": _CLAIM, "resourceClaimTemplateName": about.name}],
    }


def _pod(about: Workload) -> list[Object]:
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": _metadata(about.name, about.namespace),
            "spec": _pod_spec(about),
        }
    ]


def _job(about: Workload) -> list[Object]:
    """An indexed Job and the headless Service by which its pods find each other: NAME-0.NAME, NAME-1.NAME, …"""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(about.name, about.namespace),
        # published before the pods are ready: a gang's first pod waits for the others
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": about.name},
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(about.name, about.namespace),
        "spec": _job_spec(about),
    }
    return [service, job]


def _job_spec(about: Workload) -> Object:
    return {
        "completionMode": "Indexed",
        "completions": about.nodes,
        "parallelism": about.nodes,
        "backoffLimit": 0,
        "template": {"spec": {"subdomain": about.name, **_pod_spec(about)}},
    }


def _jobset(about: Workload) -> list[Object]:
    """JobSet makes the headless Service itself."""
    spec = _job_spec(about)
    del spec["template"]["spec"]["subdomain"]
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(about.name, about.namespace),
        "spec": {"replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": spec}}]},
    }
    return [jobset]


def _kueue(about: Workload) -> list[Object]:
    """The Job, held back until its queue has room; the ClusterQueue counts the class by Kueue's deviceClassMappings."""
    service, job = _job(about)
    job["metadata"] = _metadata(about.name, about.namespace, {"kueue.x-k8s.io/queue-name": about.queue})
    job["spec"]["suspend"] = True
    return [service, job]


#: Word of --for to what makes the objects beside the template.
KINDS: Final[dict[str, Callable[[Workload], list[Object]]]] = {
    "pod": _pod,
    "job": _job,
    "jobset": _jobset,
    "kueue": _kueue,
}
