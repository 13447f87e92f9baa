"""What a pod costs the API server, counted there: one GET of its claim and one PATCH of its status.devices.

The API server counts requests by flow schema (API Priority and Fairness), and a flow schema may name a ServiceAccount,
verbs and a resource; so it says itself what the driver asked of it.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.lab import Lab, Workspace, claim_spec, eventually, pod, template
from e2e.test_kubelet_scenarios import PAIR
from harness.deploy import NAMESPACE, RELEASE

_COUNTED = re.compile(
    r'^apiserver_flowcontrol_dispatched_requests_total\{flow_schema="railmate-e2e-([a-z-]+)".*\} (\S+)$',
    re.MULTILINE,
)
_WRITES = ["create", "update", "patch", "delete", "deletecollection"]
#: Name, verbs and resource, the first that fits counts.
_KINDS = (
    ("get-claim", ["get"], "resource.k8s.io", "resourceclaims"),
    ("patch-status", ["patch"], "resource.k8s.io", "resourceclaims/status"),
    ("write-slice", _WRITES, "resource.k8s.io", "resourceslices"),
    ("event", ["create"], "", "events"),
    ("write", _WRITES, "*", "*"),
    ("read", ["get", "list", "watch"], "*", "*"),
)
#: Seconds of peace in which nothing may be written; the longer time has two rounds of repairs (60 s) in it.
IDLE, LONG_IDLE = 12.0, 140.0


def schema(place: int, name: str, verbs: list[str], group: str, resource: str) -> dict[str, Any]:
    return {
        "apiVersion": "flowcontrol.apiserver.k8s.io/v1",
        "kind": "FlowSchema",
        "metadata": {"name": f"railmate-e2e-{name}"},
        "spec": {
            "matchingPrecedence": 100 + place,
            "priorityLevelConfiguration": {"name": "workload-high"},
            "rules": [
                {
                    "subjects": [
                        {
                            "kind": "ServiceAccount",
                            "serviceAccount": {"name": RELEASE, "namespace": NAMESPACE},
                        }
                    ],
                    "resourceRules": [
                        {
                            "verbs": verbs,
                            "apiGroups": [group],
                            "resources": [resource],
                            "clusterScope": True,
                            "namespaces": ["*"],
                        }
                    ],
                }
            ],
        },
    }


class Requests:
    """The driver's requests since the object was made."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._before: Counter[str] = Counter()
        self._before = self.counted()

    def counted(self) -> Counter[str]:
        metrics = self._lab.cluster.kubectl("get", "--raw", "/metrics")
        found: Counter[str] = Counter()
        for name, number in _COUNTED.findall(metrics):
            found[name] += int(float(number))
        return found - self._before


@pytest.fixture
def requests(lab: Lab, workspace: Workspace) -> Iterator[Requests]:
    """The counting works: a slice that is deleted is seen to be written again."""
    workspace.apply(*(schema(place, *kind) for place, kind in enumerate(_KINDS)))
    try:
        before = Requests(lab)

        def seen() -> bool:
            lab.cluster.kubectl("delete", "resourceslices", "--all")
            return before.counted()["write-slice"] > 0

        eventually(seen, "the API server counts the driver's requests")
        steady = Counter[str]()

        def calm() -> bool:
            """The driver has nothing more to write."""
            nonlocal steady
            last, steady = steady, before.counted()
            time.sleep(1.0)
            return last["write-slice"] == steady["write-slice"] > 0

        eventually(calm, "the slices are back")
        yield Requests(lab)
    finally:
        lab.cluster.kubectl("delete", "flowschema", *(f"railmate-e2e-{name}" for name, *_ in _KINDS))


@pytest.mark.long
def test_a_round_of_repairs_writes_nothing_in_peace(
    lab: Lab, workspace: Workspace, requests: Requests
) -> None:
    """With a pod there, whose claim is looked after."""
    workspace.apply(template("pair", claim_spec(PAIR)), pod("one", template="pair"))
    workspace.wait_ready("one")
    eventually(lambda: workspace.claim_of("one")["status"].get("devices"), "status.devices of pod one")
    before = requests.counted()
    time.sleep(LONG_IDLE)
    idle = requests.counted() - before
    assert idle["event"] <= 1, "what is odd about the node is told once, not in each round"
    assert {kind: number for kind, number in idle.items() if kind not in {"read", "event"}} == {}


def test_a_pod_costs_one_get_and_one_patch_and_peace_costs_nothing(
    lab: Lab, workspace: Workspace, requests: Requests, record_property: Any
) -> None:
    time.sleep(IDLE)
    idle = requests.counted()
    assert {kind: number for kind, number in idle.items() if kind != "read"} == {}

    pods = ["one", "two", "three"]
    workspace.apply(template("pair", claim_spec(PAIR)))
    for name in pods:
        workspace.apply(pod(name, template="pair"))
    for name in pods:
        workspace.wait_ready(name)
        eventually(
            lambda name=name: workspace.claim_of(name)["status"].get("devices"), f"status.devices of pod {name}"
        )  # fmt: skip
    for name in pods:
        workspace.delete_pod(name)
    lab.wait_home()
    cost = requests.counted()
    record_property("requests", dict(cost))
    assert cost["get-claim"] == len(pods)
    assert cost["patch-status"] == len(pods)
    assert cost["write-slice"] == 0
    assert cost["write"] == 0
    assert cost["event"] <= 1, "what is odd about the node is told once, not with each pod"
