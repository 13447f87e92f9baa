"""What the kubelet and people do to a driver, after the list of Kubernetes' own node e2e tests for DRA
(test/e2e_node/dra_test.go): restarts, force deletes, shared and replaced claims, wiped slices, a reboot."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from e2e.faults import no_driver
from e2e.lab import PLUGIN_DIR, Lab, Workspace, claim, claim_spec, eventually, pod, template
from harness.deploy import NAMESPACE, RELEASE, wait_ready
from harness.shell import HarnessError
from harness.soakkills import kill_driver

PAIR = "gpu-rdma-pair.railmate.dev"
#: Seconds a process goes on after its pod was told to end.
STUBBORN = 8


def stubborn(one: dict[str, Any], seconds: int = STUBBORN) -> dict[str, Any]:
    """The pod's process ignores that it should end, until the grace period is over."""
    one["spec"]["terminationGracePeriodSeconds"] = seconds
    one["spec"]["containers"][0]["command"] = ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"]
    return one


def container(workspace: Workspace, name: str) -> dict[str, Any]:
    (status,) = workspace.get("pod", name)["status"]["containerStatuses"]
    return {key: status.get(key) for key in ("containerID", "restartCount")}


def links_again(workspace: Workspace, name: str) -> dict[str, dict[str, Any]]:
    """The pod's interfaces, as soon as the kubelet that was restarted knows the pod again."""

    def look() -> dict[str, dict[str, Any]]:
        try:
            return workspace.links(name)
        except HarnessError:
            return {}

    return eventually(look, f"a command in pod {name}", seconds=30)


def slices(lab: Lab) -> list[Any]:
    """What the node publishes, without the pool's generation."""
    items = lab.cluster.kubectl_json("get", "resourceslices")["items"]
    specs = [one["spec"] for one in items if one["spec"].get("nodeName") == lab.node]
    for spec in specs:
        del spec["pool"]["generation"]
    return sorted(specs, key=json.dumps)


def failures(workspace: Workspace, name: str) -> list[str]:
    """Messages of events about prepares that failed; each costs the pod a minute or more."""
    selector = f"involvedObject.name={name},reason=FailedPrepareDynamicResources"
    events = json.loads(workspace.kubectl("get", "events", "--field-selector", selector, "-o", "json"))[
        "items"
    ]
    return [event["message"] for event in events]


def node_events(lab: Lab, reason: str) -> list[str]:
    """Messages of events about the node."""
    selector = f"involvedObject.name={lab.node},reason={reason}"
    items = lab.cluster.kubectl_json("-n", "default", "get", "events", "--field-selector", selector)["items"]
    return [event["message"] for event in items]


def driver_log(lab: Lab) -> str:
    return lab.cluster.kubectl("-n", NAMESPACE, "logs", f"daemonset/{RELEASE}", "--since=120s")


def delete_by_force(workspace: Workspace, kind: str, name: str) -> None:
    workspace.kubectl("delete", kind, name, "--force", "--grace-period=0", "--wait=false")


def record_of(workspace: Workspace, name: str) -> str:
    """Path of the ledger's entry of the pod's claim, on the node."""
    return f"{PLUGIN_DIR}/claims/{workspace.claim_of(name)['metadata']['uid']}"


def exists(lab: Lab, *paths: str) -> bool:
    return lab.on_node("sh", "-c", f"ls {' '.join(paths)} 2>/dev/null | wc -l").split() == [str(len(paths))]


def test_wiped_slices_are_back_at_once(lab: Lab) -> None:
    before = slices(lab)
    assert before
    lab.cluster.kubectl("delete", "resourceslices", "--all")
    began = time.monotonic()
    eventually(lambda: slices(lab) == before, "the slices as they were", seconds=10)
    assert time.monotonic() - began < 5


def test_a_kubelet_restart_leaves_the_pod_alone_and_the_slices_come_back(
    lab: Lab, workspace: Workspace
) -> None:
    before = slices(lab)
    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    was, links = container(workspace, "one-pair"), workspace.links("one-pair")
    lab.on_node("systemctl", "restart", "kubelet")  # it deletes all slices of its node
    eventually(lambda: slices(lab) == before, "the slices as they were", seconds=20)
    wait_ready(lab.cluster)
    assert container(workspace, "one-pair") == was
    assert links_again(workspace, "one-pair") == links
    workspace.delete_pod("one-pair")
    lab.wait_home()


