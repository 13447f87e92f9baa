"""The real scheduler with what railmate publishes: what is given together, and what never twice."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from component.conftest import CLAIMS, Cluster, request
from railmate.inventory.model import Inventory
from railmate.publish.model import Offer, OfferedDevice
from railmate.publish.shared import SharedPfs
from railmate_api import attributes as names
from unit.publish.offered_machines import cut_up, four_nics
from unit.publish.offers import offer_of, without_driver

Offers = Callable[..., Offer]
GPU, VF, PAIR = "gpu.railmate.dev", "rdma-vf.railmate.dev", "gpu-rdma-pair.railmate.dev"
CLASSES = (
    GPU,
    VF,
    PAIR,
    names.CLASS_PAIR_NUMA,
    names.CLASS_PAIR_ANY,
    names.CLASS_GROUP,
    names.CLASS_NODE,
    names.CLASS_GPU_PARTITION,
)
SWITCH = "railmate.dev/pcieSwitch"
FACTS = Path(__file__).resolve().parents[1] / "machines" / "dgx-a100.yaml"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def node(cluster: Cluster, offers: Offers, request: pytest.FixtureRequest) -> str:
    """A DGX A100 with 4 VFs on each rail, of this test's own name; free of pods at the end."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())[:50].strip("-")
    cluster.node(name)
    cluster.publish(name, offers())
    return name


def attribute(name: str, value: str) -> str:
    domain, _, plain = name.partition("/")
    return f'device.attributes["{domain}"].?{plain}.orValue("") == "{value}"'


def take(
    cluster: Cluster, node: str, suffix: str, *requests: dict[str, Any], match: str | None = None
) -> list[str]:
    """A pod with a claim; the devices it got, none when the scheduler refused it."""
    claim = cluster.claim(f"{node}-{suffix}", *requests, match=match)
    cluster.verdict(cluster.pod(f"{node}-{suffix}", node, claim))
    return cluster.allocated(claim)


def parts(offer: Offer, *devices: str) -> list[str]:
    return [part for name in devices for part in offer.by_name[name].gpus + offer.by_name[name].nics]


def test_a_pair_is_one_that_the_facts_call_right(cluster: Cluster, offers: Offers, node: str) -> None:
    expected = yaml.safe_load(FACTS.read_text())["expected"]
    (device,) = take(cluster, node, "pod", request("pair", PAIR))
    pair = offers().by_name[device]
    parent = pair.facts["railmate.dev/pfPciBusID"]
    assert {"gpus": list(pair.gpus), "nics": [parent]} in expected["pairs"]
    assert parent in expected["best"][pair.gpus[0]]


def test_eight_pairs_are_one_claim_and_a_ninth_waits(cluster: Cluster, offers: Offers, node: str) -> None:
    devices = take(cluster, node, "eight", request("pairs", PAIR, 8))
    assert len(set(parts(offers(), *devices))) == 16
    took = []
    for attempt in range(3):  # the machine is shared: one quick verdict is proof enough
        claim = cluster.claim(f"{node}-ninth{attempt}", request("pair", PAIR))
        began = time.monotonic()
        message = cluster.verdict(cluster.pod(f"{node}-ninth{attempt}", node, claim))
        took.append(time.monotonic() - began)
        assert "cannot allocate all claims" in message
    assert min(took) < 1.0
    free = cluster.claim(f"{node}-vf", request("vf", VF))
    assert cluster.verdict(cluster.pod(f"{node}-vf", node, free)) == "", "others go on scheduling"
    assert cluster.verdict(cluster.pod(f"{node}-plain", node)) == ""


def test_eight_claims_of_a_pair_each_take_eight_and_the_ninth_waits_for_one(
    cluster: Cluster, offers: Offers, node: str
) -> None:
    taken = [take(cluster, node, str(n), request("pair", PAIR)) for n in range(8)]
    assert len(set(parts(offers(), *(device for devices in taken for device in devices)))) == 16
    claim = cluster.claim(f"{node}-ninth", request("pair", PAIR))
    assert cluster.verdict(cluster.pod(f"{node}-ninth", node, claim)) != ""
    cluster.delete_pod(f"{node}-3")
    cluster.delete_claim(f"{node}-3")
    cluster.scheduled(f"{node}-ninth")
    assert cluster.allocated(claim) == taken[3], "the same devices go to the next"


def test_nine_pairs_in_one_claim_are_refused_at_once(cluster: Cluster, node: str) -> None:
    claim = cluster.claim(f"{node}-nine", request("pairs", PAIR, 9))
    began = time.monotonic()
    assert "cannot allocate all claims" in cluster.verdict(cluster.pod(f"{node}-nine", node, claim))
    assert time.monotonic() - began < 5


