"""Whether a pod's namespace still has what was put there, asked of the real kernel."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from component.netdev_lab import Pod, pods, run, veths
from railmate.attach.macvlan import stable_mac
from railmate.attach.model import ReturnRequest, SubInterface, SubInterfaceRequest
from railmate.attach.netdev import attach_all, move_in, snapshot
from railmate.attach.presence import Expected, absent

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces: needs root")

FIRST, SECOND = "0000:c1:00.1", "0000:c1:00.2"


@pytest.fixture
def pod() -> Iterator[Pod]:
    with pods("there") as (made,):
        yield made


@pytest.fixture
def make_vf() -> Iterator[Callable[[int], str]]:
    with veths("rp") as make:
        yield make


@pytest.fixture
def both(pod: Pod, make_vf: Callable[[int], str]) -> list[Expected]:
    """Two netdevs in the pod."""
    found = []
    for number, address in enumerate((FIRST, SECOND), 1):
        vf = snapshot(make_vf(number), address)
        found.append(Expected(address, ReturnRequest(vf, move_in(vf, pod.path, name=f"net{number}"))))
    return found


def test_what_is_there_is_there_whatever_a_container_calls_it(pod: Pod, both: list[Expected]) -> None:
    assert absent(both, pod.path) == [False, False]
    pod.ip("link", "set", "net1", "down")
    pod.ip("link", "set", "net1", "name", "renamed", "address", "02:00:00:00:0a:01")
    assert absent(both, pod.path) == [False, False]


def test_a_netdev_that_is_on_the_node_again_is_not_there(pod: Pod, both: list[Expected]) -> None:
    pod.ip("link", "set", "net1", "netns", str(os.getpid()), "name", both[0].netdev.snapshot.name)  # type: ignore[union-attr]
    assert absent(both, pod.path) == [True, False]


def test_a_netdev_that_has_ended_is_not_there(pod: Pod, both: list[Expected]) -> None:
    pod.ip("link", "delete", "net2")
    assert absent(both, pod.path) == [False, True]


def test_a_sub_interface_is_known_by_its_index_and_ends_with_its_port(
    pod: Pod, make_vf: Callable[[int], str]
) -> None:
    port = make_vf(1)
    mac = Path(f"/sys/class/net/{port}/address").read_text().strip()
    sub = SubInterface("share-1", port, mac, stable_mac("share-1"))
    request = SubInterfaceRequest(FIRST, sub, "net1")
    (attached,) = attach_all([request], pod.path)
    expected = [Expected(FIRST, SubInterfaceRequest(FIRST, sub, "net1", attached=attached))]
    pod.ip("link", "set", "net1", "down")
    pod.ip("link", "set", "net1", "name", "renamed", "address", "02:00:00:00:0a:01")
    assert absent(expected, pod.path) == [False]
    run("ip", "link", "delete", port)
    assert absent(expected, pod.path) == [True]


def test_of_a_namespace_that_has_ended_nothing_is_there(pod: Pod, both: list[Expected]) -> None:
    pod.end()
    assert absent(both, pod.path) == [True, True]


def test_a_look_costs_a_container_little(pod: Pod, both: list[Expected]) -> None:
    """The runtime waits for it; at most 10 ms for the whole hook. The fastest of some: the machine may be busy."""
    times = []
    for _ in range(20):
        start = time.perf_counter()
        absent(both, pod.path)
        times.append(time.perf_counter() - start)
    print(f"look: {min(times) * 1000:.2f} ms at best, {sorted(times)[10] * 1000:.2f} ms in the middle")
    assert min(times) < 0.005
