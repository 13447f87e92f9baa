"""RDMA between pods over their VFs, in exclusive mode, and what is left of it: nothing."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from e2e.vnode.lab import RDMA_ALL, RDMA_NONE, VnodeLab, VnodeWorkspace, pair_template, pod

NIC, PF = "railmate.dev/nicPciBusID", "railmate.dev/pfPciBusID"
ADDRESSES = {"first": "192.168.77.1", "second": "192.168.77.2"}
_PODS = tuple(ADDRESSES)
#: What the second pod sets of its own, of what the driver would tell a job.
OWN = {"NCCL_IB_HCA": "^mine"}
#: What a pod sees of itself, a line a fact, by one command: each exec costs seconds. $1: the GID of its address.
_LOOK = """
echo user $(id -u)
echo capabilities $(sed -n 's/^CapEff://p' /proc/self/status)
echo locked $(ulimit -l)
echo devices $(ls /sys/class/infiniband)
echo nodes $(ls /dev/infiniband)
cd /sys/class/infiniband/*/ports/1/gids
echo gids $(for i in $(grep -l $1 *); do ! grep -q v2 ../gid_attrs/types/$i || echo $i; done)
echo verbs $(grep -l "^$(ls /sys/class/infiniband)$" /sys/class/infiniband_verbs/*/ibdev | cut -d/ -f5)
echo hints $(tr '\\0' '\\n' < /proc/1/environ | grep -e ^NCCL_ -e ^UCX_)
echo metadata $(head -n 1 /var/run/kubernetes.io/dra-device-attributes/*/*/*/railmate.dev-metadata.json)
"""


@dataclass(frozen=True)
class TwoPods:
    """Two pods with a GPU and a VF each, on NICs of different sockets; what the driver and the pods say of them; the
    node's state and RDMA devices before there was any."""

    workspace: VnodeWorkspace
    before: dict[str, Any]
    claimable: set[str]
    told: dict[str, dict[str, Any]]
    seen: dict[str, dict[str, str]]

    def rdma_device(self, name: str) -> str:
        (device,) = self.seen[name]["devices"].split()
        return device

    def gid_index(self, name: str) -> int:
        """The RoCE v2 GID of the pod's own address, from the pod's own table."""
        (index,) = self.seen[name]["gids"].split()
        return int(index)


@pytest.fixture(scope="module")
def two(vlab: VnodeLab) -> Iterator[TwoPods]:
    before, claimable = vlab.state(), vlab.rdma_devices()
    with vlab.workspace() as workspace:
        for name, switch in zip(_PODS, (vlab.switches[0], vlab.switches[2]), strict=True):
            config = {"interfaceName": "rail", "addresses": [f"{ADDRESSES[name]}/24"], "envHints": True}
            one = pod(name, name)
            if name == "second":
                (container,) = one["spec"]["containers"]
                container["env"] = [{"name": key, "value": value} for key, value in OWN.items()]
            workspace.apply(pair_template(name, switch, **config), one)
        workspace.await_ready(*_PODS)
        told = {name: workspace.statuses(name) for name in _PODS}
        seen = {name: look(workspace, name) for name in _PODS}
        yield TwoPods(workspace, before, claimable, {name: one for name, (one,) in told.items()}, seen)


def look(workspace: VnodeWorkspace, name: str) -> dict[str, str]:
    octets = [int(part) for part in ADDRESSES[name].split(".")]
    gid = "0000:0000:0000:0000:0000:ffff:{:02x}{:02x}:{:02x}{:02x}".format(*octets)
    lines = workspace.in_pod(name, f"set -- {gid}{_LOOK}").splitlines()
    return {fact: value for fact, _, value in (line.partition(" ") for line in lines)}


def test_the_pods_have_vfs_of_the_nics_beside_their_gpus(two: TwoPods, vlab: VnodeLab) -> None:
    first, second = (two.workspace.allocated(name)[0] for name in _PODS)
    assert first[NIC].startswith("0000:25:")
    assert second[NIC].startswith("0000:85:")


def test_the_pods_users_are_not_root_and_have_no_capability(two: TwoPods) -> None:
    for seen in two.seen.values():
        assert (seen["user"], seen["capabilities"]) == ("1000", "0" * 16)


def test_memory_may_be_locked_without_a_capability(two: TwoPods) -> None:
    assert {seen["locked"] for seen in two.seen.values()} == {"unlimited"}


