"""From pods, workloads and files of any kind to what is asked for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from explain_world import claim, held, machine, request
from hypothesis import given
from hypothesis import strategies as st

from railmate.errors import UsageError
from railmate.explain.model import DeviceClass, Node, Taint
from railmate.explain.parse import parse_claim, parse_class, parse_node, parse_slice
from railmate.explain.quantity import parse_quantity
from railmate.explain.wish import wish_of_pod
from railmate.explain.workload import pods_of

GPU = DeviceClass("gpu", extended_resource="nvidia.com/gpu", created="2026-01-01T00:00:00Z")


def pod(**spec: Any) -> dict[str, Any]:
    return {"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [{"name": "c"}], **spec}}


def obstacle(node: Node, **spec: Any) -> str:
    return wish_of_pod("pod p", pod(**spec), {}, {}, {"gpu": GPU}).obstacle(node)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("80Gi", 80 * 2**30),
        ("1.5k", 1500),
        ("500m", parse_quantity("0.5")),
        ("1e3", 1000),
        ("2E", 2 * 10**18),
    ],
)
def test_quantities_are_exact(text: str, value: object) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "x", "1 Gi", "1GiB", "--1", "1e", None])
def test_what_is_no_quantity_is_refused(text: object) -> None:
    with pytest.raises(UsageError, match="is no quantity"):
        parse_quantity(text)


def test_newest_class_serves_an_extended_resource() -> None:
    newer = DeviceClass("pair", extended_resource="nvidia.com/gpu", created="2026-02-01T00:00:00Z")
    containers = [{"name": "c", "resources": {"limits": {"cpu": "1", "nvidia.com/gpu": "8"}}}]
    for classes in ({"gpu": GPU, "pair": newer}, {"pair": newer, "gpu": GPU}):
        (made,) = wish_of_pod("pod p", pod(containers=containers), {}, {}, classes).claims
        (slot,) = made.slots
        assert (slot.name, slot.alternatives[0].class_name, slot.alternatives[0].count) == (
            "container-0-request-1", "pair", 8,
        )  # fmt: skip


def test_of_classes_of_one_age_the_lower_name_serves() -> None:
    """Rule: extendedresourcecache, "equal, arbitrarily prefer lower name"."""
    a, ab = (
        DeviceClass(n, extended_resource="nvidia.com/gpu", created="2026-01-01T00:00:00Z")
        for n in ("a", "ab")
    )
    for classes in ({"a": a, "ab": ab}, {"ab": ab, "a": a}):
        assert requests_of(classes, containers=[gpus(1)]) == [("container-0-request-0", "a", 1)]


def gpus(count: int, **more: Any) -> dict[str, Any]:
    return {"name": "c", "resources": {"limits": {"nvidia.com/gpu": str(count)}}, **more}


def requests_of(classes: dict[str, DeviceClass], **spec: Any) -> list[tuple[str, str, int]]:
    (made,) = wish_of_pod("pod p", pod(**spec), {}, {}, classes).claims
    requests = [slot.alternatives[0] for slot in made.slots]
    return [(one.name, one.class_name, one.count) for one in requests]


@pytest.mark.parametrize(
    ("init", "containers", "counts"),
    [
        ([gpus(8, restartPolicy="Always")], [gpus(1)], {0: 8, 1: 1}),  # a sidecar runs beside the container
        ([gpus(8)], [gpus(8)], {1: 8}),  # has what the container gets afterwards
        ([gpus(8)], [gpus(5)], {0: 3, 1: 5}),
        ([gpus(4), gpus(8), gpus(6)], [gpus(2)], {1: 6, 3: 2}),  # one after the other: the largest
        (
            [gpus(2, restartPolicy="Always"), gpus(4)],
            [gpus(1)],
            {0: 2, 1: 3, 2: 1},
        ),  # the sidecar keeps its own
        ([gpus(4), gpus(2, restartPolicy="Always")], [gpus(1)], {0: 1, 1: 2, 2: 1}),
        ([], [gpus(1)] * 11, dict.fromkeys((0, 1, 10, 2, 3, 4, 5, 6, 7, 8, 9), 1)),  # by name
    ],
)
def test_init_containers_are_counted_as_the_scheduler_does(
    init: list[dict[str, Any]], containers: list[dict[str, Any]], counts: dict[int, int]
) -> None:
    expected = [(f"container-{n}-request-0", "gpu", count) for n, count in counts.items()]
    assert requests_of({"gpu": GPU}, initContainers=init, containers=containers) == expected


def test_claim_that_the_scheduler_made_for_a_running_pod_is_the_pods() -> None:
    made = held("p-extended-resources-x", "gpu-0-0") | {"kind": "ResourceClaim"}
    running = pod(containers=[gpus(1)], nodeName="n1") | {
        "status": {"extendedResourceClaimStatus": {"resourceClaimName": "p-extended-resources-x"}}
    }
    claims = {("default", "p-extended-resources-x"): made}
    (claim,) = wish_of_pod("pod p", running, claims, {}, {"gpu": GPU}).claims
    assert claim.allocation is not None
    (again,) = wish_of_pod("pod p", running, {}, {}, {"gpu": GPU}).claims
    assert again.allocation is None, "without that claim what would be asked for"


def test_node_whose_device_plugin_has_the_resource_is_out() -> None:
    containers = [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "8"}}}]
    node = Node("n", plugin_resources={"nvidia.com/gpu": 8})
    assert "a device plugin offers nvidia.com/gpu" in obstacle(node, containers=containers)
    assert obstacle(Node("n", plugin_resources={"nvidia.com/gpu": 0}), containers=containers) == ""


@pytest.mark.parametrize(
    ("node", "spec", "words"),
    [
        (Node("n"), {}, ""),
        (Node("n"), {"nodeName": "m"}, "bound to node m"),
        (Node("n", {"zone": "a"}), {"nodeSelector": {"zone": "b"}}, "nodeSelector asks for zone=b"),
        (Node("n", unschedulable=True), {}, "unschedulable:NoSchedule"),
        (Node("n", unschedulable=True), {"tolerations": [{"operator": "Exists"}]}, ""),
        (Node("n", taints=(Taint("gpu", "", "NoSchedule"),)), {}, "taint gpu:NoSchedule"),
        (Node("n", taints=(Taint("gpu", "", "PreferNoSchedule"),)), {}, ""),
    ],
)
def test_reason_of_the_pod_itself_comes_before_its_devices(
    node: Node, spec: dict[str, Any], words: str
) -> None:
    said = obstacle(node, **spec)
    assert words in said
    assert bool(said) == bool(words)


@pytest.mark.parametrize(
    ("operator", "values", "fits"),
    [
        ("In", ["a"], True),
        ("NotIn", ["a"], False),
        ("Exists", [], True),
        ("DoesNotExist", [], False),
        ("Gt", ["1"], False),
    ],
)
def test_required_affinity_is_kept(operator: str, values: list[str], fits: bool) -> None:
    term = {"matchExpressions": [{"key": "zone", "operator": operator, "values": values}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    assert (obstacle(Node("n", {"zone": "a"}), affinity={"nodeAffinity": required}) == "") == fits


def test_pod_templates_are_found_wherever_a_workload_keeps_them() -> None:
    template = {"spec": {"containers": []}}
    jobset = {
        "replicatedJobs": [{"name": n, "template": {"spec": {"template": template}}} for n in ("a", "b")]
    }
    mpi = {"mpiReplicaSpecs": {"Launcher": {"template": template}, "Worker": {"template": template}}}
    for kind, spec, count in (
        ("Job", {"template": template}, 1),
        ("CronJob", {"jobTemplate": {"spec": {"template": template}}}, 1),
        ("JobSet", jobset, 2),
        ("MPIJob", mpi, 2),
        ("ConfigMap", {}, 0),
    ):
        titles = [one.title for one in pods_of({"kind": kind, "metadata": {"name": "w"}, "spec": spec})]
        assert len(set(titles)) == count, kind


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def paths(body: Any, so_far: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    steps = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    return [so_far, *(path for key, one in steps for path in paths(one, (*so_far, key)))]


@given(st.data())
def test_junk_anywhere_in_an_object_is_a_clear_error_or_none(data: st.DataObject) -> None:
    spec = {"nodeSelector": {"a": "b"}, "tolerations": [{"key": "x"}], "resourceClaims": [{"name": "c"}]}
    whole = claim(request("r", "gpu", 2, "true", capacity={"requests": {"m": "1Gi"}}), match="a/b")
    node = {
        "kind": "Node",
        "metadata": {"name": "n"},
        "spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]},
    }
    device_class = {
        "kind": "DeviceClass",
        "metadata": {"name": "c"},
        "spec": {"selectors": [{"cel": {"expression": "x"}}]},
    }
    item, parse = data.draw(
        st.sampled_from(
            [
                (machine(switches=1, gpus=1, vfs=0)[1], parse_slice),
                (whole, parse_claim),
                (node, parse_node),
                (device_class, parse_class),
                (pod(**spec), lambda one: wish_of_pod("pod", one, {}, {}, {"gpu": GPU})),
            ]
        )
    )
    item = copy.deepcopy(item)
    where = data.draw(st.sampled_from(paths(item)[1:]))
    target: Any = item
    for key in where[:-1]:
        target = target[key]
    target[where[-1]] = data.draw(JUNK)
    said = ""
    try:
        parse(item)
    except UsageError as error:
        said = str(error)
    assert "\n" not in said
