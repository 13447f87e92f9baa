"""Pods that treat their VFs badly or end badly: afterwards the node is as it was."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from e2e.lab import PLUGIN_DIR, eventually
from e2e.vnode.lab import PATIENCE, VnodeLab, VnodeWorkspace, pair_template, pod, vf_template


@dataclass(frozen=True)
class OnePod:
    """A pod with all four VFs of a NIC, from two claims, and the node's state before there was any."""

    workspace: VnodeWorkspace
    before: dict[str, Any]


@pytest.fixture(scope="module")
def four(vlab: VnodeLab) -> Iterator[OnePod]:
    before = vlab.state()
    switch = vlab.switches[1]
    with vlab.workspace() as workspace:
        workspace.apply(
            pair_template("pairs", switch, count=2, interfaceName="first"),
            vf_template("lone", switch, count=2, interfaceName="lone", trust=True),
            pod("four", "pairs", "lone", root=True),
        )
        workspace.await_ready("four")
        yield OnePod(workspace, before)


def test_four_vfs_of_one_nic_come_into_one_pod_from_two_claims(four: OnePod, vlab: VnodeLab) -> None:
    found = netdevs(four)
    assert found.keys() == {"first", "first1", "lone", "lone1"}
    assert {function for function, _ in found.values()} == {vlab.switches[1].vf(index) for index in range(4)}


def test_the_pod_may_change_name_mtu_and_mac_and_join_a_vlan(four: OnePod, vlab: VnodeLab) -> None:
    """It may since its VF is trusted; the physical function notices the MAC."""
    listing = four.workspace.in_pod(
        "four",
        "set -e; ip link set lone down; ip link set lone name mine; "
        "ip link set mine mtu 1400 address 02:00:00:00:00:77; ip link set mine up; "
        "ip link add link mine name mine.5 type vlan id 5; ip link set mine.5 up; "
        "ip address add 10.66.5.1/24 dev mine.5; ls /sys/class/net",
    )
    assert listing.split() == ["eth0", "first", "first1", "lo", "lone1", "mine", "mine.5"]
    assert "02:00:00:00:00:77" in {one["address"] for one in vlab.kept_of_vfs("rail1")}


def test_the_pod_may_change_flags_queue_limits_interrupts_and_take_a_name_of_the_hosts(
    four: OnePod, vlab: VnodeLab
) -> None:
    """With that name on it the kernel would not move the netdev back to the host; see test_attach_hostile."""
    said = four.workspace.in_pod(
        "four",
        'set -e; ip() { /usr/bin/ip "$@"; }; '  # not busybox's
        "ip link set mine promisc on allmulticast on arp off txqueuelen 7 alias evil group 5 mode dormant "
        "gso_max_size 30000 gro_max_size 20000; ip link property add dev mine altname rail0; "
        "ethtool -C mine rx-usecs 50; ip -j -d link show mine",
    )
    (link,) = json.loads(said)
    assert {"PROMISC", "ALLMULTI", "NOARP"} <= set(link["flags"])
    assert (link["ifalias"], link["altnames"], link["txqlen"], link["gso_max_size"]) == (
        "evil",
        ["rail0"],
        7,
        30000,
    )
    assert vlab.guest.run("cat", "/sys/class/net/rail0/ifindex")


def test_a_nic_whose_driver_is_loaded_anew_is_back_and_no_container_starts_before(
    four: OnePod, vlab: VnodeLab
) -> None:
    """As an upgrade of the driver does it. The netdev ends in the pod, and its soft RDMA device with it; another one is
    made on the node, which the driver gives to the pod at once. The pod's other NICs stay as the pod has them."""
    before = netdevs(four)
    function = before.pop("first1")[0]
    in_sysfs = f"echo {function} > /sys/bus/pci/drivers/igbvf"
    vlab.guest.run("sh", "-c", f"{in_sysfs}/unbind")
    four.workspace.in_pod("four", "kill 1")
    refused = "--for=jsonpath={.status.containerStatuses[0].state.waiting.reason}=CreateContainerError"
    four.workspace.kubectl("wait", "pod/four", refused, f"--timeout={PATIENCE}s", timeout=PATIENCE + 30)
    vlab.guest.run("sh", "-c", f"{in_sysfs}/bind")
    eventually(lambda: told(four, "NicAttachedAgain", function), "an Event of the claim", PATIENCE)
    four.workspace.await_ready("four")
    after = netdevs(four)
    assert after.pop("first1")[0] == function
    assert after == before


