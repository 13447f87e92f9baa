"""The scheduler bench's own reckoning: variants, what is aligned and stranded, spread and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.bench_scheduler_forms import FORMS, BenchMachine, parse_variant
from harness.bench_scheduler_measure import Load, partly_taken, stranded_gpus
from harness.bench_scheduler_report import delays, failures, percentile, ratios, report
from harness.bench_scheduler_site import _samples, scheduler_config
from harness.shell import UsageError


@pytest.fixture(scope="module")
def machine() -> BenchMachine:
    return BenchMachine()


def test_the_machine_is_the_one_that_is_promised(machine: BenchMachine) -> None:
    nics = machine.inventory.nics
    rails = {nic.function.physical_function for nic in nics if nic.is_vf}
    switches = {machine.switch(gpu.address) for gpu in machine.inventory.gpus}
    assert (machine.gpus, len(rails), sum(nic.is_vf for nic in nics), len(switches)) == (8, 8, 32, 4)


def test_the_form_with_constraints_is_given_as_little_to_look_at_as_it_can(machine: BenchMachine) -> None:
    offer = FORMS["constraint"].offer(machine)
    assert {device.kind for device in offer.devices} == {"gpu", "rdma-vf"}
    assert len(offer.devices) == 8 + 32
    assert not offer.counter_sets
    assert not any(device.consumes for device in offer.devices)


def test_whole_switches_are_asked_for_as_groups(machine: BenchMachine) -> None:
    form = FORMS["groups"]
    asked = {one["name"]: one["exactly"]["count"] for one in form.devices(5)["requests"]}
    assert asked == {"switches": 2, "pairs": 1}
    groups = [device for device in form.offer(machine).devices if device.kind == "group"]
    assert len(groups) == 4
    pairs = form.pairs([{"request": "switches", "device": one.name} for one in groups], form.offer(machine))
    assert len(set(pairs)) == 8
    assert all(machine.aligned(pair) for pair in pairs)


def test_a_whole_node_is_asked_for_as_one_device(machine: BenchMachine) -> None:
    form = FORMS["node"]
    asked = [form.devices(count)["requests"][0]["exactly"] for count in (8, 7)]
    assert [(one["deviceClassName"].split(".")[0], one["count"]) for one in asked] == [
        ("gpu-rdma-node", 1),
        ("gpu-rdma-pair", 7),
    ]
    (node,) = [device for device in form.offer(machine).devices if device.kind == "node"]
    pairs = form.pairs([{"request": "node", "device": node.name}], form.offer(machine))
    assert len(set(pairs)) == 8
    assert all(machine.aligned(pair) for pair in pairs)


@pytest.mark.parametrize("form", ["pairs", "constraint"])
def test_results_of_a_claim_become_pairs_that_the_machine_can_judge(machine: BenchMachine, form: str) -> None:
    offer = FORMS[form].offer(machine)
    if form == "pairs":
        devices = [device for device in offer.devices if device.kind == "pair"]
        results = [{"request": "pairs", "device": device.name} for device in devices[:2]]
        expected = [(device.gpus[0], device.nics[0]) for device in devices[:2]]
    else:
        gpu = next(device for device in offer.devices if device.kind == "gpu")
        wrong = next(
            device
            for device in offer.devices
            if device.kind == "rdma-vf" and machine.switch(device.nics[0]) != machine.switch(gpu.gpus[0])
        )
        results = [
            {"request": "vf-0", "device": wrong.name},
            {"request": "gpu-0", "device": gpu.name},
        ]
        expected = [(gpu.gpus[0], wrong.nics[0])]
    found = FORMS[form].pairs(results, offer)
    assert found == expected
    assert all(machine.aligned(pair) for pair in found) == (form == "pairs")


def test_a_free_gpu_without_a_free_nic_below_its_switch_is_stranded(machine: BenchMachine) -> None:
    gpu = machine.inventory.gpus[0].address
    switch = machine.switch(gpu)
    below = [
        nic.address for nic in machine.inventory.nics if nic.is_vf and machine.switch(nic.address) == switch
    ]
    assert stranded_gpus(machine, ["a", "b"], {}) == (0, 16)
    assert stranded_gpus(machine, ["a", "b"], {"a": below[:-2]}) == (0, 16)
    assert stranded_gpus(machine, ["a", "b"], {"a": below[:-1]}) == (1, 16)
    assert stranded_gpus(machine, ["a", "b"], {"a": [gpu, *below[:-1]]}) == (0, 15)


def test_a_node_is_partly_taken_until_all_of_its_gpus_are(machine: BenchMachine) -> None:
    gpus = [gpu.address for gpu in machine.inventory.gpus]
    assert partly_taken(machine, {"a": gpus[:1], "b": gpus, "c": []}) == 1


def test_a_load_leaves_room_for_pods_that_wait() -> None:
    assert Load(60, 16, 1, free_nodes=75).population(8) == 32
    assert Load(60, 16, 1, free_nodes=20).population(8) == 4
    with pytest.raises(UsageError, match="16 free nodes have no room for 16 pods of 8 pairs"):
        Load(60, 16, 1, free_nodes=16).population(8)


def test_a_variant_is_a_form_and_words(tmp_path: Path) -> None:
    file = tmp_path / "packing.yaml"
    file.write_text("kind: KubeSchedulerConfiguration\n")
    variant = parse_variant(f"pairs+proportional+{file}")
    assert (variant.name, variant.form.name, variant.config) == ("pairs+proportional+packing", "pairs", file)
    assert variant.resources(8) == {"cpu": "240000m", "memory": "960Gi"}
    assert parse_variant("constraint").resources(8) == parse_variant("constraint").resources(1)
    limits = parse_variant("pairs+controller-limits")
    assert (limits.scheduler_limits, limits.controller_limits, limits.proportional) == (False, True, False)


@pytest.mark.parametrize("text", ["pears", "pairs+nowhere.yaml"])
def test_an_unknown_form_or_word_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=text.split("+")[-1]):
        parse_variant(text)


def test_a_file_keeps_its_client_limits_and_gets_the_kubeconfig(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("kind: KubeSchedulerConfiguration\nclientConnection: {qps: 7, burst: 9}\n")
    config = yaml.safe_load(scheduler_config(file, tmp_path / "kubeconfig", 500, 1000))
    assert config["clientConnection"] == {"qps": 7, "burst": 9, "kubeconfig": str(tmp_path / "kubeconfig")}
    file.write_text("kind: KubeSchedulerConfiguration\n")
    config = yaml.safe_load(scheduler_config(file, tmp_path / "kubeconfig", 500, 1000))
    assert (config["clientConnection"]["qps"], config["leaderElection"]["leaderElect"]) == (500, False)


def test_samples_of_a_metric_are_read_with_their_labels() -> None:
    text = '# TYPE m counter\nm{verb="POST",code="201"} 3\nmore{verb="POST"} 9\nm{verb="GET",code=""} 1e+01\n'
    assert list(_samples(text, "m")) == [
        ({"verb": "POST", "code": "201"}, 3.0),
        ({"verb": "GET", "code": ""}, 10.0),
    ]


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile([1.0, float("inf")], 0.99) == float("inf")


def results(**changes: Any) -> dict[str, Any]:
    """What a run leaves: two forms, two rounds of pods for eight pairs."""

    def rounds(*rates: float) -> list[dict[str, Any]]:
        return [
            {"podsPerSecond": rate, "aloneMs": [10.0], "busyMs": [20.0], "writesPerPod": 12.0,
             "schedulerCpuMsPerPod": 5.0, "alignedShare": 1.0, "strandedShare": 0.0, "nodesPartlyTaken": 3}
            for rate in rates
        ]  # fmt: skip

    waiting = {
        "beforeMs": [10.0] * 99 + [100.0], "waitingMs": [10.0] * 98 + [200.0] * 2, "notPlaced": 0,
        "besideFittingMs": [1500.0] * 100, "arrivingMs": [900.0] * 100,
        "infeasiblePlaced": 0, "seconds": 5.0, "schedulerCpuSeconds": 2.0,
        "attempts": {"unschedulable": {"count": 4, "seconds": 0.1}},
    }  # fmt: skip
    site = {"slices": 2, "jsonBytes": 19000, "storedBytes": 14000, "rss": 300.0}
    return {
        "nodes": 1000, "fill": 0.25, "rounds": 2, "sizes": [8], "infeasible": 100,
        "sites": {"pairs": site, "constraint": site},
        "churn": {"pairs": {"8": rounds(12.0, 10.0)}, "constraint": {"8": rounds(2.0, 2.5)}},
        "waiting": {"pairs+proportional": {"oneShort": waiting}}, **changes,
    }  # fmt: skip


def test_rates_are_compared_round_by_round() -> None:
    assert ratios(results(), 8) == [6.0, 4.0]
    assert failures(results()) == []
    text = "\n".join(report(results()))
    assert "pairs places 5.0 (4.0–6.0) times as many pods a second as constraint" in text


def test_limits_that_are_not_kept_are_said() -> None:
    slow = results()
    slow["churn"]["constraint"]["8"][0]["podsPerSecond"] = 6.0
    assert failures(slow) == ["pods of 8 pairs: 3.0 times the rate of constraints, not 4.0"]
    assert failures({**slow, "nodes": 100}) == [], "the limit is one for big clusters"

    late = results()
    one = late["waiting"]["pairs+proportional"]["oneShort"]
    one["waitingMs"] = [10.0] * 90 + [float("inf")] * 10
    assert delays(one) == {"arriving": -0.6, "waiting": float("inf")}
    assert failures(late) == [
        "pairs+proportional, oneShort: waiting infeasible pods delay others by inf s, not 0.5 at most"
    ]
    one["beforeMs"], one["waitingMs"] = [100.0] * 100, [590.0] * 100
    assert failures(late) == []
    one["waitingMs"] = [610.0] * 100
    assert failures(late) == [
        "pairs+proportional, oneShort: waiting infeasible pods delay others by 0.51 s, not 0.5 at most"
    ]
    one["waitingMs"], one["arrivingMs"] = [10.0] * 100, [2010.0] * 100
    assert failures(late) == [
        "pairs+proportional, oneShort: arriving infeasible pods delay others by 0.51 s, not 0.5 at most"
    ]

    dear = results()
    one = dear["waiting"]["pairs+proportional"]["oneShort"]
    cheap = {**one, "attempts": {"unschedulable": {"count": 8, "seconds": 0.09}}}
    dear["waiting"] = {"pairs": {"oneShort": one}, "node": {"oneShort": cheap}}
    assert failures(dear) == []
    dear["waiting"]["node"]["oneShort"] = one
    assert failures(dear) == [
        "an attempt for a whole node takes 1.00 of one for eight pairs, not 0.5 at most"
    ]

    wrong = results()
    wrong["churn"]["pairs"]["8"][1]["alignedShare"] = 0.99
    assert failures(wrong) == ["pairs, 8 pairs: alignedShare is not 1.0"]
