"""Every form of railmate claim on every machine, by the real API server and scheduler.

It takes each form on each machine that has the hardware, and gives the devices that railmate explain foretells.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from component.conftest import PODS, Cluster, wait_until
from railmate.cli.main import main
from railmate.publish.model import Offer, OfferedDevice, overlap
from railmate.publish.slices import resource_slices
from railmate_api import attributes as names
from unit.publish.offered_machines import Case, cases

DRIVER = "railmate.dev"
#: Of the machines that explain says cannot take a form, how many the scheduler is asked about: it never stops trying.
REFUSALS = 2
Needs = Iterator[Sequence[Sequence[OfferedDevice]]]


@dataclass(frozen=True)
class Form:
    """What is asked for, and how many GPUs and NICs a pod then has (0: what a group has).

    ``needs``: the ways in which a machine can have the hardware, by its offer alone; a way is, for each device that is
    wanted, those that will do. ``rails``: of the pairs, in the order of the requests.
    """

    flags: str
    gpus: int
    nics: int
    needs: Callable[[Offer], Needs]
    rails: tuple[int, ...] = ()


def _of(offer: Offer, kind: str, **attributes: object) -> list[OfferedDevice]:
    return [
        one
        for one in offer.devices
        if one.kind == kind and all(one.attributes.get(getattr(names, k)) == v for k, v in attributes.items())
    ]


def _pairs(offer: Offer) -> list[OfferedDevice]:
    return [one for one in _of(offer, names.KIND_PAIR) if names.PCIE_SWITCH in one.attributes]


def pairs(count: int, gpus: int = 0, nics: int = 0) -> Callable[[Offer], Needs]:
    def ways(offer: Offer) -> Needs:
        yield [
            *[_pairs(offer)] * count,
            *[_of(offer, names.KIND_GPU)] * gpus,
            *[_of(offer, names.KIND_RDMA_VF)] * nics,
        ]

    return ways


def under_one_switch(count: int, gpus: int = 0, nics: int = 0) -> Callable[[Offer], Needs]:
    def ways(offer: Offer) -> Needs:
        for switch in {one.attributes[names.PCIE_SWITCH] for one in _pairs(offer)}:
            (needs,) = pairs(count, gpus, nics)(offer)
            yield [[one for one in some if one.attributes.get(names.PCIE_SWITCH) == switch] for some in needs]

    return ways


def on_rails(*ordinals: int) -> Callable[[Offer], Needs]:
    """Of the rails that pairs are on, whatever their numbers among all of the machine's."""

    def ways(offer: Offer) -> Needs:
        rails = sorted(
            {rail for one in _pairs(offer) if isinstance(rail := one.attributes.get(names.RAIL), int)}
        )
        if len(rails) > max(ordinals):
            yield [[one for one in _pairs(offer) if one.attributes[names.RAIL] == rails[n]] for n in ordinals]

    return ways


def devices(kind: str, count: int, **attributes: object) -> Callable[[Offer], Needs]:
    def ways(offer: Offer) -> Needs:
        yield [_of(offer, kind, **attributes)] * count

    return ways


def has(offer: Offer, form: Form) -> bool:
    """Whether some way has devices of which no two share hardware."""

    def choose(wanted: Sequence[Sequence[OfferedDevice]], taken: frozenset[str]) -> bool:
        if not wanted:
            return True
        return any(
            choose(wanted[1:], taken | one.parts) for one in wanted[0] if not overlap(one.parts, taken)
        )

    return any(choose(way, frozenset()) for way in form.needs(offer) if _enough(way))


def _enough(way: Sequence[Sequence[OfferedDevice]]) -> bool:
    """Spares the search where one of the rows is plainly too short."""
    return all(len(row) >= sum(other is row or other == row for other in way) for row in way)


