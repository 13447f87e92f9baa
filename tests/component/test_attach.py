"""Netdevs between real network namespaces. A VF is played by one end of a veth pair, as in the simulated node."""

from __future__ import annotations

import asyncio
import errno
import os
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from component.netdev_lab import MakeVf, Pod, host_links, run
from railmate.attach import links, namespaces
from railmate.attach.errors import AttachError, NamespaceGoneError
from railmate.attach.netdev import (
    AttachedNetdev,
    MoveRequest,
    NetdevSnapshot,
    ReturnRequest,
    ReturnState,
    attach_all,
    move_back,
    move_in,
    return_all,
    snapshot,
)
from railmate.attach.settings import NO_ETHTOOL, NetdevSettings
from railmate.netlink import Netlink

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces: needs root")


def address(index: int) -> str:
    return f"0000:c1:00.{index}"


def assert_home(vf: NetdevSnapshot) -> None:
    link = host_links()[vf.name]
    assert (link["address"], link["mtu"], "UP" in link["flags"]) == (vf.mac, vf.mtu, vf.up)


def test_a_snapshot_says_what_the_host_sees(make_vf: MakeVf) -> None:
    name = make_vf(1)
    mac = host_links()[name]["address"]
    run("ip", "address", "add", "10.9.8.7/24", "dev", name)
    run("ip", "address", "add", "2001:db8::7/64", "dev", name)
    seen = snapshot(name, address(1))
    assert replace(seen, ethtool=NO_ETHTOOL, link=None, sysctls={}, steering=None) == NetdevSnapshot(
        pci_address=address(1), name=name, mac=mac, mtu=4000, up=False, parent=None,
        addresses=("10.9.8.7/24", "2001:db8::7/64"), programs=(), queues={},
    )  # fmt: skip
    assert seen.link is not None
    assert (seen.link.flags["multicast"], seen.link.flags["promisc"]) == (True, False)
    assert (seen.link.numbers["txqueuelen"], seen.link.alias) == (1000, "")
    assert (seen.sysctls["ipv4/arp_ignore"], seen.sysctls["ipv6/disable_ipv6"]) == ("0", "0")
    assert seen.ethtool.features["rx-gro"] in (True, False)
    assert seen.ethtool.channels == {"rx": 1, "tx": 1}


def test_a_netdev_that_is_not_there_has_no_snapshot() -> None:
    with pytest.raises(AttachError, match=r"netdev nosuch0 of 0000:c1:00\.1 is not on the host"):
        snapshot("nosuch0", address(1))


def test_a_netdev_moves_into_the_pod_under_its_new_name_and_is_up(pod: Pod, vf: NetdevSnapshot) -> None:
    attached = move_in(vf, pod.path, name="net1")
    link = pod.links()["net1"]
    assert attached == AttachedNetdev(address(1), "net1", link["ifindex"], vf.mac, 4000)
    assert (link["address"], link["mtu"], "UP" in link["flags"]) == (vf.mac, 4000, True)
    assert vf.name not in host_links()


def test_moving_it_in_again_changes_nothing(pod: Pod, vf: NetdevSnapshot) -> None:
    attached = move_in(vf, pod.path, name="net1")
    pod.ip("address", "add", "10.9.0.2/24", "dev", "net1")
    assert move_in(vf, pod.path, name="net1") == attached
    assert "10.9.0.2/24" in pod.ip("address", "show", "dev", "net1")


def test_an_interface_that_a_container_renamed_is_left_alone(pod: Pod, vf: NetdevSnapshot) -> None:
    attached = move_in(vf, pod.path, name="net1")
    pod.ip("link", "set", "net1", "down")
    pod.ip("link", "set", "net1", "name", "mine0")
    again = move_in(vf, pod.path, name="net1")
    assert (again.name, again.ifindex) == ("mine0", attached.ifindex)
    assert "UP" not in pod.links()["mine0"]["flags"]


