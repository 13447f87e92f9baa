"""The chart's ClusterRole against the real API server: every call of the driver's client works, and no verb is idle."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from component.conftest import DRIVER, Cluster, chart_objects, request, wait_until
from railmate.kube.client import KubeClient
from railmate.kube.errors import ApiError

ACCOUNT = (
    "rbac"  # an identity of its own with the chart's rules: the tests take them away, and others run beside
)
NODE, OTHER = "rbac-node", "rbac-other"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
ROLES = "/apis/rbac.authorization.k8s.io/v1/clusterroles"
RBAC = "rbac.authorization.k8s.io"
Permission = tuple[str, str, str]  # API group, resource with subresource, verb

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class Recorder(KubeClient):
    """The driver's client; notes which permission each request asks for."""

    def _open(self, method: str, path: str, *rest: Any, **more: Any) -> Any:
        self.__dict__.setdefault("asked", set()).update(permissions(method, path, rest[0]))
        return super()._open(method, path, *rest, **more)


def permissions(method: str, path: str, query: dict[str, str]) -> set[Permission]:
    """What the API server checks for a request (k8s.io/apiserver, RequestInfo)."""
    parts = path.strip("/").split("/")
    group, parts = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:])
    if parts[0] == "namespaces":
        parts = parts[2:]
    resource = "/".join([parts[0], *parts[2:]])
    reading = "watch" if query.get("watch") else "get" if len(parts) > 1 else "list"
    asked = {(group, resource, _VERBS.get(method, reading))}
    if resource == "resourceclaims/status":
        # For the entries of status.devices; verb prefix for an account on the claim's own node.
        asked.add((group, "resourceclaims/driver", f"associated-node:{_VERBS[method]}"))
    return asked


@dataclass
class World:
    """Nodes, an allocated claim and a published slice, and the account under test."""

    cluster: Cluster
    rules: list[dict[str, Any]]  # of the chart's ClusterRole
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def granted(self) -> set[Permission]:
        return {
            (group, resource, verb)
            for rule in self.rules
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }

    def without(self, permission: Permission) -> list[dict[str, Any]]:
        """The rules less one verb."""
        group, resource, verb = permission
        left = []
        for rule in self.rules:
            if group in rule["apiGroups"] and resource in rule["resources"]:
                rule = {**rule, "verbs": [one for one in rule["verbs"] if one != verb]}
            if rule["verbs"]:
                left.append(rule)
        return left

    def client(self, node: str | None = NODE) -> Recorder:
        plane = self.cluster.plane
        token = plane.service_account_token("default", ACCOUNT, node=node)
        return Recorder(plane.api_client(token=token).configuration)

    def slice_body(self, number: int) -> dict[str, Any]:
        pool = {"name": NODE, "generation": 1, "resourceSliceCount": 1}
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": f"{number:05}-{DRIVER}-{NODE}"},
            "spec": {"driver": DRIVER, "nodeName": NODE, "pool": pool, "devices": [{"name": "vf-0"}]},
        }

    def new_slice(self) -> dict[str, Any]:
        made: dict[str, Any] = self.cluster.plane.request("POST", SLICES, self.slice_body(next(self.numbers)))
        return made

    def status(self, driver: str = DRIVER) -> dict[str, Any]:
        """A status that differs from all before: without a change nothing is checked."""
        entry = {"driver": driver, "pool": NODE, "device": "vf-0", "data": {"n": next(self.numbers)}}
        head = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": ACCOUNT}}
        return {**head, "status": {"devices": [entry]}}

    def event(self) -> dict[str, Any]:
        involved = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"rbac.{next(self.numbers)}", "namespace": "default"},
            "involvedObject": involved,
            "reason": "Test",
            "message": "a test",
            "type": "Normal",
        }

    def grant(self, rules: list[dict[str, Any]]) -> None:
        """Give the account exactly these rules."""
        body = {
            "apiVersion": f"{RBAC}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": ACCOUNT},
            "rules": rules,
        }
        self.cluster.plane.request("PUT", f"{ROLES}/{ACCOUNT}", body)

    def may(self, permission: Permission) -> bool:
        group, resource, verb = permission
        name, _, sub = resource.partition("/")
        attributes = {"group": group, "resource": name, "subresource": sub, "verb": verb, "name": DRIVER}
        spec = {"user": f"system:serviceaccount:default:{ACCOUNT}", "resourceAttributes": attributes}
        kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        return bool(self.cluster.plane.request("POST", path, {**kind, "spec": spec})["status"]["allowed"])


def first_event(client: KubeClient) -> None:
    with closing(client.watch_slices(DRIVER, NODE, "0", 10)) as events:  # type: ignore[type-var]
        next(events)


#: One use of every call of the client.
CALLS: dict[str, Callable[[KubeClient, World], object]] = {
    "get_claim": lambda client, world: client.get_claim("default", ACCOUNT),
    "get_node": lambda client, world: client.get_node(NODE),
    "list_slices": lambda client, world: client.list_slices(DRIVER, NODE),
    "create_slice": lambda client, world: client.create_slice(world.slice_body(next(world.numbers))),
    "try_slice": lambda client, world: client.try_slice(world.slice_body(next(world.numbers))),
    "update_slice": lambda client, world: client.update_slice(world.new_slice()),
    "delete_slice": lambda client, world: client.delete_slice(world.new_slice()),
    "watch_slices": lambda client, world: first_event(client),
    "apply_claim_status": lambda client, world: client.apply_claim_status("default", ACCOUNT, world.status()),
    "create_event": lambda client, world: client.create_event("default", world.event()),
}


