"""A gang on two simulated GPU nodes: its pods find each other by name, and agree on their rails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.lab import Lab, Workspace, eventually
from harness.deploy import NAMESPACE, RELEASE, wait_ready
from harness.simnode import SimNode

PODS = "job-name=gang-job"


@pytest.fixture
def second_node(lab: Lab) -> Iterator[str]:
    """The other worker, as the same machine; an ordinary node again afterwards."""
    (name,) = set(lab.cluster.workers()) - {lab.node}
    node = SimNode(lab.cluster, name, lab.machine)
    node.up()
    try:
        wait_ready(lab.cluster)
        lab.cluster.kubectl(
            "-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=120s", timeout=130
        )
        eventually(lambda: publishes_pairs(lab, name), f"slices of {name}")
        yield name
    finally:
        node.down()
        # the kubelet forgets the node's slices half a minute after the driver's end; pods of other tests would go there
        there = ("--field-selector", f"spec.nodeName={name}")
        driver = ("-n", NAMESPACE, "-l", f"app.kubernetes.io/name={RELEASE}", *there)
        lab.cluster.kubectl("wait", "--for=delete", "pod", *driver, "--timeout=90s", timeout=100)
        lab.cluster.kubectl("delete", "resourceslices", *there)


def publishes_pairs(lab: Lab, node: str) -> bool:
    return any(
        device["name"].startswith("pair-")
        for item in lab.cluster.kubectl_json("get", "resourceslices")["items"]
        if item["spec"].get("nodeName") == node
        for device in item["spec"].get("devices") or []
    )


def test_a_gang_takes_two_nodes_and_its_pods_agree_on_hosts_and_rails(
    lab: Lab, workspace: Workspace, second_node: str
) -> None:
    workspace.apply_example("gang-job")
    try:
        workspace.kubectl("wait", "--for=create", "--timeout=60s", "pod", "-l", PODS)
        workspace.kubectl("wait", "--for=condition=Ready", "pod", "-l", PODS, "--timeout=120s", timeout=130)
        names = workspace.kubectl("get", "pods", "-l", PODS, "-o", "name").replace("pod/", "").split()
        nodes = [workspace.get("pod", name)["spec"]["nodeName"] for name in sorted(names)]
        assert sorted(nodes) == sorted([lab.node, second_node])

        hosts = {workspace.in_pod(name, "cat /tmp/gang/hostfile") for name in names}
        assert hosts == {"gang-job-0.gang-job slots=8\ngang-job-1.gang-job slots=8\n"}
        for name in names:
            assert_in_rail_order(lab, workspace, name)
    finally:
        workspace.kubectl("delete", "job", "gang-job", "--cascade=foreground", "--timeout=90s")


def assert_in_rail_order(lab: Lab, workspace: Workspace, pod: str) -> None:
    """Eight pairs by rail, each as the machine's facts have it, and the environment in the same order."""
    lines = [line.split() for line in workspace.in_pod(pod, "sh /gang/rails").splitlines()]
    assert [int(rail) for rail, *_ in lines] == list(range(8))
    owner = {
        device.name: function.physical_function
        for function in lab.machine.functions.values()
        for device in function.rdma_devices
    }
    for rail, gpu, rdma, netdev in lines:
        assert owner[rdma] == lab.machine.rails[int(rail)], "the rail's own NIC"
        assert owner[rdma] in lab.machine.expected["best"][gpu]
        assert netdev in workspace.links(pod)
    environment = dict(line.split("=", 1) for line in workspace.in_pod(pod, "cat /tmp/gang/env").splitlines())
    assert environment == {
        "MASTER_ADDR": "gang-job-0.gang-job",
        "NCCL_IB_HCA": "=" + ",".join(rdma for _, _, rdma, _ in lines),
        "RAIL_GPUS": ",".join(gpu for _, gpu, _, _ in lines),
        "RAIL_NETDEVS": ",".join(netdev for *_, netdev in lines),
    }
