"""Slices in a real API server, written by the driver's own identity."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from component.conftest import DRIVER, PATIENCE, Cluster, request, wait_until
from harness.api import ApiError as Refused
from harness.controlplane import ControlPlane
from railmate.kube.client import KubeClient
from railmate.kube.errors import ApiError
from railmate.node.instances import Instances
from railmate.node.reports import Reports
from railmate.publish import controller as controller_module
from railmate.publish.controller import SliceController
from railmate.publish.devices import build_offer
from railmate.publish.exclusive import Preference
from railmate.publish.model import Offer
from railmate.publish.shared import SharedPfs
from railmate.publish.slices import resource_slices
from railmate.publish.writes import dropped_fields
from railmate.topology.analyze import analyze
from railmate_api.attributes import CLASS_GPU, CLASS_PAIR, CLASS_RDMA_VF, PCIE_SWITCH
from unit.publish.offered_machines import largest_inventory

Offers = Callable[..., Offer]
SLICES = "/apis/resource.k8s.io/v1/resourceslices"


class Counting(KubeClient):
    """Counts what is written."""

    writes = 0

    def create_slice(self, body: Any) -> Any:
        self.writes += 1
        return super().create_slice(body)

    def update_slice(self, body: Any) -> Any:
        self.writes += 1
        return super().update_slice(body)

    def delete_slice(self, existing: Any) -> None:
        self.writes += 1
        super().delete_slice(existing)


def counting(cluster: Cluster, node: str) -> Counting:
    return Counting(cluster.driver_client(node)._api.configuration)


@contextmanager
def running(
    kube: KubeClient, node: str, offer: Offer, instance: Instances | None = None
) -> Iterator[SliceController]:
    """It has published, but where that is another instance's to do."""
    published, outdone = threading.Event(), instance.outdone if instance else lambda: False
    controller = SliceController(kube, DRIVER, node, offer, published.set, outdone=outdone)
    threading.Thread(target=controller.run, daemon=True).start()
    assert outdone() or published.wait(PATIENCE)
    try:
        yield controller
    finally:
        controller.stop()


@pytest.mark.parametrize(
    ("machine", "vfs", "share"),
    [
        ("dgx-a100", 4, False),
        ("dgx-a100", 1, False),
        ("dgx-a100", 0, False),
        ("dgx-a100", 16, True),
        ("aws-p5en", 0, False),
        ("aws-p4d", 0, False),
        ("tuolumne-mi300a", 0, False),
        ("b200-8gpu", 0, False),
        ("lassen-p9", 0, False),
    ],
)
def test_server_keeps_every_field_of_every_machine(
    cluster: Cluster, offers: Offers, machine: str, vfs: int, share: bool
) -> None:
    node = cluster.node(f"publish-{machine}-{vfs}{'-share' if share else ''}")
    all_is_kept(cluster, node, offers(machine, vfs, share_pair_vfs=share))


def test_server_keeps_every_field_of_eight_gpus_and_128_vfs_a_nic(cluster: Cluster) -> None:
    inventory = largest_inventory()
    all_is_kept(cluster, cluster.node("publish-largest"), build_offer(inventory, analyze(inventory)))


def all_is_kept(cluster: Cluster, node: str, offer: Offer) -> None:
    cluster.publish(node, offer)
    stored = cluster.slices(node)
    sent = resource_slices(offer, DRIVER, node)
    assert [item["metadata"]["name"] for item in stored] == [item["metadata"]["name"] for item in sent]
    for one, other in zip(sent, stored, strict=True):
        assert dropped_fields(one["spec"], other["spec"]) == set()
        assert one["spec"] | {"devices": []} == other["spec"] | {"devices": []}
        assert one["spec"].get("devices", []) == other["spec"].get("devices", [])


def test_slices_that_the_server_calls_invalid_are_told_on_the_node_once_and_published_when_they_are_mended(
    cluster: Cluster, offers: Offers
) -> None:
    node = cluster.node("publish-invalid")
    kube = cluster.driver_client(node)
    good = offers()
    first, *rest = good.devices
    too_long = replace(first, attributes={**first.attributes, "railmate.dev/note": "x" * 65})
    reports = Reports(kube, DRIVER, node)
    sender = threading.Thread(target=reports.run, daemon=True)
    sender.start()
    controller = SliceController(
        kube,
        DRIVER,
        node,
        replace(good, devices=(too_long, *rest)),
        on_refused=lambda message: reports.node_event("ResourceSlicesRefused", message),
    )
    loop = threading.Thread(target=controller.run, daemon=True)
    loop.start()

    def told() -> list[dict[str, Any]]:
        path = f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.name%3D{node}"
        return list(cluster.plane.request("GET", path)["items"])

    def published() -> list[str]:
        return [device["name"] for one in cluster.slices(node) for device in one["spec"].get("devices", ())]

    try:
        wait_until(lambda: bool(told()), "an Event on the Node")
        assert published() == []
        controller.update(good)
        assert published() == [device.name for device in good.devices]
        (event,) = told()
    finally:
        controller.stop()
        reports.stop()
        sender.join(PATIENCE)
    assert (event["type"], event["reason"]) == ("Warning", "ResourceSlicesRefused")
    assert event["involvedObject"]["kind"] == "Node"
    assert "attributes[note].string: Too long" in event["message"]


