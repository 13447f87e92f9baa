"""The rdma cgroup on a real kernel: a container of a claim gets nothing of what other claims may have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.lab import PLUGIN_DIR
from e2e.vnode.lab import VnodeLab, VnodeWorkspace, pod, vf_template

RDMA = "railmate.dev/rdmaDevice"
_NONE, _ALL = "hca_handle=0 hca_object=0", "hca_handle=max hca_object=max"


def on_the_host(name: str, *templates: str) -> dict[str, Any]:
    """A pod to which every RDMA device and node of the machine is open: privileged, on the host network."""
    one = pod(name, *templates)
    one["spec"]["hostNetwork"] = True
    one["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    return one


@pytest.fixture(scope="module")
def workspace(vlab: VnodeLab) -> Iterator[VnodeWorkspace]:
    first, second, third, _ = vlab.switches
    with vlab.workspace() as workspace:
        workspace.apply(
            vf_template("one", first), vf_template("other", third), vf_template("hosts", second),
            pod("plain", "one"),
            pod("both", "one", "other"),
            on_the_host("privileged", "hosts"),
            on_the_host("bystander"),
        )  # fmt: skip
        workspace.await_ready("plain", "both", "privileged", "bystander")
        yield workspace


def own(workspace: VnodeWorkspace, name: str) -> set[str]:
    """RDMA devices of the pod's claims."""
    claims = [
        one["resourceClaimName"] for one in workspace.get("pod", name)["status"]["resourceClaimStatuses"]
    ]
    statuses = [workspace.get("resourceclaim", claim)["status"] for claim in claims]
    results = [result for status in statuses for result in status["allocation"]["devices"]["results"]]
    return {workspace.lab.devices[result["device"]][RDMA] for result in results}


def limits(workspace: VnodeWorkspace, name: str) -> dict[str, str]:
    """By RDMA device, what the kernel says of the container's cgroup."""
    (status,) = workspace.get("pod", name)["status"]["containerStatuses"]
    container = status["containerID"].removeprefix("containerd://")
    find = f"cat $(find /sys/fs/cgroup -path '*{container}*' -name rdma.max)"
    lines = workspace.lab.guest.run("sh", "-c", find).splitlines()
    return {device: rest for device, _, rest in (line.strip().partition(" ") for line in lines)}


def claimable(vlab: VnodeLab) -> set[str]:
    return {values[RDMA] for values in vlab.devices.values() if RDMA in values}


@pytest.mark.parametrize("name", ["plain", "both", "privileged"])
def test_a_container_has_its_claims_devices_and_nothing_of_the_others(
    workspace: VnodeWorkspace, vlab: VnodeLab, name: str
) -> None:
    said, mine = limits(workspace, name), own(workspace, name)
    assert len(mine) == (2 if name == "both" else 1)
    assert {said[device] for device in mine} == {_ALL}
    others = claimable(vlab) - mine
    assert len(others) > 10
    assert {said[device] for device in others} == {_NONE}


def test_a_container_without_claims_is_not_limited(workspace: VnodeWorkspace) -> None:
    assert set(limits(workspace, "bystander").values()) == {_ALL}


def test_the_kernel_refuses_even_a_privileged_container_what_another_claim_may_have(
    workspace: VnodeWorkspace, vlab: VnodeLab
) -> None:
    """It has all device nodes and sees all devices, so only the cgroup can refuse it."""
    (mine,) = own(workspace, "privileged")
    taken = own(workspace, "plain") | own(workspace, "both")
    free = min(claimable(vlab) - taken - {mine})
    status, output = workspace.tries("bystander", f"ibv_devinfo -d {free}")
    assert status == 0, output
    status, output = workspace.tries("privileged", f"ibv_devinfo -d {mine}")
    assert status == 0, output
    status, output = workspace.tries("privileged", f"ibv_devinfo -d {free}")
    assert status != 0, output
    assert "open device" in output, "it is found, and cannot be opened"


def test_the_driver_knows_that_the_kernel_limits(workspace: VnodeWorkspace, vlab: VnodeLab) -> None:
    assert limits(workspace, "plain")
    assert vlab.guest.run("sh", "-c", f"cd {PLUGIN_DIR}; ls -d rdma-*").split() == ["rdma-limited"]
