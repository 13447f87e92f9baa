"""Shared physical functions with the real API server and scheduler: kept as written, given while there is room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from component.conftest import CLAIMS, DRIVER, Cluster, request
from harness.api import ApiError as Refused
from railmate.publish.model import Offer
from railmate.publish.shared import SharedPfs
from railmate.publish.slices import resource_slices
from railmate.publish.writes import dropped_fields
from railmate_api import attributes as names

Offers = Callable[..., Offer]
RAIL_0 = "0000:0c:00.0"
SHARED = names.CLASS_RDMA_SHARED


@pytest.fixture
def node(cluster: Cluster, offers: Offers, request: pytest.FixtureRequest) -> str:
    """A node that shares the port of rail 0 between three."""
    name = cluster.node(f"shared-{request.node.name.replace('_', '-')[-40:]}")
    cluster.publish(name, offers(shared_pfs=(SharedPfs(RAIL_0, 3),)))
    return name


def given(
    cluster: Cluster, node: str, name: str, *requests: dict[str, Any], match: str | None = None
) -> None:
    """A pod with the claim is placed."""
    name = f"{node}-{name}"
    cluster.claim(name, *requests, match=match)
    cluster.scheduled(cluster.pod(name, node, name))


def refused(cluster: Cluster, node: str, name: str, *requests: dict[str, Any]) -> str:
    """Why no pod with the claim is placed, in the scheduler's words."""
    name = f"{node}-{name}"
    cluster.claim(name, *requests)
    return cluster.verdict(cluster.pod(name, node, name))


def results(cluster: Cluster, node: str, name: str) -> list[dict[str, Any]]:
    claim = cluster.plane.request("GET", f"{CLAIMS}/{node}-{name}")
    found: list[dict[str, Any]] = claim["status"]["allocation"]["devices"]["results"]
    return found


def test_the_server_keeps_every_field_of_a_shared_device(cluster: Cluster, offers: Offers) -> None:
    name = cluster.node("shared-fields")
    offer = offers(shared_pfs=(SharedPfs("*", 1024),))
    cluster.publish(name, offer)
    for sent, stored in zip(resource_slices(offer, DRIVER, name), cluster.slices(name), strict=True):
        assert dropped_fields(sent["spec"], stored["spec"]) == set()
        assert sent["spec"].get("devices", []) == stored["spec"].get("devices", [])
    before = [item["metadata"]["resourceVersion"] for item in cluster.slices(name)]
    cluster.publish(name, offer)
    assert [item["metadata"]["resourceVersion"] for item in cluster.slices(name)] == before


def test_as_many_claims_as_there_is_room_have_shares_and_the_next_waits(cluster: Cluster, node: str) -> None:
    for number in range(3):
        given(cluster, node, str(number), request("nic", SHARED))
    shares = [results(cluster, node, str(number))[0] for number in range(3)]
    assert {one["device"] for one in shares} == {"shared-0000-0c-00-0"}
    assert len({one["shareID"] for one in shares}) == 3
    assert [list(one["consumedCapacity"].values()) for one in shares] == [["1"]] * 3
    assert "cannot allocate all claims" in refused(cluster, node, "fourth", request("nic", SHARED))
    cluster.delete_pod(f"{node}-0")
    cluster.delete_claim(f"{node}-0")
    cluster.scheduled(f"{node}-fourth")


def test_two_requests_of_a_claim_have_two_shares_of_one_port(cluster: Cluster, node: str) -> None:
    given(cluster, node, "two", request("a", SHARED), request("b", SHARED))
    one, other = results(cluster, node, "two")
    assert one["device"] == other["device"]
    assert one["shareID"] != other["shareID"]


def test_a_share_is_joined_with_a_gpu_below_its_switch(cluster: Cluster, offers: Offers, node: str) -> None:
    wanted = [request("gpu", names.CLASS_GPU), request("nic", SHARED)]
    given(cluster, node, "joined", *wanted, match=names.PCIE_SWITCH)
    by_name = offers(shared_pfs=(SharedPfs(RAIL_0, 3),)).by_name
    switches = {
        by_name[one["device"]].attributes[names.PCIE_SWITCH] for one in results(cluster, node, "joined")
    }
    assert len(switches) == 1


def test_a_share_is_one_sub_interface(cluster: Cluster, node: str) -> None:
    """Who wants two asks twice: a share of two would be one interface, and an address that nobody has."""
    double = request("nic", SHARED)
    double["exactly"]["capacity"] = {"requests": {names.SUB_INTERFACES: "2"}}
    assert "cannot allocate all claims" in refused(cluster, node, "double", double)


def test_the_vfs_of_a_shared_port_are_given_out_beside_it(
    cluster: Cluster, offers: Offers, node: str
) -> None:
    given(cluster, node, "share", request("nic", SHARED))
    below = f'device.attributes["resource.kubernetes.io"].pciBusID.startsWith("{RAIL_0[:8]}")'
    vfs = [
        device
        for device in offers().devices
        if device.kind == "rdma-vf" and device.nics[0].startswith(RAIL_0[:8])
    ]
    given(cluster, node, "vfs", request("vf", names.CLASS_RDMA_VF, len(vfs), below))


def test_other_classes_pick_no_shared_port(cluster: Cluster, offers: Offers) -> None:
    node = cluster.node("shared-only")
    cluster.publish(node, offers("dgx-a100", 0, shared_pfs=(SharedPfs("*", 2),)))
    with_it = f'device.attributes["railmate.dev"].?nicPciBusID.orValue("") == "{RAIL_0}"'
    itself = f'device.attributes["resource.kubernetes.io"].pciBusID == "{RAIL_0}"'
    for number, device_class in enumerate((names.CLASS_RDMA_VF, names.CLASS_PAIR)):
        wanted = request("one", device_class, expression=f"{with_it} || {itself}")
        assert "cannot allocate all claims" in refused(cluster, node, f"no{number}", wanted)
    given(cluster, node, "yes", request("one", SHARED, expression=itself))


@pytest.mark.parametrize(
    ("field", "value"), [("vlan", 5), ("trust", True), ("rings", {"rx": 64}), ("maxTxRate", 9)]
)
def test_what_a_share_cannot_have_is_refused_when_the_claim_is_made(
    cluster: Cluster, field: str, value: Any
) -> None:
    parameters = {"apiVersion": "railmate.dev/v1alpha1", "kind": "RdmaSharedConfig", field: value}
    body = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": f"shared-refused-{field.lower()}"},
        "spec": {
            "devices": {
                "requests": [request("nic", SHARED)],
                "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}],
            }
        },
    }
    with pytest.raises(Refused, match=f"has no field.*{field}.*macvlanMode"):
        cluster.plane.request("POST", CLAIMS, body)
