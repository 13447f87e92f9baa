"""Every example runs as it is in the tree, and its pod holds exactly what it was given."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from e2e.lab import Lab, Workspace, claim_spec, pod, template
from harness.deploy import CHART, EXAMPLES, NAMESPACE, RELEASE, wait_ready


def right_nics(lab: Lab) -> dict[str, set[str]]:
    """GPU address to the physical NIC functions that are right for it, from the machine's facts."""
    best = {gpu: set(nics) for gpu, nics in lab.machine.expected["best"].items()}
    assert len(best) == 8
    return best


def assert_holds_exactly(lab: Lab, workspace: Workspace, pod: str, gpus: list[str], vfs: list[str]) -> None:
    """The pod has these GPUs' nodes, these VFs' RDMA nodes and netdevs net1…, and no other's."""
    machine = lab.machine
    gpu_nodes, rdma_nodes = workspace.device_nodes(pod)
    shared = {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}
    assert gpu_nodes == {f"nvidia{machine.gpus[gpu].minor}" for gpu in gpus} | shared
    own = {
        node for vf in vfs for device in machine.functions[vf].rdma_devices for node in device.char_devices
    }
    assert len(own) == 3 * len(vfs)  # uverbs, umad and issm of each
    assert rdma_nodes == own | {"rdma_cm"}
    links = workspace.links(pod)
    macs = [machine.functions[vf].netdevs[0].mac for vf in vfs]
    assert [links.get(f"net{n}", {}).get("mac") for n in range(1, len(vfs) + 1)] == macs
    assert all(links[f"net{n}"]["up"] for n in range(1, len(vfs) + 1))
    assert set(links) == {"lo", "eth0"} | {f"net{n}" for n in range(1, len(vfs) + 1)}


def parent_of(lab: Lab, vf: str) -> str:
    physical_function = lab.machine.functions[vf].physical_function
    assert physical_function is not None
    return physical_function


def test_one_pair_gives_a_pod_one_gpu_and_the_vf_beside_it(lab: Lab, workspace: Workspace) -> None:
    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    (device,) = workspace.allocated("one-pair")
    published = lab.devices[device]
    gpu, vf = published["railmate.dev/gpuPciBusID"], published["railmate.dev/nicPciBusID"]

    assert parent_of(lab, vf) in right_nics(lab)[gpu]
    assert_holds_exactly(lab, workspace, "one-pair", [gpu], [vf])

    (metadata,) = workspace.metadata("one-pair")
    (told,) = metadata["requests"][0]["devices"]
    attributes = {name: next(iter(value.values())) for name, value in told["attributes"].items()}
    assert attributes["railmate.dev/gpuPciBusID"] == gpu
    assert attributes["railmate.dev/nicPciBusID"] == vf
    assert attributes["railmate.dev/distance"] == "PXB"
    assert attributes["railmate.dev/interface"] == "net1"
    assert told["networkData"]["hardwareAddress"] == workspace.links("one-pair")["net1"]["mac"]


def test_a_gpu_and_a_vf_joined_by_attribute_share_a_switch(lab: Lab, workspace: Workspace) -> None:
    workspace.apply_example("matched-gpu-and-vf")
    workspace.wait_ready("matched-gpu-and-vf")
    allocated = workspace.allocated("matched-gpu-and-vf")
    kinds = {lab.devices[name]["railmate.dev/kind"]: lab.devices[name] for name in allocated}
    assert set(kinds) == {"gpu", "rdma-vf"}
    gpu = kinds["gpu"]["resource.kubernetes.io/pciBusID"]
    vf = kinds["rdma-vf"]["resource.kubernetes.io/pciBusID"]
    assert kinds["gpu"]["railmate.dev/pcieSwitch"] == kinds["rdma-vf"]["railmate.dev/pcieSwitch"]
    assert parent_of(lab, vf) in right_nics(lab)[gpu]
    assert_holds_exactly(lab, workspace, "matched-gpu-and-vf", [gpu], [vf])


def test_eight_pairs_give_a_pod_the_whole_node(lab: Lab, workspace: Workspace) -> None:
    workspace.apply_example("eight-pairs")
    workspace.wait_ready("eight-pairs")
    allocated = workspace.allocated("eight-pairs")
    pairs = [
        (lab.devices[name]["railmate.dev/gpuPciBusID"], lab.devices[name]["railmate.dev/nicPciBusID"])
        for name in allocated
    ]
    assert len(set(pairs)) == 8
    assert {gpu for gpu, _ in pairs} == set(lab.machine.expected["gpus"])
    assert all(parent_of(lab, vf) in right_nics(lab)[gpu] for gpu, vf in pairs)
    assert len({parent_of(lab, vf) for _, vf in pairs}) == 8
    assert_holds_exactly(lab, workspace, "eight-pairs", [gpu for gpu, _ in pairs], [vf for _, vf in pairs])


