"""Mixed load on the real scheduler until nothing fits any more: no hardware twice, no GPU stranded."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import Counter
from pathlib import Path

import pytest

from component.conftest import Cluster, request
from harness.process import ProcessRecord
from railmate.publish.model import Offer, overlap
from railmate_api import attributes as names
from unit.publish.offered_machines import Case, big, built, four_nics, recorded

SWITCH = names.PCIE_SWITCH


class Node:
    """A node that pods fill, and what each of them has."""

    def __init__(self, cluster: Cluster, name: str, offer: Offer) -> None:
        self.cluster, self.name, self.offer = cluster, name, offer
        self.held: dict[str, list[str]] = {}
        self._asked = 0
        cluster.publish(cluster.node(name), offer)

    def ask(self, *requests: dict[str, object], match: str | None = None) -> bool:
        """A pod with a claim; whether it got a place. A refused one is taken away again."""
        self._asked += 1
        name = self.cluster.claim(f"{self.name}-{self._asked}", *requests, match=match)
        if self.cluster.verdict(self.cluster.pod(name, self.name, name)) != "":
            self.cluster.delete_pod(name)
            self.cluster.delete_claim(name)
            return False
        self.held[name] = self.cluster.allocated(name)
        self.check()
        return True

    def end(self, pod: str) -> None:
        self.cluster.delete_pod(pod)
        self.cluster.delete_claim(pod)
        del self.held[pod]

    def check(self) -> None:
        """No two devices that are given out share hardware, whatever their names."""
        taken: set[str] = set()
        for devices in self.held.values():
            for device in devices:
                parts = self.offer.by_name[device].parts
                assert not overlap(parts, taken), f"{device} of {self.held}"
                taken |= parts

    @property
    def free_gpus(self) -> set[str]:
        used = {gpu for held in self.held.values() for one in held for gpu in self.offer.by_name[one].gpus}
        return {gpu for one in self.offer.devices for gpu in one.gpus} - used


def asks(offer: Offer, nics_alone: bool) -> list[tuple[tuple[dict[str, object], ...], str | None]]:
    """Claims of every form that the machine has devices for."""
    kinds = Counter(device.kind for device in offer.devices)
    found: list[tuple[tuple[dict[str, object], ...], str | None]] = [
        ((request("g", names.CLASS_GPU),), None),
        ((request("g", names.CLASS_GPU, 2),), None),
    ]
    if kinds[names.KIND_PAIR]:
        found += [((request("p", names.CLASS_PAIR, count),), None) for count in (1, 1, 2, 3)]
        found.append(((request("p", names.CLASS_PAIR, 2),), SWITCH))
        found.append(((request("p", names.CLASS_PAIR), request("g", names.CLASS_GPU)), SWITCH))
    if kinds[names.KIND_NODE]:
        found.append(((request("node", names.CLASS_NODE),), None))
    if kinds[names.KIND_GROUP]:
        found.append(((request("all", names.CLASS_GROUP),), None))
    if nics_alone:
        found.append(((request("v", names.CLASS_RDMA_VF),), None))
        found.append(((request("g", names.CLASS_GPU), request("v", names.CLASS_RDMA_VF)), None))
    return found


def fill(node: Node, seed: int, nics_alone: bool, steps: int) -> None:
    """Claims in random order and pods that end, then claims until each form is refused."""
    chance = random.Random(seed)
    forms = asks(node.offer, nics_alone)
    for _ in range(steps):
        requests, match = chance.choice(forms)
        node.ask(*requests, match=match)
        if len(node.held) > 3 and chance.random() < 0.3:
            node.end(chance.choice(sorted(node.held)))
    for requests, match in chance.sample(forms, len(forms)):
        while node.ask(*requests, match=match):
            pass


LOADED = [
    recorded("dgx-a100", 4),
    recorded("dgx-a100", 1),
    recorded("dgx-a100", 2, switch_groups=True),
    recorded("aws-p5en", 0),
    four_nics(4),
    recorded("aws-p4d", 0),
]


@pytest.mark.parametrize("case", LOADED[1:3], ids=lambda case: str(case.name))
def test_mixed_load_gives_nothing_twice(cluster: Cluster, case: Case) -> None:
    fill(Node(cluster, f"mixed-{case.name}", case.offer), seed=7, nics_alone=True, steps=12)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", LOADED, ids=lambda case: str(case.name))
def test_much_mixed_load_gives_nothing_twice(cluster: Cluster, case: Case, seed: int) -> None:
    fill(Node(cluster, f"much-{case.name}-{seed}", case.offer), seed, nics_alone=True, steps=60)


@pytest.mark.parametrize("case", [LOADED[0]], ids=lambda case: str(case.name))
def test_no_gpu_is_stranded_while_no_claim_asks_for_a_nic_alone(cluster: Cluster, case: Case) -> None:
    strand(cluster, case, seed=3, steps=14)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", LOADED[:5], ids=lambda case: str(case.name))
def test_no_gpu_is_stranded_by_much_load(cluster: Cluster, case: Case, seed: int) -> None:
    strand(cluster, case, seed, steps=60)


def strand(cluster: Cluster, case: Case, seed: int, steps: int) -> None:
    """At any time every GPU that is free can be had with its NIC: as many pairs as there are free GPUs."""
    node = Node(cluster, f"strand-{case.name}-{seed}", case.offer)
    chance = random.Random(seed)
    forms = asks(node.offer, nics_alone=False)
    for _ in range(steps):
        requests, match = chance.choice(forms)
        node.ask(*requests, match=match)
        if node.held and (not node.free_gpus or chance.random() < 0.4):
            node.end(chance.choice(sorted(node.held)))
    free = len(node.free_gpus)
    assert free, "the last step leaves something free"
    assert node.ask(request("rest", names.CLASS_PAIR, free))
    assert not node.free_gpus


# --- how soon the answer comes
def refusals(node: Node, wanted: int, runs: int) -> list[float]:
    """Milliseconds from the pod's creation to Unschedulable, of claims that ask for one pair too many."""
    took, used = [], []
    for run in range(runs):
        name = node.cluster.claim(f"{node.name}-no{run}", request("pairs", names.CLASS_PAIR, wanted))
        began, before = time.monotonic(), scheduler_cpu(node.cluster)
        message = node.cluster.verdict(node.cluster.pod(name, node.name, name))
        took.append(1000 * (time.monotonic() - began))
        used.append(scheduler_cpu(node.cluster) - before)
        assert "cannot allocate all claims" in message
        plain = f"{name}-plain"
        assert node.cluster.verdict(node.cluster.pod(plain, node.name)) == "", "others go on scheduling"
        node.cluster.delete_pod(name)
        node.cluster.delete_claim(name)
    print(
        f"{node.name}: refused in {statistics.median(took):.0f} ms (p50 of {runs}; "
        f"{', '.join(f'{one:.0f}' for one in took)}), CPU of the scheduler {', '.join(map(str, used))} ms"
    )
    return took


