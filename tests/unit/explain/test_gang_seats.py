"""How many pods of a workload fit, where, and what keeps the next one out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from explain_world import CLASSES, claim, held, machine, request

from railmate.errors import UsageError
from railmate.explain.changes import Trial
from railmate.explain.gang import Batch, BatchVerdict, judge_gang
from railmate.explain.model import Node
from railmate.explain.parse import parse_claim, parse_class, parse_slice
from railmate.explain.problem import Problem
from railmate.explain.rendergang import gang_json, gang_text
from railmate.explain.verdict import Wish, World
from railmate.explain.workload import pods_of


def world(*nodes: str, taken: Sequence[dict[str, Any]] = (), more: Sequence[dict[str, Any]] = ()) -> World:
    """Nodes of four pairs, two a switch."""
    classes = {
        name: parse_class(
            {"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": e}} for e in es]}}
        )
        for name, es in (CLASSES | {"any": []}).items()
    }
    slices = [one for node in nodes for one in machine(node)]
    return World(
        tuple(map(parse_slice, [*slices, *more])),
        classes,
        tuple(map(parse_claim, taken)),
        tuple(map(Node, nodes)),
    )


def rack(nics: int) -> dict[str, Any]:
    """A pool that all nodes reach."""
    pool = {"name": "rack", "generation": 1, "resourceSliceCount": 1}
    devices = [{"name": f"nic-{number}", "attributes": {}} for number in range(nics)]
    return {
        "metadata": {"name": "rack"},
        "spec": {"driver": "nic.example.com", "pool": pool, "allNodes": True, "devices": devices},
    }


def wish(*requests: dict[str, Any], shared: bool = False, **more: Any) -> Wish:
    made = parse_claim(claim(*requests, **more))
    return Wish("one pod of Job g", (made,), shared=frozenset([made.title] if shared else ()))


def with_shared_gpu(pairs: int) -> Wish:
    """A GPU that all pods have, and pairs of each pod's own."""
    everybodys = parse_claim(claim(request("g", "gpu"), name="everybodys"))
    own = parse_claim(claim(request("r", "pair", pairs), name="own"))
    return Wish("one pod of Job g", (everybodys, own), shared=frozenset([everybodys.title]))


def batch(count: int, wanted: Wish, title: str = "Job g") -> Batch:
    return Batch(title, count, wanted)


def judged(where: World, *batches: Batch, seconds: float = 30.0) -> list[BatchVerdict]:
    return judge_gang(where, batches, seconds, now=time.process_time)


def seats(verdict: BatchVerdict) -> dict[str, int]:
    return dict(Counter(seat.node for seat in verdict.seats))


def devices(verdict: BatchVerdict) -> list[tuple[str, str]]:
    return [(seat.node, placed.device.name) for seat in verdict.seats for placed in seat.devices]


# --- how many fit
def test_pods_fill_nodes_until_all_have_a_seat() -> None:
    (found,) = judged(world("n1", "n2", "n3"), batch(5, wish(request("r", "pair", 2))))
    assert (found.fits, seats(found)) == (True, {"n1": 2, "n2": 2, "n3": 1})
    assert len(set(devices(found))) == 10, "nothing goes out twice"
    assert found.following is None


def test_what_is_taken_counts_and_the_next_pod_is_told_why_not() -> None:
    taken = [held("other", "gpu-0-0", pod="train")]
    (found,) = judged(world("n1", "n2", taken=taken), batch(4, wish(request("r", "pair", 2))))
    assert (found.fits, seats(found)) == (False, {"n1": 1, "n2": 2})
    assert found.following is not None
    (first, second) = found.following.nodes
    assert first.reason is not None
    (shortage,) = first.reason.shortages
    assert shortage.sentence == (
        "2 of 4 devices are allocated, and of the others 1 of 2 devices have their GPU or NIC allocated under another "
        "name; 1 left, 2 wanted"
    )
    assert [str(one) for one in shortage.holders] == [
        "gpu-0-0: pod team/train",
        "pair-0-1: claim team/wanted of pod 1 of the gang",
        "pair-1-0: claim team/wanted of pod 1 of the gang",
    ]
    assert {one.kind for one in first.changes} >= {"count", "release"}
    assert "release" not in {one.kind for one in second.changes}, "it has pods of the gang alone"
    assert all(one.value == "team/other" for one in first.changes if one.kind == "release")
    assert "empty" not in {one.kind for node in found.following.nodes for one in node.changes}


def test_most_taken_nodes_are_filled_first() -> None:
    taken = [held("other", "gpu-0-0", pool="n2")]
    (found,) = judged(world("n1", "n2", taken=taken), batch(2, wish(request("r", "pair", 1))))
    assert seats(found) == {"n2": 2}


