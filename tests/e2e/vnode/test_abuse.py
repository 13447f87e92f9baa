"""Pods that end badly or treat their VFs badly, all at once on four switches: afterwards the node is as it was.

Long: it has not passed yet. Its pods start and end cleanly, in half a minute each on a quiet machine, and on a busy one
in more than six; its first test failed because the physical function refuses a new MAC to a VF that is not trusted, and
what follows it has not run since.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from e2e.lab import eventually
from e2e.vnode.lab import PATIENCE, VnodeLab, VnodeWorkspace, group_template, pod, vf_template

pytestmark = pytest.mark.long

_CRICTL = "crictl -r unix:///run/containerd/containerd.sock"


@dataclass(frozen=True)
class Pods:
    workspace: VnodeWorkspace
    before: dict[str, Any]

    def interfaces(self, name: str) -> list[str]:
        """Names of the pod's interfaces but for its own two, sorted."""
        return sorted(set(self.workspace.in_pod(name, "ls /sys/class/net").split()) - {"lo", "eth0"})


@pytest.fixture(scope="module")
def pods(vlab: VnodeLab) -> Iterator[Pods]:
    before = vlab.state()
    first, second, third, fourth = vlab.switches
    with vlab.workspace() as workspace:
        workspace.apply(
            group_template("changed", first, interfaceName="rail", trust=True),
            pod("changed", "changed", root=True),
            group_template("killed", second, interfaceName="rail"),
            pod("killed", "killed"),
            group_template("group", third, interfaceName="group"),
            vf_template("vfs", third, count=3, interfaceName="lone"),
            pod("four", "group", "vfs"),
            group_template("forced", fourth, interfaceName="rail"),
            pod("forced", "forced"),
        )
        workspace.kubectl("wait", "--for=jsonpath={.spec.nodeName}", "pod/forced", f"--timeout={PATIENCE}s")
        workspace.kubectl("delete", "pod", "forced", "--force", "--grace-period=0")  # while it starts
        workspace.await_ready("changed", "killed", "four")
        yield Pods(workspace, before)


def test_a_pod_may_rename_its_interface_and_change_mtu_and_mac(pods: Pods) -> None:
    commands = (
        "ip link set rail down",
        "ip link set rail name mine",
        "ip link set mine mtu 1400 address 02:00:00:00:00:77",
        "ip link set mine up",
        "ip address add 10.66.0.1/24 dev mine",
    )
    status, output = pods.workspace.tries("changed", " && ".join(commands))
    assert status == 0, output
    assert pods.interfaces("changed") == ["mine"]


def test_four_vfs_of_one_nic_come_into_one_pod_from_two_claims(pods: Pods, vlab: VnodeLab) -> None:
    assert pods.interfaces("four") == ["group", "lone", "lone1", "lone2"]
    nic = vlab.switches[2].nic[:8]
    listing = pods.workspace.in_pod(
        "four", "for i in group lone lone1 lone2; do readlink /sys/class/net/$i/device; done"
    )
    functions = [line.rpartition("/")[2] for line in listing.split()]
    assert len(set(functions)) == 4
    assert all(function.startswith(nic) for function in functions)


def test_a_pod_whose_sandbox_is_killed_gets_its_vf_again(pods: Pods, vlab: VnodeLab) -> None:
    def sandbox() -> str:
        return vlab.guest.run("sh", "-c", f"{_CRICTL} pods --name killed --state ready -q").strip()

    old = sandbox()
    pause = "{{.info.pid}}"
    pid = vlab.guest.run("sh", "-c", f"{_CRICTL} inspectp -o go-template --template '{pause}' {old}").strip()
    vlab.guest.run("kill", "-KILL", pid)
    eventually(lambda: sandbox() not in ("", old), "a new sandbox", seconds=PATIENCE)
    eventually(
        lambda: (
            pods.workspace.get("pod", "killed")["status"]["containerStatuses"][0]["ready"]
            and pods.workspace.get("pod", "killed")["status"]["containerStatuses"][0]["restartCount"] > 0
        ),
        "its container runs again",
        seconds=PATIENCE,
    )
    assert pods.interfaces("killed") == ["rail"]


def test_after_all_of_it_the_node_is_as_it_was_field_by_field(pods: Pods, vlab: VnodeLab) -> None:
    """The last test of this module: it deletes the pods. One had been deleted by force while it started."""
    pods.workspace.delete_pods()
    vlab.await_state(pods.before)
