"""An offer as ResourceSlices: limits of the API, names, canonical values."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from railmate.inventory.model import Inventory
from railmate.publish.devices import OfferOptions, build_offer
from railmate.publish.model import Offer, OfferedDevice
from railmate.publish.slices import api_attribute, quantity, resource_slices, slice_name, slice_specs
from railmate.topology.analyze import analyze

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
QUALIFIED = re.compile(r"([a-z0-9.-]{1,63}/)?[A-Za-z_][A-Za-z0-9_]{0,31}")


def check_api_limits(slices: list[dict[str, Any]]) -> None:
    """k8s.io/api resource/v1 and pkg/apis/resource/validation of Kubernetes 1.37."""
    sets: dict[str, set[str]] = {}
    consumed: list[tuple[str, str]] = []
    device_names: list[str] = []
    for item in slices:
        spec = item["spec"]
        assert SUBDOMAIN.fullmatch(item["metadata"]["name"])
        assert len(item["metadata"]["name"]) <= 253
        assert spec["pool"]["resourceSliceCount"] == len(slices)
        assert not ("devices" in spec and "sharedCounters" in spec)
        assert len(spec.get("sharedCounters", [])) <= 8
        for counter_set in spec.get("sharedCounters", []):
            assert LABEL.fullmatch(counter_set["name"])
            assert 0 < len(counter_set["counters"]) <= 32
            assert all(LABEL.fullmatch(name) for name in counter_set["counters"])
            assert counter_set["name"] not in sets
            sets[counter_set["name"]] = set(counter_set["counters"])
        devices = spec.get("devices", [])
        assert len(devices) <= (64 if any("consumesCounters" in device for device in devices) else 128)
        for device in devices:
            device_names.append(device["name"])
            assert LABEL.fullmatch(device["name"])
            entries = {**device["attributes"], **device.get("capacity", {})}
            assert len(entries) <= 32
            assert all(QUALIFIED.fullmatch(name) for name in entries)
            assert all(len(value) == 1 for value in device["attributes"].values())
            for consumption in device.get("consumesCounters", []):
                consumed += [(consumption["counterSet"], counter) for counter in consumption["counters"]]
            used = [consumption["counterSet"] for consumption in device.get("consumesCounters", [])]
            assert len(used) == len(set(used)) <= 2
    assert len(device_names) == len(set(device_names))
    assert all(counter in sets[name] for name, counter in consumed)


def many(gpus: int, vfs: int, counted_vfs: int) -> Offer:
    """``gpus`` GPUs with ``vfs`` VFs each, of which ``counted_vfs`` have a counter, as with share_pair_vfs."""
    devices = []
    for g in range(gpus):
        devices.append(OfferedDevice(f"pair-{g}", "pair", {}, consumes=((f"set-{g}", f"gpu-{g}", 1),)))
        devices.append(OfferedDevice(f"gpu-{g}", "gpu", {}, consumes=((f"set-{g}", f"gpu-{g}", 1),)))
        for v in range(vfs):
            consumes = ((f"set-{g}", f"vf-{v}", 1),) if v < counted_vfs else ()
            devices.append(OfferedDevice(f"vf-{g}-{v}", "rdma-vf", {}, consumes=consumes))
    sets = {
        f"set-{g}": dict.fromkeys((f"gpu-{g}", *(f"vf-{v}" for v in range(counted_vfs))), 1)
        for g in range(gpus)
    }
    return Offer(tuple(devices), sets)


@pytest.mark.parametrize("counted", [0, 1, 31])
@pytest.mark.parametrize("gpus", [1, 8, 9, 16])
@pytest.mark.parametrize("vfs", [31, 64, 128])
def test_limits_hold_for_large_machines(gpus: int, vfs: int, counted: int) -> None:
    slices = resource_slices(many(gpus, vfs, counted), "railmate.dev", "node1")
    check_api_limits(slices)
    assert sum(len(item["spec"].get("devices", [])) for item in slices) == gpus * (vfs + 2)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("vfs", [0, 1, 4, 16])
def test_limits_hold_for_dgx_a100(scanned: Callable[[str, int], Inventory], vfs: int, share: bool) -> None:
    inventory = scanned("dgx-a100", vfs)
    offer = build_offer(inventory, analyze(inventory), OfferOptions(share_pair_vfs=share))
    check_api_limits(resource_slices(offer, "railmate.dev", "node1"))


def test_demo_machine_takes_two_slices(scanned: Callable[[str, int], Inventory]) -> None:
    """Each slice costs the scheduler on every attempt: one of counters, one of devices."""
    inventory = scanned("dgx-a100", 4)
    slices = resource_slices(build_offer(inventory, analyze(inventory)), "railmate.dev", "node1")
    assert [sorted(set(item["spec"]) & {"devices", "sharedCounters"}) for item in slices] == [
        ["sharedCounters"],
        ["devices"],
    ]


def test_order_of_devices_survives_the_split() -> None:
    """The scheduler walks slices by name and devices by place: within a kind the offer's order must stay."""
    offer = many(8, 128, 1)
    slices = sorted(
        resource_slices(offer, "railmate.dev", "node1"), key=lambda item: item["metadata"]["name"]
    )
    published = [device["name"] for item in slices for device in item["spec"].get("devices", [])]
    for prefix in ("pair-", "gpu-"):
        wanted = [device.name for device in offer.devices if device.name.startswith(prefix)]
        assert [name for name in published if name.startswith(prefix)] == wanted