def test_first_fit_fills_a_switch_before_it_opens_the_next(
    cluster: Cluster, offers: Offers, node: str
) -> None:
    offer = offers()
    taken = [take(cluster, node, str(n), request("pair", PAIR))[0] for n in range(4)]
    switches = [offer.by_name[device].attributes[SWITCH] for device in taken]
    assert switches == ["0000:01:00.0", "0000:01:00.0", "0000:41:00.0", "0000:41:00.0"]


def test_gpu_in_a_pair_is_not_allocatable_alone(cluster: Cluster, offers: Offers, node: str) -> None:
    (device,) = take(cluster, node, "pair", request("pair", PAIR))
    gpu = offers().by_name[device].gpus[0]
    only = attribute("resource.kubernetes.io/pciBusID", gpu)
    assert take(cluster, node, "alone", request("gpu", GPU, expression=only)) == []
    assert len(take(cluster, node, "rest", request("gpus", GPU, 7))) == 7
    assert take(cluster, node, "one-too-many", request("gpu", GPU)) == []


def test_pair_whose_gpu_is_taken_is_not_allocatable(cluster: Cluster, offers: Offers, node: str) -> None:
    (device,) = take(cluster, node, "alone", request("gpu", GPU))
    gpu = offers().by_name[device].gpus[0]
    only = attribute("railmate.dev/gpuPciBusID", gpu)
    assert take(cluster, node, "pair", request("pair", PAIR, expression=only)) == []
    assert len(take(cluster, node, "rest", request("pairs", PAIR, 7))) == 7


@pytest.mark.parametrize(("vfs", "share"), [(1, False), (4, True)])
def test_vf_of_a_pair_goes_out_under_one_name_only(
    cluster: Cluster, offers: Offers, vfs: int, share: bool
) -> None:
    node, offer = cluster.node(f"shared-vf-{vfs}"), offers("dgx-a100", vfs, share_pair_vfs=share)
    cluster.publish(node, offer)
    (pair,) = take(cluster, node, "pair", request("pair", PAIR))
    vf = attribute("resource.kubernetes.io/pciBusID", offer.by_name[pair].nics[0])
    assert take(cluster, node, "alone", request("vf", VF, expression=vf)) == []

    other = next(d for d in offer.devices if d.kind == "pair" and d.name != pair)
    vf = attribute("resource.kubernetes.io/pciBusID", other.nics[0])
    assert len(take(cluster, node, "first", request("vf", VF, expression=vf))) == 1
    only = attribute("railmate.dev/gpuPciBusID", other.gpus[0])
    assert take(cluster, node, "late", request("pair", PAIR, expression=only)) == []
    alone = attribute("resource.kubernetes.io/pciBusID", other.gpus[0])
    assert len(take(cluster, node, "gpu", request("gpu", GPU, expression=alone))) == 1, "its GPU is free"


def test_vfs_kept_for_pairs_are_not_allocatable_alone(cluster: Cluster, offers: Offers, node: str) -> None:
    kept = next(d for d in offers().devices if d.name.startswith("pair-0000-07-00-0")).nics[0]
    only = attribute("resource.kubernetes.io/pciBusID", kept)
    assert take(cluster, node, "kept", request("vf", VF, expression=only)) == []
    assert len(take(cluster, node, "all", request("vfs", VF, 24))) == 24
    assert len(take(cluster, node, "pairs", request("pairs", PAIR, 8))) == 8


@pytest.mark.parametrize("name", [SWITCH, "resource.kubernetes.io/pcieRoot"])
def test_gpu_and_vf_are_joined_by_attribute(cluster: Cluster, offers: Offers, node: str, name: str) -> None:
    offer = offers()
    for number in range(4):
        wanted = [request("gpu", GPU), request("vf", VF)]
        gpu, vf = take(cluster, node, str(number), *wanted, match=name)
        assert offer.by_name[gpu].attributes[name] == offer.by_name[vf].attributes[name]


