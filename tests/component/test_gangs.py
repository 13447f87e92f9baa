"""The gang examples with the real controllers of Kueue, JobSet, LeaderWorkerSet and MPIJob, and the real scheduler.

No kubelet is here, so no container starts; tests/e2e/test_gangs.py runs the plain Job for real.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from component.conftest import DRIVER, Cluster, wait_until
from harness.batch import BatchController, install_crds
from harness.controlplane import ControlPlane
from harness.shell import HarnessError
from railmate.cli.main import main
from railmate.publish.model import Offer
from railmate.publish.slices import resource_slices

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GANGS = ["gang-job", "gang-jobset", "gang-kueue", "gang-lws", "gang-mpijob"]
NODES = ("gang-a", "gang-b")
QUEUE = EXAMPLES / "gang-kueue" / "queue.yaml"


@pytest.fixture(scope="module")
def gangs(
    tmp_path_factory: pytest.TempPathFactory,
    start_cluster: Callable[..., Cluster],
    offers: Callable[..., Offer],
) -> Iterator[Cluster]:
    """Two nodes of eight pairs each, and the projects' definitions."""
    with ControlPlane(tmp_path_factory.mktemp("gangs")) as plane:
        cluster = start_cluster(plane)
        for name in NODES:
            for item in resource_slices(offers(), DRIVER, cluster.node(name)):
                plane.request("POST", "/apis/resource.k8s.io/v1/resourceslices", item)
        install_crds(plane)
        yield cluster


