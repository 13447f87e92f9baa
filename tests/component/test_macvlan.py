"""Sub-interfaces of a netdev that stays on the host, between real network namespaces. A physical function is played by
one end of a veth pair, as in the simulated node."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from component.netdev_lab import Pod, host_links, pods, run, veths
from railmate.attach import macvlan
from railmate.attach.errors import AttachError
from railmate.attach.macvlan import stable_mac
from railmate.attach.model import AttachedNetdev, MoveRequest, SubInterface, SubInterfaceRequest
from railmate.attach.namespaces import open_namespace, with_namespace
from railmate.attach.netdev import attach_all, remove_all, snapshot
from railmate.attach.rdmalook import Wanted, look
from railmate.attach.settings import NetdevSettings, Route, RoutingRule

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces: needs root")

PF = "0000:c1:00.0"


@pytest.fixture
def made() -> Iterator[list[Pod]]:
    with pods("m", "n") as both:
        yield both


@pytest.fixture
def pod(made: list[Pod]) -> Pod:
    return made[0]


@pytest.fixture
def make_port() -> Iterator[Callable[..., str]]:
    with veths("rmx") as make:
        yield make


@pytest.fixture
def port(make_port: Callable[..., str]) -> str:
    name = make_port(1)
    run("ip", "link", "set", name, "up")
    return name


def wanted(port: str, number: int = 1, name: str = "net1", **settings: Any) -> SubInterfaceRequest:
    found = macvlan.port(port, PF)
    sub = SubInterface(
        f"share-{number}", found.name, found.mac, stable_mac(f"share-{number}"), parent=found.parent
    )
    return SubInterfaceRequest(PF, sub, name, NetdevSettings(**settings))


def details(pod: Pod, name: str = "net1") -> dict[str, Any]:
    (link,) = pod.json("-details", "link", "show", "dev", name)
    return link


def gone(request: SubInterfaceRequest, pod: Pod, attached: AttachedNetdev | None = None) -> list[str]:
    return remove_all([replace(request, attached=attached)], pod.path)


def test_a_pod_gets_an_interface_of_its_own_and_the_port_stays(pod: Pod, port: str) -> None:
    before = host_links()
    (attached,) = attach_all([wanted(port)], pod.path)
    link = details(pod)
    assert link["linkinfo"]["info_kind"] == "macvlan"
    assert link["linkinfo"]["info_data"]["mode"] == "bridge"
    assert (link["address"], link["mtu"], "UP" in link["flags"]) == (stable_mac("share-1"), 4000, True)
    assert attached == AttachedNetdev(PF, "net1", link["ifindex"], link["address"], 4000, "share-1")
    assert host_links().keys() == before.keys()
    assert host_links()[port]["address"] == before[port]["address"]


def udp(pod: Pod, family: socket.AddressFamily) -> socket.socket:
    """A socket that belongs to the pod's namespace."""
    with open_namespace(pod.path) as fd:
        made = with_namespace(fd, lambda _: socket.socket(family, socket.SOCK_DGRAM))
    made.settimeout(1.0)
    return made