def test_nics_alone_are_joined_with_the_gpus_of_another_vendors_driver(
    cluster: Cluster, offers: Offers, scanned: Callable[[str, int], Inventory]
) -> None:
    """By the host bridge, as its driver and ours publish it in the attribute that is everybody's."""
    node, offer = cluster.node("foreign-gpus"), offers(nics_only=True)
    cluster.publish(node, offer)
    root = "resource.kubernetes.io/pcieRoot"
    gpus = {f"gpu-{n}": gpu.function.pcie_root for n, gpu in enumerate(scanned("dgx-a100", 4).gpus)}
    body = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": node},
        "spec": {
            "driver": "gpu.example.com",
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": name, "attributes": {root: {"string": of}}} for name, of in gpus.items()],
        },
    }
    cluster.plane.request("POST", "/apis/resource.k8s.io/v1/resourceslices", body)
    cel = {"expression": 'device.driver == "gpu.example.com"'}
    body = {"metadata": {"name": "gpu.example.com"}, "spec": {"selectors": [{"cel": cel}]}}
    body |= {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass"}
    cluster.plane.request("POST", "/apis/resource.k8s.io/v1/deviceclasses", body)
    for number in range(8):
        gpu, vf = take(
            cluster, node, str(number), request("gpu", "gpu.example.com"), request("vf", VF), match=root
        )
        assert gpus[gpu] == offer.by_name[vf].attributes[root]
    assert take(cluster, node, "pair", request("pair", PAIR)) == []


def test_switch_is_not_joined_across_two_switches(cluster: Cluster, node: str) -> None:
    """Three GPUs below one switch: there are two."""
    assert take(cluster, node, "three", request("gpus", GPU, 3), request("vf", VF), match=SWITCH) == []
    assert len(take(cluster, node, "two", request("gpus", GPU, 2), request("vf", VF), match=SWITCH)) == 3


def test_gpus_that_share_a_nic_go_out_in_pairs_or_as_their_group_and_never_both(cluster: Cluster) -> None:
    """Eight GPUs and four NICs with VFs: each GPU has a VF of its own."""
    offer = four_nics(vfs=4).offer
    node = cluster.node("scheduling-four-nics")  # other files have machines of this kind
    cluster.publish(node, offer)
    group = next(one for one in offer.devices if one.kind == names.KIND_GROUP)
    (pair,) = take(cluster, node, "pair", request("pair", PAIR))
    assert offer.by_name[pair].gpus[0] in group.gpus, "the first of each"
    groups = take(cluster, node, "groups", request("groups", names.CLASS_GROUP, 3))
    assert len(groups) == 3
    assert group.name not in groups
    assert take(cluster, node, "fourth", request("group", names.CLASS_GROUP)) == []
    (other,) = take(cluster, node, "other", request("pair", PAIR))
    assert set(parts(offer, pair, other)) >= set(group.gpus), "the rest of the group that could not be had"
    assert take(cluster, node, "none", request("pair", PAIR)) == []
    used = parts(offer, pair, other, *groups)
    assert len(used) == len(set(used))

    for pod in ("fourth", "none", "groups", "pair", "other"):  # those that wait first
        cluster.delete_pod(f"{node}-{pod}")
        cluster.delete_claim(f"{node}-{pod}")
    assert len(take(cluster, node, "all", request("pairs", PAIR, 8))) == 8
    assert take(cluster, node, "late", request("group", names.CLASS_GROUP)) == []


def test_whole_node_is_given_as_one_device_and_nothing_of_it_beside(
    cluster: Cluster, offers: Offers, node: str
) -> None:
    (device,) = take(cluster, node, "whole", request("node", names.CLASS_NODE))
    assert len(set(parts(offers(), device))) == 16
    for number, device_class in enumerate((PAIR, GPU, names.CLASS_NODE)):
        assert take(cluster, node, f"none{number}", request("one", device_class)) == []
    assert len(take(cluster, node, "vfs", request("vfs", VF, 24))) == 24, "those that are in no pair"


@pytest.mark.parametrize("device_class", [PAIR, GPU])
def test_whole_node_is_not_given_while_a_part_of_it_is_taken(
    cluster: Cluster, offers: Offers, device_class: str
) -> None:
    node = cluster.node(f"part-{device_class.split('.')[0]}")
    cluster.publish(node, offers())
    assert take(cluster, node, "part", request("one", device_class))
    claim = cluster.claim(f"{node}-whole", request("node", names.CLASS_NODE))
    assert "cannot allocate all claims" in cluster.verdict(cluster.pod(f"{node}-whole", node, claim))
    cluster.delete_pod(f"{node}-part")
    cluster.delete_claim(f"{node}-part")
    cluster.scheduled(f"{node}-whole")


def test_parts_of_a_gpu_and_the_whole_of_it_exclude_each_other(cluster: Cluster) -> None:
    """By units of one counter: AMD's XCPs, which are offered beside their GPU."""
    case = next(one for one in cut_up() if one.name == "xcp")
    offer, partition = case.offer, names.CLASS_GPU_PARTITION
    node = cluster.node("scheduling-xcp")
    cluster.publish(node, offer)
    one = next(device for device in offer.devices if device.partition)
    whole = attribute("resource.kubernetes.io/pciBusID", one.gpus[0])
    (first,) = take(cluster, node, "first", request("part", partition))
    assert take(cluster, node, "whole", request("gpu", GPU, expression=whole)) == []
    others = take(cluster, node, "others", request("parts", partition, 5))
    assert len({first, *others}) == 6, "each once"
    assert take(cluster, node, "seventh", request("part", partition)) == []
    for pod in ("whole", "seventh", "first", "others"):  # those that wait first
        cluster.delete_pod(f"{node}-{pod}")
        cluster.delete_claim(f"{node}-{pod}")
    assert len(take(cluster, node, "again", request("gpu", GPU, expression=whole))) == 1
    assert take(cluster, node, "none", request("part", partition)) == []


@pytest.mark.parametrize("kept", [True, False])
def test_offer_that_changes_under_a_pod_leaves_its_gpu_and_the_rest_of_the_node_usable(
    cluster: Cluster, scanned: Callable[[str, int], Inventory], kept: bool
) -> None:
    """A pair gets another VF while a pod has it with the first, and gets the first one back. Without what is held the
    GPU goes out twice, and then the scheduler refuses all that is left."""
    node, inventory = cluster.node(f"held-{kept}".lower()), scanned("dgx-a100", 4)
    first = offer_of(inventory)
    cluster.publish(node, first)
    (pair,) = take(cluster, node, "pod", request("pair", PAIR))
    device = first.by_name[pair]
    held = [OfferedDevice(pair, "", {}, gpus=device.gpus, nics=device.nics)] if kept else []
    cluster.publish(node, offer_of(without_driver(inventory, device.nics[0]), held=held))
    gpu = attribute("resource.kubernetes.io/pciBusID", device.gpus[0])
    assert bool(take(cluster, node, "again", request("gpu", GPU, expression=gpu))) is not kept
    if kept:
        cluster.delete_pod(f"{node}-again")
        cluster.delete_claim(f"{node}-again")
    cluster.publish(node, first)
    assert len(take(cluster, node, "rest", request("pairs", PAIR, 7))) == (7 if kept else 0)


#: Devices as other drivers may have them: without attributes, with ours by name but not by type.
FOREIGN = [
    {"name": "bare"},
    {
        "name": "odd",
        "attributes": {"railmate.dev/kind": {"int": 1}, "railmate.dev/pcieSwitch": {"bool": True}},
    },
    {"name": "alike", "attributes": {"railmate.dev/kind": {"string": "pair"}, "pcieSwitch": {"string": "x"}}},
]


def test_classes_pick_nothing_of_another_driver(cluster: Cluster, offers: Offers) -> None:
    """A device without our attributes must not end the scheduling attempt."""
    node = cluster.node("foreign-first")
    body = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "foreign"},
        "spec": {
            "driver": "a.example.com",  # sorts before ours: the scheduler looks there first
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": FOREIGN,
        },
    }
    cluster.plane.request("POST", "/apis/resource.k8s.io/v1/resourceslices", body)
    for number, device_class in enumerate(CLASSES):
        name = f"{node}-none{number}"
        claim = cluster.claim(name, request("one", device_class))
        assert "cannot allocate all claims" in cluster.verdict(cluster.pod(name, node, claim))
        cluster.delete_pod(name)
        cluster.delete_claim(name)
    cluster.publish(node, offers())
    for number, device_class in enumerate((GPU, VF, PAIR)):
        (device,) = take(cluster, node, str(number), request("one", device_class))
        assert device in offers().by_name


