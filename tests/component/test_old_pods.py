"""Pods in the old style, by a number in their resources: each GPU comes with its NIC, and nothing of theirs is edited.

The scheduler makes the claim (KEP-5004); it is prepared like any other, which is tested with the claim from the API.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from component.conftest import CHART, CLAIMS, NAMESPACE, PODS, Cluster, request, wait_until
from component.test_prepare_kinds import Prepare, driver, ref_of, view
from harness.gobuild import program
from harness.shell import HarnessError, run
from railmate.claims.plan import make_plan
from railmate.inventory.model import Inventory
from railmate.node.deviceplugins import DevicePlugins
from railmate.publish.devices import OfferOptions, build_offer
from railmate.publish.model import Offer
from railmate.topology.analyze import analyze
from railmate_api import attributes as names
from unit.publish.offered_machines import recorded

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "old-pod"
RESOURCE = "nvidia.com/gpu"
__all__ = ["driver"]  # a fixture


@pytest.fixture(scope="module", autouse=True)
def classes(cluster: Cluster) -> Iterator[dict[str, Any]]:
    """The classes that the chart makes."""
    resources = dict.fromkeys(("nvidia.com/gpu", "amd.com/gpu"), names.CLASS_PAIR)
    setting = f"extendedResources={json.dumps(resources)}"
    text = run([program("helm"), "template", "railmate", CHART, "-n", NAMESPACE, "--set-json", setting])
    made = [
        item
        for item in yaml.safe_load_all(text)
        if item and item["kind"] == "DeviceClass" and "extendedResourceName" in item["spec"]
    ]
    cluster.plane.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(made))
    yield {item["spec"]["extendedResourceName"]: item for item in made}
    for item in made:
        cluster.plane.request("DELETE", f"/apis/resource.k8s.io/v1/deviceclasses/{item['metadata']['name']}")


def old_pod(cluster: Cluster, name: str, node: str, *numbers: int) -> str:
    """A pod as people have them: one container for each number of GPUs."""
    containers = [
        {
            "name": f"c{index}",
            "image": "pause",
            "env": [{"name": "NCCL_IB_HCA", "value": "mlx5"}],
            "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
            "resources": {"limits": {RESOURCE: str(number), "cpu": "1"}},
        }
        for index, number in enumerate(numbers)
    ]
    spec = {"nodeSelector": {"kubernetes.io/hostname": node}, "containers": containers}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    cluster.plane.request("POST", PODS, body)
    return name


def claim_of(cluster: Cluster, pod: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod, and the claim that the scheduler made for it."""
    found = cluster.plane.request("GET", f"{PODS}/{pod}")
    name = found["status"]["extendedResourceClaimStatus"]["resourceClaimName"]
    return found, cluster.plane.request("GET", f"{CLAIMS}/{name}")


def test_eight_gpus_come_each_with_its_nics(
    cluster: Cluster, driver: Callable[[str, Inventory, Offer], Prepare]
) -> None:
    """On a p5en: two NICs of its switch for each GPU. They have no netdevs, so all of prepare runs here."""
    case = recorded("aws-p5en", 0)
    node, offer = cluster.node("old-p5en"), case.offer
    cluster.publish(node, offer)
    assert cluster.verdict(old_pod(cluster, "old-eight", node, 8)) == ""
    pod, claim = claim_of(cluster, "old-eight")

    owner = claim["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Pod", "old-eight", pod["metadata"]["uid"])
    assert claim["metadata"]["annotations"]["resource.kubernetes.io/extended-resource-claim"] == "true"
    assert claim["metadata"]["name"].startswith("old-eight-extended-resources-")
    (mapping,) = pod["status"]["extendedResourceClaimStatus"]["requestMappings"]
    assert mapping == {
        "containerName": "c0",
        "resourceName": RESOURCE,
        "requestName": "container-0-request-1",
    }

    prepared = driver(node, case.inventory, offer)(claim)
    assert {device.request for device in prepared.devices} == {"container-0-request-1"}
    assert len({gpu for device in prepared.devices for gpu in device.gpus}) == 8
    assert len({nic.address for device in prepared.devices for nic in device.nics}) == 16
    for device in prepared.devices:
        assert {nic.address for nic in device.nics} <= case.right[device.gpus[0]]
        paths = {node.path for node in device.nodes}
        assert {path for path in paths if path.startswith("/dev/nvidia")} >= {"/dev/nvidiactl"}
        assert sum("uverbs" in path for path in paths) == 2
        assert prepared.cdi_ids[device.device]


