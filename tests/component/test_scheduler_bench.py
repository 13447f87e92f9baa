"""The scheduler bench in small, and the scheduler's ready files in the real scheduler."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness import api
from harness.bench import main
from harness.bench_scheduler import add_parser, measure
from harness.bench_scheduler_forms import BenchMachine, parse_variant
from harness.bench_scheduler_load import PODS, Pods
from harness.bench_scheduler_report import failures, report
from harness.bench_scheduler_site import Site, scheduler_config
from harness.controlplane import ControlPlane
from harness.shell import HarnessError

READY = Path(__file__).resolve().parents[2] / "examples" / "scheduler"
CONFIGS = sorted(
    path.name for path in READY.glob("*.yaml") if "kind: KubeSchedulerConfiguration" in path.read_text()
)
SMALL = ["--nodes", "8", "--rounds", "1", "--pods", "8", "--window", "3", "--alone", "2", "--seconds", "4"]


def bench(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return measure(parser.parse_args(["scheduler", *SMALL, *arguments]))


def test_both_forms_are_given_aligned_pairs_and_strand_none() -> None:
    found = bench("--sizes", "1,8", "--infeasible", "0")
    assert failures(found) == []
    for name in ("pairs", "constraint"):
        for pairs, rounds in found["churn"][name].items():
            (one,) = rounds
            assert (one["alignedShare"], one["strandedShare"]) == (1.0, 0.0)
            assert one["pairs"] >= int(pairs), "allocations were looked at"
            assert one["podsPerSecond"] > 0
            assert len(one["aloneMs"]) == 2
            assert len(one["busyMs"]) == 8 + 3
            # the pod and its claim are made and deleted, the claim is allocated and released, the pod is bound
            assert one["writesPerPod"] > 6
            assert one["writesByResource"]["pods/binding"] == pytest.approx(1, abs=0.3)
        assert found["churn"][name]["8"][0]["nodesPartlyTaken"] == 0
        assert 1000 < found["sites"][name]["storedBytes"] < found["sites"][name]["jsonBytes"] < 50_000
    assert any("times as many pods a second as constraint" in line for line in report(found))


def test_pods_that_fit_nowhere_are_told_so_and_the_others_get_their_pairs() -> None:
    found = bench("--forms", "pairs", "--sizes", "", "--infeasible", "4", "--clusters", "oneShort,full")
    for kind in ("oneShort", "full"):
        one = found["waiting"]["pairs"][kind]
        assert one["infeasiblePlaced"] == 0
        assert one["attempts"]["unschedulable"]["count"] >= 4, "each was tried"
        assert one["attempts"].get("error", {"count": 0})["count"] == 0
        assert one["notPlaced"] == 0
        assert len(one["arrivingMs"]) == len(one["waitingMs"]) == len(one["besideFittingMs"]) == 40


def test_a_bench_without_a_known_form_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["scheduler", "--forms", "pears"]) == 2
    assert "no form 'pears'; there are pairs, node, groups, constraint" in capsys.readouterr().out


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """With a node."""
    with ControlPlane(tmp_path_factory.mktemp("plane")) as started:
        started.add_node("node-a")
        yield started


@pytest.mark.parametrize("name", CONFIGS)
def test_the_scheduler_starts_with_a_ready_file_and_places_a_pod(name: str, plane: ControlPlane) -> None:
    wanted = yaml.safe_load((READY / name).read_text())
    restart_scheduler(plane, READY / name)
    used = running_config(plane)
    assert used["clientConnection"]["qps"] == wanted["clientConnection"]["qps"]
    assert used.get("percentageOfNodesToScore") == wanted.get("percentageOfNodesToScore", 0)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name.removesuffix(".yaml")},
        "spec": {"containers": [{"name": "main", "image": "none"}]},
    }
    plane.request("POST", PODS, pod)
    watch = plane.watch(f"{PODS}?fieldSelector=spec.nodeName%3Dnode-a", 30)
    assert any(event["object"]["metadata"]["name"] == pod["metadata"]["name"] for event in watch)


def test_a_wrong_field_in_a_ready_file_would_be_found(plane: ControlPlane, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((READY / CONFIGS[0]).read_text() + "percentageOfNodes: 10\n")
    with pytest.raises(HarnessError, match="percentageOfNodes"):
        restart_scheduler(plane, wrong)


def restart_scheduler(plane: ControlPlane, file: Path) -> None:
    config = plane.directory / "scheduler.yaml"
    config.write_text(scheduler_config(file, plane.directory / "kube-scheduler.kubeconfig"))
    plane.restart_scheduler([f"--config={config}"])


def running_config(plane: ControlPlane) -> dict[str, Any]:
    """The configuration that the scheduler itself says it runs with."""
    status, data = api.fetch(plane.scheduler_server, plane.token(), "GET", "/configz")
    assert status == 200, data
    found: dict[str, Any] = next(iter(json.loads(data).values()))
    return found


@pytest.mark.parametrize(("words", "nodes"), [("", 3), (f"+{READY / 'packing.yaml'}", 1)])
def test_packing_fills_a_node_before_the_next_is_opened(tmp_path: Path, words: str, nodes: int) -> None:
    """Without the file the same pods spread."""
    with Site(tmp_path, parse_variant(f"pairs+proportional{words}"), BenchMachine(), 3) as site:
        pods = Pods(site)
        for _ in range(6):  # one after the other: each sees where the last one went
            name = pods.create("one", 1)
            assert pods.next_bound(30) == name
        assert len(pods.taken().hardware) == nodes


@pytest.mark.long
def test_eight_pairs_are_placed_at_four_times_the_rate_of_constraints_on_a_thousand_nodes() -> None:
    assert bench_passes(
        "--nodes", "1000", "--sizes", "8", "--infeasible", "0", "--rounds", "3", "--pods", "40"
    )


@pytest.mark.long
def test_a_hundred_pods_that_fit_nowhere_delay_others_by_half_a_second_at_most() -> None:
    assert bench_passes(
        "--nodes",
        "100",
        "--forms",
        "pairs+proportional,node+proportional",
        "--sizes",
        "",
        "--infeasible",
        "100",
    )


@pytest.mark.long
def test_a_whole_node_that_is_nowhere_to_be_had_costs_half_of_eight_pairs_at_most() -> None:
    assert bench_passes(
        "--nodes", "50", "--forms", "node,pairs", "--sizes", "", "--infeasible", "20", "--seconds", "10"
    )


def bench_passes(*arguments: str) -> bool:
    words: Sequence[str] = ("scheduler", *arguments)
    return main(words) == 0
