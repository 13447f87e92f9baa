"""Whatever a container with NET_ADMIN does to its netdev, the host has it back as it was, field by field.

What the kernel's own tools say of the netdev before and afterwards is compared, beside what the driver says.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from component.netdev_lab import MakeVf, Pod, pods, run
from railmate.attach import queues
from railmate.attach.ethtool import Ethtool
from railmate.attach.model import AttachedNetdev, NetdevReturn, NetdevSnapshot, ReturnState
from railmate.attach.namespaces import enter, open_namespace, with_namespace
from railmate.attach.netdev import move_back, move_in, snapshot
from railmate.attach.settings import EthtoolSettings
from railmate.claims.records import netdev_snapshot

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces: needs root")

ADDRESS = "0000:c1:00.1"
#: What a container does, as arguments of ``ip link set dev net1``.
CHANGES: dict[str, tuple[str, ...]] = {
    "it sees all packets": ("promisc", "on"),
    "it sees all groups": ("allmulticast", "on"),
    "it does not resolve addresses": ("arp", "off"),
    "it takes no groups": ("multicast", "off"),
    "its queue": ("txqueuelen", "7"),
    "its alias": ("alias", "mine now"),
    "its group": ("group", "5"),
    "its link mode": ("mode", "dormant"),
    "its broadcast address": ("broadcast", "02:02:02:02:02:02"),
    "segments it may send": ("gso_max_size", "30000"),
    "how many of them": ("gso_max_segs", "3"),
    "segments it may receive": ("gro_max_size", "20000"),
    "flags without a meaning": ("trailers", "off", "dynamic", "on"),
}
#: What only sysfs has, below the netdev's directory.
QUEUES = {
    "napi_defer_hard_irqs": "2",
    "gro_flush_timeout": "20000",
    "queues/rx-1/rps_cpus": "1",
    "queues/rx-1/rps_flow_cnt": "32",
    "queues/tx-2/xps_cpus": "1",
    "queues/tx-3/xps_rxqs": "1",
}
#: What differs in any pod, as ip(8) calls it.
_MOVED = {"ifindex", "ifname", "link", "link_index", "link_netnsid", "flags", "operstate", "qdisc"}
_STATES = {"UP", "LOWER_UP", "M-DOWN", "NO-CARRIER"}


#: What the kernel gives anew; and a count of users, that it corrects (net/core/dev.c) when the netdev comes up next.
_ANEW = {"ifindex", "link_index", "link", "promiscuity"}


def told(name: str) -> dict[str, Any]:
    """What ip(8) says of a netdev of the host."""
    (link,) = json.loads(run("ip", "-json", "-details", "link", "show", "dev", name))
    link["altnames"] = sorted(link.get("altnames", []))  # the last that was added comes first
    return {key: value for key, value in link.items() if key not in _ANEW}


def snapshot_in(pod: Pod, name: str) -> NetdevSnapshot:
    """The netdev as the driver sees it in the pod."""
    found: list[NetdevSnapshot] = []

    def look() -> None:
        with open_namespace(pod.path) as fd:
            enter(fd)
        found.append(snapshot(name, ADDRESS))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


@contextmanager
def given(vf: NetdevSnapshot, pod: Pod) -> Iterator[AttachedNetdev]:
    """Within, the pod has the netdev. Afterwards it is home, and as it was."""
    before = told(vf.name)
    attached = move_in(vf, pod.path, name="net1")
    yield attached
    assert_returned(move_back(vf, pod.path, attached=attached), ReturnState.RETURNED)
    assert told(vf.name) == before
    assert snapshot(vf.name, ADDRESS) == vf


def assert_returned(result: NetdevReturn, state: ReturnState) -> None:
    assert (result.state, result.problems) == (state, ())


def attach_program(pod: Pod, netdev: str, how: str) -> int:
    """A program of the pod on its netdev: its id. Skips where the kernel has no such thing."""
    command = [sys.executable, Path(__file__).with_name("bpf_programs.py"), netdev, how]
    done = subprocess.run(["ip", "netns", "exec", pod.name, *command], capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip(f"this kernel has no such programs: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@contextmanager
def program_held(pod: Pod, netdev: str, how: str) -> Iterator[int]:
    """The same by a link, which a process of the pod holds within."""
    command = [sys.executable, str(Path(__file__).with_name("bpf_programs.py")), netdev, how]
    command = ["ip", "netns", "exec", pod.name, *command]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line and process.wait() == 3:
            pytest.skip("this kernel has no such links")
        yield int(line)
    finally:
        process.communicate()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_the_pod_sets_is_set_back(vf: NetdevSnapshot, pod: Pod, change: tuple[str, ...]) -> None:
    before = told(vf.name)
    with given(vf, pod):
        pod.ip("link", "set", "dev", "net1", *change)
        (link,) = pod.json("-details", "link", "show", "dev", "net1")
        differing = {key for key in link.keys() | before.keys() if link.get(key) != before.get(key)}
        flags = set(link["flags"]) ^ set(before["flags"])
        assert differing - _MOVED or flags - _STATES, "the pod can do that"


@pytest.mark.parametrize(("path", "value"), QUEUES.items(), ids=QUEUES.keys())
def test_what_a_privileged_pod_writes_into_sysfs_is_set_back(
    vf: NetdevSnapshot, pod: Pod, path: str, value: str
) -> None:
    assert vf.queues == {}
    file = Path("/sys/class/net", vf.name, path)
    before = file.read_text()
    with given(vf, pod):
        pod.write(path, value)
        seen = snapshot_in(pod, "net1").queues or {}
        assert seen.keys() == {path}, "the pod can do that"
    assert file.read_text() == before


def test_what_the_host_had_in_sysfs_is_there_again(vf: NetdevSnapshot, pod: Pod) -> None:
    """Queues that serve one CPU, also when the pod has changed how many there are."""
    for path, value in QUEUES.items():
        Path("/sys/class/net", vf.name, path).write_text(value)
    mine = snapshot(vf.name, ADDRESS)
    assert mine.queues is not None
    assert mine.queues.keys() == QUEUES.keys()
    with given(mine, pod) as attached, open_namespace(pod.path) as fd:
        for path in QUEUES:
            pod.write(path, "0")
        one = EthtoolSettings(channels={"rx": 1, "tx": 1})
        with_namespace(fd, lambda sides: Ethtool().set(attached.ifindex, one, "net1"))
        assert snapshot_in(pod, "net1").ethtool.channels == one.channels


def test_a_queue_that_is_no_more_is_no_problem_and_a_value_that_is_refused_is(
    vf: NetdevSnapshot, pod: Pod
) -> None:
    foreign = {"queues/rx-99/rps_cpus": "1", "../../../kernel/profiling": "1"}
    move_in(vf, pod.path, name="net1")
    assert_returned(move_back(replace(vf, queues=foreign), pod.path), ReturnState.RETURNED)
    move_in(vf, pod.path, name="net1")
    result = move_back(replace(vf, queues={"queues/rx-0/rps_cpus": "nonsense"}), pod.path)
    assert result.problems == ("its queues/rx-0/rps_cpus is 0, not nonsense: Invalid argument",)


def test_where_no_sysfs_can_be_mounted_the_rest_is_set_back(
    vf: NetdevSnapshot, pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(filesystem: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(queues.detached, "mount", refuse)
    mine = snapshot(vf.name, ADDRESS)
    assert mine == replace(vf, queues=None)
    with given(mine, pod):
        pod.ip("link", "set", "dev", "net1", "txqueuelen", "7")


def test_everything_at_once_is_set_back_also_when_the_kernel_has_brought_it_home(
    vf: NetdevSnapshot, pod: Pod
) -> None:
    """As after the end of its namespace: on the host, with the pod's name and settings."""
    before = told(vf.name)
    move_in(vf, pod.path, name="net1")
    for change in CHANGES.values():
        pod.ip("link", "set", "dev", "net1", *change)
    for path, value in QUEUES.items():
        pod.write(path, value)
    pod.ip("link", "property", "add", "dev", "net1", "altname", vf.name, "altname", "rhother")
    attach_program(pod, "net1", "generic")
    pod.ip("link", "set", "net1", "netns", str(os.getpid()), "name", "rhnet1")
    assert_returned(move_back(vf, None), ReturnState.ALREADY_HOME)
    assert told(vf.name) == before
    assert snapshot(vf.name, ADDRESS) == vf