def test_a_pod_on_the_host_network_gets_its_device_nodes_and_the_netdev_stays(
    lab: Lab, workspace: Workspace
) -> None:
    workspace.apply_example("host-network")
    workspace.wait_ready("host-network")
    (device,) = workspace.allocated("host-network")
    vf = lab.machine.functions[lab.devices[device]["railmate.dev/nicPciBusID"]]
    own = {node for rdma in vf.rdma_devices for node in rdma.char_devices}
    _, rdma_nodes = workspace.device_nodes("host-network")
    assert rdma_nodes == own | {"rdma_cm"}
    assert workspace.links("host-network")[vf.netdevs[0].name]["mac"] == vf.netdevs[0].mac


def test_a_container_that_does_not_reference_the_claim_gets_no_device_node(
    lab: Lab, workspace: Workspace
) -> None:
    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    spec = workspace.get("pod", "one-pair")["spec"]
    bystander = {
        key: value
        for key, value in spec["containers"][0].items()
        if key in {"image", "imagePullPolicy", "command"}
    }
    two = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "two"},
        "spec": {
            "terminationGracePeriodSeconds": 2,
            "resourceClaims": spec["resourceClaims"],
            "containers": [
                {"name": "with", **bystander, "resources": spec["containers"][0]["resources"]},
                {"name": "without", **bystander},
            ],
        },
    }
    workspace.apply(two)
    workspace.wait_ready("two")
    listing = "ls -d /dev/nvidia* /dev/infiniband 2>/dev/null || true"
    assert "/dev/infiniband" in workspace.kubectl("exec", "two", "-c", "with", "--", "sh", "-c", listing)
    assert workspace.kubectl("exec", "two", "-c", "without", "--", "sh", "-c", listing).strip() == ""


HINTS = ("NCCL_", "UCX_", "PCIDEVICE_")


@pytest.fixture
def stated_switch(lab: Lab) -> Iterator[str]:
    """An administrator has said of one GPU and its NIC what sysfs says, too: then the node has an NCCL topology file.
    The GPU's address."""
    pair = next(one for one in lab.devices.values() if one["railmate.dev/kind"] == "pair")
    gpu, nic = pair["railmate.dev/gpuPciBusID"], parent_of(lab, pair["railmate.dev/nicPciBusID"])
    switch = {"id": pair["railmate.dev/pcieSwitch"], "devices": [gpu, nic]}
    kind = {"apiVersion": "railmate.dev/v1alpha1", "kind": "TopologyOverride"}
    override(lab, json.dumps({**kind, "switches": [switch]}))
    try:
        yield gpu
    finally:
        override(lab, "")


def override(lab: Lab, text: str) -> None:
    lab.cluster.helm(
        "upgrade", RELEASE, str(CHART), "--namespace", NAMESPACE, "--reuse-values",
        "--set-json", f"topology.override={json.dumps(text)}",
    )  # fmt: skip
    wait_ready(lab.cluster)


def test_hints_for_the_job_reach_the_container_that_has_the_claim_and_not_its_sibling(
    lab: Lab, workspace: Workspace, stated_switch: str
) -> None:
    """The cluster's machine has no RDMA in its kernel, so of all hints the one about the topology is seen here."""
    asked = {"apiVersion": "railmate.dev/v1alpha1", "kind": "RdmaVfConfig", "envHints": True}
    workspace.apply(template("hinted", claim_spec("gpu-rdma-pair.railmate.dev", config=asked)))
    two = pod("two", template="hinted")
    (with_claim,) = two["spec"]["containers"]
    without = {key: value for key, value in with_claim.items() if key != "resources"} | {"name": "without"}
    two["spec"]["containers"].append(without)
    workspace.apply(two)
    workspace.wait_ready("two")

    def hints(container: str) -> dict[str, str]:
        lines = workspace.kubectl("exec", "two", "-c", container, "--", "env").splitlines()
        return dict(line.split("=", 1) for line in lines if line.startswith(HINTS))

    assert hints("main") == {"NCCL_TOPO_FILE": "/var/run/railmate/nccl-topology.xml"}
    assert hints("without") == {}
    show = "cat /var/run/railmate/nccl-topology.xml 2>/dev/null || true"
    assert stated_switch in workspace.kubectl("exec", "two", "-c", "main", "--", "sh", "-c", show)
    assert workspace.kubectl("exec", "two", "-c", "without", "--", "sh", "-c", show) == ""


@pytest.mark.parametrize(
    "example", ["one-pair", "matched-gpu-and-vf", "eight-pairs", "host-network", "old-pod", "shared-pf"]
)
def test_an_example_is_described_where_it_is(example: str) -> None:
    readme = (EXAMPLES / example / "README.md").read_text()
    assert re.search(rf"kubectl apply -f examples/{example}/manifest\.yaml", readme)
