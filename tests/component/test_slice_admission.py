"""The chart's slice policy against the real API server: a node's driver writes its own node's slices only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from component.conftest import DRIVER, NAMESPACE, Cluster, wait_until
from harness.api import ApiError
from railmate.publish.model import Offer

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
OWN, OTHER = "adm-own", "adm-other"

Body = dict[str, Any]


class Driver:
    """What the ServiceAccount may do with the token of one node (None: a token that is bound to nothing)."""

    def __init__(self, cluster: Cluster, node: str | None) -> None:
        self.plane = cluster.plane
        self.token = self.plane.service_account_token(NAMESPACE, cluster.service_account, node=node)

    def create(self, body: Body, dry_run: bool = True) -> Any:
        query = "?dryRun=All" if dry_run else ""
        return self.plane.request("POST", SLICES + query, body, token=self.token)

    def update(self, body: Body) -> Any:
        path = f"{SLICES}/{body['metadata']['name']}?dryRun=All"
        return self.plane.request("PUT", path, body, token=self.token)

    def delete(self, name: str, dry_run: bool = True) -> Any:
        query = "?dryRun=All" if dry_run else ""
        return self.plane.request("DELETE", f"{SLICES}/{name}{query}", token=self.token)


def resource_slice(node: str = OWN, name: str = "", **spec: Any) -> Body:
    driver = spec.get("driver", DRIVER)
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name or f"00000-{driver}-{node}"},
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "device-0"}],
        }
        | spec,
    }


def without_node(**spec: Any) -> Body:
    body = resource_slice(**spec)
    del body["spec"]["nodeName"]
    return body


ANY_NODE = {
    "nodeSelectorTerms": [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "Exists"}]}]
}
BY_NAME = {
    "nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [OWN]}]}]
}
PER_DEVICE = [{"name": "device-0", "nodeName": OWN}]


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Cluster:
    """Two nodes, and the policy in force (the API server looks for new ones once a second)."""
    for name in (OWN, OTHER):
        cluster.node(name)
    driver = Driver(cluster, OWN)
    wait_until(lambda: refused(lambda: driver.create(resource_slice(OTHER))), "the slice policy is in force")
    return cluster


def refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except ApiError as error:
        return "ValidatingAdmissionPolicy" in str(error)
    return False


def test_driver_creates_changes_and_deletes_its_own_slice(nodes: Cluster) -> None:
    driver = Driver(nodes, OWN)
    made = driver.create(resource_slice(name=f"00001-{DRIVER}-{OWN}"), dry_run=False)
    made["spec"]["devices"] = [{"name": "device-1"}]
    assert driver.update(made)["spec"]["devices"] == [{"name": "device-1"}]
    driver.delete(made["metadata"]["name"], dry_run=False)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (resource_slice(OTHER), f"spec.nodeName is not {OWN}"),
        (resource_slice(driver="gpu.example.org"), f"spec.driver is not {DRIVER}"),
        (without_node(allNodes=True), f"spec.nodeName is not {OWN}"),
        (without_node(nodeSelector=ANY_NODE), f"spec.nodeName is not {OWN}"),
        (without_node(nodeSelector=BY_NAME), f"spec.nodeName is not {OWN}"),
        (
            without_node(perDeviceNodeSelection=True, devices=PER_DEVICE),
            f"spec.nodeName is not {OWN}",
        ),
        (
            resource_slice(pool={"name": OTHER, "generation": 9, "resourceSliceCount": 2}),
            f"spec.pool.name is not {OWN}",
        ),
        (resource_slice(name=f"00000-{DRIVER}-{OTHER}"), f"metadata.name does not end with -{DRIVER}-{OWN}"),
    ],
    ids=["other-node", "other-driver", "all-nodes", "selector", "selector-of-own-node", "per-device", "other-pool",
         "name-of-other-node"],
)  # fmt: skip
def test_driver_cannot_create(nodes: Cluster, body: Body, reason: str) -> None:
    with pytest.raises(ApiError) as caught:
        Driver(nodes, OWN).create(body)
    assert caught.value.status == 422
    assert f"denied request: {reason}" in str(caught.value)


@pytest.mark.parametrize("node", [OTHER, None], ids=["another-nodes", "bound-to-nothing"])
@pytest.mark.parametrize("verb", ["create", "update", "delete"])
def test_other_tokens_cannot_touch_a_slice(nodes: Cluster, node: str | None, verb: str) -> None:
    name = f"00000-{DRIVER}-{OWN}"
    nodes.plane.request("POST", SLICES, resource_slice(OWN))
    try:
        there = nodes.plane.request("GET", f"{SLICES}/{name}")
        there["spec"]["devices"] = []
        driver = Driver(nodes, node)
        calls: dict[str, Callable[[], Any]] = {
            "create": lambda: driver.create(resource_slice(OWN, f"00001-{DRIVER}-{OWN}")),
            "update": lambda: driver.update(there),
            "delete": lambda: driver.delete(name),
        }
        reason = "the token names no node" if node is None else f"spec.nodeName is not {node}"
        with pytest.raises(ApiError, match=reason):
            calls[verb]()
    finally:
        nodes.plane.request("DELETE", f"{SLICES}/{name}")


@pytest.mark.parametrize(
    "body",
    [
        resource_slice(driver="gpu.example.org", name="foreign-admission"),
        without_node(allNodes=True, name="everywhere"),
        without_node(nodeSelector=BY_NAME, name="selected"),
    ],
    ids=["other-driver", "all-nodes", "selector"],
)
def test_driver_cannot_delete_or_change_what_it_could_not_create(nodes: Cluster, body: Body) -> None:
    made = nodes.plane.request("POST", SLICES, body)
    driver = Driver(nodes, OWN)
    try:
        with pytest.raises(ApiError, match="ValidatingAdmissionPolicy"):
            driver.delete(made["metadata"]["name"])
        made["spec"]["devices"] = []
        with pytest.raises(ApiError, match="ValidatingAdmissionPolicy"):
            driver.update(made)
    finally:
        nodes.plane.request("DELETE", f"{SLICES}/{made['metadata']['name']}")


def test_an_update_cannot_move_the_slice_into_another_pool(nodes: Cluster) -> None:
    made = nodes.plane.request("POST", SLICES, resource_slice())
    made["spec"]["pool"]["name"] = OTHER
    try:
        with pytest.raises(ApiError):
            Driver(nodes, OWN).update(made)
    finally:
        nodes.plane.request("DELETE", f"{SLICES}/{made['metadata']['name']}")


def test_nobody_else_is_affected(nodes: Cluster) -> None:
    admin = nodes.plane.request("POST", f"{SLICES}?dryRun=All", without_node(allNodes=True, name="any"))
    assert admin["spec"]["allNodes"] is True
    nodes.plane.request("POST", f"{SLICES}?dryRun=All", resource_slice(driver="gpu.example.org", name="x"))


def test_slices_as_the_driver_publishes_them_pass(nodes: Cluster, offers: Callable[..., Offer]) -> None:
    nodes.publish(OWN, offers())
    assert nodes.slices(OWN)
    nodes.publish(OWN, offers(vfs=2))