def test_a_netdev_that_the_pod_has_left_dormant_has_its_carrier_again(make_vf: MakeVf, pod: Pod) -> None:
    """The kernel does not look at the link mode by itself when that is set back."""
    name = make_vf(1)
    run("ip", "link", "set", name, "up")
    vf = snapshot(name, ADDRESS)
    move_in(vf, pod.path, name="net1")
    pod.ip("link", "set", "dev", "net1", "mode", "dormant")
    pod.ip("link", "set", "net1", "netns", str(os.getpid()), "name", "rhnet1")
    run("ip", "link", "set", "rhnet1", "up")
    await_operstate("rhnet1", "DORMANT")
    assert_returned(move_back(vf, None), ReturnState.ALREADY_HOME)
    await_operstate(name, "UP")


def await_operstate(name: str, wanted: str) -> None:
    """The kernel works it out in the background, within a second."""
    end = time.monotonic() + 10
    while (seen := told(name)["operstate"]) != wanted:
        assert time.monotonic() < end, f"{name} is {seen}, not {wanted}"
        time.sleep(0.05)


def test_what_the_host_had_set_is_there_again(make_vf: MakeVf, pod: Pod) -> None:
    name = make_vf(1)
    run(
        "ip", "link", "set", "dev", name, "txqueuelen", "77", "alias", "rail 1", "promisc", "on", "group", "9"
    )
    run("ip", "link", "property", "add", "dev", name, "altname", "rhslot1", "altname", "rhslot1np0")
    vf = snapshot(name, ADDRESS)
    with given(vf, pod):
        pod.ip("link", "set", "dev", "net1", "txqueuelen", "7", "alias", "", "promisc", "off", "group", "0")
        pod.ip("link", "property", "del", "dev", "net1", "altname", "rhslot1")


