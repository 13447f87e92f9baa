"""A control plane with the chart's ServiceAccount, RBAC and DeviceClasses, and nodes that carry a machine's devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from component.netdev_lab import MakeVf, Pod, pods, veths
from harness.controlplane import ControlPlane
from harness.gobuild import program
from harness.shell import run
from railmate.attach.model import NetdevSnapshot
from railmate.attach.netdev import snapshot
from railmate.inventory.model import Inventory
from railmate.kube.client import KubeClient
from railmate.publish.controller import SliceController
from railmate.publish.devices import OfferOptions, build_offer
from railmate.publish.model import Offer
from railmate.topology.analyze import analyze

CHART = Path(__file__).resolve().parents[2] / "driver" / "chart"
NAMESPACE = "railmate"
DRIVER = "railmate.dev"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
PODS = "/api/v1/namespaces/default/pods"
#: Seconds after which a test gives up on something that should come at once.
PATIENCE = 30


def chart_objects() -> list[dict[str, Any]]:
    """What the chart installs, less the DaemonSet: there is no kubelet to run it."""
    text = run([program("helm"), "template", "railmate", CHART, "--namespace", NAMESPACE])
    return [item for item in yaml.safe_load_all(text) if item and item["kind"] != "DaemonSet"]


@dataclass
class Cluster:
    plane: ControlPlane
    service_account: str

    def node(self, name: str) -> str:
        self.plane.add_node(name)
        return name

    def driver_client(self, node: str) -> KubeClient:
        """The node plugin's identity: its ServiceAccount, with a token bound to its node."""
        token = self.plane.service_account_token(NAMESPACE, self.service_account, node=node)
        return KubeClient(self.plane.api_client(token=token).configuration)

    def publish(self, node: str, offer: Offer) -> None:
        SliceController(self.driver_client(node), DRIVER, node, offer).sync()

    def slices(self, node: str) -> list[dict[str, Any]]:
        selector = f"fieldSelector=spec.driver%3D{DRIVER},spec.nodeName%3D{node}"
        items = self.plane.request("GET", f"/apis/resource.k8s.io/v1/resourceslices?{selector}")["items"]
        return sorted(items, key=lambda item: str(item["metadata"]["name"]))

    def claim(self, name: str, *requests: dict[str, Any], match: str | None = None) -> str:
        """Makes a claim; requests are ``request(…)``."""
        devices: dict[str, Any] = {"requests": list(requests)}
        if match:
            names = [one["name"] for one in requests]
            devices["constraints"] = [{"requests": names, "matchAttribute": match}]
        body = {"metadata": {"name": name}, "spec": {"devices": devices}}
        self.plane.request(
            "POST", CLAIMS, {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", **body}
        )
        return name

    def pod(self, name: str, node: str, *claims: str) -> str:
        """Makes a pod for the node, left to the scheduler."""
        container = {
            "name": "main",
            "image": "pause",
            "resources": {"claims": [{"name": one} for one in claims]},
        }
        spec = {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "containers": [container],
            "resourceClaims": [{"name": one, "resourceClaimName": one} for one in claims],
        }
        self.plane.request(
            "POST", PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        )
        return name

    def verdict(self, pod: str) -> str:
        """Waits for the scheduler: "" when it found a node, else its message."""
        for one in self.follow(f"{PODS}?fieldSelector=metadata.name%3D{pod}"):
            if one["spec"].get("nodeName"):
                return ""
            for condition in one.get("status", {}).get("conditions", []):
                if condition["type"] == "PodScheduled" and condition["status"] == "False":
                    return str(condition["message"])
        raise AssertionError(f"the scheduler said nothing about pod {pod} within {PATIENCE} s")

    def scheduled(self, pod: str) -> None:
        """Waits until the pod has a node, also where the scheduler refused it at first."""
        for one in self.follow(f"{PODS}?fieldSelector=metadata.name%3D{pod}"):
            if one["spec"].get("nodeName"):
                return
        raise AssertionError(f"pod {pod} got no node within {PATIENCE} s")

    def follow(self, path: str) -> Iterator[dict[str, Any]]:
        """The object as it is and whenever it changes."""
        with closing(self.plane.watch(path, PATIENCE)) as events:  # type: ignore[type-var]
            for event in events:
                if event["type"] in ("ADDED", "MODIFIED"):
                    yield event["object"]

    def allocated(self, claim: str) -> list[str]:
        """The allocated devices' names, in the order of the results."""
        status = self.plane.request("GET", f"{CLAIMS}/{claim}").get("status", {})
        results = status.get("allocation", {}).get("devices", {}).get("results", [])
        return [str(one["device"]) for one in results]

    def delete_pod(self, pod: str) -> None:
        """At once: there is no kubelet that would confirm the end of its containers."""
        self.plane.request("DELETE", f"{PODS}/{pod}?gracePeriodSeconds=0")

    def delete_claim(self, claim: str) -> None:
        """Returns when the claim is gone and its devices are free."""
        self.plane.request("DELETE", f"{CLAIMS}/{claim}")
        wait_until(lambda: claim not in self._claim_names(), f"claim {claim} is gone")

    def _claim_names(self) -> list[str]:
        return [one["metadata"]["name"] for one in self.plane.request("GET", CLAIMS)["items"]]


def request(name: str, device_class: str, count: int = 1, expression: str | None = None) -> dict[str, Any]:
    exactly: dict[str, Any] = {"deviceClassName": device_class, "count": count}
    if expression:
        exactly["selectors"] = [{"cel": {"expression": expression}}]
    return {"name": name, "exactly": exactly}


def wait_until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> float:
    """Looks every 20 ms; how long it took. For what no watch can tell."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - began


# --- netdevs between network namespaces
@pytest.fixture
def pod() -> Iterator[Pod]:
    with pods("t") as (made,):
        yield made


@pytest.fixture
def make_vf() -> Iterator[MakeVf]:
    with veths() as make:
        yield make


@pytest.fixture
def vf(make_vf: MakeVf) -> NetdevSnapshot:
    return snapshot(make_vf(1, queues=4), "0000:c1:00.1")


# --- clusters
@pytest.fixture(scope="session")
def start_cluster() -> Callable[..., Cluster]:
    def start(plane: ControlPlane) -> Cluster:
        objects = chart_objects()
        plane.request("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        plane.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(objects))
        (account,) = [one["metadata"]["name"] for one in objects if one["kind"] == "ServiceAccount"]
        return Cluster(plane, account)

    return start


@pytest.fixture(scope="session")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, start_cluster: Callable[..., Cluster]
) -> Iterator[Cluster]:
    """One control plane for all tests; each test makes nodes, claims and pods of its own names."""
    with ControlPlane(tmp_path_factory.mktemp("plane")) as plane:
        yield start_cluster(plane)


@pytest.fixture(scope="session")
def offers(scanned: Callable[[str, int], Inventory]) -> Callable[..., Offer]:
    def offer(machine: str = "dgx-a100", vfs: int = 4, **options: Any) -> Offer:
        inventory = scanned(machine, vfs)
        return build_offer(inventory, analyze(inventory), OfferOptions(**options))

    return offer
