"""The agent of a simulated GPU node, with real links, in network and mount namespaces of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces: needs root")

AGENT = Path(__file__).resolve().parents[2] / "hack/harness/simnode_agent.sh"
FABRIC = "fabric"
LINKS = {"enp1s0": "02:00:00:00:00:01", "enp1s0v0": "02:00:00:00:00:02", "enp2s0v0": "02:00:00:00:00:03"}


class Node:
    """Namespaces that stand for a node: network, and mounts with a /run of its own."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.holder = subprocess.Popen(
            [
                "unshare",
                "--net",
                "--mount",
                "sh",
                "-c",
                "mount -t tmpfs tmpfs /run && echo ready && exec cat",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline() == "ready\n"
        self.agent: subprocess.Popen[bytes] | None = None

    def command(self, *words: str | Path) -> list[str]:
        return [
            "nsenter",
            f"--target={self.holder.pid}",
            "--net",
            "--mount",
            "--",
            *(str(word) for word in words),
        ]

    def run(self, *words: str | Path) -> str:
        done = subprocess.run(self.command(*words), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def links(self, *options: str) -> dict[str, dict[str, Any]]:
        return {link["ifname"]: link for link in json.loads(self.run("ip", *options, "-json", "link"))}

    def once(self) -> None:
        self.run("bash", AGENT, self.state, FABRIC, "once")

    def watch(self) -> None:
        self.agent = subprocess.Popen(self.command("bash", AGENT, self.state, FABRIC, "watch"))

    def in_tree(self, name: str) -> bool:
        """Whether the tree shows the netdev; the agent moves it in and out of two places, one after the other."""
        places = [self.state / "sys/class/net" / name, self.state / "sys/devices" / name / "net" / name]
        eventually(lambda: len({place.exists() for place in places}) == 1, f"both places of {name} agree")
        return places[0].exists()

    def end(self) -> None:
        if self.agent is not None:
            self.agent.terminate()
            self.agent.wait(10)
        self.holder.kill()
        self.holder.wait(10)


def eventually(condition: Callable[[], bool], what: str) -> None:
    """The agent acts on what the kernel tells it and tells nobody, so its effect is looked for."""
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    lines = []
    (tmp_path / "sys/class/net").mkdir(parents=True)
    for name, mac in LINKS.items():
        (tmp_path / f"sys/devices/{name}/net/{name}").mkdir(parents=True)
        (tmp_path / f"sys/class/net/{name}").symlink_to(f"../../devices/{name}/net/{name}")
        lines.append(f"{name}\t{mac}\t9000\tdevices/{name}\n")
    (tmp_path / "links.tsv").write_text("".join(lines))
    made = Node(tmp_path)
    try:
        made.once()
        yield made
    finally:
        made.end()


def test_netdevs_have_name_mac_and_mtu_and_their_peers_meet_on_a_bridge(node: Node) -> None:
    links, peers = node.links(), node.links("-netns", FABRIC)
    for name, mac in LINKS.items():
        assert (links[name]["address"], links[name]["mtu"]) == (mac, 9000)
        assert "UP" in links[name]["flags"]
        assert peers[name]["master"] == "rails"
    assert (node.state / "sys/class/net/enp1s0/ifindex").read_text() == f"{links['enp1s0']['ifindex']}\n"


def test_what_is_there_stays_as_it_is(node: Node) -> None:
    before = {name: link["ifindex"] for name, link in node.links().items()}
    node.once()
    assert {name: link["ifindex"] for name, link in node.links().items()} == before


def test_a_foreign_link_of_the_same_name_is_named_and_left_alone(node: Node) -> None:
    node.run("ip", "link", "delete", "enp1s0")
    node.run("ip", "link", "add", "enp1s0", "type", "bridge")
    done = subprocess.run(
        node.command("bash", AGENT, node.state, FABRIC, "once"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "a link enp1s0 that is not of this machine is in the way" in done.stderr


def test_a_vf_that_died_with_its_pod_comes_back_under_its_own_name(node: Node) -> None:
    node.watch()
    node.run("ip", "netns", "add", "pod")
    node.run("ip", "link", "set", "enp1s0v0", "netns", "pod", "name", "net1")
    eventually(lambda: not node.in_tree("enp1s0v0"), "the VF is gone from the tree")
    eventually(
        lambda: not (node.state / "sys/devices/enp1s0v0/net").exists(), "its directory is gone as well"
    )
    node.run("ip", "netns", "delete", "pod")
    eventually(lambda: "enp1s0v0" in node.links(), "the VF is made again")
    eventually(lambda: node.in_tree("enp1s0v0"), "the VF is in the tree again")
    assert node.links()["enp1s0v0"]["address"] == LINKS["enp1s0v0"]
    eventually(
        lambda: node.links("-netns", FABRIC)["enp1s0v0"].get("master") == "rails", "its peer is a port"
    )


def test_a_vf_that_comes_home_alive_is_the_same_link(node: Node) -> None:
    node.watch()
    index = node.links()["enp2s0v0"]["ifindex"]
    node.run("ip", "netns", "add", "pod")
    node.run("ip", "link", "set", "enp2s0v0", "netns", "pod", "name", "net1")
    eventually(lambda: not node.in_tree("enp2s0v0"), "the VF is gone from the tree")
    node.run("ip", "-netns", "pod", "link", "set", "net1", "netns", str(node.holder.pid), "name", "enp2s0v0")
    eventually(lambda: node.in_tree("enp2s0v0"), "the VF is in the tree again")
    assert node.links()["enp2s0v0"]["ifindex"] == index


def test_pods_reach_each_other_over_their_vfs(node: Node) -> None:
    for number, (pod, name) in enumerate((("one", "enp1s0v0"), ("two", "enp2s0v0")), 1):
        node.run("ip", "netns", "add", pod)
        node.run("ip", "link", "set", name, "netns", pod)
        node.run("ip", "-netns", pod, "address", "add", f"192.0.2.{number}/24", "dev", name)
        node.run("ip", "-netns", pod, "link", "set", name, "up")
    server = subprocess.Popen(
        node.command("ip", "netns", "exec", "two", "python3", "-c", _SERVER),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"
        assert node.run("ip", "netns", "exec", "one", "python3", "-c", _CLIENT) == "hello from two\n"
    finally:
        server.kill()
        server.wait(10)


_SERVER = """
import socket
listener = socket.create_server(("192.0.2.2", 4000))
print("listening", flush=True)
listener.accept()[0].sendall(b"hello from two")
"""
_CLIENT = """
import socket
print(socket.create_connection(("192.0.2.2", 4000), timeout=10).recv(100).decode())
"""
