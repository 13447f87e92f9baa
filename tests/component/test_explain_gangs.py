"""How many pods of a gang fit, against the real scheduler and the scheduler's own allocator."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from component.allocator_cases import Case, cases
from component.conftest import PODS, Cluster, request, wait_until
from component.test_claim_forms import run
from component.test_explain_allocator import Asked, world_and_wish
from harness.api import ApiError
from railmate.explain.cel import Selectors
from railmate.explain.gang import Batch, BatchVerdict, Seat, judge_gang
from railmate.publish.model import Offer
from railmate_api import attributes as names

CASES = 400
JOBS = "/apis/batch/v1/namespaces/default/jobs"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"


# --- the scheduler
def gang(pods: int, pairs: int, nodes: Sequence[str]) -> list[dict[str, Any]]:
    """A Job whose pods go to these nodes only."""
    code, text = run(
        "claim", "--pairs", str(pairs), "--for", "job", "--nodes", str(pods), "--name", "many", "-o", "json"
    )
    assert code == 0
    objects: list[dict[str, Any]] = json.loads(text)["items"]
    spec = objects[-1]["spec"]["template"]["spec"]
    spec["containers"][0]["resources"].pop("requests")
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": list(nodes)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [here]}]}
    spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    return objects


def test_as_many_pods_of_a_gang_get_a_node_as_explain_says_and_where_and_with_which_devices(
    cluster: Cluster, offers: Callable[..., Offer], tmp_path: Path
) -> None:
    """Three nodes: one empty, one with a GPU taken, one with three pairs taken."""
    nodes = ["many-a", "many-b", "many-c"]
    for node in nodes:
        cluster.publish(cluster.node(node), offers())
    for node, taken in (
        ("many-b", request("r", names.CLASS_GPU)),
        ("many-c", request("r", names.CLASS_PAIR, 3)),
    ):
        cluster.scheduled(cluster.pod(node, node, cluster.claim(node, taken)))
    file = tmp_path / "gang.json"
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": gang(12, 2, nodes)}))
    command = ("explain", "-f", file, "--kubeconfig", cluster.plane.kubeconfig(), "--timeout", "20")
    code, text = run(*command, "-o", "json")
    told = json.loads(text)["gang"]
    assert (code, told["wanted"], told["placed"], told["fits"]) == (1, 12, 9, False)
    where = Counter(pod["node"] for pod in told["pods"])
    assert where == {"many-a": 4, "many-b": 3, "many-c": 2}
    assert (
        "9 of 12 pods of Job default/many fit:\n  many-a: 4\n  many-b: 3\n  many-c: 2\n" in run(*command)[1]
    )

    cluster.plane.kubectl("apply", "-f", str(file))

    def pods() -> list[dict[str, Any]]:
        selector = "labelSelector=batch.kubernetes.io%2Fjob-name%3Dmany"
        items: list[dict[str, Any]] = cluster.plane.request("GET", f"{PODS}?{selector}")["items"]
        return items

    def refused(pod: dict[str, Any]) -> bool:
        conditions = pod["status"].get("conditions", ())
        return any(one["type"] == "PodScheduled" and one["status"] == "False" for one in conditions)

    wait_until(
        lambda: (
            sum(bool(one["spec"].get("nodeName")) for one in pods()) >= 9 and sum(map(refused, pods())) == 3
        ),
        "nine pods have a node and three are refused",
    )
    placed = [one["spec"]["nodeName"] for one in pods() if one["spec"].get("nodeName")]
    assert Counter(placed) == where
    given = Counter(
        (results[0]["pool"], *sorted(one["device"] for one in results))
        for claim in cluster.plane.request("GET", CLAIMS)["items"]
        if claim["metadata"]["name"].startswith("many-")
        and claim["metadata"]["name"] not in nodes
        and (results := claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results"))
    )
    assert given == Counter(
        (pod["node"], *sorted(one["device"] for one in pod["devices"])) for pod in told["pods"]
    )
    cluster.plane.request("DELETE", f"{JOBS}/many?propagationPolicy=Foreground")
    for pod in pods():
        try:
            cluster.delete_pod(pod["metadata"]["name"])
        except ApiError as error:  # the garbage collector is at it, too
            if error.status != 404:
                raise
    for node in nodes[1:]:
        cluster.delete_pod(node)
        cluster.delete_claim(node)


# --- the allocator
def held(seat: Seat, number: int) -> list[dict[str, Any]]:
    """A seat's claims as the API server has them."""
    made = []
    for claim in seat.claims:
        results = []
        for place, one in enumerate(claim.allocation or ()):
            driver, pool, device = one.device
            result: dict[str, Any] = {
                "request": one.request,
                "driver": driver,
                "pool": pool,
                "device": device,
            }
            if one.admin_access:
                result["adminAccess"] = True
            if one.share is not None:
                result["shareID"] = f"00000000-0000-0000-{number:04d}-{place:012d}"
                result["consumedCapacity"] = {name: str(value) for name, value in one.consumed.items()}
            results.append(result)
        status = {"allocation": {"devices": {"results": results}}}
        metadata = {"name": f"{claim.name.split()[0]}-{number}", "namespace": claim.namespace}
        made.append({"metadata": metadata, "spec": {}, "status": status})
    return made


def asked_of(case: Case, found: BatchVerdict) -> list[tuple[Case, str, list[list[str]]]]:
    """For each pod the question when those before have their seats, the answer that is due and its devices."""
    others, questions = list(case["others"]), []
    for number, seat in enumerate(found.seats):
        devices = [
            [device for _, _, device in (one.device for one in claim.allocation or ())]
            for claim in seat.claims
        ]
        questions.append((case | {"others": list(others)}, "allocated", devices))
        others += held(seat, number)
    if found.fits is False and not found.one.stopped and not (found.following and found.following.stopped):
        questions.append((case | {"others": others}, "none", []))
    return questions


def test_each_pod_of_a_gang_gets_what_the_allocator_gives_it_after_the_others(tmp_path: Path) -> None:
    seed = int(os.environ.get("RAILMATE_ALLOCATOR_SEED") or random.SystemRandom().randrange(10**9))
    print(f"\nRAILMATE_ALLOCATOR_SEED={seed}")
    selectors, tally = Selectors(), Counter[str]()
    questions: list[tuple[Case, str, list[list[str]]]] = []
    for number, case in enumerate(cases(seed, CASES)):
        if number % 100 == 0:
            selectors = Selectors()
        world, wish = world_and_wish(case)
        (found,) = judge_gang(world, [Batch("gang", 4, wish)], 4.0, selectors, time.process_time)
        asked = asked_of(case, found)
        tally[f"{len(found.seats)} pods, fits {found.fits}"] += 1
        tally["shared"] += any(
            one.share for seat in found.seats for claim in seat.claims for one in claim.allocation or ()
        )
        questions += asked
    print(dict(sorted(tally.items())))
    answers = Asked((case for case, _, _ in questions), tmp_path).answers()
    unanswered = 0
    for (case, wanted, devices), answer in zip(questions, answers, strict=True):
        if answer["verdict"] == "timeout":
            unanswered += 1
            continue
        assert answer["verdict"] == wanted, f"seed {seed}: {answer} for {case}"
        if wanted == "allocated":
            assert [
                [one["device"] for one in claim or ()] for claim in answer.get("devices") or ()
            ] == devices
    assert unanswered <= 0.02 * len(questions)
    assert tally["shared"]
    assert all(any(key.startswith(f"{count} pods") for key in tally) for count in (0, 1, 2, 3, 4))
