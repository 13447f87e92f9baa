"""From a cable that is pulled to a pod that is not placed there, and back: monitor, controller, server, scheduler."""

from __future__ import annotations

import threading
from pathlib import Path

from component.conftest import DRIVER, PATIENCE, Cluster, request, wait_until
from railmate.health.damping import Damping
from railmate.health.monitor import HealthMonitor
from railmate.publish.controller import SliceController
from railmate_api.attributes import CLASS_PAIR
from unit.health.health_tree import Tree


def test_broken_pair_gets_no_pod_until_it_is_mended(cluster: Cluster, tmp_path: Path) -> None:
    node, tree = cluster.node("health-loop"), Tree(tmp_path / "machine")
    controller = SliceController(cluster.driver_client(node), DRIVER, node, tree.offer)
    monitor = HealthMonitor(
        tree.sys,
        tree.offer,
        tree.inventory,
        pcie_links=True,
        on_change=controller.set_taints,
        period=0.5,
        damping=Damping(settle=0.0),
    )

    def tainted() -> set[str]:
        devices = [device for item in cluster.slices(node) for device in item["spec"].get("devices", [])]
        return {device["name"] for device in devices if "taints" in device}

    threads = [
        threading.Thread(target=one, daemon=True) for one in (monitor.run, monitor.deliver, controller.run)
    ]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(cluster.slices(node)) == 2, "slices are published")
        tree.set_carrier(tree.pf, False)
        wait_until(lambda: tree.pair.name in tainted(), "the pair is tainted")
        cluster.pod("loop-both", node, cluster.claim("loop-both", request("pairs", CLASS_PAIR, count=2)))
        assert cluster.verdict("loop-both")
        tree.set_carrier(tree.pf, True)
        cluster.scheduled("loop-both")
        assert tainted() == set()
    finally:
        controller.stop()
        monitor.stop()
        for thread in threads[:2]:
            thread.join(PATIENCE)
        cluster.delete_pod("loop-both")
        cluster.delete_claim("loop-both")
