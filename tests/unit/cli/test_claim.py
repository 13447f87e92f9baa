"""railmate claim: what is written for each form, by meaning, and what is refused with which way out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from railmate.cli.main import main
from railmate.inventory.model import Inventory
from railmate.publish.devices import build_offer
from railmate.publish.slices import resource_slices
from railmate.topology.analyze import analyze
from unit.publish.offered_machines import big, built

Run = Callable[..., list[dict[str, Any]]]
PAIR, GPU, VF = "gpu-rdma-pair.railmate.dev", "gpu.railmate.dev", "rdma-vf.railmate.dev"
NUMA, ANY, GROUP = (
    "gpu-rdma-pair-numa.railmate.dev",
    "gpu-rdma-pair-any.railmate.dev",
    "gpu-rdma-group.railmate.dev",
)
NODE = "gpu-rdma-node.railmate.dev"
SWITCH = "railmate.dev/pcieSwitch"


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> Run:
    """The objects that the command writes."""

    def run(*flags: str | Path) -> list[dict[str, Any]]:
        assert main(["claim", *map(str, flags)]) == 0
        return list(yaml.safe_load_all(capsys.readouterr().out))

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*flags: str | Path) -> tuple[int, str]:
        code = main(["claim", *map(str, flags)])
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        return code, err

    return run


@pytest.fixture(scope="module")
def dgx(scanned: Callable[[str, int], Inventory], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved slices of a DGX A100."""
    inventory = scanned("dgx-a100", 4)
    path = tmp_path_factory.mktemp("slices") / "slices.yaml"
    slices = resource_slices(build_offer(inventory, analyze(inventory)), "railmate.dev", "dgx")
    path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": slices}))
    return path


