"""A cable that is pulled is seen at once: the kernel's own words about a real link, in a network namespace."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue

import pytest
from pyroute2 import netns

from railmate.health.damping import Damping
from railmate.health.links import LinkWatch
from railmate.health.monitor import HealthMonitor
from unit.health.health_tree import Tree

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces: needs root")

PATIENCE = 20.0
#: Seconds from the carrier's loss to the taint. The bound is for a busy machine; it takes some milliseconds, and up to
#: 0.2 s when another look has just been.
AT_ONCE = 1.5


class Node:
    """A namespace with a link whose other end stands for the switch."""

    def __init__(self) -> None:
        self.name = f"railmate-{uuid.uuid4().hex[:8]}"
        self._ip("netns", "add", self.name)
        for command in (
            "link add rail0 type veth peer name switch0",
            "link set rail0 up",
            "link set switch0 up",
        ):
            self._ip("-n", self.name, *command.split())

    def cable(self, *, plugged: bool) -> None:
        self._ip("-n", self.name, "link", "set", "switch0", "up" if plugged else "down")

    def carrier(self) -> bool:
        (link,) = json.loads(self._ip("-n", self.name, "-json", "link", "show", "rail0"))
        return "LOWER_UP" in link["flags"]

    def rename(self) -> None:
        self._ip("-n", self.name, "link", "set", "switch0", "alias", uuid.uuid4().hex)

    def end(self) -> None:
        self._ip("netns", "delete", self.name)

    @staticmethod
    def _ip(*words: str) -> str:
        return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    try:
        yield node
    finally:
        node.end()


class Watching:
    """A LinkWatch within the node."""

    def __init__(self, node: Node, changed: Callable[[], None]) -> None:
        self.watch = LinkWatch(changed)
        self._entered = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(node.name,), daemon=True)

    def __enter__(self) -> None:
        self._thread.start()
        assert self._entered.wait(PATIENCE)

    def __exit__(self, *error: object) -> None:
        self.watch.stop()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def _run(self, name: str) -> None:
        netns.setns(name)  # of this thread only
        self._entered.set()
        self.watch.run()


def drained(heard: Queue[float], seconds: float = 0.5) -> int:
    """How many words came until it was quiet."""
    count = 0
    with suppress(Empty):
        while True:
            heard.get(timeout=seconds)
            count += 1
    return count


def test_each_fall_and_each_rise_is_heard(node: Node) -> None:
    heard: Queue[float] = Queue()
    with Watching(node, lambda: heard.put(time.monotonic())):
        drained(heard)
        for plugged in (False, True, False, True):
            node.cable(plugged=plugged)
            assert node.carrier() is plugged
            heard.get(timeout=PATIENCE)
            drained(heard)


def test_changes_that_do_not_touch_the_carrier_are_not_heard(node: Node) -> None:
    heard: Queue[float] = Queue()
    with Watching(node, lambda: heard.put(time.monotonic())):
        node.cable(plugged=False)
        node.cable(plugged=True)
        heard.get(timeout=PATIENCE)
        drained(heard)
        node.rename()  # the kernel speaks of the link, and nothing of ours has changed
        assert drained(heard) == 0


def test_cable_pulled_is_a_taint_at_once(
    node: Node, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """With a look once an hour; sysfs is a tree, and shows what the kernel has just said."""
    tree = Tree(tmp_path / "machine")
    told: Queue[tuple[float, dict[str, str]]] = Queue()
    monitor = HealthMonitor(
        tree.sys, tree.offer, tree.inventory, pcie_links=True, period=3600.0, damping=Damping(settle=0),
        on_change=lambda taints: told.put((time.monotonic(), dict(taints))),
    )  # fmt: skip
    monitor.look()
    threads = [threading.Thread(target=one, daemon=True) for one in (monitor.run, monitor.deliver)]
    for thread in threads:
        thread.start()
    took = []
    try:
        with Watching(node, monitor.recheck):
            for plugged in (False, True, False, True):
                tree.set_carrier(tree.pf, plugged)
                began = time.monotonic()
                node.cable(plugged=plugged)
                at, taints = told.get(timeout=PATIENCE)
                took.append(at - began)
                assert (tree.pair.name in taints) is not plugged
    finally:
        monitor.stop()
        for thread in threads:
            thread.join(PATIENCE)
    record_property("milliseconds from carrier to taint", [round(one * 1000) for one in took])
    assert max(took) < AT_ONCE
