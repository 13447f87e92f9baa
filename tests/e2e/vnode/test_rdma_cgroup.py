"""The rdma cgroup on a real kernel: a container of a claim gets nothing of what other claims may have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from e2e.lab import PLUGIN_DIR
from e2e.vnode.lab import RDMA_ALL, RDMA_NONE, VnodeLab, VnodeWorkspace, pod, vf_template


@dataclass(frozen=True)
class Pods:
    """Two privileged ones: one with two claims, one without; and the RDMA devices that the node had before: those of
    every VF, and of the physical functions above them. One that is not privileged, with one claim: test_rdma."""

    workspace: VnodeWorkspace
    claimable: set[str]

    @property
    def mine(self) -> set[str]:
        return self.workspace.rdma_devices("privileged")

    @property
    def free(self) -> set[str]:
        """Those that no pod here has got. A soft device that moves is another one for the kernel, without limits of
        containers that are there already; what hardware has moves as it is."""
        return self.claimable - self.mine


def on_the_host(name: str, *templates: str) -> dict[str, Any]:
    """A pod to which every RDMA device and node of the machine is open: privileged, on the host network."""
    one = pod(name, *templates)
    one["spec"]["hostNetwork"] = True
    one["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    return one


@pytest.fixture(scope="module")
def pods(vlab: VnodeLab) -> Iterator[Pods]:
    claimable = vlab.rdma_devices()
    first, _, third, _ = vlab.switches
    with vlab.workspace() as workspace:
        workspace.apply(
            vf_template("one", first), vf_template("other", third),
            on_the_host("privileged", "one", "other"),
            on_the_host("bystander"),
        )  # fmt: skip
        workspace.await_ready("privileged", "bystander")
        yield Pods(workspace, claimable)


def test_a_container_has_the_devices_of_all_its_claims_and_nothing_of_the_others(pods: Pods) -> None:
    said, mine, free = pods.workspace.rdma_limits("privileged"), pods.mine, pods.free
    assert len(mine) == 2
    assert {said[device] for device in mine} == {RDMA_ALL}
    assert len(free) > 10
    assert {device: said[device] for device in free} == dict.fromkeys(free, RDMA_NONE)


def test_a_container_without_claims_is_not_limited(pods: Pods) -> None:
    assert set(pods.workspace.rdma_limits("bystander").values()) == {RDMA_ALL}


def test_the_kernel_refuses_even_a_privileged_container_what_another_claim_may_have(pods: Pods) -> None:
    """It has all device nodes and sees all devices, so only the cgroup can refuse it."""
    mine, free = max(pods.mine), max(pods.free)
    look = "ibv_devinfo -d"
    assert "hca_id" in pods.workspace.in_pod("bystander", f"{look} {free}")
    own, others = pods.workspace.tries("privileged", f"{look} {mine}", f"{look} {free}")
    assert own[0] == 0, own
    assert others[0] != 0, others
    assert "open device" in others[1], "it is found, and cannot be opened"


def test_the_driver_knows_that_the_kernel_limits(vlab: VnodeLab, pods: Pods) -> None:
    told = vlab.guest.run("sh", "-c", f"cd {PLUGIN_DIR}; ls -d rdma-*").split()
    assert ("rdma-limited" in told, "rdma-unlimited" in told) == (True, False)
