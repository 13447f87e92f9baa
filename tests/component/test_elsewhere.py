"""Netdevs in namespaces that nobody knows of: found through their mounts and through processes, and brought home."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from component.netdev_lab import Pod, host_links, pods, run
from railmate.attach.elsewhere import Elsewhere
from railmate.attach.model import NetdevSnapshot, ReturnRequest, ReturnState
from railmate.claims.ledger import Ledger
from railmate.claims.records import Attachment, ClaimRef, Entry, PreparedDevice, PreparedNic
from railmate.claims.strays import Strays
from railmate.claims.surroundings import Surroundings

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces: needs root")

ADDRESS = "0000:c1:00.1"


@pytest.fixture
def pod() -> Iterator[Pod]:
    with pods("e1", "e2") as (made, _):
        yield made


@pytest.fixture
def unmounted() -> Iterator[int]:
    """A process whose namespace no file names, as one that a container has made for itself."""
    process = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo; exec sleep 60"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()  # it is in its namespace
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def strays(tmp_path: Path) -> Strays:
    return Strays(Ledger(tmp_path), "boot", Surroundings(elsewhere=Elsewhere(Path("/proc"))))


def move(vf: NetdevSnapshot, namespace: str | int) -> None:
    run("ip", "link", "set", vf.name, "netns", str(namespace), "name", "mine")


def is_home(vf: NetdevSnapshot) -> bool:
    link = host_links().get(vf.name)
    return link is not None and (link["address"], link["mtu"]) == (vf.mac, vf.mtu)


def test_a_mounted_namespace_gives_the_netdev_back(vf: NetdevSnapshot, pod: Pod, tmp_path: Path) -> None:
    move(vf, pod.name)
    (found,) = Elsewhere(tmp_path).fetch_netdevs([ReturnRequest(vf)])
    assert (found.state, found.name, found.problems) == (ReturnState.RETURNED, vf.name, ())
    assert is_home(vf)


def test_a_namespace_of_processes_alone_gives_it_back(vf: NetdevSnapshot, unmounted: int) -> None:
    move(vf, unmounted)
    (found,) = Elsewhere(Path("/proc"), ()).fetch_netdevs([ReturnRequest(vf)])
    assert found.state is ReturnState.RETURNED
    assert is_home(vf)


def test_what_is_on_the_host_is_not_found_elsewhere(vf: NetdevSnapshot, pod: Pod) -> None:
    assert Elsewhere(Path("/proc")).fetch_netdevs([ReturnRequest(vf)]) == []


def test_the_drivers_own_namespace_is_none_of_them_and_each_is_there_once(pod: Pod, unmounted: int) -> None:
    paths = Elsewhere(Path("/proc")).namespaces()
    numbers = [path.stat().st_ino for path in paths]
    assert len(numbers) == len(set(numbers))
    assert Path("/proc/self/ns/net").stat().st_ino not in numbers
    assert pod.path.stat().st_ino in numbers
    assert Path(f"/proc/{unmounted}/ns/net").stat().st_ino in numbers


def test_a_stray_comes_home_from_a_namespace_that_no_claim_knows(
    vf: NetdevSnapshot, unmounted: int, strays: Strays, tmp_path: Path
) -> None:
    move(vf, unmounted)
    ledger = Ledger(tmp_path)
    ledger.put_stray(vf)
    assert strays.fetch() == 0, "the host alone is looked at between the rounds"
    assert strays.fetch_from_elsewhere() == (1, 0)
    assert is_home(vf)
    assert ledger.strays() == []


def test_a_netdev_that_a_claim_has_again_stays_in_its_pod(
    vf: NetdevSnapshot, pod: Pod, strays: Strays, tmp_path: Path
) -> None:
    move(vf, pod.name)
    ledger = Ledger(tmp_path)
    ledger.put_stray(vf)
    device = PreparedDevice("main", "node1", "vf", nics=(PreparedNic(ADDRESS, "mine", replace(vf)),))
    ledger.put(Entry(ClaimRef("1-2-3", "team", "c"), ("pod",), (device,), "boot"))
    assert strays.fetch_from_elsewhere() == (0, 0)
    assert "mine" in pod.links()


def test_a_stray_that_a_pod_on_the_host_network_has_again_stays_as_that_has_set_it_up(
    vf: NetdevSnapshot, strays: Strays, tmp_path: Path
) -> None:
    """It is home but cannot be put right, its name is taken: the next pod on it must not lose its link every second."""
    run("ip", "link", "set", vf.name, "name", "elhome")
    run("ip", "link", "add", vf.name, "type", "bridge")
    try:
        ledger = Ledger(tmp_path)
        ledger.put_stray(vf)
        assert strays.fetch() == 0
        (called,) = [name for name, link in host_links().items() if link["address"] == vf.mac]
        device = PreparedDevice("main", "node1", "vf", nics=(PreparedNic(ADDRESS, "net1", vf),))
        at = Attachment("s", "pod", "team/p", None, True)
        ledger.put(Entry(ClaimRef("1-2-3", "team", "c"), ("pod",), (device,), "boot", None, at))
        run("ip", "link", "set", called, "mtu", "3000", "up")
        strays.fetch()
        link = host_links()[called]
        assert (link["mtu"], "UP" in link["flags"]) == (3000, True)
        ledger.drop("1-2-3")
        run("ip", "link", "delete", vf.name)
        assert strays.fetch() == 1
        assert is_home(vf)
    finally:
        subprocess.run(["ip", "link", "delete", vf.name], capture_output=True, check=False)