def test_gang_of_which_no_pod_fits_is_told_by_one_pod() -> None:
    (found,) = judged(world("n1"), batch(3, wish(request("r", "pair", 5))))
    assert (found.fits, found.seats, found.following) == (False, (), None)
    assert found.one.nearest() is not None
    assert "0 of 3 pods of Job g fit\n" in gang_text(found)


def test_nodes_of_one_sort_take_as_many_each() -> None:
    names = [f"n{number:02}" for number in range(40)]
    (found,) = judged(world(*names), batch(79, wish(request("r", "pair", 2))))
    assert Counter(seats(found).values()) == {2: 39, 1: 1}
    assert {device.device.id[1] for seat in found.seats for device in seat.devices} == set(names)
    assert "n00, n01, n02, n03, n04, n05, n06, n07 and 31 more: 2 each\n  n39: 1\n" in gang_text(found)


def test_shares_of_a_device_are_counted() -> None:
    shared = {
        "name": "shared",
        "attributes": {"railmate.dev/kind": {"string": "rdma-vf"}},
        "allowMultipleAllocations": True,
        "capacity": {"bandwidth": {"value": "10", "requestPolicy": {"default": "4"}}},
    }
    pool = {"name": "p", "generation": 1, "resourceSliceCount": 1}
    slices = {
        "metadata": {"name": "p"},
        "spec": {"driver": "railmate.dev", "pool": pool, "nodeName": "n1", "devices": [shared]},
    }
    where = world("n1", more=[slices])
    wanted = wish(request("r", "any", 1, "device.allowMultipleAllocations"))
    (found,) = judged(where, batch(3, wanted))
    assert (found.fits, len(found.seats)) == (False, 2)


def test_template_without_pods_is_not_said_to_fit_all() -> None:
    some, none = judged(
        world("n1"), batch(2, wish(request("r", "pair", 1))), batch(0, wish(request("r", "pair", 1)))
    )
    assert (some.fits, none.fits) == (True, True)
    assert "all 2 pods of Job g fit" in gang_text(some)
    assert "pods of Job g" not in gang_text(none)
    assert "fit," not in gang_text(none)


# --- where the order matters
def test_those_that_ask_for_most_are_seated_first() -> None:
    """In the order of the file the leader might open the node that a worker needs."""
    taken = [held("other", "gpu-0-0", pool="n1")]
    where = world("n1", "n2", taken=taken)
    leader, worker = judged(
        where,
        batch(1, wish(request("r", "pair", 1)), "leader"),
        batch(1, wish(request("r", "pair", 4)), "worker"),
    )
    assert (leader.batch.title, worker.batch.title) == ("leader", "worker")
    assert (seats(leader), seats(worker)) == ({"n1": 1}, {"n2": 1})
    assert (leader.fits, worker.fits) == (True, True)


def test_templates_that_are_not_all_seated_are_no_certain_no_but_for_one_that_does_not_fit_alone() -> None:
    where = world("n1", "n2")
    small, large = wish(request("r", "pair", 3)), wish(request("r", "pair", 4))
    some, whole = judged(where, batch(2, small), batch(1, large))
    assert (whole.fits, len(some.seats), some.fits) == (True, 1, None)
    assert "1 of 2 pods of Job g fit for certain, another order may place more:" in gang_text(some)
    some, whole = judged(where, batch(3, small), batch(1, large))
    assert (whole.fits, some.fits) == (True, False), "two at most, with all nodes for themselves"


def test_a_claim_that_all_pods_share_keeps_them_on_one_node() -> None:
    (found,) = judged(world("n1", "n2"), batch(3, wish(request("r", "pair", 3), shared=True)))
    assert found.fits is True
    assert len(seats(found)) == 1
    assert len(devices(found)) == 3, "once, for the first pod"


def test_no_more_pods_share_a_claim_than_the_api_server_takes() -> None:
    wanted = wish(request("r", "pair"), shared=True)
    (found,) = judged(world("n1", "n2"), batch(300, wanted))
    assert (len(found.seats), found.fits, found.following) == (256, False, None), "in whatever order"
    assert "a claim is for 256 pods at most, and 300 pods of Job g share one; 256 fit:" in gang_text(found)
    (found,) = judged(world("n1"), batch(256, wanted))
    assert found.fits is True


