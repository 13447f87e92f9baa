"""Every DeviceClass on every machine, by the real scheduler: it allocates where the hardware is, and what is right."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from component.conftest import DRIVER, Cluster, request
from railmate.publish.model import OfferedDevice, overlap
from railmate.publish.slices import resource_slices
from railmate_api import attributes as names
from unit.publish.offered_machines import Case, cases, cut_up

#: Class to the devices that it may give.
CLASSES = {
    names.CLASS_GPU: lambda one: one.kind == names.KIND_GPU,
    names.CLASS_GPU_PARTITION: lambda one: one.kind == names.KIND_GPU_PARTITION,
    names.CLASS_RDMA_VF: lambda one: one.kind == names.KIND_RDMA_VF,
    names.CLASS_PAIR: lambda one: one.kind == names.KIND_PAIR and names.PCIE_SWITCH in one.attributes,
    names.CLASS_PAIR_NUMA: lambda one: (
        one.kind == names.KIND_PAIR and names.PCIE_SWITCH not in one.attributes
    ),
    names.CLASS_PAIR_ANY: lambda one: one.kind == names.KIND_PAIR,
    names.CLASS_GROUP: lambda one: one.kind == names.KIND_GROUP,
    names.CLASS_NODE: lambda one: one.kind == names.KIND_NODE,
}
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
MACHINES = (*cases(), *cut_up())
PODS = [(case, name) for case in MACHINES for name in CLASSES]


def pod_of(case: Case, device_class: str) -> str:
    return f"{case.name}-{device_class.split('.')[0]}"


def node_of(case: Case, device_class: str) -> str:
    """A whole node is not there beside parts of it."""
    return f"{'whole' if device_class == names.CLASS_NODE else 'class'}-{case.name}"


@pytest.fixture(scope="module")
def given(cluster: Cluster) -> Mapping[str, list[str]]:
    """Pod to the devices it got: on a node for each machine, one pod of each class after the other."""
    for case in MACHINES:
        for node in {node_of(case, device_class) for device_class in CLASSES}:
            cluster.node(node)
            for item in resource_slices(case.offer, DRIVER, node):
                cluster.plane.request("POST", SLICES, item)
    found = {}
    for case, device_class in PODS:
        pod = cluster.claim(pod_of(case, device_class), request("one", device_class))
        cluster.verdict(cluster.pod(pod, node_of(case, device_class), pod))
        found[pod] = cluster.allocated(pod)
    return found


def expected(case: Case) -> Mapping[str, str | None]:
    """Class to the first device of it that shares nothing with those of the classes before; None: there is none."""
    taken: set[str] = set()
    found: dict[str, str | None] = {}
    for device_class, fits in CLASSES.items():
        if device_class == names.CLASS_NODE:
            taken = set()
        free = [one for one in case.offer.devices if fits(one) and not overlap(one.parts, taken)]
        found[device_class] = free[0].name if free else None
        taken |= free[0].parts if free else set()
    return found


def right_nics(case: Case, device: OfferedDevice) -> bool:
    """Whether all NICs of the device are right for all of its GPUs, and there are any."""
    functions = case.inventory.functions
    ports = {functions[nic].physical_function or nic for nic in device.nics}
    if device.kind == names.KIND_NODE:  # each GPU has its own
        return ports == {nic for gpu in device.gpus for nic in case.right[gpu]}
    return bool(ports) and all(ports <= case.right[gpu] for gpu in device.gpus)


@pytest.mark.parametrize(("case", "device_class"), PODS, ids=[pod_of(*one) for one in PODS])
def test_class_gives_what_the_machine_has_and_nothing_else(
    given: Mapping[str, list[str]], case: Case, device_class: str
) -> None:
    devices = given[pod_of(case, device_class)]
    wanted = expected(case)[device_class]
    assert devices == ([wanted] if wanted else [])
    for device in (case.offer.by_name[name] for name in devices):
        if device.gpus and device.nics:
            assert right_nics(case, device)


def test_a_class_finds_hardware_wherever_there_is_some() -> None:
    """None of the above is empty for want of devices: the classes before leave enough on every machine."""
    for case in MACHINES:
        had = {name for name, fits in CLASSES.items() if any(fits(one) for one in case.offer.devices)}
        assert had == {name for name, wanted in expected(case).items() if wanted}, case.name
    everywhere = {name for case in MACHINES for name, wanted in expected(case).items() if wanted}
    assert everywhere == CLASSES.keys()


def test_every_pair_and_group_of_every_machine_is_right() -> None:
    for case in MACHINES:
        for device in case.offer.devices:
            if device.gpus and device.nics:
                assert right_nics(case, device), f"{case.name}: {device.name}"