def plain(example: Path) -> bool:
    """Whether it is made of what Kubernetes itself knows, and of single pods."""
    kinds = {item["kind"] for item in yaml.safe_load_all(example.read_text())}
    return kinds <= {"Pod", "ResourceClaimTemplate", "DeviceClass"}


@pytest.mark.parametrize(
    "example", sorted(path.parent.name for path in EXAMPLES.glob("*/manifest.yaml") if plain(path))
)
def test_examples_are_scheduled_as_they_are(cluster: Cluster, offers: Offers, example: str) -> None:
    node = f"example-{example}"
    cluster.node(node)
    offer = offers(shared_pfs=(SharedPfs("*", 16),))
    cluster.publish(node, offer)
    objects = list(yaml.safe_load_all((EXAMPLES / example / "manifest.yaml").read_text()))
    pods = [item for item in objects if item["kind"] == "Pod"]
    for pod in pods:
        pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    cluster.plane.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(objects))
    for pod in pods:
        cluster.scheduled(pod["metadata"]["name"])
    claims = [
        item
        for item in cluster.plane.request("GET", CLAIMS)["items"]
        if item["metadata"].get("ownerReferences", [{}])[0].get("name")
        in {pod["metadata"]["name"] for pod in pods}
    ]
    assert claims
    for claim in claims:
        results = claim["status"]["allocation"]["devices"]["results"]
        used = parts(offer, *(result["device"] for result in results))
        assert len(used) == len(set(used))
        assert {result["pool"] for result in results} == {node}