@pytest.fixture(scope="module")
def bigger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved slices of a machine with 16 GPUs and as many NICs."""
    offer = built("big", big(switches=8, gpus=2, nics=2), {}).offer
    path = tmp_path_factory.mktemp("slices") / "bigger.yaml"
    slices = resource_slices(offer, "railmate.dev", "bigger")
    path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": slices}))
    return path


def devices(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (template,) = [one for one in objects if one["kind"] == "ResourceClaimTemplate"]
    assert template["apiVersion"] == "resource.k8s.io/v1"
    found: dict[str, Any] = template["spec"]["spec"]["devices"]
    return found


def asked(objects: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    return [
        (one["name"], one["exactly"]["deviceClassName"], one["exactly"]["count"])
        for one in devices(objects)["requests"]
    ]


def test_pairs_are_one_request_with_a_count_and_no_constraint(written: Run) -> None:
    objects = written("--pairs", "8")
    assert asked(objects) == [("pairs", PAIR, 8)]
    assert "constraints" not in devices(objects)


def test_gpus_and_vfs_of_one_switch_become_pairs_and_one_constraint(written: Run) -> None:
    objects = written("--gpus", "2", "--vfs", "2", "--same-switch")
    assert asked(objects) == [("pairs", PAIR, 2)]
    assert devices(objects)["constraints"] == [{"requests": ["pairs"], "matchAttribute": SWITCH}]


@pytest.mark.parametrize(("gpus", "vfs", "rest"), [("3", "2", ("gpus", GPU, 1)), ("1", "3", ("vfs", VF, 2))])
def test_what_has_no_other_half_is_asked_for_alone_on_the_same_switch(
    written: Run, gpus: str, vfs: str, rest: tuple[str, str, int]
) -> None:
    objects = written("--gpus", gpus, "--vfs", vfs, "--same-switch")
    assert asked(objects) == [("pairs", PAIR, min(int(gpus), int(vfs))), rest]
    (constraint,) = devices(objects)["constraints"]
    assert constraint == {"requests": ["pairs", rest[0]], "matchAttribute": SWITCH}


def test_fallbacks_are_alternatives_in_the_order_given(written: Run) -> None:
    (request,) = devices(written("--pairs", "4", "--fallback", "numa,any"))["requests"]
    assert request["firstAvailable"] == [
        {"name": "switch", "deviceClassName": PAIR, "count": 4},
        {"name": "numa", "deviceClassName": NUMA, "count": 4},
        {"name": "any", "deviceClassName": ANY, "count": 4},
    ]


def test_rails_are_a_request_each_in_their_order(written: Run) -> None:
    """One with a count would take two pairs of one rail where GPUs share a NIC."""
    for flags, rails in ((["--rail-aligned"], (0, 1)), (["--rails", "5,4"], (5, 4))):
        objects = written("--pairs", "2", *flags)
        assert asked(objects) == [(f"rail-{rail}", PAIR, 1) for rail in rails]
        for rail, request in zip(rails, devices(objects)["requests"], strict=True):
            (selector,) = request["exactly"]["selectors"]
            assert selector["cel"]["expression"].endswith(f".?rail).orValue(-1) == {rail}")


def test_each_rail_has_the_alternatives(written: Run) -> None:
    for request in devices(written("--pairs", "2", "--rail-aligned", "--fallback", "any"))["requests"]:
        classes = [(one["name"], one["deviceClassName"]) for one in request["firstAvailable"]]
        assert classes == [("switch", PAIR), ("any", ANY)]
        assert len({one["selectors"][0]["cel"]["expression"] for one in request["firstAvailable"]}) == 1


def test_scarcest_request_comes_first(written: Run) -> None:
    objects = written(
        "--vfs", "1", "--gpus", "2", "--pairs", "3", "--groups", "1", "--class", "nic.example.com=2"
    )
    assert [name for name, _, _ in asked(objects)] == ["groups", "pairs", "nic", "gpus", "vfs"]


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--class gpu.nvidia.com --class gpu.amd.com --class gpu.intel.com", ["gpu", "gpu-2", "gpu-3"]),
        ("--class vfs.x --vfs 1", ["vfs-2", "vfs"]),
        ("--class gpu.a --class gpu-2.a --class gpu.b", ["gpu", "gpu-2", "gpu-3"]),
        ("--class rail-1.x --pairs 2 --rail-aligned", ["rail-0", "rail-1", "rail-1-2"]),
        (f"--class {'x' * 63}.a --class {'x' * 63}.b", ["x" * 63, "x" * 61 + "-2"]),
    ],
)
def test_requests_have_names_of_their_own(written: Run, flags: str, names: list[str]) -> None:
    """The API refuses a claim with two of one name."""
    assert [name for name, _, _ in asked(written(*flags.split()))] == names


def test_groups_may_be_of_a_size(written: Run) -> None:
    (request,) = devices(written("--groups", "4", "--gpus-per-group", "2"))["requests"]
    assert (request["exactly"]["deviceClassName"], request["exactly"]["count"]) == (GROUP, 4)
    assert "gpuCount.orValue(0) == 2" in request["exactly"]["selectors"][0]["cel"]["expression"]


def test_yaml_says_why_it_is_as_it_is_and_json_is_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claim", "--gpus", "2", "--vfs", "2", "--same-switch"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# GPU and VF are asked for as pair devices")
    assert all(len(line) <= 112 for line in out.splitlines())
    assert main(["claim", "--gpus", "2", "--vfs", "2", "-o", "json"]) == 0
    assert [one["kind"] for one in json.loads(capsys.readouterr().out)["items"]] == ["ResourceClaimTemplate"]


@pytest.mark.parametrize(
    ("kind", "kinds"),
    [("pod", ["Pod"]), ("job", ["Service", "Job"]), ("jobset", ["JobSet"]), ("kueue", ["Service", "Job"])],
)
def test_workload_uses_the_template_of_the_same_name(written: Run, kind: str, kinds: list[str]) -> None:
    template, *objects = written(
        "--pairs", "2", "--for", kind, "--name", "train", "-n", "team", "--nodes", "3", "--queue", "gpus"
    )
    assert [one["kind"] for one in objects] == kinds
    assert {one["metadata"]["namespace"] for one in (template, *objects)} == {"team"}
    workload = objects[-1]
    if kind == "jobset":
        (replicated,) = workload["spec"]["replicatedJobs"]
        job = replicated["template"]["spec"]
    else:
        job = workload["spec"]
    pod = job if kind == "pod" else job["template"]["spec"]
    assert pod["resourceClaims"] == [{"name": "devices", "resourceClaimTemplateName": "train"}]
    assert pod["containers"][0]["resources"]["claims"] == [{"name": "devices"}]
    if kind != "pod":
        assert (job["completions"], job["parallelism"], job["completionMode"]) == (3, 3, "Indexed")
    if kind == "kueue":
        assert workload["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "gpus"}
        assert workload["spec"]["suspend"] is True


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "nothing is asked for"),
        (["--pairs", "0"], "--pairs 0: must be 1 or more"),
        (["--gpus", "-1"], "--gpus -1: must be 1 or more"),
        (["--pairs", "33"], "a claim holds 32 at most"),
        (["--gpus", "16", "--vfs", "17"], "a claim holds 32 at most"),
        (["--gpus", "2", "--fallback", "numa"], "--fallback is about pairs"),
        (["--pairs", "2", "--fallback", "numa,far"], "--fallback far: only numa and any"),
        (["--pairs", "2", "--fallback", "numa,numa"], "twice"),
        (["--pairs", "2", "--fallback", "numa", "--same-switch"], "contradict each other"),
        (["--gpus", "2", "--rail-aligned"], "--rail-aligned is about pairs"),
        (["--pairs", "2", "--rails", "1"], "1 rails for 2 pairs"),
        (["--pairs", "2", "--rails", "1,x"], "must be different numbers"),
        (["--pairs", "1", "--same-switch"], "needs two devices"),
        (["--vfs", "2", "--whole-node"], "--whole-node goes with --pairs N"),
        (["--pairs", "8", "--gpus", "1", "--whole-node"], "--whole-node goes with --pairs N alone"),
        (["--groups", "1", "--same-switch"], "a group is already"),
        (["--pairs", "1", "--gpus-per-group", "2"], "give --groups N"),
        (["--class", f"{PAIR}=2"], "use --pairs for it"),
        (["--class", "nic.example.com=x"], "CLASS=N"),
        (["--class", "a.b", "--class", "a.b"], "a class twice"),
        (["--pairs", "1", "--name", "Not_A_Name"], "--name"),
        (["--pairs", "1", "--for", "job", "--nodes", "0"], "--nodes 0"),
        (["--pairs", "1", "--slices", "/no/such/file"], "cannot be read"),
    ],
)
def test_what_cannot_be_is_bad_usage_with_the_way_out(
    refused: Callable[..., tuple[int, str]], flags: list[str], words: str
) -> None:
    code, err = refused(*flags)
    assert code == 2
    assert words in err


def test_claim_that_suits_the_slices_is_written(written: Run, dgx: Path) -> None:
    assert asked(written("--pairs", "7", "--slices", dgx)) == [("pairs", PAIR, 7)]


def test_all_pairs_of_a_node_are_asked_for_as_one_device_where_the_slices_have_it(
    written: Run, dgx: Path, bigger: Path
) -> None:
    whole = devices(written("--pairs", "8", "--whole-node"))
    (one,) = whole["requests"]
    assert (one["exactly"]["deviceClassName"], one["exactly"]["count"]) == (NODE, 1)
    assert "gpuCount.orValue(0) == 8" in one["exactly"]["selectors"][0]["cel"]["expression"]
    assert devices(written("--pairs", "8", "--slices", dgx)) == whole
    for more in (["--rail-aligned"], ["--same-switch"], ["--gpus", "1"], ["--fallback", "any"]):
        with contextlib.suppress(AssertionError):  # some of it fits on no node
            assert NODE not in str(written("--pairs", "8", *more, "--slices", dgx))
    both = asked(written("--pairs", "8", "--slices", dgx, "--slices", bigger))
    assert both == [("pairs", PAIR, 8)], "where eight are half of a node, that would be left out"
    assert asked(written("--pairs", "16", "--slices", dgx, "--slices", bigger)) == [("node", NODE, 1)]


def test_kueue_gets_what_it_can_count_also_where_the_slices_have_whole_nodes(written: Run, dgx: Path) -> None:
    objects = written("--pairs", "8", "--for", "kueue", "--slices", dgx)
    assert devices(objects) == {
        "requests": [{"name": "pairs", "exactly": {"deviceClassName": PAIR, "count": 8}}]
    }


@pytest.mark.parametrize(
    "flags",
    [
        "--pairs 8 --whole-node",
        "--pairs 2 --same-switch",
        "--pairs 2 --rail-aligned",
        "--pairs 2 --rails 4,5",
        "--pairs 2 --fallback numa",
        "--groups 2 --gpus-per-group 2",
    ],
)
def test_what_kueue_would_never_admit_is_refused_with_the_way_out(
    refused: Callable[..., tuple[int, str]], flags: str
) -> None:
    code, err = refused(*flags.split(), "--for", "kueue")
    assert code == 2
    assert "Kueue counts only requests of a class and a number" in err
    assert "or use --for job" in err


def test_pods_around_a_whole_node_ask_for_the_cpus_of_all_its_gpus(written: Run) -> None:
    one, other = (
        written("--pairs", "8", *more, "--for", "pod")[-1]["spec"]["containers"][0]["resources"]["requests"]
        for more in ([], ["--whole-node"])
    )
    assert one == other


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--pairs", "9"], "8 instead of 9"),
        (["--gpus", "3", "--vfs", "3", "--same-switch"], "any pcieSwitch"),
        (
            ["--groups", "1"],
            f"no device is of class {GROUP}. Classes with devices: {NODE}, {ANY}, {PAIR}, {GPU}, {VF}",
        ),
        (["--pairs", "10", "--whole-node"], "without the selector"),
        (["--class", "nic.example.com"], "no device is of class nic.example.com"),
        (
            ["--pairs", "2", "--rails", "9,1"],
            "no pair is on rail 9. The pairs there are on rails 0, 1, 2, 3, 4, 5, 6, 7",
        ),
        (["--pairs", "9", "--rail-aligned"], "no pair is on rail 8"),
    ],
)
def test_claim_that_no_node_of_the_slices_could_take_is_refused_with_the_nearest(
    refused: Callable[..., tuple[int, str]], dgx: Path, flags: list[str], words: str
) -> None:
    code, err = refused(*flags, "--slices", dgx)
    assert code == 1
    assert words in err


def test_alternatives_need_only_one_class_that_the_slices_have(written: Run, dgx: Path) -> None:
    assert len(written("--pairs", "4", "--fallback", "numa", "--slices", dgx)) == 1
