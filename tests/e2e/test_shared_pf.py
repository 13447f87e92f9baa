"""Pods share a physical function: each has a sub-interface of its own, and nothing of it is left behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.lab import Lab, Workspace, claim_spec, eventually, pod, template
from e2e.test_exclusive import unschedulable
from harness.deploy import CHART, NAMESPACE, RELEASE, wait_ready
from harness.machines import list_netdevs

PORT = "enp12s0np0"  # of rail 0
ROOM = 2
PODS = ("shared-pf-a", "shared-pf-b")
_BOOKS = "/var/lib/cni/networks/railmate"  # host-local's


def share(lab: Lab, *rules: str) -> None:
    lab.cluster.helm(
        "upgrade", RELEASE, str(CHART), "--namespace", NAMESPACE, "--reuse-values",
        "--set-json", f"sharedPFs={json.dumps(rules)}",
    )  # fmt: skip
    wait_ready(lab.cluster)


def shared_devices(lab: Lab) -> dict[str, Any]:
    slices = lab.cluster.kubectl_json("get", "resourceslices")["items"]
    return {
        device["name"]: device
        for item in slices
        if item["spec"].get("nodeName") == lab.node
        for device in item["spec"].get("devices") or []
        if device.get("allowMultipleAllocations")
    }


@pytest.fixture(scope="module")
def sharing(lab: Lab) -> Iterator[Lab]:
    """The driver shares one function of the node, between two at most."""
    share(lab, f"{PORT}={ROOM}")
    try:
        eventually(lambda: shared_devices(lab), "the shared device is published")
        yield lab
    finally:
        share(lab)
        try:
            eventually(lambda: not shared_devices(lab), "nothing shared is published any more")
        except AssertionError as error:
            log = lab.cluster.kubectl("-n", NAMESPACE, "logs", "-l", f"app.kubernetes.io/name={RELEASE}")
            raise AssertionError(f"{error}\n{lab.leftovers()}\n{log}") from error


def address(workspace: Workspace, name: str) -> str:
    words = workspace.in_pod(name, "ip -4 -o address show rail0").split()
    return words[words.index("inet") + 1].partition("/")[0]


def nics(lab: Lab) -> dict[str, str]:
    """The machine's own netdevs in the node's namespace, name to MAC."""
    names = {one.name for one in list_netdevs(lab.machine)}
    return {name: mac for name, mac in lab.links().items() if name in names}


def leases(lab: Lab) -> list[str]:
    found = lab.on_node("sh", "-c", f"ls {_BOOKS} 2>/dev/null || true").split()
    return [name for name in found if name[0].isdigit()]


def test_two_pods_share_a_function_and_reach_each_other_through_it(
    sharing: Lab, workspace: Workspace
) -> None:
    before = nics(sharing)
    workspace.apply_example("shared-pf")
    for name in PODS:
        workspace.wait_ready(name)

    results = [workspace.claim_of(name)["status"]["allocation"]["devices"]["results"][0] for name in PODS]
    assert {result["device"] for result in results} == {"shared-0000-0c-00-0"}
    assert len({result["shareID"] for result in results}) == 2

    links = [workspace.links(name) for name in PODS]
    assert all(set(one) == {"lo", "eth0", "rail0"} and one["rail0"]["up"] for one in links)
    macs = {one["rail0"]["mac"] for one in links}
    assert len(macs) == 2
    assert before[PORT] not in macs
    assert nics(sharing) == before, "the node keeps its netdevs"
    assert macs.isdisjoint(sharing.links().values()), "and shows none of the pods'"

    addresses = [address(workspace, name) for name in PODS]
    assert len(set(addresses)) == 2
    for name, other in zip(PODS, reversed(addresses), strict=True):
        assert "0% packet loss" in workspace.in_pod(name, f"ping -c 2 -W 5 -I rail0 {other}")

    own = {
        node for rdma in sharing.machine.functions["0000:0c:00.0"].rdma_devices for node in rdma.char_devices
    }
    for name in PODS:
        gpus, rdma = workspace.device_nodes(name)
        assert gpus == set()
        assert rdma == {node for node in own if node.startswith("uverbs")} | {"rdma_cm"}

    for name, result, one in zip(PODS, results, links, strict=True):
        (metadata,) = workspace.metadata(name)
        (told,) = metadata["requests"][0]["devices"]
        assert told["attributes"]["railmate.dev/shareID"] == {"string": result["shareID"]}
        assert told["networkData"]["hardwareAddress"] == one["rail0"]["mac"]
        status = eventually(
            lambda name=name: workspace.claim_of(name)["status"].get("devices"),  # type: ignore[misc]
            f"status.devices of the claim of {name}",
        )
        assert [entry["shareID"] for entry in status] == [result["shareID"]]
        assert status[0]["networkData"]["ips"] == [f"{address(workspace, name)}/24"]

    for name in PODS:
        workspace.delete_pod(name)
    eventually(lambda: not leases(sharing), "the addresses are given back")
    sharing.wait_home()
    assert nics(sharing) == before


def test_a_pod_more_than_there_is_room_for_waits_and_then_gets_the_free_share(
    sharing: Lab, workspace: Workspace
) -> None:
    workspace.apply_example("shared-pf")
    for name in PODS:
        workspace.wait_ready(name)
    workspace.apply(pod("third", template="shared-pf"))
    assert "cannot allocate all claims" in unschedulable(workspace, "third")
    workspace.delete_pod(PODS[0])
    workspace.wait_ready("third")
    assert address(workspace, "third") != address(workspace, PODS[1])
    assert "0% packet loss" in workspace.in_pod("third", f"ping -c 1 -W 5 {address(workspace, PODS[1])}")


def test_a_share_is_back_in_a_new_sandbox_as_it_was(sharing: Lab, workspace: Workspace) -> None:
    """The pause process is killed: the kubelet makes the sandbox anew, and nobody prepares the claim again."""
    config = {
        "apiVersion": "railmate.dev/v1alpha1",
        "kind": "RdmaSharedConfig",
        "interfaceName": "rail0",
        "addresses": ["192.168.78.5/24"],
    }
    workspace.apply(template("one", claim_spec("rdma-shared.railmate.dev", config=config)))
    workspace.apply(pod("one", template="one", terminationGracePeriodSeconds=0))
    workspace.wait_ready("one")
    before = workspace.links("one")["rail0"]
    uid = workspace.get("pod", "one")["metadata"]["uid"]
    was = workspace.get("pod", "one")["status"]["podIP"]
    sandbox = sharing.on_node("sh", "-c", f"crictl pods -q --label io.kubernetes.pod.uid={uid}").split()[0]
    sharing.on_node("sh", "-c", f"crictl --timeout 60s stopp {sandbox}")
    eventually(
        lambda: workspace.get("pod", "one")["status"].get("podIP") not in (None, was),
        "the pod has a new sandbox",
        90,
    )
    workspace.wait_ready("one", 90)
    assert workspace.links("one")["rail0"] == before
    assert address(workspace, "one") == "192.168.78.5"
