"""The rdma cgroup on a real kernel: a container of a claim gets nothing of what other claims may have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.lab import PLUGIN_DIR
from e2e.vnode.lab import VnodeLab, VnodeWorkspace, pod, vf_template

_ALL = "hca_handle=max hca_object=max"


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


def limits(workspace: VnodeWorkspace, name: str) -> dict[str, str]:
    """By RDMA device, what the kernel says of the container's cgroup."""
    (status,) = workspace.get("pod", name)["status"]["containerStatuses"]
    container = status["containerID"].removeprefix("containerd://")
    find = f"cat $(find /sys/fs/cgroup -path '*{container}*' -name rdma.max)"
    lines = workspace.lab.guest.run("sh", "-c", find).splitlines()
    return {device: rest for device, _, rest in (line.strip().partition(" ") for line in lines)}


def test_a_container_without_claims_is_not_limited(workspace: VnodeWorkspace) -> None:
    assert set(limits(workspace, "bystander").values()) == {_ALL}


def test_the_driver_knows_that_the_kernel_limits(workspace: VnodeWorkspace, vlab: VnodeLab) -> None:
    assert limits(workspace, "plain")
    told = vlab.guest.run("sh", "-c", f"cd {PLUGIN_DIR}; ls -d rdma-*").split()
    assert ("rdma-limited" in told, "rdma-unlimited" in told) == (True, False)