@pytest.mark.parametrize("nodes", [("n1",), ("n1", "n2")])
def test_shared_claim_that_fits_nowhere_is_a_certain_no(nodes: tuple[str, ...]) -> None:
    (found,) = judged(world(*nodes), batch(3, wish(request("r", "pair", 5), shared=True)))
    assert (found.fits, found.seats) == (False, ())
    assert "0 of 3 pods of Job g fit\n" in gang_text(found)
    both = judged(world(*nodes), batch(3, found.batch.wish), batch(1, found.batch.wish, "Job h"))
    assert [one.fits for one in both] == [False, False]


@pytest.mark.parametrize(("nodes", "fits"), [(("n1",), False), (("n1", "n2"), None)])
def test_shared_claim_that_only_one_node_can_have_is_a_certain_no(
    nodes: tuple[str, ...], fits: bool | None
) -> None:
    """With more nodes it matters which of them the first pod takes."""
    (found,) = judged(world(*nodes), batch(9, with_shared_gpu(1)))
    assert (found.fits, len(found.seats)) == (fits, 3)


def test_shared_claim_of_two_templates_is_no_certain_no() -> None:
    """The other template's pod may get other devices for it."""
    some, others = judged(world("n1"), batch(4, with_shared_gpu(1)), batch(1, with_shared_gpu(1), "Job h"))
    assert (some.fits, len(some.seats), others.fits, len(others.seats)) == (None, 3, None, 0)


def test_template_that_a_different_node_would_serve_is_no_certain_no() -> None:
    """Whole nodes go out first, to n2, and the shared claim then to n1, which has no room for three; n3 has."""
    where = world("n1", "n2", "n3", taken=[held("other", "pair-0-0", pool="n1")])
    whole, some = judged(
        where, batch(1, wish(request("r", "pair", 4)), "A"), batch(3, with_shared_gpu(1), "B")
    )
    assert whole.fits is True
    assert (len(some.seats), some.fits) == (2, None)


def test_a_device_that_all_nodes_reach_goes_to_one_pod_only() -> None:
    where = world("n1", "n2", more=[rack(3)])
    wanted = wish(request("r", "any", 1, 'device.driver == "nic.example.com"'))
    (found,) = judged(where, batch(4, wanted))
    assert sorted(name for _, name in devices(found)) == ["nic-0", "nic-1", "nic-2"]
    wanted = wish(request("r", "any", 1, 'device.driver == "nic.example.com"'), request("p", "pair", 3))
    (found,) = judged(where, batch(3, wanted))
    assert seats(found) == {"n1": 1, "n2": 1}
    assert len(set(devices(found))) == 8
    assert found.fits is None


# --- the time
def test_what_was_not_looked_at_in_time_is_no_certain_no() -> None:
    (found,) = judged(world("n1", "n2"), batch(3, wish(request("r", "pair", 4))), seconds=1e-9)
    assert (found.fits, found.seats) == (None, ())
    assert "of more it is not certain" in gang_text(found)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """It counts the searches that are prepared, 10 ms each."""
    prepared = 0
    prepare = Trial.problem

    def counted(*args: Any, **keywords: Any) -> Problem:
        nonlocal prepared
        prepared += 1
        return prepare(*args, **keywords)

    monkeypatch.setattr(Trial, "problem", counted)
    return lambda: prepared / 100


def test_no_time_is_so_short_that_it_makes_a_certain_no(clock: Callable[[], float]) -> None:
    """Nor is it one when the time is over while a template is tried alone."""
    where = world("n1", "n2", taken=[held("other", "gpu-0-0", pool="n2")])
    whole = batch(1, wish(request("r", "pair", 4)), "A")
    some = batch(7, wish(request("r", "pair")), "B")
    for hundredths in range(1, 60):
        assert judge_gang(where, [whole, some], hundredths / 100, now=clock)[1].fits is None, hundredths


def test_nodes_that_reach_one_pool_are_not_prepared_when_the_time_is_over(
    clock: Callable[[], float],
) -> None:
    """Each of them is a search of its own."""
    where = world(*(f"n{number:03}" for number in range(300)), more=[rack(300)])
    wanted = wish(request("r", "any", 1, 'device.driver == "nic.example.com"'), request("p", "pair", 4))
    (found,) = judge_gang(where, [batch(300, wanted)], 0.5, now=clock)
    assert 10 < len(found.seats) < 50
    assert found.fits is None
    assert clock() < 0.8, "0.5, and the bisection that had begun"


def test_scheduler_error_of_the_first_pod_is_no_for_all() -> None:
    (found,) = judged(world("n1"), batch(3, wish(request("r", "pair", 1, "device.attributes['x'].y"))))
    assert found.fits is False
    assert "stops with an error" in gang_text(found)
    assert "pods of Job g" not in gang_text(found)


