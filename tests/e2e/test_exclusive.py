"""No GPU and no VF is given out twice, by whichever name, and a full node says so at once."""

from __future__ import annotations

import json
import time

from e2e.lab import Lab, Workspace, claim_spec, eventually, pod, template

ADDRESS = 'device.attributes["resource.kubernetes.io"].pciBusID'


def unschedulable(workspace: Workspace, name: str, seconds: float = 10) -> str:
    """The scheduler's own words on why the pod is not placed."""

    def look() -> str:
        for condition in workspace.get("pod", name)["status"].get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return str(condition["message"])
        return ""

    return eventually(look, f"verdict of the scheduler on pod {name}", seconds)


def test_a_gpu_in_a_pair_is_not_given_out_alone(lab: Lab, workspace: Workspace) -> None:
    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    gpu = lab.devices[workspace.allocated("one-pair")[0]]["railmate.dev/gpuPciBusID"]
    alone = claim_spec("gpu.railmate.dev", where=f'{ADDRESS} == "{gpu}"')
    workspace.apply(template("alone", alone), pod("alone", template="alone"))
    assert "cannot allocate all claims" in unschedulable(workspace, "alone")

    workspace.delete_pod("one-pair")
    workspace.wait_ready("alone")


def test_a_pair_of_a_gpu_that_is_given_out_alone_is_not_available(lab: Lab, workspace: Workspace) -> None:
    gpu = lab.machine.expected["gpus"][0]
    alone = claim_spec("gpu.railmate.dev", where=f'{ADDRESS} == "{gpu}"')
    workspace.apply(template("alone", alone), pod("alone", template="alone"))
    workspace.wait_ready("alone")
    pair = claim_spec("gpu-rdma-pair.railmate.dev", where=f'{ADDRESS} == "{gpu}"')
    workspace.apply(template("pair", pair), pod("pair", template="pair"))
    assert "cannot allocate all claims" in unschedulable(workspace, "pair")


def test_a_ninth_pair_waits_and_others_are_scheduled(lab: Lab, workspace: Workspace) -> None:
    workspace.apply_example("eight-pairs")
    workspace.wait_ready("eight-pairs")
    workspace.apply_example("one-pair")
    start = time.monotonic()
    message = unschedulable(workspace, "one-pair")
    verdict = time.monotonic() - start
    assert "cannot allocate all claims" in message
    assert verdict < 1.0, f"the scheduler took {verdict:.1f} s"

    workspace.apply(pod("plain"))
    workspace.wait_ready("plain", seconds=20)
    assert workspace.get("pod", "one-pair")["status"]["phase"] == "Pending"

    workspace.delete_pod("eight-pairs")
    workspace.wait_ready("one-pair")


def test_after_a_pod_everything_is_as_before(lab: Lab, workspace: Workspace) -> None:
    before = lab.links()
    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    allocated = workspace.allocated("one-pair")
    vf = lab.devices[allocated[0]]["railmate.dev/nicPciBusID"]
    netdev = lab.machine.functions[vf].netdevs[0].name
    assert netdev in before
    assert netdev not in lab.links()
    assert len(lab.leftovers()) == 5  # CDI spec, ledger entry and its copy, gate marker, metadata

    # the container may do what it likes to the netdev
    changes = (
        "ip link set net1 down; ip link set net1 mtu 1400; ip link set net1 name mine; ip link set mine up"
    )
    spec = workspace.get("pod", "one-pair")["spec"]["containers"][0]
    assert spec["name"]
    lab.on_node("nsenter", f"--net={_netns(lab, workspace, 'one-pair')}", "sh", "-c", changes)
    workspace.delete_pod("one-pair")
    lab.wait_home()
    link = json.loads(lab.on_node("ip", "-j", "link", "show", netdev))[0]
    assert link["address"] == before[netdev]
    assert link["mtu"] == lab.machine.functions[vf].netdevs[0].mtu

    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    assert workspace.allocated("one-pair") == allocated


def _netns(lab: Lab, workspace: Workspace, name: str) -> str:
    """Path of the pod's network namespace on the node."""
    sandbox = lab.on_node("crictl", "pods", "--namespace", workspace.namespace, "--name", name, "-q").split()[
        0
    ]
    info = json.loads(lab.on_node("crictl", "inspectp", "-o", "json", sandbox))
    namespaces = info["info"]["runtimeSpec"]["linux"]["namespaces"]
    return next(str(one["path"]) for one in namespaces if one["type"] == "network")