def hears(one: Pod, other: Pod, address: str) -> str | None:
    """Where a datagram from ``one`` to the ``address`` of ``other`` comes from; None when it does not come."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with closing(udp(one, family)) as sender, closing(udp(other, family)) as receiver:
        receiver.bind((address, 5005))
        for _ in range(5):  # the first may be lost while neighbours are looked for
            sender.sendto(b"hello", (address, 5005))
            try:
                return str(receiver.recvfrom(16)[1][0])
            except TimeoutError:
                continue
        return None


def test_pods_that_share_a_port_reach_each_other_by_addresses_of_their_own(
    made: list[Pod], port: str
) -> None:
    for number, one in enumerate(made, 1):
        addresses = (f"10.66.0.{number}/24", f"fd66::{number}/64")
        attach_all([wanted(port, number, addresses=addresses)], one.path)
    assert hears(made[0], made[1], "10.66.0.2") == "10.66.0.1"
    assert hears(made[1], made[0], "fd66::1") == "fd66::2"


def test_private_sub_interfaces_do_not_reach_each_other(made: list[Pod], port: str) -> None:
    for number, one in enumerate(made, 1):
        request = wanted(port, number, addresses=(f"10.66.0.{number}/24",))
        attach_all([replace(request, sub=replace(request.sub, mode="private"))], one.path)
    assert details(made[0])["linkinfo"]["info_data"]["mode"] == "private"
    assert hears(made[0], made[1], "10.66.0.2") is None


def test_what_is_asked_for_is_set_up(pod: Pod, port: str) -> None:
    run("ip", "-netns", pod.name, "link", "set", "lo", "up")
    request = wanted(
        port, name="rail0", mtu=1400, addresses=("10.66.0.1/24",), routes=(Route("10.67.0.0/16", "10.66.0.9"),),
        rules=(RoutingRule(100, 1000, source="10.66.0.0/24"),), sysctls={"ipv4/arp_ignore": "1"},
    )  # fmt: skip
    attach_all([request], pod.path)
    assert details(pod, "rail0")["mtu"] == 1400
    assert "10.67.0.0/16" in [route["dst"] for route in pod.json("route", "show", "dev", "rail0")]
    assert pod.sysctl("ipv4/conf/rail0/arp_ignore") == "1"
    assert 1000 in [rule["priority"] for rule in pod.json("rule", "show")]
    assert gone(request, pod) == []
    assert "rail0" not in pod.links()
    assert 1000 not in [rule["priority"] for rule in pod.json("rule", "show")]


def test_attaching_twice_changes_nothing(pod: Pod, port: str) -> None:
    (first,) = attach_all([wanted(port)], pod.path)
    pod.ip("link", "set", "net1", "down")
    pod.ip("link", "set", "net1", "name", "renamed0")
    (second,) = attach_all([wanted(port)], pod.path)
    assert (second.name, second.ifindex) == ("renamed0", first.ifindex)
    assert set(pod.links()) == {"lo", "renamed0"}


def test_several_shares_of_a_port_in_one_pod_end_one_by_one(pod: Pod, port: str) -> None:
    requests = [wanted(port, 1, "net1"), wanted(port, 2, "net2")]
    attached = attach_all(requests, pod.path)
    assert gone(requests[0], pod, attached[0]) == []
    assert set(pod.links()) == {"lo", "net2"}
    assert gone(requests[1], pod) == []
    assert set(pod.links()) == {"lo"}


def test_it_ends_whatever_the_pod_has_made_of_it(pod: Pod, port: str) -> None:
    request = wanted(port)
    (attached,) = attach_all([request], pod.path)
    pod.ip("link", "set", "net1", "down")
    pod.ip("link", "set", "net1", "name", "other0", "address", "02:00:00:00:77:77", "mtu", "1300")
    assert gone(request, pod, attached) == []
    assert set(pod.links()) == {"lo"}


def test_an_interface_of_the_pods_own_is_spared(pod: Pod, port: str) -> None:
    """It has the name and the index that were ours, and its other end has the port's index: those are counted from 1 in
    each namespace."""
    request = wanted(port)
    (attached,) = attach_all([request], pod.path)
    pod.ip("link", "delete", "net1")
    below = str(host_links()[port]["ifindex"])
    pod.ip(
        "link",
        "add",
        "net1",
        "index",
        str(attached.ifindex),
        "type",
        "veth",
        "peer",
        "name",
        "other1",
        "index",
        below,
    )
    assert gone(request, pod, attached) == []
    assert set(pod.links()) == {"lo", "net1", "other1"}


def test_a_sub_interface_of_the_pods_own_is_spared(pod: Pod, port: str) -> None:
    request = wanted(port)
    (attached,) = attach_all([request], pod.path)
    pod.ip("link", "delete", "net1")
    pod.ip("link", "add", "other1", "type", "veth", "peer", "name", "other2")
    pod.ip("link", "add", "net1", "link", "other1", "index", str(attached.ifindex), "type", "macvlan")
    assert gone(request, pod, attached) == []
    assert "net1" in pod.links()


def test_with_the_namespace_everything_is_gone(made: list[Pod], port: str) -> None:
    request = wanted(port)
    attach_all([request], made[0].path)
    attach_all([wanted(port, 2)], made[1].path)
    before = host_links().keys()
    made[0].end()
    assert gone(request, made[0]) == []
    assert host_links().keys() == before
    assert "net1" in made[1].links(), "the other pod's stays"
    # and nothing stands on the port any more, once the kernel has cleaned up
    made[1].end()
    deadline = time.monotonic() + 10
    while (other := _can_be_enslaved(port)) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert other is None


def _can_be_enslaved(port: str) -> str | None:
    """The kernel's refusal to make the port a bridge's while sub-interfaces stand on it; None when none do."""
    run("ip", "link", "add", "rmxbr", "type", "bridge")
    try:
        done = subprocess.run(["ip", "link", "set", port, "master", "rmxbr"], capture_output=True, text=True)
        return done.stderr if done.returncode else None
    finally:
        run("ip", "link", "delete", "rmxbr")


def test_a_name_that_the_pod_has_is_told_and_nothing_is_left(pod: Pod, port: str) -> None:
    pod.ip("link", "add", "net2", "type", "veth", "peer", "name", "peer2")
    with pytest.raises(AttachError, match=r"the pod has another interface of that name"):
        attach_all([wanted(port, 1, "net1"), wanted(port, 2, "net2")], pod.path)
    assert set(pod.links()) == {"lo", "net2", "peer2"}


def test_what_fails_half_way_leaves_neither_share_nor_vf(
    pod: Pod, port: str, make_port: Callable[..., str]
) -> None:
    vf = snapshot(make_port(2), "0000:c1:00.2")
    wrong = wanted(port, sysctls={"ipv4/no_such_setting": "1"})
    with pytest.raises(AttachError, match="no_such_setting"):
        attach_all([MoveRequest(vf, "net2"), wrong], pod.path)
    assert set(pod.links()) == {"lo"}
    assert vf.name in host_links()


def test_more_than_the_ports_mtu_is_refused_in_words(pod: Pod, port: str) -> None:
    with pytest.raises(AttachError, match=f"mtu 9000 is above the 4000 of {port}"):
        attach_all([wanted(port, mtu=9000)], pod.path)
    assert set(pod.links()) == {"lo"}


def test_a_port_of_a_bridge_is_refused_in_words(pod: Pod, port: str) -> None:
    run("ip", "link", "add", "rmxbr", "type", "bridge")
    try:
        run("ip", "link", "set", port, "master", "rmxbr")
        with pytest.raises(AttachError, match=f"{port} is a port of a bond or bridge"):
            attach_all([wanted(port)], pod.path)
    finally:
        run("ip", "link", "delete", "rmxbr")
    assert set(pod.links()) == {"lo"}


def test_a_port_that_is_not_there_is_told(pod: Pod, port: str) -> None:
    request = wanted(port)
    run("ip", "link", "delete", port)
    with pytest.raises(AttachError, match=f"{port} is not on the host"):
        attach_all([request], pod.path)
    with pytest.raises(AttachError, match=f"netdev {port} of {PF} is not on the host"):
        macvlan.port(port, PF)


def test_a_port_that_was_renamed_is_found(pod: Pod, port: str) -> None:
    request = wanted(port)
    run("ip", "link", "set", port, "down")
    run("ip", "link", "set", port, "name", "rmxother")
    attach_all([request], pod.path)
    assert "net1" in pod.links()
    run("ip", "link", "set", "rmxother", "name", port)
    assert gone(request, pod) == []


def test_what_the_pod_sees_is_looked_at_share_by_share(pod: Pod, port: str) -> None:
    requests = [wanted(port, n, f"net{n}", addresses=(f"10.66.0.{n}/24",)) for n in (1, 2)]
    attach_all(requests, pod.path)
    seen = look([Wanted(PF, one.name, share=one.sub.share) for one in requests], pod.path)
    assert [(one.share, one.interface, one.mac, one.addresses) for one in seen] == [
        (one.sub.share, one.name, one.sub.mac, (f"10.66.0.{n}/24",)) for n, one in enumerate(requests, 1)
    ]


def test_eight_shares_are_made_within_the_hooks_time(
    pod: Pod, port: str, figures: Callable[[object], None]
) -> None:
    """As for VFs: 10 ms for one, 40 ms for eight. The fastest counts: the kernel's lock is the whole machine's."""
    for count, most in ((1, 0.010), (8, 0.040)):
        requests = [wanted(port, n, f"net{n}", addresses=(f"10.66.0.{n}/24",)) for n in range(1, count + 1)]
        taken = []
        for _ in range(9):
            began = time.perf_counter()
            attach_all(requests, pod.path)
            taken.append(time.perf_counter() - began)
            assert remove_all(requests, pod.path) == []
        figures(
            f"{count} share(s): {statistics.median(taken) * 1000:.1f} ms, most {max(taken) * 1000:.1f} ms"
        )
        assert min(taken) < most
