"""From an allocated claim to a plan: devices, device nodes, interface names, and every way to refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from claims_world import DRIVER, GPUS, VFS, claim, config, inventory, ref, result, view

from railmate.claims.allocation import ClaimError
from railmate.claims.plan import NodeView, Plan, make_plan
from railmate.inventory.model import Inventory


def plan(one: dict[str, Any], node: NodeView | None = None, taken: tuple[str, ...] = ()) -> Plan:
    return make_plan(one, ref(1), node or view(), taken)


def interfaces(made: Plan) -> list[str]:
    return [nic.interface for device in made.devices for nic in device.nics]


def refusal(one: dict[str, Any], node: NodeView | None = None, taken: tuple[str, ...] = ()) -> str:
    with pytest.raises(ClaimError) as caught:
        plan(one, node, taken)
    text = str(caught.value)
    assert "ResourceClaim team/claim-1" in text, "the object"
    assert "\n" not in text
    return text


# --- the straight path
def test_pair_gets_the_nodes_of_its_gpu_and_of_its_vf_only() -> None:
    (device,) = plan(claim(1, "pair-0")).devices
    assert [node.path for node in device.nodes] == [
        "/dev/nvidia0",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
        "/dev/infiniband/uverbs0",
        "/dev/infiniband/umad0",
        "/dev/infiniband/rdma_cm",
    ]
    assert {node.host_path for node in device.nodes} == {f"/host{node.path}" for node in device.nodes}
    assert (device.gpus, [nic.address for nic in device.nics]) == ((GPUS[0],), [VFS[0]])


def test_rdma_nodes_are_those_of_this_moment() -> None:
    """A driver that was bound anew has other numbers, and the former ones may be another VF's by now."""
    now = {"mlx5_0": ("uverbs3", "umad3")}
    (device,) = plan(claim(1, "vf-0"), view(char_devices=lambda name, *_: now.get(name, ()))).devices
    assert [node.path for node in device.nodes] == [
        "/dev/infiniband/uverbs3",
        "/dev/infiniband/umad3",
        "/dev/infiniband/rdma_cm",
    ]


def test_vf_gets_no_gpu_node_and_gpu_no_rdma_node() -> None:
    vf, gpu = plan(claim(1, result("vf-3", "nic"), result("gpu-1", "gpu"))).devices
    assert all(node.path.startswith("/dev/infiniband/") for node in vf.nodes)
    assert all(node.path.startswith("/dev/nvidia") for node in gpu.nodes)


def test_shared_nodes_that_do_not_exist_are_left_out() -> None:
    absent = {Path("/host/dev/nvidia-uvm-tools"), Path("/host/dev/infiniband/rdma_cm")}
    (device,) = plan(claim(1, "pair-0"), view(node_exists=lambda path: path not in absent)).devices
    assert {Path(node.host_path) for node in device.nodes}.isdisjoint(absent)


def test_vendors_cdi_device_takes_the_place_of_gpu_nodes() -> None:
    (device,) = plan(claim(1, "pair-0"), view(vendor_cdi=lambda: {"GPU-0": "nvidia.com/gpu=GPU-0"})).devices
    assert device.vendor_cdi_ids == ("nvidia.com/gpu=GPU-0",)
    assert all(node.path.startswith("/dev/infiniband/") for node in device.nodes)


def test_missing_vendor_spec_is_warned_of() -> None:
    (warning,) = plan(claim(1, "pair-0")).warnings
    assert GPUS[0] in warning
    assert "user-space libraries" in warning


def test_results_of_other_drivers_are_left_to_them() -> None:
    made = plan(claim(1, result("theirs", "other", driver="gpu.example.com"), "pair-1"))
    assert [device.device for device in made.devices] == ["pair-1"]


def test_subrequest_is_answered_under_the_requests_name() -> None:
    (device,) = plan(claim(1, result("pair-0", "main/large"))).devices
    assert device.request == "main"


def test_plan_knows_the_pods_and_the_pods_name_for_the_claim() -> None:
    one = claim(1, "pair-0", pods=("pod-7",), template="pair")
    one["status"]["reservedFor"].append(
        {"apiGroup": "example.com", "resource": "jobs", "name": "j", "uid": "j"}
    )
    made = plan(one)
    assert made.pods == ("pod-7",)
    assert made.pod_claim_name == "pair"


def test_metadata_attributes_name_the_interface() -> None:
    (device,) = plan(claim(1, "pair-0")).devices
    assert device.attributes["railmate.dev/interface"] == {"string": "net1"}
    assert device.attributes["railmate.dev/distance"] == {"string": "PXB"}


def test_gpus_may_be_shared_by_pods() -> None:
    assert plan(claim(1, "gpu-0", pods=("a", "b"))).pods == ("a", "b")


# --- interface names
def test_interfaces_are_numbered_in_the_order_of_the_results() -> None:
    assert interfaces(plan(claim(1, "vf-0", "vf-1", "vf-2"))) == ["net1", "net2", "net3"]
    assert interfaces(plan(claim(1, "wide"))) == ["net1", "net2"]


def test_second_claim_of_the_pod_goes_on_counting() -> None:
    assert interfaces(plan(claim(1, "vf-0", "vf-1"), taken=("net1", "net3"))) == ["net2", "net4"]


def test_configured_name_is_used_and_numbered_within_a_request() -> None:
    one = claim(1, "vf-0", "vf-1", "vf-2", configs=[config(interfaceName="rail")])
    assert interfaces(plan(one)) == ["rail", "rail1", "rail2"]


def test_claim_config_wins_over_class_config() -> None:
    configs = [config("FromClass", interfaceName="fabric"), config("FromClaim", interfaceName="rail")]
    assert interfaces(plan(claim(1, "vf-0", configs=configs))) == ["rail"]