FORMS: Mapping[str, Form] = {
    "one": Form("--pairs 1", 1, 1, pairs(1)),
    "eight": Form("--pairs 8", 8, 8, pairs(8)),
    "whole": Form("--pairs 8 --whole-node", 8, 1, pairs(8)),
    "switch": Form("--gpus 2 --vfs 2 --same-switch", 2, 2, under_one_switch(2)),
    "uneven": Form("--gpus 2 --vfs 1 --same-switch", 2, 1, under_one_switch(1, gpus=1)),
    "more-vfs": Form("--gpus 1 --vfs 2 --same-switch", 1, 2, under_one_switch(1, nics=1)),
    "pairs-of-a-switch": Form("--pairs 2 --same-switch", 2, 2, under_one_switch(2)),
    "fallback": Form("--pairs 4 --fallback numa,any", 4, 4, devices(names.KIND_PAIR, 4)),
    "apart": Form("--gpus 2 --vfs 2", 2, 2, pairs(0, gpus=2, nics=2)),
    "rails": Form("--pairs 2 --rail-aligned", 2, 2, on_rails(0, 1), (0, 1)),
    "all-rails": Form("--pairs 8 --rail-aligned", 8, 8, on_rails(*range(8)), tuple(range(8))),
    "other-rails": Form("--pairs 2 --rails 3,2", 2, 2, on_rails(3, 2), (3, 2)),
    "mixed": Form("--pairs 2 --gpus 1 --vfs 1", 3, 3, pairs(2, gpus=1, nics=1)),
    "groups": Form("--groups 2", 0, 0, devices(names.KIND_GROUP, 2)),
    "twos": Form("--groups 2 --gpus-per-group 2", 4, 0, devices(names.KIND_GROUP, 2, GPU_COUNT=2)),
    "class": Form("--class rdma-vf-of-all.railmate.dev=2", 0, 2, devices(names.KIND_RDMA_VF, 2)),
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
    objects: list[dict[str, Any]] = json.loads(_printed(name, FORMS[form].flags))["items"]
    objects[-1]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": f"n-{name}"}
    # the placeholders are for a real machine; these nodes have CPUs and memory for something else
    objects[-1]["spec"]["containers"][0]["resources"].pop("requests")
    return objects


@cache
def _printed(name: str, flags: str) -> str:
    code, text = run("claim", *flags.split(), "--for", "pod", "--name", name, "-o", "json")
    assert code == 0
    return text


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
    given = [offer_of(case).by_name[name] for name in outcome.foretold]
    if not given:
        return
    wanted = FORMS[form]
    if wanted.gpus:
        assert sum(len(one.gpus) for one in given) == wanted.gpus
    if wanted.nics:
        assert sum(1 for one in given if one.nics) == wanted.nics
    parts = [part for one in given for part in one.gpus + one.nics]
    assert len(parts) == len(set(parts)), "nothing goes out twice"
    if "--same-switch" in wanted.flags:
        assert len({one.attributes[names.PCIE_SWITCH] for one in given}) == 1
    if wanted.rails:
        of_pairs = sorted(
            {rail for one in _pairs(offer_of(case)) if (rail := one.attributes.get(names.RAIL)) is not None}
        )
        assert [of_pairs.index(one.attributes[names.RAIL]) for one in given] == list(wanted.rails)


def test_every_form_finds_a_machine_that_has_the_hardware(outcomes: Mapping[str, Outcome]) -> None:
    found = {form for case, form in TRIED if outcomes[name_of(case, form)].given}
    assert found == set(FORMS)


@pytest.mark.parametrize("form", FORMS)
def test_every_machine_that_has_the_hardware_takes_the_form_and_no_other_does(
    outcomes: Mapping[str, Outcome], form: str
) -> None:
    """Told from the offer alone, so that the scheduler and explain cannot be wrong together."""
    taken = {case.name for case in MACHINES if outcomes[name_of(case, form)].foretold}
    assert taken == {case.name for case in MACHINES if has(offer_of(case), FORMS[form])}


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