def test_a_containerd_restart_leaves_the_pod_alone_and_its_end_is_complete(
    lab: Lab, workspace: Workspace
) -> None:
    """After it the runtime tells no plugin about the end of sandboxes that it had before."""
    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    was, links = container(workspace, "one-pair"), workspace.links("one-pair")
    lab.on_node("systemctl", "restart", "containerd")
    wait_ready(lab.cluster)
    assert container(workspace, "one-pair") == was
    assert links_again(workspace, "one-pair") == links
    workspace.delete_pod("one-pair")
    lab.wait_home()


def test_a_driver_that_dies_between_prepare_and_attach(lab: Lab, workspace: Workspace) -> None:
    with lab.runtime_unreachable():
        workspace.apply_example("one-pair")
        eventually(lambda: workspace.get("pod", "one-pair")["spec"].get("nodeName"), "the pod is scheduled")
        record = record_of(workspace, "one-pair")
        eventually(lambda: exists(lab, f"{record}.json"), "the claim in the ledger")
        kill_driver(lab)
        lab.reconnect_runtime()
        workspace.wait_ready("one-pair", seconds=90)
    assert workspace.links("one-pair")["net1"]["up"]
    workspace.delete_pod("one-pair")
    lab.wait_home()


def test_a_pod_made_while_no_driver_runs_starts_when_there_is_one(lab: Lab, workspace: Workspace) -> None:
    """Its slices are there for another half minute, so the scheduler sends it here."""
    with no_driver(lab):
        workspace.apply_example("one-pair")
        (message,) = eventually(lambda: failures(workspace, "one-pair"), "the kubelet says what is missing")
        assert "railmate.dev is not registered" in message or "not found" in message
        assert workspace.get("pod", "one-pair")["status"]["phase"] == "Pending"
    lab.on_node("systemctl", "restart", "kubelet")  # which asks again only after 60 to 90 s
    workspace.wait_ready("one-pair")
    assert workspace.links("one-pair")["net1"]["up"]
    workspace.delete_pod("one-pair")
    lab.wait_home()


def test_devices_of_a_pod_deleted_by_force_are_waited_for(lab: Lab, workspace: Workspace) -> None:
    """The API has them free at once and the scheduler gives them to the next pod; the old one still runs."""
    workspace.apply(template("all", claim_spec(PAIR, count=8)))
    workspace.apply(stubborn(pod("old", template="all")))
    workspace.wait_ready("old")
    held = workspace.claim_of("old")["metadata"]
    delete_by_force(workspace, "pod", "old")
    began = time.monotonic()
    workspace.apply(pod("new", template="all"))
    workspace.wait_ready("new", seconds=40)
    assert failures(workspace, "new") == []
    wanted = workspace.claim_of("new")["metadata"]
    waits = f"ResourceClaim {workspace.namespace}/{wanted['name']}: "
    why = f"is still held by ResourceClaim {workspace.namespace}/{held['name']} ({held['uid']})"
    assert any(waits in line and why in line for line in driver_log(lab).splitlines()), (
        "the old pod still ran when the new one was asked for"
    )
    assert time.monotonic() - began < 30
    found = workspace.links("new")
    assert {f"net{number}" for number in range(1, 9)} <= found.keys()
    assert found.keys().isdisjoint(lab.vf_links), "each has the name that was asked for"


@pytest.mark.long  # the kubelet itself refuses the new claim first and looks again after a minute
def test_a_claim_replaced_under_its_name_is_another_claim(lab: Lab, workspace: Workspace) -> None:
    workspace.apply(claim("mine", claim_spec(PAIR, count=8)), stubborn(pod("old", claim="mine")))
    workspace.wait_ready("old")
    before = workspace.get("resourceclaim", "mine")["metadata"]["uid"]
    delete_by_force(workspace, "pod", "old")
    workspace.kubectl("delete", "resourceclaim", "mine", "--timeout=20s")
    workspace.apply(claim("mine", claim_spec(PAIR, count=8)), pod("new", claim="mine"))
    # while it still holds the old one the kubelet refuses the new one itself, and asks again after 60 to 90 s
    workspace.wait_ready("new", seconds=150)
    assert workspace.get("resourceclaim", "mine")["metadata"]["uid"] != before
    assert all("old ResourceClaim with same name" in message for message in failures(workspace, "new"))