@pytest.fixture
def namespace(gangs: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own; afterwards all pairs are free again."""
    name = f"t{abs(hash(request.node.name)) % 10**8}"
    gangs.plane.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    wait_until(
        lambda: gangs.plane.request("GET", f"/api/v1/namespaces/{name}/serviceaccounts")["items"] != [],
        "the namespace's ServiceAccount",
    )
    yield name
    gangs.plane.kubectl("delete", "namespace", name, "--wait=false")
    wait_until(lambda: gone(gangs, name), f"namespace {name} is empty")


def gone(gangs: Cluster, namespace: str) -> bool:
    """Ends pods as a kubelet would."""
    for pod in pods(gangs, namespace):
        path = f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}?gracePeriodSeconds=0"
        try:
            gangs.plane.request("DELETE", path)
        except HarnessError:
            continue  # it went by itself
    return not pods(gangs, namespace) and not claims(gangs, namespace)


def pods(gangs: Cluster, namespace: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = gangs.plane.request("GET", f"/api/v1/namespaces/{namespace}/pods")["items"]
    return items


def claims(gangs: Cluster, namespace: str) -> list[dict[str, Any]]:
    path = f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims"
    items: list[dict[str, Any]] = gangs.plane.request("GET", path)["items"]
    return items


def apply(gangs: Cluster, namespace: str, *files: Path) -> None:
    gangs.plane.kubectl("-n", namespace, "apply", *(word for file in files for word in ("-f", str(file))))


def manifest(name: str) -> Path:
    return EXAMPLES / name / "manifest.yaml"


def assert_two_whole_nodes(gangs: Cluster, namespace: str) -> list[dict[str, Any]]:
    """Two pods get a node each, and all eight pairs of it. The pods, by name."""
    wait_until(lambda: len(placed(gangs, namespace)) == 2, "two pods have a node")
    found = placed(gangs, namespace)
    assert {pod["spec"]["nodeName"] for pod in found} == set(NODES)
    results = [claim["status"]["allocation"]["devices"]["results"] for claim in claims(gangs, namespace)]
    assert sorted(len(one) for one in results) == [8, 8]
    assert {one[0]["pool"] for one in results} == set(NODES)
    assert all(device["device"].startswith("pair-") for one in results for device in one)
    return found


def placed(gangs: Cluster, namespace: str) -> list[dict[str, Any]]:
    return sorted(
        (pod for pod in pods(gangs, namespace) if pod["spec"].get("nodeName")),
        key=lambda pod: str(pod["metadata"]["name"]),
    )


@pytest.mark.parametrize("name", GANGS)
def test_the_api_server_takes_the_manifest_without_a_warning(
    gangs: Cluster, namespace: str, name: str
) -> None:
    said = gangs.plane.kubectl(
        "-n", namespace, "create", "--dry-run=server", "--validate=strict", "--warnings-as-errors",
        "-f", str(manifest(name)),
    )  # fmt: skip
    assert said.count("created (server dry run)") == len(list(yaml.safe_load_all(manifest(name).read_text())))


@pytest.mark.parametrize("kind", ["pod", "job", "jobset", "kueue"])
def test_the_api_server_takes_what_railmate_claim_writes_around_a_claim(
    gangs: Cluster, namespace: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            ["claim", "--pairs", "8", "--for", kind, "--name", "train", "--image", "pause", "--queue", "gpus"]
        )
        == 0
    )
    written = capsys.readouterr().out
    said = gangs.plane.kubectl(
        "-n", namespace, "create", "--dry-run=server", "--validate=strict", "--warnings-as-errors",
        "-f", "-", input=written,
    )  # fmt: skip
    assert said.count("created (server dry run)") == len(list(yaml.safe_load_all(written)))


def test_a_field_that_is_none_is_refused(gangs: Cluster, namespace: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(manifest("gang-jobset").read_text().replace("replicatedJobs:", "replicatedJobz:"))
    with pytest.raises(HarnessError, match="replicatedJobz"):
        gangs.plane.kubectl(
            "-n", namespace, "create", "--dry-run=server", "--validate=strict", "-f", str(wrong)
        )


def test_the_job_takes_two_nodes_whole(gangs: Cluster, namespace: str) -> None:
    apply(gangs, namespace, manifest("gang-job"))
    for index, pod in enumerate(assert_two_whole_nodes(gangs, namespace)):
        assert pod["spec"]["hostname"] == f"gang-job-{index}"
        assert pod["spec"]["subdomain"] == "gang-job"


@pytest.mark.long  # its program is built for this test alone, from Go modules of its own
def test_the_jobset_takes_two_nodes_whole(gangs: Cluster, namespace: str, tmp_path: Path) -> None:
    with BatchController(gangs.plane, tmp_path, "jobset"):
        apply(gangs, namespace, manifest("gang-jobset"))
        found = assert_two_whole_nodes(gangs, namespace)
        wanted = peers(found[0])
        assert [f"{pod['spec']['hostname']}.{pod['spec']['subdomain']}" for pod in found] == wanted
        service = gangs.plane.request("GET", f"/api/v1/namespaces/{namespace}/services/gang-jobset")
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"]


@pytest.mark.long  # its program is built for this test alone, from Go modules of its own
def test_the_leaderworkerset_takes_two_nodes_whole(gangs: Cluster, namespace: str, tmp_path: Path) -> None:
    with BatchController(gangs.plane, tmp_path, "lws"):
        apply(gangs, namespace, manifest("gang-lws"))
        found = assert_two_whole_nodes(gangs, namespace)
        leader, worker = (f"{pod['spec']['hostname']}.{pod['spec']['subdomain']}" for pod in found)
        assert peers(found[0]) == ["$LWS_LEADER_ADDRESS", worker]
        environment = {one["name"]: one.get("value") for one in found[1]["spec"]["containers"][0]["env"]}
        assert environment["LWS_LEADER_ADDRESS"] == f"{leader}.{namespace}"
        gangs.plane.kubectl("-n", namespace, "delete", "leaderworkerset", "gang-lws")


@pytest.mark.long  # its program is built for this test alone, from Go modules of its own
def test_the_mpijob_takes_two_nodes_whole_and_lists_them(
    gangs: Cluster, namespace: str, tmp_path: Path
) -> None:
    with BatchController(gangs.plane, tmp_path, "mpi-operator"):
        apply(gangs, namespace, manifest("gang-mpijob"))
        assert_two_whole_nodes(gangs, namespace)
        path = f"/api/v1/namespaces/{namespace}/configmaps/gang-mpijob-config"
        hosts = gangs.plane.request("GET", path)["data"]["hostfile"].splitlines()
        assert [line.split(".")[0] for line in hosts] == ["gang-mpijob-worker-0", "gang-mpijob-worker-1"]
        assert all(line.endswith("slots=8") for line in hosts)
        gangs.plane.kubectl("-n", namespace, "delete", "mpijob", "gang-mpijob")


@pytest.mark.long  # its program is built for this test alone, from Go modules of its own
def test_kueue_starts_a_job_whole_and_lets_the_next_wait_for_its_pairs(
    gangs: Cluster, namespace: str, tmp_path: Path
) -> None:
    config = yaml.safe_load((EXAMPLES / "gang-kueue" / "kueue.yaml").read_text())
    with BatchController(gangs.plane, tmp_path, "kueue", config):
        apply(gangs, namespace, QUEUE, manifest("gang-kueue"))
        assert_two_whole_nodes(gangs, namespace)
        wait_until(lambda: pairs_in_use(gangs) == "16", "Kueue counts all pairs of the job")

        second = tmp_path / "second.yaml"
        second.write_text(manifest("gang-kueue").read_text().replace("gang-kueue", "second"))
        apply(gangs, namespace, second)
        path = f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{namespace}/workloads"
        wait_until(lambda: len(workloads(gangs, path)) == 2, "both jobs are in the queue")
        wait_until(
            lambda: "insufficient" in workloads(gangs, path)["second"].get("QuotaReserved", ""),
            "the second job is told that there is no quota",
        )
        job = f"/apis/batch/v1/namespaces/{namespace}/jobs/second"
        assert gangs.plane.request("GET", job)["spec"]["suspend"]
        assert len(pods(gangs, namespace)) == 2, "nothing of it is in the scheduler's way"

        gangs.plane.kubectl("-n", namespace, "delete", "job", "gang-kueue", "--wait=false")
        began = time.monotonic()
        for pod in placed(gangs, namespace):
            gangs.plane.request(
                "DELETE",
                f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}?gracePeriodSeconds=0",
            )
        wait_until(lambda: not gangs.plane.request("GET", job)["spec"]["suspend"], "the second job starts")
        assert time.monotonic() - began < 30
        assert_two_whole_nodes(gangs, namespace)
        gangs.plane.kubectl("-n", namespace, "delete", "-f", str(QUEUE), "--wait=false")
        gangs.plane.kubectl("-n", namespace, "delete", "job", "second", "--wait=false")
        wait_until(lambda: gone(gangs, namespace), "its pods are gone")
        wait_until(lambda: not workloads(gangs, path), "Kueue has let go of both")


def pairs_in_use(gangs: Cluster) -> str:
    status = gangs.plane.request("GET", "/apis/kueue.x-k8s.io/v1beta2/clusterqueues/training").get(
        "status", {}
    )
    (flavor,) = status.get("flavorsUsage") or [{"resources": [{"name": "railmate.dev/pairs", "total": "0"}]}]
    (resource,) = flavor["resources"]
    assert resource["name"] == "railmate.dev/pairs"
    return str(resource["total"])


def workloads(gangs: Cluster, path: str) -> dict[str, dict[str, str]]:
    """Job name to its workload's conditions: type to message."""
    return {
        item["metadata"]["ownerReferences"][0]["name"]: {
            one["type"]: one["message"] for one in item.get("status", {}).get("conditions", [])
        }
        for item in gangs.plane.request("GET", path)["items"]
    }


def peers(pod: dict[str, Any]) -> list[str]:
    """The names of the gang's pods in the example's command."""
    words: list[str] = (
        pod["spec"]["containers"][0]["command"][-1].partition("/gang/gang ")[2].split(" && ")[0].split()
    )
    return words


def test_all_gangs_find_their_rails_in_one_way() -> None:
    scripts = {
        name: next(
            one for one in yaml.safe_load_all(manifest(name).read_text()) if one["kind"] == "ConfigMap"
        )["data"]
        for name in GANGS
    }
    assert {one["rails"] for one in scripts.values()} == {scripts["gang-job"]["rails"]}
    assert {one["gang"] for name, one in scripts.items() if name != "gang-mpijob"} == {
        scripts["gang-job"]["gang"]
    }
