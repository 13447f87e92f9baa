"""RDMA between pods over their VFs, in exclusive mode, and what is left of it: nothing."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from e2e.vnode.lab import VnodeLab, VnodeWorkspace, pair_template, pod

NIC, PF = "railmate.dev/nicPciBusID", "railmate.dev/pfPciBusID"
ADDRESSES = {"first": "192.168.77.1", "second": "192.168.77.2"}
_PODS = tuple(ADDRESSES)


@dataclass(frozen=True)
class TwoPods:
    """Two pods with two GPUs and a VF each, on NICs of different sockets, and the node's state before there was any."""

    workspace: VnodeWorkspace
    before: dict[str, Any]

    def rdma_device(self, name: str) -> str:
        (device,) = self.workspace.in_pod(name, "ls /sys/class/infiniband").split()
        return device


@pytest.fixture(scope="module")
def two(vlab: VnodeLab) -> Iterator[TwoPods]:
    before = vlab.state()
    with vlab.workspace() as workspace:
        for name, switch in zip(_PODS, (vlab.switches[0], vlab.switches[2]), strict=True):
            template = pair_template(name, switch, interfaceName="rail", addresses=[f"{ADDRESSES[name]}/24"])
            workspace.apply(template, pod(name, name))
        workspace.await_ready(*_PODS)
        yield TwoPods(workspace, before)


def gid_index(two: TwoPods, name: str) -> int:
    """The RoCE v2 GID of the pod's own address, from the pod's own table."""
    device = two.rdma_device(name)
    table = f"/sys/class/infiniband/{device}/ports/1"
    octets = [int(part) for part in ADDRESSES[name].split(".")]
    gid = "0000:0000:0000:0000:0000:ffff:{:02x}{:02x}:{:02x}{:02x}".format(*octets)
    listing = two.workspace.in_pod(name, f"cd {table}/gids; grep -l {gid} * || true").split()
    found = [
        index
        for index in listing
        if "v2" in two.workspace.in_pod(name, f"cat {table}/gid_attrs/types/{index}")
    ]
    assert len(found) == 1, f"{name} has its address in {found or 'no'} RoCE v2 GIDs"
    return int(found[0])


def test_the_pods_have_vfs_of_the_nics_beside_their_gpus(two: TwoPods, vlab: VnodeLab) -> None:
    first, second = (two.workspace.allocated(name)[0] for name in _PODS)
    assert first[NIC].startswith("0000:25:")
    assert second[NIC].startswith("0000:85:")


def test_the_pods_users_are_not_root_and_have_no_capability(two: TwoPods) -> None:
    for name in _PODS:
        said = two.workspace.in_pod(name, "id -u; grep CapEff /proc/self/status").split()
        assert said == ["1000", "CapEff:", "0" * 16]


def test_memory_may_be_locked_without_a_capability(two: TwoPods) -> None:
    for name in _PODS:
        assert two.workspace.in_pod(name, "ulimit -l").strip() == "unlimited"


def test_the_claims_status_and_the_pods_metadata_name_the_gid_of_the_pods_address(two: TwoPods) -> None:
    pattern = "/var/run/kubernetes.io/dra-device-attributes/*/*/*/railmate.dev-metadata.json"
    for name in _PODS:
        index, device = gid_index(two, name), two.rdma_device(name)
        claim = two.workspace.get("pod", name)["status"]["resourceClaimStatuses"][0]["resourceClaimName"]
        (status,) = two.workspace.get("resourceclaim", claim)["status"]["devices"]
        ready = {one["type"]: (one["status"], one["message"]) for one in status["conditions"]}
        assert {kind: said[0] for kind, said in ready.items()} == {
            "Ready": "True", "NetworkReady": "True", "RDMAReady": "True",
        }, ready  # fmt: skip
        assert status["networkData"]["ips"] == [f"{ADDRESSES[name]}/24"]
        (nic,) = status["data"]["nics"]
        assert (nic["rdmaDevice"], nic["gidIndex"]) == (device, index)
        newest, _ = two.workspace.in_pod(name, f"cat {pattern}").splitlines()
        (told,) = json.loads(newest)["requests"][0]["devices"]
        assert told["attributes"]["railmate.dev/gidIndex"] == {"int": index}
        assert told["attributes"]["railmate.dev/rdmaDevice"] == {"string": device}


def test_ib_write_bw_runs_between_the_pods_over_their_vfs(two: TwoPods) -> None:
    workspace = two.workspace
    options = "-n 200 -F --report_gbits"
    server: list[tuple[int, str]] = []

    def serve() -> None:
        command = (
            f"timeout 240 ib_write_bw -d {two.rdma_device('first')} -x {gid_index(two, 'first')} {options}"
        )
        server.append(workspace.tries("first", command))

    thread = threading.Thread(target=serve)
    thread.start()
    # perftest's server listens on 18515 (48E3 in hexadecimal) for the exchange of addresses.
    listening = "until grep -q ':4853 .* 0A ' /proc/net/tcp /proc/net/tcp6; do sleep 0.2; done"
    workspace.in_pod("first", f'timeout 120 sh -c "{listening}"')
    client = f"timeout 200 ib_write_bw -d {two.rdma_device('second')} -x {gid_index(two, 'second')} {options}"
    status, output = workspace.tries("second", f"{client} {ADDRESSES['first']}")
    thread.join()
    assert status == 0, output
    assert server[0][0] == 0, server[0][1]
    figures = re.findall(r"^\s*65536\s+200\s+\S+\s+(\S+)", output, re.MULTILINE)
    assert len(figures) == 1, output
    assert float(figures[0]) > 0, output


def test_a_pod_cannot_open_the_other_pods_rdma_device(two: TwoPods) -> None:
    devices = {name: two.rdma_device(name) for name in _PODS}
    assert devices["first"] != devices["second"]
    for name, other in (_PODS, _PODS[::-1]):
        status, output = two.workspace.tries(name, f"ibv_devinfo -d {devices[other]}")
        assert status != 0, output
        assert two.workspace.tries(name, f"ibv_devinfo -d {devices[name]}")[0] == 0


def test_a_pod_has_the_character_devices_of_its_own_rdma_device_only(two: TwoPods) -> None:
    for name in _PODS:
        device = two.rdma_device(name)
        nodes = two.workspace.in_pod(name, "ls /dev/infiniband").split()
        own = two.workspace.in_pod(
            name, f"grep -l '^{device}$' /sys/class/infiniband_verbs/*/ibdev | cut -d/ -f5"
        ).split()
        assert [node for node in nodes if node.startswith("uverbs")] == own


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