def test_a_name_that_the_pod_has_taken_from_the_host_does_not_keep_the_netdev_there(
    make_vf: MakeVf, vf: NetdevSnapshot, pod: Pod
) -> None:
    """The kernel moves no netdev to where one of its alternative names is taken."""
    other = make_vf(2)
    with given(vf, pod):
        pod.ip("link", "property", "add", "dev", "net1", "altname", other, "altname", vf.name)
    assert told(other)["ifname"] == other


def test_an_interface_that_the_pod_made_over_it_ends(vf: NetdevSnapshot, pod: Pod) -> None:
    """The kernel leaves it where it is, and its packets would go out through the next pod's netdev."""
    with given(vf, pod):
        pod.ip("link", "add", "link", "net1", "name", "mine0", "type", "macvlan", "mode", "bridge")
        pod.ip("link", "set", "mine0", "up")
    assert set(pod.links()) == {"lo"}


def test_a_bridge_and_a_tunnel_of_the_pod_lose_it(vf: NetdevSnapshot, pod: Pod) -> None:
    """By the kernel; the driver does nothing for it. Bonds and the like: test_whole_port."""
    with given(vf, pod):
        pod.ip("link", "add", "mine0", "type", "bridge")
        pod.ip("link", "set", "net1", "master", "mine0", "up")
        pod.ip("link", "set", "mine0", "up")
        assert pod.links()["net1"]["master"] == "mine0"
        pod.ip("link", "add", "mine1", "type", "vxlan", "id", "5", "dev", "net1", "dstport", "4789")
    assert set(pod.links()) == {"lo", "mine0"}


def test_interfaces_of_the_pod_that_are_not_over_it_stay(vf: NetdevSnapshot, pod: Pod) -> None:
    """Also one over an interface of another namespace that has there the number that the netdev has here."""
    with given(vf, pod) as attached, pods("o") as (other,):
        pod.ip("link", "add", "own0", "type", "veth", "peer", "name", "own1")
        pod.ip("link", "add", "link", "own0", "name", "mine0", "type", "macvlan")
        far = ("link", "add", "index", str(attached.ifindex), "name", "far1", "type", "veth")
        other.ip(*far, "peer", "name", "far0")
        other.ip("link", "add", "link", "far1", "name", "over0", "type", "macvlan")
        for name in ("far0", "over0"):
            other.ip("link", "set", name, "netns", pod.name)
        assert move_back(vf, pod.path).state == ReturnState.RETURNED
        assert {"own0", "own1", "mine0", "far0", "over0"} <= set(pod.links())
        move_in(vf, pod.path, name="net1")


@pytest.mark.parametrize("how", ["driver", "generic", "ingress", "egress"])
def test_a_program_that_the_pod_attached_is_gone(vf: NetdevSnapshot, pod: Pod, how: str) -> None:
    with given(vf, pod):
        program = attach_program(pod, "net1", how)
        if how in ("driver", "generic"):
            assert f"id {program} " in pod.ip("-details", "link", "show", "dev", "net1")