def test_json_names_each_pods_devices_and_the_next_pods_verdict() -> None:
    (found,) = judged(world("n1"), batch(2, wish(request("r", "pair", 3))))
    document = gang_json(found)
    assert document["fits"] is True, "of one pod"
    gang = document["gang"]
    assert (gang["object"], gang["wanted"], gang["placed"], gang["fits"]) == ("Job g", 2, 1, False)
    (pod,) = gang["pods"]
    assert pod["node"] == "n1"
    assert [one["device"] for one in pod["devices"]] == ["pair-0-0", "pair-0-1", "pair-1-0"]
    assert gang["next"]["fits"] is False


# --- how many pods a workload has
TEMPLATE = {"spec": {"containers": [{"name": "c"}]}}


def counts(kind: str, spec: dict[str, Any]) -> list[tuple[str, int]]:
    found = pods_of({"kind": kind, "metadata": {"name": "w"}, "spec": spec})
    return [(one.together.removeprefix(f"{kind} default/w").strip(", "), one.count) for one in found]


@pytest.mark.parametrize(
    ("kind", "spec", "expected"),
    [
        ("Job", {"template": TEMPLATE}, [("", 1)]),
        ("Job", {"parallelism": 4, "template": TEMPLATE}, [("", 4)]),
        ("Job", {"parallelism": 4, "completions": 2, "template": TEMPLATE}, [("", 2)]),
        ("Job", {"completions": 8, "template": TEMPLATE}, [("", 1)]),  # parallelism is 1 by default
        ("CronJob", {"jobTemplate": {"spec": {"parallelism": 3, "template": TEMPLATE}}}, [("", 3)]),
        ("Deployment", {"replicas": 3, "template": TEMPLATE}, [("", 3)]),
        ("Deployment", {"replicas": 0, "template": TEMPLATE}, [("", 0)]),
        (
            "JobSet",
            {
                "replicatedJobs": [
                    {
                        "name": "a",
                        "replicas": 2,
                        "template": {"spec": {"parallelism": 3, "template": TEMPLATE}},
                    },
                    {"name": "b", "template": {"spec": {"template": TEMPLATE}}},
                ]
            },
            [("a", 6), ("b", 1)],
        ),
        (
            "LeaderWorkerSet",
            {"replicas": 2, "leaderWorkerTemplate": {"size": 4, "workerTemplate": TEMPLATE}},
            [("", 8)],
        ),
        (
            "LeaderWorkerSet",
            {"leaderWorkerTemplate": {"size": 4, "leaderTemplate": TEMPLATE, "workerTemplate": TEMPLATE}},
            [("leaderWorkerTemplate/leaderTemplate", 1), ("leaderWorkerTemplate/workerTemplate", 3)],
        ),
        (
            "LeaderWorkerSet",
            {
                "replicas": 2,
                "leaderWorkerTemplate": {"size": 4, "leaderTemplate": None, "workerTemplate": TEMPLATE},
            },
            [("", 8)],
        ),
        (
            "RayCluster",
            {
                "headGroupSpec": {"template": TEMPLATE},
                "workerGroupSpecs": [
                    {"groupName": "w", "replicas": 2, "numOfHosts": 4, "template": TEMPLATE}
                ],
            },
            [("headGroupSpec", 1), ("workerGroupSpecs/0", 8)],
        ),
        ("DaemonSet", {"template": TEMPLATE}, [("", 1)]),  # and says so
        (
            "MPIJob",
            {
                "mpiReplicaSpecs": {
                    "Launcher": {"template": TEMPLATE},
                    "Worker": {"replicas": 2, "template": TEMPLATE},
                }
            },
            [("mpiReplicaSpecs/Launcher", 1), ("mpiReplicaSpecs/Worker", 2)],
        ),
    ],
)
def test_pods_that_run_at_a_time_are_counted(
    kind: str, spec: dict[str, Any], expected: list[tuple[str, int]]
) -> None:
    assert counts(kind, spec) == expected


def test_pod_of_a_daemonset_is_not_told_as_all_of_them() -> None:
    body = {"kind": "DaemonSet", "metadata": {"name": "w"}, "spec": {"template": TEMPLATE}}
    (found,) = pods_of(body)
    assert (
        found.title
        == "one pod of DaemonSet default/w (it makes one for each node, and only one is looked at)"
    )


@pytest.mark.parametrize("value", ["4", -1, True, 1.5, [2]])
def test_what_is_no_number_of_pods_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match=r"Job w: not as the API has it .*is no number of pods"):
        counts("Job", {"parallelism": value, "template": TEMPLATE})
