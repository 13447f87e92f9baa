"""A pod without its NIC does not start, whatever is down; it starts by itself when all is well again."""

from __future__ import annotations

import json
from collections.abc import Set
from typing import Any

import pytest

from e2e.lab import Lab, Workspace, claim, claim_spec, eventually, pod, template
from harness.shell import HarnessError

SENTENCE = "railmate.dev: the network device of claim"


def containers(workspace: Workspace, name: str) -> dict[str, dict[str, Any]]:
    status = workspace.get("pod", name)["status"]
    return {one["name"]: one for one in status.get("containerStatuses", [])}


def running(workspace: Workspace, name: str) -> set[str]:
    """IDs of the pod's containers that run, as the kubelet tells."""
    return {
        str(one["containerID"]) for one in containers(workspace, name).values() if "running" in one["state"]
    }


def refused(workspace: Workspace, name: str, sentence: str, before: Set[str] = frozenset()) -> str:
    """Wait until the user is told; until then no container runs at any look, but for those that ran ``before``
    (the kubelet may not have noticed their end)."""

    def look() -> str:
        assert running(workspace, name) <= before
        told = workspace.describe(name)
        return told if sentence in told else ""

    try:
        # after a prepare that fails the kubelet takes 60 to 90 s to its next one
        return eventually(look, f"{sentence!r} in kubectl describe pod {name}", seconds=120)
    except AssertionError as error:
        raise AssertionError(f"{error}; told was:\n{workspace.describe(name)}") from None


def pause_process(lab: Lab, workspace: Workspace, name: str) -> str:
    found = lab.on_node(
        "crictl", "pods", "--namespace", workspace.namespace, "--name", name, "--state", "ready", "-q"
    )
    info = json.loads(lab.on_node("crictl", "inspectp", "-o", "json", found.split()[0]))
    return str(info["info"]["pid"])


def test_a_new_pod_waits_for_its_nic_while_the_runtime_is_not_connected(
    lab: Lab, workspace: Workspace
) -> None:
    with lab.runtime_unreachable():
        workspace.apply_example("one-pair")
        refused(workspace, "one-pair", SENTENCE)
        before = workspace.get("pod", "one-pair")["metadata"]["uid"]
        lab.reconnect_runtime()
        running = workspace.wait_ready("one-pair")
    assert running["metadata"]["uid"] == before
    assert workspace.links("one-pair")["net1"]["up"]


def test_a_pod_whose_sandbox_is_made_again_waits_for_its_nic_too(lab: Lab, workspace: Workspace) -> None:
    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    mac = workspace.links("one-pair")["net1"]["mac"]
    first, before = pause_process(lab, workspace, "one-pair"), running(workspace, "one-pair")
    with lab.runtime_unreachable():
        lab.on_node("kill", "-9", first)
        eventually(lambda: _other_sandbox(lab, workspace, first), "a new sandbox")
        refused(workspace, "one-pair", SENTENCE, before)
        lab.reconnect_runtime()
        eventually(
            lambda: running(workspace, "one-pair") - before, "the container in the new sandbox", seconds=90
        )
    assert workspace.links("one-pair")["net1"] == {"mac": mac, "up": True}


def test_a_sandbox_that_is_made_again_gets_the_nic_at_once(lab: Lab, workspace: Workspace) -> None:
    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    mac = workspace.links("one-pair")["net1"]["mac"]
    first, before = pause_process(lab, workspace, "one-pair"), running(workspace, "one-pair")
    lab.on_node("kill", "-9", first)
    eventually(lambda: running(workspace, "one-pair") - before, "the container in a new sandbox")
    assert _other_sandbox(lab, workspace, first)
    assert workspace.links("one-pair")["net1"] == {"mac": mac, "up": True}


def test_a_second_pod_on_the_claim_is_refused(lab: Lab, workspace: Workspace) -> None:
    workspace.apply(claim("shared", claim_spec("gpu-rdma-pair.railmate.dev")), pod("first", claim="shared"))
    workspace.wait_ready("first")
    workspace.apply(pod("second", claim="shared"))
    told = refused(workspace, "second", "a NIC can be in one pod only")
    assert f"is in pod {workspace.namespace}/first" in told

    # and the hook alone refuses it as well
    workspace.delete_pod("second")
    with lab.runtime_unreachable():
        workspace.apply(pod("third", claim="shared"))
        refused(workspace, "third", SENTENCE)
        assert "net1" in workspace.links("first")
        workspace.delete_pod("third")


def test_a_pod_on_the_host_network_keeps_the_netdev_on_the_node(lab: Lab, workspace: Workspace) -> None:
    workspace.apply(
        template("pair", claim_spec("gpu-rdma-pair.railmate.dev")),
        pod("host", template="pair", hostNetwork=True),
    )
    workspace.wait_ready("host")
    vf = lab.devices[workspace.allocated("host")[0]]["railmate.dev/nicPciBusID"]
    assert lab.machine.functions[vf].netdevs[0].name in lab.links()
    assert "rdma_cm" in workspace.device_nodes("host")[1]


def test_a_driver_that_is_killed_comes_back_to_the_pods_it_left(lab: Lab, workspace: Workspace) -> None:
    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    lab.on_node("pkill", "-9", "-f", "railmate node")
    assert workspace.links("one-pair")["net1"]["up"]
    workspace.delete_pod("one-pair")
    lab.wait_home()


def test_unknown_config_is_refused_at_admission_with_the_fields_name(lab: Lab, workspace: Workspace) -> None:
    config = {"apiVersion": "railmate.dev/v1alpha1", "kind": "RdmaVfConfig", "interfaceNmae": "rail0"}
    spec = claim_spec("gpu-rdma-pair.railmate.dev", config=config)
    with pytest.raises(HarnessError, match=r'has no field "interfaceNmae"; it has: .*interfaceName'):
        workspace.apply(template("bad", spec))


def _other_sandbox(lab: Lab, workspace: Workspace, first: str) -> bool:
    try:
        return pause_process(lab, workspace, "one-pair") != first
    except IndexError:
        return False