def test_a_move_that_broke_off_before_the_rename_is_finished(pod: Pod, vf: NetdevSnapshot) -> None:
    run("ip", "link", "set", vf.name, "netns", pod.name)
    assert move_in(vf, pod.path, name="net1").name == "net1"
    assert "UP" in pod.links()["net1"]["flags"]


def test_the_pods_own_interface_of_the_hosts_name_is_no_obstacle(pod: Pod, vf: NetdevSnapshot) -> None:
    pod.ip("link", "add", vf.name, "type", "veth", "peer", "name", "other0")
    move_in(vf, pod.path, name="net1")
    assert pod.links()["net1"]["address"] == vf.mac


def test_an_attach_works_from_a_running_event_loop_through_a_thread(pod: Pod, vf: NetdevSnapshot) -> None:
    async def attach() -> AttachedNetdev:
        return await asyncio.to_thread(move_in, vf, pod.path, name="net1")

    assert asyncio.run(attach()).name == "net1"


def test_the_callers_own_namespace_stays_what_it_was(pod: Pod, vf: NetdevSnapshot) -> None:
    before = Path("/proc/thread-self/ns/net").stat().st_ino
    move_in(vf, pod.path, name="net1")
    assert Path("/proc/thread-self/ns/net").stat().st_ino == before
    assert before != pod.path.stat().st_ino


@pytest.mark.parametrize("name", ["", "a" * 16, "net/1", "net 1", "..", "net%d", "net:1"])
def test_what_is_no_interface_name_is_refused(pod: Pod, vf: NetdevSnapshot, name: str) -> None:
    with pytest.raises(AttachError, match="is no interface name"):
        move_in(vf, pod.path, name=name)
    assert_home(vf)


def test_a_name_that_the_pod_uses_already_is_refused_and_the_netdev_stays(
    pod: Pod, vf: NetdevSnapshot
) -> None:
    pod.ip("link", "add", "net1", "type", "veth", "peer", "name", "other0")
    with pytest.raises(
        AttachError, match=rf"netdev {vf.name} .* as net1: the pod has another interface of that name"
    ):
        move_in(vf, pod.path, name="net1")
    assert_home(vf)


def test_a_netdev_that_is_nowhere_is_refused(pod: Pod, vf: NetdevSnapshot) -> None:
    run("ip", "link", "delete", vf.name)
    with pytest.raises(AttachError, match=rf"netdev {vf.name} .* is neither on the host nor in this pod"):
        move_in(vf, pod.path, name="net1")


def test_a_namespace_that_is_gone_is_told_apart(pod: Pod, vf: NetdevSnapshot, tmp_path: Path) -> None:
    pod.end()
    with pytest.raises(NamespaceGoneError, match="does not exist any more"):
        move_in(vf, pod.path, name="net1")
    plain_file = tmp_path / "cni-1"
    plain_file.touch()
    with pytest.raises(NamespaceGoneError, match="HostToContainer"):
        move_in(vf, plain_file, name="net1")
    assert_home(vf)


def test_several_netdevs_are_attached_in_order(pod: Pod, make_vf: MakeVf) -> None:
    vfs = [snapshot(make_vf(n), address(n)) for n in (1, 2, 3)]
    attached = attach_all([MoveRequest(vf, f"net{i + 1}") for i, vf in enumerate(vfs)], pod.path)
    assert [(one.pci_address, one.name) for one in attached] == [(address(n), f"net{n}") for n in (1, 2, 3)]
    results = return_all([ReturnRequest(vf, at) for vf, at in zip(vfs, attached, strict=True)], pod.path)
    assert {result.state for result in results} == {ReturnState.RETURNED}
    for vf in vfs:
        assert_home(vf)


