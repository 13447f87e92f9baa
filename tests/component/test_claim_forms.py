"""Every form of railmate claim on every machine, by the real API server and scheduler.

It takes each form on each machine that has the hardware, and gives the devices that railmate explain foretells.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from component.conftest import PODS, Cluster, wait_until
from railmate.cli.main import main
from railmate.publish.model import Offer, OfferedDevice
from railmate.publish.slices import resource_slices
from railmate_api import attributes as names
from unit.publish.offered_machines import Case, cases

DRIVER = "railmate.dev"
#: Of the machines that explain says cannot take a form, how many the scheduler is asked about: it never stops trying.
REFUSALS = 2
#: What is asked for, and how many GPUs and NICs a pod then has; a group has what it has.
FORMS: Mapping[str, tuple[str, int, int]] = {
    "one": ("--pairs 1", 1, 1),
    "eight": ("--pairs 8", 8, 8),
    "whole": ("--pairs 8 --whole-node", 8, 1),
    "switch": ("--gpus 2 --vfs 2 --same-switch", 2, 2),
    "uneven": ("--gpus 2 --vfs 1 --same-switch", 2, 1),
    "more-vfs": ("--gpus 1 --vfs 2 --same-switch", 1, 2),
    "pairs-of-a-switch": ("--pairs 2 --same-switch", 2, 2),
    "fallback": ("--pairs 4 --fallback numa,any", 4, 4),
    "apart": ("--gpus 2 --vfs 2", 2, 2),
    "rails": ("--pairs 2 --rail-aligned", 2, 2),
    "other-rails": ("--pairs 2 --rails 2,3", 2, 2),
    "mixed": ("--pairs 2 --gpus 1 --vfs 1", 3, 3),
    "groups": ("--groups 2", 0, 0),
    "twos": ("--groups 2 --gpus-per-group 2", 4, 0),
    "class": ("--class rdma-vf-of-all.railmate.dev=2", 0, 2),
}
EXTRA_CLASS = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "DeviceClass",
    "metadata": {"name": "rdma-vf-of-all.railmate.dev"},
    "spec": {
        "selectors": [
            {"cel": {"expression": 'device.attributes[device.driver].?kind.orValue("") == "rdma-vf"'}}
        ]
    },
}
MACHINES = cases()
TRIED = [(case, form) for case in MACHINES for form in FORMS]


def run(*arguments: str | Path) -> tuple[int, str]:
    out = io.StringIO()
    with redirect_stdout(out):
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue()


def as_list(objects: list[dict[str, Any]]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})


@cache
def _offer(name: str) -> Offer:
    return next(case for case in MACHINES if case.name == name).offer


def offer_of(case: Case) -> Offer:
    return _offer(case.name)


def name_of(case: Case, form: str) -> str:
    return f"{case.name}-{form}"[:50].strip("-")


def written(case: Case, form: str) -> list[dict[str, Any]]:
    """What the command writes for a pod, bound to a node of its own."""
    name = name_of(case, form)
    code, text = run("claim", *FORMS[form][0].split(), "--for", "pod", "--name", name, "-o", "json")
    assert code == 0
    objects: list[dict[str, Any]] = json.loads(text)["items"]
    objects[-1]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": f"n-{name}"}
    # the placeholders are for a real machine; these nodes have CPUs and memory for something else
    objects[-1]["spec"]["containers"][0]["resources"].pop("requests")
    return objects


@dataclass(frozen=True)
class Outcome:
    foretold: list[str]
    given: list[str] | None  # None: not asked


def foretell(case: Case, form: str, classes: list[dict[str, Any]], directory: Path) -> list[str]:
    """By railmate explain, from the machine's slices alone; nothing when it says no."""
    name = name_of(case, form)
    slices, wanted = directory / f"{name}.slices.yaml", directory / f"{name}.yaml"
    slices.write_text(as_list([*resource_slices(offer_of(case), DRIVER, f"n-{name}"), *classes]))
    wanted.write_text(as_list(written(case, form)))
    code, text = run("explain", "-f", wanted, "--slices", slices, "-o", "json", "--timeout", "30")
    document = json.loads(text)
    assert (code == 0) == document["fits"]
    assert not document["error"]
    (node,) = document["nodes"]
    assert node["outcome"] in ("fits", "no")
    return [one["device"] for one in node["devices"]]


def claims_of(cluster: Cluster, pod: str) -> list[str]:
    """The claims that the controller made of the pod's templates."""

    def statuses() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (
            cluster.plane.request("GET", f"{PODS}/{pod}").get("status", {}).get("resourceClaimStatuses") or []
        )
        return found

    wait_until(lambda: bool(statuses()), f"the claims of pod {pod}")
    return [str(one["resourceClaimName"]) for one in statuses()]