def test_containers_get_their_own_requests(cluster: Cluster, offers: Callable[..., Offer]) -> None:
    node = cluster.node("old-two")
    cluster.publish(node, offers())
    assert cluster.verdict(old_pod(cluster, "old-two", node, 2, 1)) == ""
    pod, claim = claim_of(cluster, "old-two")
    requests = {
        one["containerName"]: one["requestName"]
        for one in pod["status"]["extendedResourceClaimStatus"]["requestMappings"]
    }
    inventory = recorded("dgx-a100", 4).inventory
    plan = make_plan(claim, ref_of(claim), view(node, inventory, offers(), Path("/")), ())
    held = {name: [d for d in plan.devices if d.request == requests[name]] for name in ("c0", "c1")}
    assert {name: len(devices) for name, devices in held.items()} == {"c0": 2, "c1": 1}
    assert len({gpu for device in plan.devices for gpu in device.gpus}) == 3
    assert [nic.interface for device in plan.devices for nic in device.nics] == ["net1", "net2", "net3"]
    assert plan.pods == (pod["metadata"]["uid"],)


def test_the_class_of_the_example_is_the_charts(classes: dict[str, Any]) -> None:
    shown, _ = yaml.safe_load_all((EXAMPLE / "manifest.yaml").read_text())
    made = classes[RESOURCE]
    assert shown["metadata"]["name"] == made["metadata"]["name"]
    assert shown["spec"] == made["spec"]


@pytest.mark.parametrize(
    ("resource", "device_class"),
    [
        ("example.com/gpu", names.CLASS_PAIR),
        ("nvidia.com/gpu", names.CLASS_RDMA_VF),
        ("gpu", names.CLASS_GPU),
    ],
)
def test_mapping_that_no_vendor_guards_is_refused(resource: str, device_class: str) -> None:
    setting = f"extendedResources={json.dumps({resource: device_class})}"
    with pytest.raises(HarnessError, match="extendedResources"):
        run([program("helm"), "template", "railmate", CHART, "--set-json", setting])


def test_ninth_gpu_is_refused(cluster: Cluster, offers: Callable[..., Offer]) -> None:
    node = cluster.node("old-nine")
    cluster.publish(node, offers())
    assert cluster.verdict(old_pod(cluster, "old-nine", node, 9)) != ""
    assert cluster.verdict(old_pod(cluster, "old-nine-8", node, 8)) == ""


def test_gpus_of_another_vendor_are_not_taken(
    cluster: Cluster, classes: dict[str, Any], offers: Callable[..., Offer]
) -> None:
    assert {"nvidia.com/gpu", "amd.com/gpu"} <= classes.keys()
    node = cluster.node("old-amd")
    cluster.publish(node, offers("tuolumne-mi300a", 0))
    assert cluster.verdict(old_pod(cluster, "old-amd", node, 1)) != ""


# --- beside a device plugin
def hand_out(cluster: Cluster, node: str, count: int) -> None:
    """As the kubelet says it for a device plugin."""
    numbers = {RESOURCE: str(count)}
    body = {"status": {"capacity": numbers, "allocatable": numbers}}
    cluster.plane.request(
        "PATCH", f"/api/v1/nodes/{node}/status", body, content_type="application/merge-patch+json"
    )


def test_a_pod_gets_the_plugins_gpus_where_there_is_a_plugin(
    cluster: Cluster, offers: Callable[..., Offer]
) -> None:
    """One cluster, two nodes, the same pod."""
    plugin, own = cluster.node("mixed-plugin"), cluster.node("mixed-railmate")
    hand_out(cluster, plugin, 8)
    cluster.publish(own, offers())
    for node in (plugin, own):
        pod = f"{node}-pod"
        assert cluster.verdict(old_pod(cluster, pod, node, 4)) == ""
        status = cluster.plane.request("GET", f"{PODS}/{pod}")["status"]
        assert ("extendedResourceClaimStatus" in status) == (node == own)


def test_gpus_of_a_plugin_on_the_same_node_are_withheld(cluster: Cluster) -> None:
    """And come back when the plugin is gone. The driver asks with its own identity."""
    inventory = recorded("dgx-a100", 4).inventory
    node, said = cluster.node("mixed-guard"), list[str]()

    def publish() -> None:
        plugins = DevicePlugins(cluster.driver_client(node), node, said.append)
        options = OfferOptions(handed_out=plugins.handed_out())
        cluster.publish(node, build_offer(inventory, analyze(inventory), options))

    hand_out(cluster, node, 8)
    publish()
    (message,) = said
    assert "nvidia.com/gpu" in message
    claim = cluster.claim("mixed-guard-pair", request("pair", names.CLASS_PAIR))
    assert cluster.verdict(cluster.pod(claim, node, claim)) != ""
    vfs = cluster.claim("mixed-guard-vfs", request("vfs", names.CLASS_RDMA_VF, 32))
    assert cluster.verdict(cluster.pod(vfs, node, vfs)) == "", "the NICs are nobody else's"
    cluster.delete_pod(vfs)
    cluster.delete_claim(vfs)

    hand_out(cluster, node, 0)
    publish()
    cluster.scheduled(claim)
    wait_until(lambda: bool(cluster.allocated(claim)), "the pair is given")