def test_names_keep_the_order_also_past_ten_and_sixteen_slices() -> None:
    names = [slice_name(index, "railmate.dev", "node1") for index in (0, 9, 10, 15, 16, 255, 4096)]
    assert names == sorted(names)
    assert len(set(names)) == len(names)


def test_two_drivers_and_two_nodes_do_not_meet_in_one_name() -> None:
    names = {slice_name(0, driver, node) for driver in ("a.dev", "b.dev") for node in ("n1", "n2")}
    assert len(names) == 4


def test_name_is_legal_for_the_longest_node_name() -> None:
    """A Node's name may take all 253 characters that an object's name may have."""
    node = ".".join(["n" * 62] * 4)[:253]
    name = slice_name(0, "railmate.dev", node)
    assert len(name) <= 253
    assert SUBDOMAIN.fullmatch(name)


def test_long_node_names_that_differ_at_the_end_have_different_slices() -> None:
    names = {slice_name(0, "railmate.dev", "n" * 240 + end) for end in ("a", "b")}
    assert len(names) == 2


def test_empty_node_publishes_one_empty_slice() -> None:
    (item,) = resource_slices(Offer(), "railmate.dev", "node1")
    assert item["spec"]["devices"] == []
    assert item["spec"]["pool"] == {"name": "node1", "generation": 1, "resourceSliceCount": 1}


def test_slices_belong_to_the_node_object() -> None:
    (item,) = resource_slices(Offer(), "railmate.dev", "node1", node_uid="uid-1", generation=7)
    (owner,) = item["metadata"]["ownerReferences"]
    assert owner == {"apiVersion": "v1", "kind": "Node", "name": "node1", "uid": "uid-1", "controller": True}
    assert item["spec"]["pool"]["generation"] == 7


def test_same_offer_same_bytes(scanned: Callable[[str, int], Inventory]) -> None:
    inventory = scanned("dgx-a100", 4)
    texts = {
        json.dumps(resource_slices(build_offer(inventory, analyze(inventory)), "railmate.dev", "node1"))
        for _ in range(2)
    }
    assert len(texts) == 1


#: Prints a digest of the slices of every machine.
DIGEST = """
import hashlib, json
from railmate.publish.slices import resource_slices
from unit.publish.offered_machines import cases, cut_up
offers = [case.offer for case in (*cases(), *cut_up())]
text = json.dumps([resource_slices(offer, "railmate.dev", "node1") for offer in offers])
print(hashlib.sha256(text.encode()).hexdigest())
"""


def test_every_process_makes_the_same_bytes_of_every_machine() -> None:
    """Sets have another order in each: none of it may show."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert len(digests) == 1


def test_every_counter_is_one_piece_of_hardware() -> None:
    specs = slice_specs(many(8, 4, 1))
    values = [
        counter["value"]
        for spec in specs
        for counter_set in spec.get("sharedCounters", [])
        for counter in counter_set["counters"].values()
    ]
    assert set(values) == {"1"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1, "1"),
        (1000, "1000"),
        (1023, "1023"),
        (1024, "1Ki"),
        (1536, "1536"),
        (40 * 2**30, "40Gi"),
        (80 * 2**30 + 2**20, "81921Mi"),
        (42949672960, "40Gi"),
        (2**60, "1Ei"),
        (3 * 2**62, "12Ei"),
    ],
)
def test_quantity_is_what_the_api_server_writes_back(value: int, text: str) -> None:
    assert quantity(value) == text


def test_attribute_type_picks_the_field() -> None:
    assert api_attribute(True) == {"bool": True}
    assert api_attribute(3) == {"int": 3}
    assert api_attribute("535.104.05") == {"string": "535.104.05"}