def test_the_claims_status_and_the_pods_metadata_name_the_gid_of_the_pods_address(two: TwoPods) -> None:
    for name, status in two.told.items():
        index, device = two.gid_index(name), two.rdma_device(name)
        ready = {one["type"]: (one["status"], one["message"]) for one in status["conditions"]}
        assert {kind: said[0] for kind, said in ready.items()} == {
            "Ready": "True", "NetworkReady": "True", "RDMAReady": "True",
        }, ready  # fmt: skip
        assert status["networkData"]["ips"] == [f"{ADDRESSES[name]}/24"]
        (nic,) = status["data"]["nics"]
        assert (nic["rdmaDevice"], nic["gidIndex"]) == (device, index)
        (told,) = json.loads(two.seen[name]["metadata"])["requests"][0]["devices"]
        assert told["attributes"]["railmate.dev/gidIndex"] == {"int": index}
        assert told["attributes"]["railmate.dev/rdmaDevice"] == {"string": device}


def test_a_job_is_told_its_device_and_the_index_of_its_gid_and_keeps_what_it_sets_itself(
    two: TwoPods,
) -> None:
    """In the environment of the container's first process; the index is that of the pod's own GID table."""
    for name in _PODS:
        port = f"{two.rdma_device(name)}:1"
        expected = {
            "NCCL_IB_HCA": f"={port}",
            "NCCL_IB_GID_INDEX": str(two.gid_index(name)),
            "UCX_NET_DEVICES": port,
        }
        own = OWN if name == "second" else {}
        assert dict(line.split("=", 1) for line in two.seen[name]["hints"].split()) == expected | own


def test_ib_write_bw_runs_between_the_pods_over_their_vfs(two: TwoPods, vlab: VnodeLab) -> None:
    commands = {
        name: f"timeout 240 ib_write_bw -d {two.rdma_device(name)} -x {two.gid_index(name)} -n 200 -F --report_gbits"
        for name in _PODS
    }
    server: list[tuple[int, str]] = []
    thread = threading.Thread(target=lambda: server.extend(two.workspace.tries("first", commands["first"])))
    thread.start()
    # perftest's server listens on 18515 (4853 in hexadecimal) for the exchange of addresses.
    tables = "$(pgrep -x ib_write_bw | sed 's|.*|/proc/&/net/tcp /proc/&/net/tcp6|')"
    vlab.guest.run("sh", "-c", f"until grep -qs ':4853 .* 0A ' {tables} /dev/null; do sleep 0.2; done")
    ((status, output),) = two.workspace.tries("second", f"{commands['second']} {ADDRESSES['first']}")
    thread.join()
    assert status == 0, output
    assert server[0][0] == 0, server[0][1]
    figures = re.findall(r"^\s*65536\s+200\s+\S+\s+(\S+)", output, re.MULTILINE)
    assert len(figures) == 1, output
    assert float(figures[0]) > 0, output


def test_a_pod_cannot_open_the_other_pods_rdma_device(two: TwoPods) -> None:
    assert two.rdma_device("first") != two.rdma_device("second")
    for name, other in (_PODS, _PODS[::-1]):
        commands = [f"ibv_devinfo -d {two.rdma_device(one)}" for one in (other, name)]
        (others, said), (own, _) = two.workspace.tries(name, *commands)
        assert others != 0, said
        assert own == 0


def test_a_pod_has_the_character_devices_of_its_own_rdma_device_only(two: TwoPods) -> None:
    for seen in two.seen.values():
        (own,) = seen["verbs"].split()
        assert [node for node in seen["nodes"].split() if node.startswith("uverbs")] == [own]


def test_the_kernel_gives_a_pod_its_own_rdma_device_and_nothing_of_the_others(two: TwoPods) -> None:
    """By its cgroup; see test_rdma_cgroup."""
    free = two.claimable - {two.rdma_device(name) for name in _PODS}
    for name in _PODS:
        limits = two.workspace.rdma_limits(name)
        assert limits[two.rdma_device(name)] == RDMA_ALL
        assert {device: limits[device] for device in free} == dict.fromkeys(free, RDMA_NONE)


def test_the_node_no_longer_sees_the_pods_netdevs_and_rdma_devices(two: TwoPods, vlab: VnodeLab) -> None:
    here = vlab.guest.run("sh", "-c", "ls /sys/class/net; rdma dev").split()
    for name in _PODS:
        assert two.rdma_device(name) not in [word.rstrip(":") for word in here]
    assert {"rail0", "rail2"} <= set(here)
    assert len([word for word in here if re.fullmatch(r"rail\dv\d", word)]) == 14


def test_after_the_pods_are_gone_the_node_is_as_it_was_field_by_field(two: TwoPods, vlab: VnodeLab) -> None:
    """The last test of this module: it deletes the pods."""
    assert any(key.startswith("link.rail0v0.") for key in two.before)
    two.workspace.delete_pods()
    vlab.await_state(two.before)