def test_the_pods_namespace_is_entered_once_whatever_the_number_of_netdevs(
    pod: Pod, make_vf: MakeVf, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[int] = []
    real = namespaces.enter

    def enter(fd: int) -> None:
        entered.append(fd)
        real(fd)

    vfs = [snapshot(make_vf(n), address(n)) for n in (1, 2, 3, 4)]
    monkeypatch.setattr(namespaces, "enter", enter)
    settings = NetdevSettings(mtu=1400, addresses=("10.1.0.1/24",))
    attach_all([MoveRequest(vf, f"net{i}", settings) for i, vf in enumerate(vfs, 1)], pod.path)
    assert len(entered) == 1


def test_when_one_cannot_be_attached_none_is(pod: Pod, make_vf: MakeVf) -> None:
    vfs = [snapshot(make_vf(n), address(n)) for n in (1, 2, 3)]
    run("ip", "link", "delete", vfs[2].name)
    with pytest.raises(AttachError, match=f"netdev {vfs[2].name} "):
        attach_all([MoveRequest(vf, f"net{i + 1}") for i, vf in enumerate(vfs)], pod.path)
    assert set(pod.links()) == {"lo"}
    assert_home(vfs[0])
    assert_home(vfs[1])


def test_a_failed_attach_does_not_take_what_the_pod_had_before(pod: Pod, make_vf: MakeVf) -> None:
    vfs = [snapshot(make_vf(n), address(n)) for n in (1, 2)]
    move_in(vfs[0], pod.path, name="net1")
    run("ip", "link", "delete", vfs[1].name)
    with pytest.raises(AttachError):
        attach_all([MoveRequest(vf, f"net{i + 1}") for i, vf in enumerate(vfs)], pod.path)
    assert "net1" in pod.links()


@pytest.mark.parametrize("was_up", [False, True])
def test_it_comes_home_as_it_was_whatever_the_pod_did_to_it(pod: Pod, make_vf: MakeVf, was_up: bool) -> None:
    name = make_vf(1)
    if was_up:
        run("ip", "link", "set", name, "up")
    vf = snapshot(name, address(1))
    assert vf.up == was_up
    attached = move_in(vf, pod.path, name="net1")
    pod.ip("link", "set", "net1", "down")
    pod.ip("link", "set", "net1", "name", "mine0", "address", "02:00:00:00:99:99", "mtu", "1400")
    pod.ip("link", "set", "mine0", "up")
    result = move_back(vf, pod.path, attached=attached)
    assert (result.state, result.name, result.problems) == (ReturnState.RETURNED, vf.name, ())
    assert_home(vf)
    assert set(pod.links()) == {"lo"}


def test_the_mac_is_enough_when_the_attachment_was_forgotten(pod: Pod, vf: NetdevSnapshot) -> None:
    move_in(vf, pod.path, name="net1")
    pod.ip("link", "set", "net1", "down")
    pod.ip("link", "set", "net1", "name", "mine0")
    assert move_back(vf, pod.path).state == ReturnState.RETURNED
    assert_home(vf)


def test_bringing_it_home_again_finds_it_there(pod: Pod, vf: NetdevSnapshot) -> None:
    attached = move_in(vf, pod.path, name="net1")
    move_back(vf, pod.path, attached=attached)
    for path in (pod.path, None):
        result = move_back(vf, path, attached=attached)
        assert (result.state, result.name, result.home) == (ReturnState.ALREADY_HOME, vf.name, True)
    assert_home(vf)


def test_one_that_the_kernel_gave_back_under_the_pods_name_gets_its_own(vf: NetdevSnapshot) -> None:
    run("ip", "link", "set", vf.name, "name", "rmnet1", "mtu", "1400")
    run("ip", "link", "set", "rmnet1", "up")
    result = move_back(vf, None)
    assert (result.state, result.name) == (ReturnState.ALREADY_HOME, vf.name)
    assert_home(vf)


def test_a_netdev_that_died_with_its_namespace_is_lost(pod: Pod, vf: NetdevSnapshot) -> None:
    attached = move_in(vf, pod.path, name="net1")
    pod.end()
    result = move_back(vf, pod.path, attached=attached)
    assert (result.state, result.name, result.home) == (ReturnState.LOST, None, False)


def test_when_its_name_is_taken_it_comes_home_under_another_and_says_so(pod: Pod, vf: NetdevSnapshot) -> None:
    attached = move_in(vf, pod.path, name="net1")
    run("ip", "link", "add", vf.name, "type", "veth", "peer", "name", "rmother0")
    try:
        result = move_back(vf, pod.path, attached=attached)
        assert (result.state, result.name) == (ReturnState.RETURNED, "rm0000c1001")
        assert result.problems == (
            f"its name {vf.name} is taken by another device; it is called rm0000c1001 now",
        )
        assert host_links()["rm0000c1001"]["address"] == vf.mac
    finally:
        run("ip", "link", "delete", vf.name)
    assert move_back(vf, None).name == vf.name
    assert_home(vf)


def test_what_the_device_refuses_to_restore_is_told(pod: Pod, vf: NetdevSnapshot) -> None:
    attached = move_in(vf, pod.path, name="net1")
    impossible = replace(vf, mtu=10_000_000)
    result = move_back(impossible, pod.path, attached=attached)
    assert (result.state, result.name) == (ReturnState.RETURNED, vf.name)
    assert result.problems == (
        "MTU 10000000 cannot be set: Invalid argument (mtu greater than device maximum)",
    )


def test_one_failure_does_not_keep_the_others_from_coming_home(pod: Pod, make_vf: MakeVf) -> None:
    vfs = [snapshot(make_vf(n), address(n)) for n in (1, 2)]
    attached = attach_all([MoveRequest(vf, f"net{i + 1}") for i, vf in enumerate(vfs)], pod.path)
    run("ip", "-netns", pod.name, "link", "delete", "net1")
    results = return_all([ReturnRequest(vf, at) for vf, at in zip(vfs, attached, strict=True)], pod.path)
    assert [result.state for result in results] == [ReturnState.LOST, ReturnState.RETURNED]
    assert_home(vfs[1])


def test_one_that_the_kernel_does_not_tell_of_does_not_keep_the_others_from_coming_home(
    pod: Pod, make_vf: MakeVf, monkeypatch: pytest.MonkeyPatch
) -> None:
    vfs = [snapshot(make_vf(n), address(n)) for n in (1, 2)]
    attached = attach_all([MoveRequest(vf, f"net{i + 1}") for i, vf in enumerate(vfs)], pod.path)
    real = links.get

    def get(netlink: Netlink, name: str) -> links.Link | None:
        if name == "net1":
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        return real(netlink, name)

    monkeypatch.setattr(links, "get", get)
    results = return_all([ReturnRequest(vf, at) for vf, at in zip(vfs, attached, strict=True)], pod.path)
    assert [result.state for result in results] == [ReturnState.FAILED, ReturnState.RETURNED]
    assert results[0].problems == (f"{vfs[0]} cannot be looked for: No buffer space available",)
    assert_home(vfs[1])


def test_no_file_descriptors_or_threads_are_left(pod: Pod, vf: NetdevSnapshot) -> None:
    def resources() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    move_back(vf, pod.path, attached=move_in(vf, pod.path, name="net1"))
    before = resources()
    for _ in range(5):
        move_back(vf, pod.path, attached=move_in(vf, pod.path, name="net1"))
        with pytest.raises(AttachError):
            move_in(vf, Path("/run/netns/no-such"), name="net1")
    assert resources() == before


def test_an_attach_is_far_below_the_runtimes_limit(pod: Pod, vf: NetdevSnapshot) -> None:
    """About 25 ms on an idle machine, most of it the kernel's; the runtime gives up after 2 s, for all plugins."""
    durations = []
    for _ in range(9):
        start = time.perf_counter()
        attached = move_in(vf, pod.path, name="net1")
        durations.append(time.perf_counter() - start)
        move_back(vf, pod.path, attached=attached)
    assert statistics.median(durations) < 0.2