def test_slices_belong_to_the_node(cluster: Cluster, offers: Offers) -> None:
    node = cluster.node("publish-owner")
    cluster.publish(node, offers())
    uid = cluster.plane.request("GET", f"/api/v1/nodes/{node}")["metadata"]["uid"]
    for item in cluster.slices(node):
        (owner,) = item["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("Node", node, uid)
    cluster.plane.request("DELETE", f"/api/v1/nodes/{node}")
    wait_until(lambda: not cluster.slices(node), "the slices of a deleted node are gone")


def test_nothing_is_written_when_nothing_changed(cluster: Cluster, offers: Offers) -> None:
    node = cluster.node("publish-idle")
    kube = counting(cluster, node)
    SliceController(kube, DRIVER, node, offers()).sync()
    before = [item["metadata"]["resourceVersion"] for item in cluster.slices(node)]
    kube.writes = 0
    for _ in range(3):
        SliceController(kube, DRIVER, node, offers()).sync()
    assert kube.writes == 0
    assert [item["metadata"]["resourceVersion"] for item in cluster.slices(node)] == before


def test_wiped_slices_are_back_within_a_second(cluster: Cluster, offers: Offers) -> None:
    """The kubelet wipes them at its start, by its own identity, as here."""
    node = "node-a"  # has a kubelet's token
    cluster.node(node)
    kube = counting(cluster, node)
    with running(kube, node, offers()):
        wanted = [item["spec"]["devices"] for item in cluster.slices(node) if "devices" in item["spec"]]
        kube.writes = 0
        selector = f"fieldSelector=spec.nodeName%3D{node}"
        uids = {item["metadata"]["uid"] for item in cluster.slices(node)}
        cluster.plane.request("DELETE", f"{SLICES}?{selector}", identity=f"system:node:{node}")

        def restored() -> bool:
            found = cluster.slices(node)
            return len(found) == 2 and uids.isdisjoint(item["metadata"]["uid"] for item in found)

        assert wait_until(restored, "the slices are back") < 1.0
        assert [i["spec"]["devices"] for i in cluster.slices(node) if "devices" in i["spec"]] == wanted
        assert_one_pool(cluster, node)


def test_single_deleted_slice_is_back_within_a_second(cluster: Cluster, offers: Offers) -> None:
    node = cluster.node("publish-single")
    with running(cluster.driver_client(node), node, offers()):
        gone = cluster.slices(node)[1]["metadata"]
        cluster.plane.request("DELETE", f"{SLICES}/{gone['name']}")

        def restored() -> bool:
            found = cluster.slices(node)
            return len(found) == 2 and found[1]["metadata"]["uid"] != gone["uid"] and one_pool(found)

        assert wait_until(restored, "the slice is back") < 1.0


def test_altered_slice_is_put_right(cluster: Cluster, offers: Offers) -> None:
    node = cluster.node("publish-altered")
    with running(cluster.driver_client(node), node, offers()):
        altered = cluster.slices(node)[1]
        wanted = len(altered["spec"]["devices"])
        altered["spec"]["devices"] = altered["spec"]["devices"][:3]
        cluster.plane.request("PUT", f"{SLICES}/{altered['metadata']['name']}", altered)
        wait_until(
            lambda: len(cluster.slices(node)[1]["spec"]["devices"]) == wanted, "the slice is put right"
        )


def test_another_offer_replaces_the_slices(cluster: Cluster, offers: Offers) -> None:
    """More slices, then fewer: stale ones go, and the pool is of one generation each time."""
    node = cluster.node("publish-changes")
    counts = []
    for vfs in (4, 16, 4):
        offer = offers("dgx-a100", vfs)
        cluster.publish(node, offer)
        counts.append(len(cluster.slices(node)))
        assert counts[-1] == len(resource_slices(offer, DRIVER, node))
        assert_one_pool(cluster, node)
    assert counts[0] < counts[1]


def test_of_two_instances_the_one_that_registered_last_keeps_the_slices_until_it_is_no_more(
    cluster: Cluster, offers: Offers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update changes what is offered, and then its instance dies. They do not fight for the slices meanwhile."""
    monkeypatch.setattr(controller_module, "_WATCH_OUTDONE", 1)
    node = cluster.node("publish-two")
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    of_elder, of_younger = counting(cluster, node), counting(cluster, node)

    def offered() -> list[str]:
        return [device["name"] for item in cluster.slices(node) for device in item["spec"].get("devices", [])]

    elder.registered()
    with running(of_elder, node, offers("dgx-a100", 1), elder):
        first, written = offered(), of_elder.writes
        other = offers("dgx-a100", 0)
        with running(of_younger, node, other, younger) as controller:
            controller.sync()
            assert of_younger.writes == 0, "the kubelet asks the elder"
            younger.registered()
            controller.update(other)
            second = offered()
            assert second != first
            assert_one_pool(cluster, node)
            cluster.plane.request("DELETE", f"{SLICES}?fieldSelector=spec.nodeName%3D{node}")
            wait_until(lambda: offered() == second, "the younger has put them back")
            assert of_elder.writes == written
        younger.leave()
        wait_until(lambda: offered() == first, "the elder has them back")
        assert_one_pool(cluster, node)


def test_empty_machine_shows_that_its_driver_is_up(cluster: Cluster) -> None:
    node = cluster.node("publish-empty")
    cluster.publish(node, Offer())
    (item,) = cluster.slices(node)
    assert item["spec"].get("devices", []) == []


def test_long_node_name_is_published(cluster: Cluster, offers: Offers) -> None:
    node = ".".join(["n" * 60, "o" * 60, "p" * 60, "q" * 60])
    cluster.plane.add_node(node, {"kubernetes.io/hostname": "long"})
    cluster.publish(node, offers())
    assert len(cluster.slices(node)) == 2


def test_driver_may_do_nothing_else(cluster: Cluster) -> None:
    node = cluster.node("publish-rights")
    token = cluster.plane.service_account_token("railmate", cluster.service_account, node=node)
    for method, path in (
        ("GET", "/api/v1/secrets"),
        ("GET", "/api/v1/pods"),
        ("GET", "/api/v1/nodes"),
        ("DELETE", f"/api/v1/nodes/{node}"),
        ("GET", "/apis/resource.k8s.io/v1/resourceclaims"),
        ("DELETE", "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/x"),
    ):
        with pytest.raises(Refused) as caught:
            cluster.plane.request(method, path, token=token)
        assert caught.value.status == 403, path


def test_error_of_the_server_is_in_its_words(cluster: Cluster) -> None:
    node = cluster.node("publish-errors")
    with pytest.raises(ApiError, match=r'resourceclaims.* "nothing" not found') as caught:
        cluster.driver_client(node).get_claim("default", "nothing")
    assert caught.value.not_found


@pytest.fixture(scope="module", params=["1.35", pytest.param("1.34", marks=pytest.mark.long)])
def old_server(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    start_cluster: Callable[..., Cluster],
) -> Iterator[Cluster]:
    """A server and a scheduler as of Kubernetes 1.34 and 1.35: counters and taints are off there."""
    with ControlPlane(tmp_path_factory.mktemp("old"), emulated_version=request.param) as plane:
        yield start_cluster(plane)


def test_server_without_counters_gets_each_piece_of_hardware_once(
    old_server: Cluster, offers: Offers, caplog: pytest.LogCaptureFixture
) -> None:
    node, offer, said = old_server.node("old-pairs"), offers(), list[str]()
    kube = counting(old_server, node)
    controller = SliceController(kube, DRIVER, node, offer, on_lost=said.append)
    controller.sync()
    published = [offer.by_name[name] for name in names_of(old_server, node)]
    assert Counter(device.kind for device in published) == {"pair": 8, "rdma-vf": 24}
    assert len({part for device in published for part in device.parts}) == 8 + 8 + 24
    assert "DRAPartitionableDevices" in said[0]
    assert "left out: 1 whole node, 8 GPUs alone" in said[0]
    assert "DRADeviceTaints" in said[1]
    assert all(message in caplog.text for message in said)

    kube.writes = 0
    controller.sync()
    SliceController(kube, DRIVER, node, offer).sync()
    assert kube.writes == 0
    old_server.plane.request("DELETE", f"{SLICES}?fieldSelector=spec.nodeName%3D{node}")
    controller.sync()
    assert names_of(old_server, node) == [device.name for device in published]
    assert len(said) == 2, "said once"


def test_scheduler_of_an_old_server_gives_pairs_and_nothing_twice(
    old_server: Cluster, offers: Offers
) -> None:
    node = old_server.node("old-scheduled")
    old_server.publish(node, offers())
    claim = old_server.claim("old-eight", request("pairs", CLASS_PAIR, 8))
    assert old_server.verdict(old_server.pod("old-eight", node, claim)) == ""
    for name, device_class in (("old-ninth", CLASS_PAIR), ("old-gpu", CLASS_GPU)):
        claim = old_server.claim(name, request("one", device_class))
        assert old_server.verdict(old_server.pod(name, node, claim)) != ""


def test_parts_in_place_of_pairs_are_joined_by_their_switch(old_server: Cluster, offers: Offers) -> None:
    node, offer = old_server.node("old-parts"), offers()
    kube = old_server.driver_client(node)
    SliceController(kube, DRIVER, node, offer, preference=Preference.PARTS).sync()
    published = [offer.by_name[name] for name in names_of(old_server, node)]
    assert Counter(device.kind for device in published) == {"gpu": 8, "rdma-vf": 24}
    wanted = [request("gpu", CLASS_GPU), request("vf", CLASS_RDMA_VF)]
    claim = old_server.claim("old-joined", *wanted, match=PCIE_SWITCH)
    assert old_server.verdict(old_server.pod("old-joined", node, claim)) == ""


def test_taints_that_the_server_drops_are_not_wanted_again(old_server: Cluster, offers: Offers) -> None:
    node, offer = old_server.node("old-taints"), offers()
    kube = counting(old_server, node)
    pair = offer.devices[0].name
    controller = SliceController(kube, DRIVER, node, offer, taints={pair: "nic-link-down"})
    controller.sync()
    assert pair in names_of(old_server, node)
    kube.writes = 0
    controller.set_taints({pair: "gpu-lost"})
    assert kube.writes == 0


def test_a_server_that_lets_no_two_claims_have_a_device_gets_no_shared_one(
    old_server: Cluster, offers: Offers
) -> None:
    """The whole port would go to the first claim that asks for a share."""
    node, said = old_server.node("old-shared"), list[str]()
    offer = offers(shared_pfs=(SharedPfs("*", 4),))
    kube = counting(old_server, node)
    controller = SliceController(kube, DRIVER, node, offer, on_lost=said.append)
    controller.sync()
    assert Counter(offer.by_name[name].kind for name in names_of(old_server, node)) == {
        "pair": 8,
        "rdma-vf": 24,
    }
    (told,) = [one for one in said if "DRAConsumableCapacity" in one]
    assert "left out: 8" in told
    kube.writes = 0
    controller.sync()
    assert kube.writes == 0


@pytest.mark.long  # a control plane each
@pytest.mark.parametrize(
    "gates", [("DRAPartitionableDevices",), ("DRAConsumableCapacity",), ("DRADeviceTaints", "DRADeviceTaintRules")]
)  # fmt: skip
def test_with_one_gate_off_the_rest_is_kept_and_the_gate_is_named(
    tmp_path_factory: pytest.TempPathFactory,
    start_cluster: Callable[..., Cluster],
    offers: Offers,
    gates: tuple[str, ...],
) -> None:
    offer, said = offers(shared_pfs=(SharedPfs("*", 4),)), list[str]()
    with ControlPlane(tmp_path_factory.mktemp("gates"), dict.fromkeys(gates, False)) as plane:
        server = start_cluster(plane)
        node = server.node("gates")
        kube = counting(server, node)
        sick = offer.devices[0].name
        SliceController(kube, DRIVER, node, offer, on_lost=said.append, taints={sick: "gpu-lost"}).sync()
        (told,) = said
        assert gates[0] in told
        kinds = Counter(offer.by_name[name].kind for name in names_of(server, node))
        devices = [one for item in server.slices(node) for one in item["spec"].get("devices") or []]
        counted = any("consumesCounters" in one for one in devices)
        assert counted == (gates[0] != "DRAPartitionableDevices")
        assert any("taints" in one for one in devices) == (gates[0] != "DRADeviceTaints")
        assert bool(kinds["rdma-shared"]) == (gates[0] != "DRAConsumableCapacity")
        assert bool(kinds["gpu"]) == counted, "without counters a GPU has one name, that of its pair"
        kube.writes = 0
        SliceController(kube, DRIVER, node, offer, taints={sick: "gpu-lost"}).sync()
        assert kube.writes == 0


def names_of(cluster: Cluster, node: str) -> list[str]:
    return [
        str(device["name"]) for item in cluster.slices(node) for device in item["spec"].get("devices") or []
    ]


def one_pool(slices: list[dict[str, Any]]) -> bool:
    pools = [item["spec"]["pool"] for item in slices]
    return {pool["resourceSliceCount"] for pool in pools} == {len(pools)} and len(
        {pool["generation"] for pool in pools}
    ) == 1


def assert_one_pool(cluster: Cluster, node: str) -> None:
    assert one_pool(cluster.slices(node))