@pytest.fixture(scope="module")
def outcomes(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Outcome]:
    """One node for each machine and form, all asked at once."""
    directory = tmp_path_factory.mktemp("forms")
    shipped = cluster.plane.request("GET", "/apis/resource.k8s.io/v1/deviceclasses")["items"]
    classes = [{"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", **one} for one in shipped]
    classes.append(EXTRA_CLASS)
    objects, asked = list(classes[len(shipped) :]), list[str]()
    foretold: dict[str, list[str]] = {}
    refused: Counter[str] = Counter()
    for case, form in TRIED:
        name = name_of(case, form)
        foretold[name] = foretell(case, form, classes, directory)
        refused[form] += not foretold[name]
        if not foretold[name] and refused[form] > REFUSALS:
            continue
        cluster.publish(cluster.node(f"n-{name}"), offer_of(case))
        objects += written(case, form)
        asked.append(name)
    cluster.plane.kubectl("apply", "-f", "-", input=as_list(objects))
    found = {name: Outcome(devices, None) for name, devices in foretold.items()}
    for name in asked:
        if foretold[name]:
            cluster.scheduled(name)
        else:
            cluster.verdict(name)
        given = [device for claim in claims_of(cluster, name) for device in cluster.allocated(claim)]
        found[name] = Outcome(foretold[name], given)
    return found


@pytest.mark.parametrize(("case", "form"), TRIED, ids=[name_of(*one) for one in TRIED])
def test_scheduler_gives_what_explain_foretells_and_as_much_as_was_asked(
    outcomes: Mapping[str, Outcome], case: Case, form: str
) -> None:
    outcome = outcomes[name_of(case, form)]
    assert outcome.given in (outcome.foretold, None)
    devices = [offer_of(case).by_name[name] for name in outcome.foretold]
    if not devices:
        return
    _, gpus, nics = FORMS[form]
    if gpus:
        assert sum(len(one.gpus) for one in devices) == gpus
    if nics:
        assert sum(1 for one in devices if one.nics) == nics
    parts = [part for one in devices for part in one.gpus + one.nics]
    assert len(parts) == len(set(parts)), "nothing goes out twice"
    if "--same-switch" in FORMS[form][0]:
        assert len({one.attributes[names.PCIE_SWITCH] for one in devices}) == 1
    if form in ("rails", "other-rails"):
        assert {one.attributes[names.RAIL] for one in devices} <= ({0, 1} if form == "rails" else {2, 3})


def test_every_form_finds_a_machine_that_has_the_hardware(outcomes: Mapping[str, Outcome]) -> None:
    found = {form for case, form in TRIED if outcomes[name_of(case, form)].given}
    assert found == set(FORMS)


def test_every_machine_with_that_many_pairs_takes_them(outcomes: Mapping[str, Outcome]) -> None:
    """Told from the offer alone, so that the scheduler and explain cannot be wrong together."""
    for case in MACHINES:
        on_switch = [
            one for one in offer_of(case).devices if _is_pair(one) and names.PCIE_SWITCH in one.attributes
        ]
        for form, count in (("one", 1), ("eight", 8), ("whole", 8)):
            assert bool(outcomes[name_of(case, form)].foretold) == (len(on_switch) >= count), (
                f"{case.name}: {form}"
            )


def _is_pair(device: OfferedDevice) -> bool:
    return device.kind == names.KIND_PAIR


# --- in a cluster that is in use
def test_pod_that_waits_is_explained_and_runs_once_what_was_said_is_done(
    cluster: Cluster, offers: Callable[..., Offer]
) -> None:
    cluster.publish(cluster.node("explained"), offers())
    code, text = run("claim", "--gpus", "1", "--for", "pod", "--name", "taker", "-o", "json")
    assert code == 0
    taker = json.loads(text)["items"]
    waiting = json.loads(run("claim", "--pairs", "8", "--for", "pod", "--name", "waiting", "-o", "json")[1])[
        "items"
    ]
    for objects in (taker, waiting):
        objects[-1]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "explained"}
        objects[-1]["spec"]["containers"][0]["resources"].pop("requests")
    cluster.plane.kubectl("apply", "-f", "-", input=as_list(taker))
    cluster.scheduled("taker")
    cluster.plane.kubectl("apply", "-f", "-", input=as_list(waiting))
    assert "cannot allocate all claims" in cluster.verdict("waiting")

    kubeconfig = cluster.plane.kubeconfig()
    code, text = run("explain", "pod/waiting", "--kubeconfig", kubeconfig, "-o", "json", "--timeout", "10")
    document = json.loads(text)
    assert code == 1
    (node,) = [one for one in document["nodes"] if one["node"] == "explained"]
    assert node["outcome"] == "no"
    (shortage,) = node["reason"]["shortages"]
    assert [holder["pods"] for holder in shortage["holders"]] == [["default/taker"]]
    kinds = {change["kind"]: change for change in node["changes"]}
    assert kinds["count"]["value"] == "7"
    assert kinds["release"]["sentence"] == "after pod default/taker ends"

    code, text = run("explain", "--cluster", "--kubeconfig", kubeconfig, "-o", "json")
    (state,) = [one for one in json.loads(text)["nodes"] if one["node"] == "explained"]
    assert (state["freePairs"], state["idleNics"], state["largestNode"]) == (7, 1, 7)

    cluster.delete_pod("taker")
    cluster.scheduled("waiting")
    code, text = run("explain", "waiting", "--kubeconfig", kubeconfig)
    assert (code, text.count("pair-")) == (0, 8)