def test_class_config_stays_where_the_claim_says_nothing() -> None:
    configs = [config("FromClass", interfaceName="fabric"), config("FromClaim")]
    assert interfaces(plan(claim(1, "vf-0", configs=configs))) == ["fabric"]


def test_config_reaches_the_requests_it_names() -> None:
    results = [result("vf-0", "a"), result("vf-1", "b")]
    one = claim(1, *results, configs=[config(requests=["b"], interfaceName="rail")])
    assert interfaces(plan(one)) == ["net1", "rail"]


@pytest.mark.parametrize(
    ("wanted", "name"), [(["main"], "rail"), (["main/large"], "rail"), (["main/small"], "net1"), ([], "rail")]
)
def test_config_of_a_subrequest(wanted: list[str], name: str) -> None:
    one = claim(1, result("vf-0", "main/large"), configs=[config(requests=wanted, interfaceName="rail")])
    assert interfaces(plan(one)) == [name]


def test_config_of_other_drivers_is_not_read() -> None:
    configs = [config(driver="nic.example.com", nonsense=True), {"source": "FromClaim"}]
    assert interfaces(plan(claim(1, "vf-0", configs=configs))) == ["net1"]


def test_default_names_keep_clear_of_configured_ones() -> None:
    """The user's words are known before the first device is named."""
    results = [result("vf-0", "a"), result("vf-1", "b")]
    one = claim(1, *results, configs=[config(requests=["b"], interfaceName="net1")])
    assert sorted(interfaces(plan(one))) == ["net1", "net2"]


# --- refusals: object, cause, next step
def test_replaced_claim() -> None:
    one = claim(1, "pair-0")
    one["metadata"]["uid"] = "other"
    text = refusal(one)
    assert "replaced" in text
    assert ref(1).uid in text
    assert "Delete the pod" in text


@pytest.mark.parametrize("status", [None, {}, {"allocation": None}])
def test_claim_that_is_not_allocated(status: Any) -> None:
    one = claim(1)
    if status is None:
        del one["status"]
    else:
        one["status"] = status
    assert "not allocated" in refusal(one)


def test_claim_for_another_driver() -> None:
    text = refusal(claim(1, result("theirs", driver="gpu.example.com")))
    assert "gpu.example.com" in text
    assert DRIVER in text


@pytest.mark.parametrize("changed", [{"device": "pair-9"}, {"pool": "node2"}])
def test_device_that_is_not_on_the_node(changed: dict[str, str]) -> None:
    text = refusal(claim(1, result("pair-0") | changed))
    assert "not on node node1" in text
    assert "Delete the pod" in text


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        ({"mtu": 1}, "mtu"),
        ({"interfaceName": "much-too-long-for-one"}, "much-too-long-for-one"),
        ({"kind": "Other"}, "Other"),
        ({"apiVersion": "railmate.dev/v2"}, "railmate.dev/v2"),
    ],
)
@pytest.mark.parametrize(("source", "where"), [("FromClaim", "claim"), ("FromClass", "DeviceClass")])
def test_bad_config(bad: dict[str, Any], cause: str, source: str, where: str) -> None:
    one = config(source)
    one["opaque"]["parameters"] |= bad
    text = refusal(claim(1, "vf-0", configs=[one]))
    assert cause in text
    assert f"Correct it in the {where}" in text


def test_bad_config_of_a_claim_without_nic_is_refused_too() -> None:
    """Whoever writes it expects an effect; silence would hide that there is none."""
    assert "mtu" in refusal(claim(1, "gpu-0", configs=[config(mtu=1)]))


def test_config_for_a_request_without_nic_is_refused() -> None:
    one = claim(1, result("gpu-0", "gpu"), result("vf-0", "nic"), configs=[config(requests=["gpu"], mtu=1)])
    assert "mtu" in refusal(one)


@pytest.mark.parametrize("parameters", [None, [], "text"])
def test_config_that_is_no_object(parameters: Any) -> None:
    one = config()
    one["opaque"]["parameters"] = parameters
    refusal(claim(1, "vf-0", configs=[one]))


def test_one_name_for_two_requests() -> None:
    results = [result("vf-0", "a"), result("vf-1", "b")]
    text = refusal(claim(1, *results, configs=[config(interfaceName="rail")]))
    assert "'rail'" in text
    assert "interfaceName of its own" in text


def test_name_that_another_claim_of_the_pod_has() -> None:
    assert "'rail'" in refusal(claim(1, "vf-0", configs=[config(interfaceName="rail")]), taken=("rail",))


def test_name_that_grows_too_long_with_its_number() -> None:
    one = claim(1, "vf-0", "vf-1", configs=[config(interfaceName="abcdefghijklmno")])
    assert "longer than 15" in refusal(one)


def test_gpu_without_device_node() -> None:
    found = inventory()
    bare = replace(found, gpus=tuple(replace(gpu, device_nodes=()) for gpu in found.gpus))
    text = refusal(claim(1, "gpu-0"), view(inventory=bare))
    assert GPUS[0] in text
    assert "driver" in text


# --- a driver that started while the VF was in a pod
def away(found: Inventory) -> Inventory:
    functions = {
        address: replace(one, netdevs=()) if address == VFS[0] else one
        for address, one in found.functions.items()
    }
    return replace(found, functions=functions)


def test_vf_whose_netdev_was_away_at_the_start_is_not_planned_without_it() -> None:
    """Else the next pod runs without its NIC and nobody says so."""
    try:
        made = plan(claim(1, "vf-0"), view(inventory=away(inventory())))
    except Exception:  # to refuse is right as well, as long as it is said
        return
    assert made.devices[0].nics[0].interface
