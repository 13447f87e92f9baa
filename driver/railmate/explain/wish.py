"""From a pod, a workload or a claim to what is asked of a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from railmate.errors import UsageError
from railmate.explain.model import (
    BLOCKING_EFFECTS,
    Claim,
    DeviceClass,
    Node,
    Request,
    RequestSlot,
    Taint,
    Toleration,
)
from railmate.explain.parse import guarded, parse_claim
from railmate.explain.places import selector_matches
from railmate.explain.quantity import parse_quantity
from railmate.explain.verdict import Wish

Object = Mapping[str, Any]
#: Every class can be named in a pod's resources by this prefix (k8s.io/api resource/v1, ResourceDeviceClassPrefix).
_IMPLICIT = "deviceclass.resource.kubernetes.io/"


def wish_of_pod(
    title: str,
    pod: Object,
    claims: Mapping[tuple[str, str], Object],
    templates: Mapping[tuple[str, str], Object],
    classes: Mapping[str, DeviceClass],
) -> Wish:
    """``claims`` and ``templates`` by namespace and name. Raises UsageError for one that is missing, or a bad pod."""
    return guarded("Pod", pod, lambda item: _wish_of_pod(title, item, claims, templates, classes))


def _wish_of_pod(
    title: str,
    pod: Object,
    claims: Mapping[tuple[str, str], Object],
    templates: Mapping[tuple[str, str], Object],
    classes: Mapping[str, DeviceClass],
) -> Wish:
    spec, metadata = pod.get("spec") or {}, pod.get("metadata") or {}
    namespace = str(metadata.get("namespace") or "default")
    statuses = (pod.get("status") or {}).get("resourceClaimStatuses") or ()
    generated = {one["name"]: one.get("resourceClaimName") for one in statuses}
    found = []
    shared = set()
    for entry in spec.get("resourceClaims") or ():
        name = entry.get("resourceClaimName") or generated.get(entry["name"])
        template = entry.get("resourceClaimTemplateName")
        if name and (namespace, name) in claims:
            found.append(parse_claim(claims[namespace, name]))
            if entry.get("resourceClaimName"):
                shared.add(found[-1].title)
        elif template and (namespace, template) in templates:
            made = parse_claim(templates[namespace, template])
            found.append(replace(made, name=f"{metadata.get('name', 'pod')}-{entry['name']}"))
        else:
            what = f"ResourceClaim {name}" if name else f"ResourceClaimTemplate {template}"
            raise UsageError(
                f"{title}: its {what} in namespace {namespace} is not there. Give it with --file, or create it first."
            )
    extended, names = _extended_claim(namespace, pod, classes)
    given = ((pod.get("status") or {}).get("extendedResourceClaimStatus") or {}).get("resourceClaimName")
    if given and (namespace, given) in claims:
        found.append(parse_claim(claims[namespace, given]))  # what the scheduler made and allocated
    elif extended is not None:
        found.append(extended)
    return Wish(title, tuple(found), _Place(spec, names).obstacle, frozenset(shared))


def wish_of_claim(item: Object) -> Wish:
    claim = parse_claim(item)
    kind = str(item.get("kind") or "ResourceClaim")
    return Wish(f"{kind} {claim.title}", (claim,))


# --- nvidia.com/gpu: 8
def _extended_claim(
    namespace: str, pod: Object, classes: Mapping[str, DeviceClass]
) -> tuple[Claim | None, list[str]]:
    """The claim that the scheduler makes for extended resources that a DeviceClass stands for, and their names.

    Rule: createRequestsAndMappings of the scheduler's dynamicresources plugin: one request a container and resource, in
    the order of their names. Ordinary init containers use what containers after them have, one after the other: only
    the most that one of them needs beyond that is asked for. Those that restart always run beside the others.
    """
    by_resource: dict[str, DeviceClass] = {}
    for one in sorted(classes.values(), key=lambda c: c.name, reverse=True):
        # the newest class wins, then the lower name
        known = by_resource.get(one.extended_resource)
        if one.extended_resource and (known is None or one.created >= known.created):
            by_resource[one.extended_resource] = one
    spec = pod.get("spec") or {}
    first = list(spec.get("initContainers") or ())
    asked = [_asked(container) for container in (*first, *(spec.get("containers") or ()))]
    brief = {n for n, container in enumerate(first) if container.get("restartPolicy") != "Always"}
    requests: dict[str, Request] = {}
    names = []
    for resource in sorted({name for one in asked for name in one}):
        device_class = by_resource.get(resource)
        if device_class is None and resource.startswith(_IMPLICIT):
            device_class = classes.get(resource.removeprefix(_IMPLICIT))
        if device_class is None:
            continue
        counts = {n: count for n, one in enumerate(asked) if (count := one.get(resource, 0)) > 0}
        lasting = {n: count for n, count in counts.items() if n not in brief}
        beyond = {
            n: counts[n] - sum(count for other, count in lasting.items() if other > n)
            for n in brief & counts.keys()
        }
        most = max(sorted(beyond), key=lambda n: beyond[n], default=None)
        if most is not None and beyond[most] > 0:
            lasting[most] = beyond[most]
        for number, count in lasting.items():
            name = f"container-{number}-request-{sorted(asked[number]).index(resource)}"
            requests[name] = Request(name, device_class.name, count=count)
        if counts:
            names.append(resource)
    if not requests:
        return None, []
    pod_name = str((pod.get("metadata") or {}).get("name") or "pod")
    slots = tuple(RequestSlot(name, (requests[name],)) for name in sorted(requests))
    return Claim(namespace, f"{pod_name}-extended-resources", slots), names


def _asked(container: Object) -> dict[str, int]:
    """Whole numbers of all that a container asks for; the API server makes requests of limits."""
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {str(name): int(parse_quantity(value)) for name, value in asked.items()}


# --- why a node is out for the pod itself
class _Place:
    """What a pod's spec says of its node, and extended resources that a device plugin may serve."""

    def __init__(self, spec: Object, extended: Sequence[str]) -> None:
        self._node = str(spec.get("nodeName") or "")
        self._labels = dict(spec.get("nodeSelector") or {})
        affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
        self._required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
        if self._required:
            selector_matches(self._required, Node(""))  # a malformed one fails here, where it is told
        self._tolerations = [
            Toleration(*(str(one.get(key) or "") for key in ("key", "operator", "value", "effect")))
            for one in spec.get("tolerations") or ()
        ]
        self._extended = extended

    def obstacle(self, node: Node) -> str:
        if self._node and self._node != node.name:
            return f"the pod is bound to node {self._node}"
        for key, value in self._labels.items():
            if node.labels.get(key) != value:
                return f"the pod's nodeSelector asks for {key}={value}"
        if self._required and not selector_matches(self._required, node):
            return "the pod's required node affinity does not match"
        taints = [taint for taint in node.taints if taint.effect in BLOCKING_EFFECTS]
        if node.unschedulable:
            taints.append(Taint("node.kubernetes.io/unschedulable", "", "NoSchedule"))
        for taint in taints:
            if not any(one.tolerates(taint) for one in self._tolerations):
                return f"the pod does not tolerate the node's taint {taint}"
        for resource in self._extended:
            if node.plugin_resources.get(resource):
                return f"a device plugin offers {resource} there, and the scheduler takes it instead of DRA"
        return ""
