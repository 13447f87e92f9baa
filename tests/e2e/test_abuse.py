"""What pods, people and the kernel do to a claim's NIC, after the failure lists of other drivers: all ends clean.

Elsewhere: the pause process killed (test_gate), the interface renamed by the pod (test_exclusive), a forced delete
(test_kubelet_scenarios); and what needs real VFs (vnode/test_abuse).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.faults import no_driver
from e2e.lab import Lab, Workspace, claim_spec, eventually, pod, template
from e2e.test_health import WELL_AGAIN, taints
from e2e.test_kubelet_scenarios import PAIR, container, slices
from e2e.vnode.lab import flatten
from harness.deploy import NAMESPACE, RELEASE

VF = "rdma-vf.railmate.dev"


def state(lab: Lab) -> dict[str, Any]:
    """The node as a claim could leave it changed: its netdevs, files of claims, what is offered. Path to value."""
    listed = json.loads(lab.on_node("ip", "-j", "-d", "address", "show"))
    of_pods = ("veth", "cni")  # the bridge comes with the first pod
    links = {link["ifname"]: link for link in listed if not link["ifname"].startswith(of_pods)}
    kept = ("address", "mtu", "flags", "operstate", "qdisc", "txqlen", "inet6_addr_gen_mode", "addr_info")
    return flatten({
        "links": {name: {key: link.get(key) for key in kept} for name, link in links.items()},
        "files": lab.leftovers(),
        "offered": slices(lab),
    })  # fmt: skip


@pytest.fixture(autouse=True)
def unchanged(lab: Lab) -> Iterator[None]:
    """The node is after each test what it was before it, field by field."""
    lab.wait_home()
    eventually(lambda: not taints(lab), "a node without taints of an earlier test", WELL_AGAIN)
    before = state(lab)
    yield
    differing: dict[str, Any] = {}

    def same() -> bool:
        now = state(lab)
        differing.clear()
        differing.update({
            key: (before.get(key), now.get(key))
            for key in before.keys() | now.keys()
            if before.get(key) != now.get(key)
        })  # fmt: skip
        return not differing

    try:
        eventually(same, "the node as it was")
    except AssertionError:
        raise AssertionError(f"the node is not as it was: {differing}") from None


def sandboxes(lab: Lab, namespace: str) -> list[dict[str, Any]]:
    """Of the namespace's pods on the node, the sandboxes that run."""
    listed = lab.on_node("crictl", "pods", "--namespace", namespace, "--state", "ready", "-o", "json")
    return list(json.loads(listed)["items"])


def netns(lab: Lab, namespace: str) -> str:
    """Path of the only pod's network namespace on the node."""
    (sandbox,) = sandboxes(lab, namespace)
    info = json.loads(lab.on_node("crictl", "inspectp", "-o", "json", sandbox["id"]))
    namespaces = info["info"]["runtimeSpec"]["linux"]["namespaces"]
    return next(str(one["path"]) for one in namespaces if one["type"] == "network")


def test_a_container_that_crashes_again_and_again_finds_its_nic_every_time(
    lab: Lab, workspace: Workspace
) -> None:
    looks = "(ip -o link show net1; ls /dev/infiniband/rdma_cm) >> /said/it 2>&1; exit 7"
    crashing = pod("crashing", template="pair", volumes=[{"name": "said", "emptyDir": {}}])
    crashing["spec"]["containers"][0] |= {
        "command": ["sh", "-c", looks],
        "volumeMounts": [{"name": "said", "mountPath": "/said"}],
    }
    workspace.apply(template("pair", claim_spec(PAIR)), crashing)

    def restarts() -> int:
        statuses = workspace.get("pod", "crashing")["status"].get("containerStatuses", [])
        return int(statuses[0]["restartCount"]) if statuses else 0

    eventually(lambda: restarts() >= 2, "two restarts", 90)
    (sandbox,) = sandboxes(lab, workspace.namespace)
    assert not sandbox["metadata"].get("attempt"), "all in the same sandbox"
    uid = workspace.get("pod", "crashing")["metadata"]["uid"]
    path = f"/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/said/it"
    lines = lab.on_node("cat", path).splitlines()
    links, nodes = lines[::2], lines[1::2]
    assert len(links) >= 3
    assert "UP" in links[0]
    assert len(set(links)) == 1, "the same NIC at every start"
    assert nodes == ["/dev/infiniband/rdma_cm"] * len(links)
    workspace.delete_pod("crashing")
    lab.wait_home()


def test_a_network_namespace_that_is_deleted_under_the_driver(lab: Lab, workspace: Workspace) -> None:
    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    name = netns(lab, workspace.namespace).rpartition("/")[2]
    lab.on_node("ip", "netns", "delete", name)  # what runs in it keeps it, without a name, until it ends
    assert workspace.links("one-pair")["net1"]["up"]
    workspace.delete_pod("one-pair")
    lab.wait_home()


def test_a_namespace_that_is_deleted_with_pod_claim_and_template(lab: Lab) -> None:
    name = f"e2e-{uuid.uuid4().hex[:8]}"
    lab.cluster.kubectl("create", "namespace", name)
    workspace = Workspace(lab, name)
    try:
        workspace.apply_example("one-pair")
        workspace.wait_ready("one-pair")
    finally:
        lab.cluster.kubectl("delete", "namespace", name, "--timeout=90s", timeout=100)
    lab.wait_home()