@pytest.mark.parametrize("how", ["xdp-link", "ingress-link"])
def test_a_program_that_a_process_of_the_pod_still_holds_is_gone(
    vf: NetdevSnapshot, pod: Pod, how: str
) -> None:
    attached = move_in(vf, pod.path, name="net1")
    with program_held(pod, "net1", how) as program:
        assert snapshot_in(pod, "net1").programs == (program,)
        assert_returned(move_back(vf, pod.path, attached=attached), ReturnState.RETURNED)
        assert snapshot(vf.name, ADDRESS) == vf


def test_a_program_of_the_host_stays(vf: NetdevSnapshot, pod: Pod, make_vf: MakeVf) -> None:
    name = make_vf(2)
    run("ip", "link", "set", name, "netns", pod.name)
    program = attach_program(pod, name, "generic")
    pod.ip("link", "set", name, "netns", str(os.getpid()))
    theirs = snapshot(name, ADDRESS)
    assert theirs.programs == (program,)
    with given(theirs, pod):
        attach_program(pod, "net1", "ingress")


def test_what_else_the_pod_does_ends_with_the_move(vf: NetdevSnapshot, pod: Pod) -> None:
    """By the kernel; the driver does nothing for it."""
    with given(vf, pod):
        pod.ip(
            "neighbour", "add", "10.1.1.1", "lladdr", "02:00:00:00:00:09", "dev", "net1", "nud", "permanent"
        )
        pod.ip("maddress", "add", "33:33:00:00:00:77", "dev", "net1")
        pod.ip("address", "add", "10.1.1.2/24", "dev", "net1")
        run("bridge", "-netns", pod.name, "fdb", "add", "02:11:22:33:44:55", "dev", "net1", "self")
        assert "02:11:22:33:44:55" in run("bridge", "-netns", pod.name, "fdb", "show", "dev", "net1")
    assert not run("ip", "neighbour", "show", "dev", vf.name)
    assert "10.1.1.2" not in run("ip", "address", "show", "dev", vf.name)
    assert "33:33:00:00:00:77" not in run("ip", "maddress", "show", "dev", vf.name)
    assert "02:11:22:33:44:55" not in run("bridge", "fdb", "show", "dev", vf.name)


def test_a_snapshot_of_the_railmate_before_changes_nothing_of_it(vf: NetdevSnapshot, pod: Pod) -> None:
    record = json.loads(json.dumps(vf.to_dict()))
    del record["link"], record["programs"], record["queues"]
    old = netdev_snapshot(record)
    assert old == replace(vf, link=None, programs=None, queues=None)
    move_in(old, pod.path, name="net1")
    pod.ip("link", "set", "dev", "net1", "txqueuelen", "7")
    pod.write("napi_defer_hard_irqs", "2")
    assert_returned(move_back(old, pod.path), ReturnState.RETURNED)
    assert told(vf.name)["txqlen"] == 7
    assert (Path("/sys/class/net") / vf.name / "napi_defer_hard_irqs").read_text() == "2\n"
    assert netdev_snapshot(json.loads(json.dumps(vf.to_dict()))) == vf


@pytest.fixture
def tap() -> Iterator[str]:
    """A netdev of the kernel's tun driver, which has something to coalesce."""
    name = "rhtap1"
    run("ip", "tuntap", "add", "dev", name, "mode", "tap")
    try:
        yield name
    finally:
        subprocess.run(["ip", "link", "delete", name], capture_output=True)


def coalescing(name: str, rx_frames: int | None = None) -> int:
    """ioctl(2) SIOCETHTOOL with ETHTOOL_GCOALESCE or ETHTOOL_SCOALESCE in this thread's namespace."""
    get = rx_frames is None
    values = array("I", [0xE if get else 0xF, 0, rx_frames or 0, *[0] * 20])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8946, struct.pack("16sP", name.encode(), values.buffer_info()[0]))
    return values[2]


def test_coalescing_is_set_back(tap: str, pod: Pod) -> None:
    vf = snapshot(tap, ADDRESS)
    before = coalescing(tap)
    assert vf.ethtool.coalescing == {"rx-frames": before}
    with given(vf, pod), open_namespace(pod.path) as fd:
        with_namespace(fd, lambda sides: coalescing("net1", before + 16))
        assert with_namespace(fd, lambda sides: coalescing("net1")) == before + 16
    assert coalescing(tap) == before
