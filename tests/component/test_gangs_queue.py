"""What a queue in front is worth: two gangs of two nodes and a small job, on two nodes of which one is in use."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from component.conftest import Cluster, wait_until
from component.test_claim_forms import run
from component.test_gangs import EXAMPLES, QUEUE, apply, gangs, gone, namespace, placed, pods, workloads
from harness.batch import BatchController
from harness.shell import HarnessError

#: How often it is tried in each way.
ROUNDS = int(os.environ.get("RAILMATE_QUEUE_ROUNDS", "10"))
GANGS = ("one", "two")
RUNNING, SMALL = "running", "small"
__all__ = ["gangs", "namespace"]  # fixtures


def submit(cluster: Cluster, namespace: str, kind: str, nodes: int, pairs: int, *names: str) -> None:
    """Jobs of so many pods, in one go."""
    objects: list[dict[str, Any]] = []
    for name in names:
        words = ("--pairs", str(pairs), "--for", kind, "--nodes", str(nodes), "--queue", "training")
        code, text = run("claim", *words, "--name", name, "-o", "json")
        assert code == 0
        objects += json.loads(text)["items"]
        objects[-1]["spec"]["template"]["spec"]["containers"][0]["resources"].pop("requests")
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    cluster.plane.kubectl("-n", namespace, "apply", "-f", "-", input=text)


def seated(cluster: Cluster, namespace: str) -> Counter[str]:
    """Job to how many of its pods have a node."""
    return Counter(
        pod["metadata"]["labels"]["batch.kubernetes.io/job-name"] for pod in placed(cluster, namespace)
    )


def judged(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", ())
    return bool(pod["spec"].get("nodeName")) or any(one["type"] == "PodScheduled" for one in conditions)


def end(cluster: Cluster, namespace: str, *names: str) -> None:
    for name in names:
        cluster.plane.kubectl("-n", namespace, "delete", "job", name, "--wait=false", "--ignore-not-found")
        for pod in pods(cluster, namespace):
            if pod["metadata"]["labels"].get("batch.kubernetes.io/job-name") == name:
                path = f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}?gracePeriodSeconds=0"
                with contextlib.suppress(HarnessError):  # it went by itself
                    cluster.plane.request("DELETE", path)


def clear(cluster: Cluster, namespace: str) -> None:
    end(cluster, namespace, *GANGS, RUNNING, SMALL)
    wait_until(lambda: gone(cluster, namespace), "all jobs are gone")


def without_queue(cluster: Cluster, namespace: str) -> tuple[int, bool, bool]:
    """GPUs that a gang holds while it cannot start; whether the small job starts; whether the gangs block each other
    once the node that was in use is free."""

    def all_judged(count: int) -> bool:
        found = pods(cluster, namespace)
        return len(found) == count and all(map(judged, found))

    submit(cluster, namespace, "job", 1, 8, RUNNING)
    wait_until(lambda: seated(cluster, namespace)[RUNNING] == 1, "one node is in use")
    submit(cluster, namespace, "job", 2, 8, *GANGS)
    wait_until(lambda: all_judged(5), "all pods of the gangs are placed or refused")
    held = 8 * sum(seated(cluster, namespace)[name] for name in GANGS)
    submit(cluster, namespace, "job", 1, 1, SMALL)
    wait_until(lambda: all_judged(6), "the small job's pod is placed or refused")
    starts = seated(cluster, namespace)[SMALL] == 1
    end(cluster, namespace, RUNNING, SMALL)
    wait_until(lambda: sum(seated(cluster, namespace).values()) == 2, "both nodes are taken")
    blocked = max(seated(cluster, namespace).values()) == 1
    clear(cluster, namespace)
    return held, starts, blocked


def behind_queue(cluster: Cluster, namespace: str) -> tuple[float, float]:
    """Seconds until the small job has its node; and until a gang has both once the others have ended."""
    submit(cluster, namespace, "kueue", 1, 8, RUNNING)
    wait_until(lambda: seated(cluster, namespace)[RUNNING] == 1, "one node is in use")
    submit(cluster, namespace, "kueue", 2, 8, *GANGS)
    path = f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{namespace}/workloads"
    wait_until(
        lambda: all("QuotaReserved" in workloads(cluster, path).get(name, {}) for name in GANGS),
        "both gangs are told to wait",
    )
    began = time.monotonic()
    submit(cluster, namespace, "kueue", 1, 1, SMALL)
    wait_until(lambda: seated(cluster, namespace)[SMALL] == 1, "the small job has a node")
    small = time.monotonic() - began
    assert len(pods(cluster, namespace)) == 2, "the gangs have no pods, and hold nothing"
    began = time.monotonic()
    end(cluster, namespace, RUNNING, SMALL)
    wait_until(lambda: max(seated(cluster, namespace)[name] for name in GANGS) == 2, "one gang is whole")
    gang = time.monotonic() - began
    assert len(pods(cluster, namespace)) == 2, "the other has no pods"
    clear(cluster, namespace)
    wait_until(lambda: not workloads(cluster, path), "Kueue has let go of all")
    return small, gang


@pytest.mark.long  # needs Kueue, which is built for this and one other test
def test_gangs_that_wait_in_a_queue_hold_nothing_and_are_never_half_placed(
    gangs: Cluster, namespace: str, tmp_path: Path
) -> None:
    without = [without_queue(gangs, namespace) for _ in range(ROUNDS)]
    assert all(held == 8 for held, _, _ in without), "a gang that cannot start has taken the free node"
    started, blocked = (sum(one[place] for one in without) for place in (1, 2))
    print(
        f"\nwithout a queue: 8 of 16 GPUs are held by a gang that cannot start, the small job starts in {started} of "
        f"{ROUNDS} rounds, and in {blocked} the gangs block each other when the other node is free"
    )
    config = yaml.safe_load((EXAMPLES / "gang-kueue" / "kueue.yaml").read_text())
    with BatchController(gangs.plane, tmp_path, "kueue", config):
        apply(gangs, namespace, QUEUE)
        small, gang = zip(*(behind_queue(gangs, namespace) for _ in range(ROUNDS)), strict=True)
        gangs.plane.kubectl("-n", namespace, "delete", "-f", str(QUEUE), "--wait=false")
    print(
        f"behind the queue: none is held, the small job has a node after {spread(small)} s in all {ROUNDS} rounds, and "
        f"a gang is whole {spread(gang)} s after the others have ended"
    )


def spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.1f} ({min(seconds):.1f}–{max(seconds):.1f})"