def test_a_pod_that_ends_while_the_driver_is_down(lab: Lab, workspace: Workspace) -> None:
    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    with no_driver(lab):
        workspace.kubectl("delete", "pod", "one-pair", "--wait=false")
        eventually(lambda: not sandboxes(lab, workspace.namespace), "its sandbox has ended")
        assert len(lab.leftovers()) > 0, "nobody was there to clear up"
    workspace.kubectl("wait", "--for=delete", "pod/one-pair", "--timeout=90s")
    lab.wait_home()


def test_the_pods_interface_may_be_called_like_one_of_the_node(lab: Lab, workspace: Workspace) -> None:
    workspace.apply(template("plain", claim_spec(VF)), pod("plain", template="plain"))
    workspace.wait_ready("plain")
    mine = lab.devices[workspace.allocated("plain")[0]]["resource.kubernetes.io/pciBusID"]
    other = next(name for name in lab.vf_links if name in lab.links())
    workspace.delete_pod("plain")
    lab.wait_home()

    config = {"apiVersion": "railmate.dev/v1alpha1", "kind": "RdmaVfConfig", "interfaceName": other}
    where = f'device.attributes["resource.kubernetes.io"].pciBusID == "{mine}"'
    workspace.apply(
        template("named", claim_spec(VF, where=where, config=config)), pod("named", template="named")
    )
    workspace.wait_ready("named")
    netdev = lab.machine.functions[mine].netdevs[0].name
    assert netdev != other
    assert workspace.links("named")[other] == {"mac": lab.vf_links[netdev], "up": True}
    assert lab.links()[other] == lab.vf_links[other]
    workspace.delete_pod("named")
    lab.wait_home()


def test_a_name_that_was_taken_meanwhile_is_had_again_when_it_is_free(lab: Lab, workspace: Workspace) -> None:
    workspace.apply(template("plain", claim_spec(VF)), pod("plain", template="plain"))
    workspace.wait_ready("plain")
    address = lab.devices[workspace.allocated("plain")[0]]["resource.kubernetes.io/pciBusID"]
    netdev = lab.machine.functions[address].netdevs[0].name
    mac = lab.vf_links[netdev]
    lab.on_node("ip", "link", "add", netdev, "type", "bridge")
    try:
        workspace.delete_pod("plain")
        (called,) = eventually(
            lambda: [name for name, one in lab.links().items() if one == mac], "the VF is home", 30
        )
        assert called.startswith("rm")
    finally:
        lab.on_node("ip", "link", "delete", netdev)
    eventually(lambda: lab.links().get(netdev) == mac, "the VF has its own name", 20)


_RELEASE_ONE = """
import sys, glob, grpc
from railmate_api.proto import dra_v1_pb2 as messages
namespace, name, uid = sys.argv[1:]
request = messages.NodeUnprepareResourcesRequest()
request.claims.add(namespace=namespace, name=name, uid=uid)
(socket,) = glob.glob("/var/lib/kubelet/plugins/railmate.dev/dra*.sock")
with grpc.insecure_channel(f"unix:{socket}") as channel:
    method = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources"
    call = channel.unary_unary(
        method,
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=messages.NodeUnprepareResourcesResponse.FromString,
    )
    print(call(request, timeout=30).claims[uid].error)
"""


def test_of_two_claims_in_a_pod_one_is_released_first_and_the_other_stays(
    lab: Lab, workspace: Workspace
) -> None:
    """The kubelet releases a pod's claims one after the other, and may be asked to stop between the two."""
    names = ("one", "two")
    both = pod("both")
    both["spec"]["resourceClaims"] = [{"name": name, "resourceClaimTemplateName": name} for name in names]
    both["spec"]["containers"][0]["resources"] = {"claims": [{"name": name} for name in names]}
    workspace.apply(*(template(name, claim_spec(VF)) for name in names), both)
    workspace.wait_ready("both")
    macs = {name: link["mac"] for name, link in workspace.links("both").items() if name.startswith("net")}
    assert macs.keys() == {"net1", "net2"}
    was = container(workspace, "both")

    statuses = workspace.get("pod", "both")["status"]["resourceClaimStatuses"]
    claims = {one["name"]: workspace.get("resourceclaim", one["resourceClaimName"]) for one in statuses}
    metadata = claims["one"]["metadata"]
    said = lab.cluster.kubectl(
        "-n", NAMESPACE, "exec", f"daemonset/{RELEASE}", "--", "python3", "-c", _RELEASE_ONE,
        workspace.namespace, metadata["name"], metadata["uid"],
    )  # fmt: skip
    assert said.strip() == ""

    left = workspace.links("both")
    assert "net1" not in left
    assert left["net2"] == {"mac": macs["net2"], "up": True}
    assert macs["net1"] in lab.links().values(), "the first is home"
    assert macs["net2"] not in lab.links().values()
    assert not any(metadata["uid"] in path for path in lab.leftovers())
    assert container(workspace, "both") == was
    workspace.delete_pod("both")
    lab.wait_home()