def test_the_next_pod_of_a_claim_gets_what_the_first_had(lab: Lab, workspace: Workspace) -> None:
    workspace.apply(claim("mine", claim_spec(PAIR)))
    for name in ("first", "second"):
        workspace.apply(pod(name, claim="mine"))
        workspace.wait_ready(name)
        assert workspace.links(name)["net1"]["up"]
        workspace.delete_pod(name)
    lab.wait_home()


def test_a_pod_that_waits_for_a_shared_claim_is_told_and_starts_when_the_first_has_ended(
    lab: Lab, workspace: Workspace
) -> None:
    """The kubelet prepares a claim once; the second pod starts by itself, without another prepare."""
    workspace.apply(claim("shared", claim_spec(PAIR)), pod("first", claim="shared"))
    workspace.wait_ready("first")
    was, links = container(workspace, "first"), workspace.links("first")
    workspace.apply(pod("second", claim="shared"))
    eventually(
        lambda: "a NIC can be in one pod only" in workspace.describe("second"), "the second pod is told why"
    )
    assert container(workspace, "first") == was
    assert workspace.links("first") == links
    workspace.delete_pod("first")
    workspace.wait_ready("second")  # the kubelet tries its container again every 12 s or so
    assert workspace.links("second")["net1"] == links["net1"]
    workspace.delete_pod("second")
    lab.wait_home()


def test_a_damaged_record_does_not_cost_the_pod_its_devices(lab: Lab, workspace: Workspace) -> None:
    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    links = workspace.links("one-pair")
    record = record_of(workspace, "one-pair")
    lab.on_node("truncate", "-s", "40", f"{record}.json")
    try:
        kill_driver(lab)  # the next one reads it at its start
        eventually(
            lambda: exists(lab, f"{record}.json", f"{record}.bad"),
            "the record rebuilt, the damaged one set aside",
        )
        uid = workspace.claim_of("one-pair")["metadata"]["uid"]
        (message,) = eventually(
            lambda: [one for one in node_events(lab, "ClaimRecordDamaged") if uid in one],
            "an Event on the Node",
        )
        assert "rebuilt" in message
        wait_ready(lab.cluster)
        assert links_again(workspace, "one-pair") == links
        workspace.delete_pod("one-pair")
    finally:
        lab.on_node("rm", "-f", f"{record}.bad")  # kept for people
    lab.wait_home()


def test_a_reboot(lab: Lab, workspace: Workspace) -> None:
    """As the driver sees it: another boot id, an empty CDI directory, no sandbox of before; the ledger is there."""
    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    allocated, links = workspace.allocated("one-pair"), workspace.links("one-pair")
    lab.on_node("systemctl", "stop", "kubelet")
    try:
        kill_driver(lab)
        sandbox = lab.on_node("crictl", "pods", "--namespace", workspace.namespace, "-q").split()
        lab.on_node("crictl", "--timeout", "60s", "stopp", *sandbox)
        lab.on_node("crictl", "--timeout", "60s", "rmp", "-f", *sandbox)
        edit = (
            f'sed -i \'s/"boot_id": "[^"]*"/"boot_id": "before"/\' {PLUGIN_DIR}/claims/*.json && '
            "rm /var/run/cdi/railmate.dev-*"
        )
        lab.on_node("sh", "-c", edit)
    finally:
        lab.on_node("systemctl", "start", "kubelet")
    eventually(
        lambda: container(workspace, "one-pair")["restartCount"] > 0, "the pod's container anew", seconds=150
    )
    workspace.wait_ready("one-pair")
    assert workspace.allocated("one-pair") == allocated
    again = links_again(workspace, "one-pair")
    assert again["net1"] == links["net1"]
    workspace.delete_pod("one-pair")
    lab.wait_home()