@pytest.fixture(scope="module")
def world(cluster: Cluster) -> Iterator[World]:
    (rules,) = [one["rules"] for one in chart_objects() if one["kind"] == "ClusterRole"]
    plane, made = cluster.plane, World(cluster, rules)
    for name in (NODE, OTHER):
        cluster.node(name)
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT}}
    plane.request("POST", "/api/v1/namespaces/default/serviceaccounts", account)
    role = {"apiVersion": f"{RBAC}/v1", "kind": "ClusterRole", "metadata": {"name": ACCOUNT}, "rules": rules}
    plane.request("POST", ROLES, role)
    binding = {
        **{"apiVersion": f"{RBAC}/v1", "kind": "ClusterRoleBinding", "metadata": {"name": ACCOUNT}},
        "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": ACCOUNT},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": "default"}],
    }
    plane.request("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", binding)
    cluster.claim(ACCOUNT, request("vf", "rdma-vf.railmate.dev"))
    allocate(cluster)
    made.new_slice()
    wait_until(lambda: all(made.may(one) for one in made.granted), "the account has the chart's rules")
    yield made
    plane.request("DELETE", f"{SLICES}?fieldSelector=spec.nodeName%3D{NODE}")
    cluster.delete_claim(ACCOUNT)


def allocate(cluster: Cluster) -> None:
    """What the scheduler does: the claim has a device of NODE."""
    here = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [NODE]}]}
    result = {"request": "vf", "driver": DRIVER, "pool": NODE, "device": "vf-0"}
    foreign = {"request": "vf", "driver": "gpu.example.org", "pool": NODE, "device": "vf-0"}
    allocation = {"devices": {"results": [result, foreign]}, "nodeSelector": {"nodeSelectorTerms": [here]}}
    body = {"status": {"allocation": allocation}}
    merge = "application/merge-patch+json"
    cluster.plane.request("PATCH", f"{CLAIMS}/{ACCOUNT}/status", body, content_type=merge)


def test_every_call_of_the_client_is_tried_here() -> None:
    public = {name for name, _ in inspect.getmembers(KubeClient, callable) if not name.startswith("_")}
    # read is for people's commands, which come with their own rights
    assert set(CALLS) == public - {"connect", "read"}


def test_the_role_allows_every_call_and_nothing_else(world: World) -> None:
    client = world.client()
    for call in CALLS.values():
        call(client, world)
    assert client.__dict__["asked"] == world.granted


def test_no_verb_can_be_taken_away(world: World) -> None:
    """Without any one of them exactly one call fails."""
    client = world.client()
    broken = {}
    for permission in sorted(world.granted):
        world.grant(world.without(permission))
        try:
            wait_until(lambda gone=permission: not world.may(gone), f"{permission} is gone")  # type: ignore[misc]
            broken[permission] = [name for name, call in CALLS.items() if is_forbidden(call, client, world)]
        finally:
            world.grant(world.rules)
            wait_until(lambda back=permission: world.may(back), f"{permission} is back")  # type: ignore[misc]
    # a slice is tried by the verb that makes it
    counts = {permission: len(set(calls) - {"try_slice"}) for permission, calls in broken.items()}
    assert counts == dict.fromkeys(broken, 1)
    assert sorted({name for calls in broken.values() for name in calls}) == sorted(CALLS)


def is_forbidden(call: Callable[[KubeClient, World], object], client: KubeClient, world: World) -> bool:
    try:
        call(client, world)
    except ApiError as error:
        if "forbidden" not in str(error).lower():
            raise
        return True
    return False


def test_status_of_a_claim_on_its_own_node_is_written(world: World) -> None:
    body = world.status()
    world.client().apply_claim_status("default", ACCOUNT, body)
    status = world.cluster.plane.request("GET", f"{CLAIMS}/{ACCOUNT}")["status"]
    assert [one["data"] for one in status["devices"]] == [body["status"]["devices"][0]["data"]]


@pytest.mark.parametrize("node", [OTHER, None], ids=["another-node", "bound-to-nothing"])
def test_status_of_another_nodes_claim_is_refused(world: World, node: str | None) -> None:
    with pytest.raises(ApiError, match=r"changing status\.devices requires"):
        world.client(node).apply_claim_status("default", ACCOUNT, world.status())


def test_status_of_another_drivers_device_is_refused(world: World) -> None:
    with pytest.raises(ApiError, match=r"changing status\.devices requires"):
        world.client().apply_claim_status("default", ACCOUNT, world.status("gpu.example.org"))


def test_allocation_is_not_for_the_driver_to_change(world: World) -> None:
    body = world.status()
    body["status"] = {"reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}]}
    with pytest.raises(ApiError, match="resourceclaims/binding"):
        world.client().apply_claim_status("default", ACCOUNT, body)