def test_the_next_container_opens_the_rdma_devices_of_all_its_nics(four: OnePod) -> None:
    """That of the NIC which came anew was made anew, and has other device nodes now."""
    opened = four.workspace.in_pod(
        "four",
        "cd /sys/class/infiniband; for i in *; do ibv_devinfo -d $i > /dev/null && "
        "echo $(cat $i/ports/1/gid_attrs/ndevs/0); done",
    )
    assert sorted(opened.split()) == ["first", "first1", "lone1", "mine"]


def test_what_the_pod_changed_is_as_it_was_when_it_has_ended(four: OnePod, vlab: VnodeLab) -> None:
    """The last test with this pod: it deletes it."""
    assert vlab.state() != four.before
    four.workspace.delete_pods()
    vlab.await_state(four.before)


def test_a_pod_deleted_by_force_while_its_vf_is_attached_leaves_nothing(vlab: VnodeLab) -> None:
    before = vlab.state()
    with vlab.workspace() as workspace:
        forced = (pair_template("forced", vlab.switches[1]), pod("forced", "forced"))
        with attach_held(vlab, workspace, *forced):
            workspace.kubectl("delete", "pod", "forced", "--force", "--grace-period=0", "--wait=false")
        vlab.await_state(before)


def netdevs(four: OnePod) -> dict[str, tuple[str, str]]:
    """PCI address and index of the pod's netdevs that have one, by name."""
    look = (
        "cd /sys/class/net; for i in *; do "
        "[ ! -e $i/device ] || echo $i $(readlink $i/device) $(cat $i/ifindex); done"
    )
    lines = [line.split() for line in four.workspace.in_pod("four", look).splitlines()]
    return {name: (path.rpartition("/")[2], index) for name, path, index in lines}


def told(four: OnePod, reason: str, function: str) -> list[str]:
    """Events of the pod's claims about one of their NICs."""
    selector = f"involvedObject.kind=ResourceClaim,reason={reason}"
    listed = json.loads(four.workspace.kubectl("get", "events", "--field-selector", selector, "-o", "json"))
    return [one["message"] for one in listed["items"] if function in one["message"]]


@contextmanager
def attach_held(vlab: VnodeLab, workspace: VnodeWorkspace, *objects: dict[str, Any]) -> Iterator[None]:
    """Applies a pod. Within, its claim is prepared, its pause process runs, and the runtime's call to attach its VF
    waits for the ledger's lock."""
    lock, held, released = (
        f"{PLUGIN_DIR}/serialize.lock",
        "/run/vnode-test-held",
        "/run/vnode-test-released",
    )
    hold = (
        f"rm -f {held} {released}; until ls {PLUGIN_DIR}/claims/*.json > /dev/null 2>&1; do sleep 0.3; done; "
        f"exec flock {lock} sh -c 'touch {held}; until [ -e {released} ]; do sleep 0.2; done'"
    )
    others = vlab.guest.run("sh", "-c", "pgrep -x -c pause || true").strip()
    waited_for = (
        f"until [ -e {held} ] && [ $(pgrep -x -c pause) -gt {others} ]; do sleep 1; done; "
        f"inode=$(stat -c %i {lock}); "
        'until grep -q -- "-> FLOCK .*:$inode " /proc/locks; do sleep 1; done'  # proc_locks(5)
    )
    holder = threading.Thread(target=lambda: vlab.guest.run("sh", "-c", hold, timeout=2 * PATIENCE))
    holder.start()
    try:
        workspace.apply(*objects)
        vlab.guest.run("sh", "-c", waited_for, timeout=PATIENCE)
        yield
    finally:
        vlab.guest.run("touch", released)
        holder.join(PATIENCE)
    assert not holder.is_alive()
