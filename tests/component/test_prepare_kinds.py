"""Claims on every kind of device, allocated by the real scheduler and prepared by the driver.

The machines' NICs are EFAs, which have no netdev, so that all of prepare runs without the hardware.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from component.conftest import CLAIMS, Cluster, request
from railmate.claims.ledger import Ledger
from railmate.claims.plan import NodeView
from railmate.claims.records import ClaimRef
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.state import ClaimState, PreparedClaim
from railmate.errors import RailmateError
from railmate.inventory.model import Inventory, Partition
from railmate.publish.devices import build_offer
from railmate.publish.model import Offer
from railmate.topology.analyze import analyze
from railmate_api import attributes as names
from unit.publish.offered_machines import cases, recorded

Prepare = Callable[[dict[str, Any]], PreparedClaim]


def view(node: str, inventory: Inventory, offer: Offer, dev_root: Path) -> NodeView:
    return NodeView(
        driver=names.DRIVER_NAME,
        pool=node,
        offer=offer,
        inventory=inventory,
        dev_root=dev_root,
        node_exists=lambda path: True,
        netdev_of=lambda address: None,
    )


def ref_of(claim: dict[str, Any]) -> ClaimRef:
    metadata = claim["metadata"]
    return ClaimRef(metadata["uid"], metadata["namespace"], metadata["name"])


@pytest.fixture
def driver(cluster: Cluster, tmp_path: Path) -> Callable[[str, Inventory, Offer], Prepare]:
    """The driver's own prepare on a node, as its own identity, with claims from the API."""

    def on(node: str, inventory: Inventory, offer: Offer) -> Prepare:
        files = RuntimeFiles(names.DRIVER_NAME, tmp_path, tmp_path / "cdi", tmp_path / "gate")
        shown = view(node, inventory, offer, tmp_path)
        state = ClaimState(cluster.driver_client(node), shown, Ledger(tmp_path), files, "boot")
        return lambda claim: state.prepare(ref_of(claim), patience=0)

    return on


def allocated(cluster: Cluster, node: str, name: str, device_class: str, count: int = 1) -> dict[str, Any]:
    claim = cluster.claim(name, request("main", device_class, count))
    assert cluster.verdict(cluster.pod(name, node, claim)) == ""
    found: dict[str, Any] = cluster.plane.request("GET", f"{CLAIMS}/{claim}")
    return found


def paths(prepared: PreparedClaim) -> set[str]:
    return {node.path.removeprefix("/dev/") for device in prepared.devices for node in device.nodes}


def test_group_gives_all_of_its_gpus_and_nics(
    cluster: Cluster, driver: Callable[[str, Inventory, Offer], Prepare], tmp_path: Path
) -> None:
    case = recorded("aws-p4d", 0)
    node = cluster.node("kinds-group")
    cluster.publish(node, case.offer)
    claim = allocated(cluster, node, "kinds-group", names.CLASS_GROUP)
    prepared = driver(node, case.inventory, case.offer)(claim)
    (device,) = prepared.devices
    assert device.gpus == ("0000:10:1c.0", "0000:10:1d.0")
    assert [nic.address for nic in device.nics] == ["0000:10:1b.0"]
    gpus = {gpu.address: gpu.device_nodes for gpu in case.inventory.gpus}
    uverbs = case.inventory.functions["0000:10:1b.0"].rdma_devices[0].uverbs[0]
    wanted = {*gpus["0000:10:1c.0"], *gpus["0000:10:1d.0"], f"infiniband/{uverbs}", "infiniband/rdma_cm"}
    assert paths(prepared) == wanted | {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}
    assert device.attributes[names.GPU_COUNT] == {"int": 2}
    (spec,) = (json.loads(path.read_text()) for path in (tmp_path / "cdi").glob("*.json"))
    assert len(spec["devices"]) == 1


def test_whole_node_gives_all_of_its_gpus_and_nics(
    cluster: Cluster, driver: Callable[[str, Inventory, Offer], Prepare]
) -> None:
    case = next(one for one in cases() if one.name == "p5")
    node = cluster.node("kinds-node")
    cluster.publish(node, case.offer)
    prepared = driver(node, case.inventory, case.offer)(
        allocated(cluster, node, "kinds-node", names.CLASS_NODE)
    )
    (device,) = prepared.devices
    pairs = {one.gpus[0]: one.nics for one in case.offer.devices if one.kind == names.KIND_PAIR}
    assert (len(device.gpus), len(device.nics)) == (8, 32)
    assert [nic.address for nic in device.nics] == [nic for gpu in device.gpus for nic in pairs[gpu]]
    wanted = {node for gpu in case.inventory.gpus for node in gpu.device_nodes}
    rdma = [one for nic in device.nics for one in case.inventory.functions[nic.address].rdma_devices]
    wanted |= {f"infiniband/{name}" for one in rdma for name in one.char_devices}
    assert paths(prepared) == wanted | {"infiniband/rdma_cm", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}
    assert device.attributes[names.NIC_COUNT] == {"int": 32}


