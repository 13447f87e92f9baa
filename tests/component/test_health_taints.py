"""Taints before a real API server and a real scheduler: kept, respected, and gone again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from component.conftest import DRIVER, Cluster, request
from harness.controlplane import ControlPlane
from railmate.publish.controller import SliceController
from railmate.publish.model import Offer
from railmate.publish.slices import keep_taint_times, resource_slices
from railmate.publish.writes import dropped_fields
from railmate_api.attributes import CLASS_PAIR, KIND_PAIR

Offers = Callable[..., Offer]


def write(cluster: Cluster, node: str, offer: Offer, taints: Mapping[str, str]) -> set[str]:
    """Bring the node's slices, which are published, to these taints; return the names of fields that were dropped.

    With the driver's own identity, and only what differs.
    """
    kube, lost = cluster.driver_client(node), set()
    stored = cluster.slices(node)
    generation = stored[0]["spec"]["pool"]["generation"]
    uid = stored[0]["metadata"]["ownerReferences"][0]["uid"]
    wanted = resource_slices(offer, DRIVER, node, node_uid=uid, generation=generation, taints=taints)
    keep_taint_times(wanted, stored)
    for old, new in zip(stored, wanted, strict=True):
        if old["spec"] != new["spec"]:
            new["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
            lost |= dropped_fields(new["spec"], kube.update_slice(new)["spec"])
    return lost


def times(cluster: Cluster, node: str) -> dict[str, str]:
    """Tainted devices and since when."""
    return {
        device["name"]: device["taints"][0]["timeAdded"]
        for item in cluster.slices(node)
        for device in item["spec"].get("devices", [])
        if "taints" in device
    }


def test_server_keeps_taints_and_nothing_else_changes(cluster: Cluster, offers: Offers) -> None:
    """More devices than a slice with taints may have, one tainted in each slice."""
    node, offer = cluster.node("health-kept"), offers("dgx-a100", 16)
    cluster.publish(node, offer)
    before = cluster.slices(node)
    taints = {device.name: "nic-link-down" for device in offer.devices[::50]}
    assert write(cluster, node, offer, taints) == set()
    assert set(times(cluster, node)) == set(taints)
    first = times(cluster, node)

    # another device is tainted: those that were keep their time, and slices without a change are not written
    more = {**taints, offer.devices[1].name: "gpu-lost"}
    versions = [item["metadata"]["resourceVersion"] for item in cluster.slices(node)]
    assert write(cluster, node, offer, more) == set()
    assert {name: times(cluster, node)[name] for name in taints} == first
    after = [item["metadata"]["resourceVersion"] for item in cluster.slices(node)]
    assert sum(old != new for old, new in zip(versions, after, strict=True)) == 1

    assert write(cluster, node, offer, {}) == set()
    assert [item["spec"] for item in cluster.slices(node)] == [item["spec"] for item in before]


def test_scheduler_passes_over_a_tainted_pair_and_takes_it_when_it_is_well(
    cluster: Cluster, offers: Offers
) -> None:
    node, offer = cluster.node("health-skip"), offers()
    pairs = [device.name for device in offer.devices if device.kind == KIND_PAIR]
    cluster.publish(node, offer)
    write(cluster, node, offer, {pairs[0]: "nic-link-down"})
    cluster.pod("health-one", node, cluster.claim("health-one", request("pair", CLASS_PAIR)))
    cluster.scheduled("health-one")
    assert cluster.allocated("health-one") == [pairs[1]]

    write(cluster, node, offer, {})
    cluster.pod("health-two", node, cluster.claim("health-two", request("pair", CLASS_PAIR)))
    cluster.scheduled("health-two")
    assert cluster.allocated("health-two") == [pairs[0]]


def test_pod_that_needs_the_tainted_pair_waits_until_it_is_well(cluster: Cluster, offers: Offers) -> None:
    node, offer = cluster.node("health-wait"), offers()
    pairs = [device.name for device in offer.devices if device.kind == KIND_PAIR]
    cluster.publish(node, offer)
    write(cluster, node, offer, {pairs[3]: "gpu-lost"})
    cluster.pod(
        "health-all", node, cluster.claim("health-all", request("pairs", CLASS_PAIR, count=len(pairs)))
    )
    assert cluster.verdict("health-all")
    write(cluster, node, offer, {})
    cluster.scheduled("health-all")
    assert sorted(cluster.allocated("health-all")) == sorted(pairs)


def test_pod_that_has_the_device_stays(cluster: Cluster, offers: Offers) -> None:
    """NoSchedule, not NoExecute: the pod is neither evicted nor its claim taken."""
    node, offer = cluster.node("health-stay"), offers()
    cluster.publish(node, offer)
    cluster.pod("health-stay", node, cluster.claim("health-stay", request("pair", CLASS_PAIR)))
    cluster.scheduled("health-stay")
    (pair,) = cluster.allocated("health-stay")
    write(cluster, node, offer, {pair: "gpu-lost"})
    # what the eviction controller would have done by the time that a later pod has its verdict
    cluster.pod("health-later", node, cluster.claim("health-later", request("pair", CLASS_PAIR)))
    cluster.scheduled("health-later")
    found = cluster.plane.request("GET", "/api/v1/namespaces/default/pods/health-stay")
    assert "deletionTimestamp" not in found["metadata"]
    assert cluster.allocated("health-stay") == [pair]


def test_server_without_taints_keeps_everything_else(
    tmp_path: Path, start_cluster: Callable[[ControlPlane], Cluster], offers: Offers
) -> None:
    """Kubernetes 1.34 and 1.35 have the gate off: health is shown, and that is all. People are told once, and what the
    server does not keep is not written again and again."""
    gates = {"DRADeviceTaints": False, "DRADeviceTaintRules": False}
    with ControlPlane(tmp_path, gates) as plane:
        cluster, offer, lost = start_cluster(plane), offers(), list[str]()
        node = cluster.node("health-gate")
        kube = cluster.driver_client(node)
        controller = SliceController(kube, DRIVER, node, offer, on_lost=lost.append)
        controller.sync()
        before = cluster.slices(node)
        controller.set_taints({offer.devices[0].name: "gpu-lost"})
        assert [item["spec"] for item in cluster.slices(node)] == [item["spec"] for item in before]
        (message,) = lost
        assert "DRADeviceTaints" in message
        assert "only shown as unhealthy" in message
        versions = [item["metadata"]["resourceVersion"] for item in cluster.slices(node)]
        for taints in ({}, {offer.devices[1].name: "nic-link-down"}, {offer.devices[0].name: "gpu-lost"}):
            controller.set_taints(taints)
        assert [item["metadata"]["resourceVersion"] for item in cluster.slices(node)] == versions
        assert len(lost) == 1


@pytest.fixture(autouse=True)
def _clean(cluster: Cluster) -> Iterator[None]:
    """Pods of a test hold its claims only; both go with it."""
    yield
    pods = cluster.plane.request("GET", "/api/v1/namespaces/default/pods")["items"]
    for pod in (item["metadata"]["name"] for item in pods):
        if pod.startswith("health-"):
            cluster.delete_pod(pod)
            cluster.delete_claim(pod)