def test_eight_pairs_of_seven_are_refused_within_150_ms(cluster: Cluster) -> None:
    node = Node(cluster, "seven-free", recorded("dgx-a100", 4).offer)
    assert node.ask(request("pair", names.CLASS_PAIR))
    # the quickest is what the scheduler takes; the others are what else the machine does
    assert min(refusals(node, wanted=8, runs=7)) < 150


def scheduler_cpu(cluster: Cluster) -> int:
    """Milliseconds of CPU that the scheduler has used, which other work on the machine does not add to."""
    record = ProcessRecord.load(cluster.plane.directory / "kube-scheduler.process.json")
    assert record is not None
    fields = Path(f"/proc/{record.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 // os.sysconf("SC_CLK_TCK")


def test_sixteen_gpus_and_nics_are_given_or_refused_within_a_second(cluster: Cluster) -> None:
    case = built("big", big(switches=8, gpus=2, nics=2), {}, vfs=2)
    assert Counter(device.kind for device in case.offer.devices)[names.KIND_PAIR] == 16
    node = Node(cluster, "sixteen", case.offer)
    given = []
    for _ in range(3):
        began = time.monotonic()
        assert node.ask(request("pairs", names.CLASS_PAIR, 16))
        given.append(1000 * (time.monotonic() - began))
        node.end(next(iter(node.held)))
    print(f"sixteen: given in {', '.join(f'{ms:.0f}' for ms in given)} ms")
    assert min(given) < 1000
    assert node.ask(request("pair", names.CLASS_PAIR))
    assert min(refusals(node, wanted=16, runs=5)) < 1000