def test_whole_port_is_given_alone_and_no_more_in_its_group(
    cluster: Cluster, driver: Callable[[str, Inventory, Offer], Prepare]
) -> None:
    case = recorded("aws-p4d", 0)
    node = cluster.node("kinds-port")
    cluster.publish(node, case.offer)
    claim = allocated(cluster, node, "kinds-port", names.CLASS_RDMA_VF)
    (device,) = driver(node, case.inventory, case.offer)(claim).devices
    assert [nic.address for nic in device.nics] == ["0000:10:1b.0"]
    assert device.gpus == ()
    claim = allocated(cluster, node, "kinds-port-group", names.CLASS_GROUP)
    (group,) = driver(node, case.inventory, case.offer)(claim).devices
    assert group.gpus == ("0000:20:1c.0", "0000:20:1d.0")


def cut(inventory: Inventory, mode: str, *parts: Partition) -> tuple[Inventory, Offer]:
    """The machine with its first GPU cut into parts."""
    first, *others = inventory.gpus
    found = replace(inventory, gpus=(replace(first, partition_mode=mode, partitions=parts), *others))
    return found, build_offer(found, analyze(found))


def test_mig_instances_of_one_gpu_go_to_two_pods(
    cluster: Cluster, driver: Callable[[str, Inventory, Offer], Prepare]
) -> None:
    parts = [
        Partition(f"gi{n}ci0", "3g.20gb", f"MIG-{n}", 20 << 30, (f"nvidia-caps/nvidia-cap{n}0",))
        for n in (1, 2)
    ]
    inventory, offer = cut(recorded("aws-p4d", 0).inventory, "MIG", *parts)
    node = cluster.node("kinds-mig")
    cluster.publish(node, offer)
    prepare = driver(node, inventory, offer)
    whole = inventory.gpus[0].device_nodes[0]
    shared = {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}
    for n in (1, 2):
        claim = allocated(cluster, node, f"kinds-mig-{n}", names.CLASS_GPU_PARTITION)
        prepared = prepare(claim)
        assert paths(prepared) == {whole, f"nvidia-caps/nvidia-cap{n}0"} | shared
        assert prepared.devices[0].attributes[names.UUID] == {"string": f"MIG-{n}"}
    third = cluster.claim("kinds-mig-3", request("main", names.CLASS_GPU_PARTITION))
    assert cluster.verdict(cluster.pod("kinds-mig-3", node, third)) != ""


def test_gpu_and_its_parts_are_never_out_together(
    cluster: Cluster, driver: Callable[[str, Inventory, Offer], Prepare]
) -> None:
    """AMD's XCPs, where the whole is all of them; the scheduler sees to it, and in case it does not, the driver."""
    parts = [Partition(f"xcp{n}", "CPX", f"xcp-{n}", 16 << 30, (f"dri/renderD{200 + n}",)) for n in range(2)]
    inventory, offer = cut(recorded("tuolumne-mi300a", 0).inventory, "CPX/NPS1", *parts)
    node = cluster.node("kinds-xcp")
    cluster.publish(node, offer)
    prepare = driver(node, inventory, offer)
    part = allocated(cluster, node, "kinds-xcp-part", names.CLASS_GPU_PARTITION)
    assert paths(prepare(part)) == {"dri/renderD200", "kfd"}
    gpus = allocated(cluster, node, "kinds-xcp-gpus", names.CLASS_GPU, 3)
    assert inventory.gpus[0].address not in {gpu for one in prepare(gpus).devices for gpu in one.gpus}
    fourth = cluster.claim("kinds-xcp-fourth", request("main", names.CLASS_GPU))
    assert cluster.verdict(cluster.pod("kinds-xcp-fourth", node, fourth)) != ""

    # as after a force delete: the scheduler hands on what is still in use
    cluster.delete_pod("kinds-xcp-part")
    cluster.delete_claim("kinds-xcp-part")
    cluster.scheduled(fourth)
    with pytest.raises(RailmateError, match=r"0000:02:00\.0 is still held by .*kinds-xcp-part"):
        prepare(cluster.plane.request("GET", f"{CLAIMS}/{fourth}"))
