"""Servers with a feature gate off: what they drop is noticed, said, and never lets hardware go out twice."""

from __future__ import annotations

from typing import Any

import pytest
from test_controller import FakeApi, api, consistent, controller

from railmate.publish.exclusive import Preference
from railmate.publish.model import Offer, OfferedDevice
from railmate.publish.writes import dropped_fields

__all__ = ["api"]  # a fixture

GPU, VF, OTHER = "0000:01:00.0", "0000:02:00.1", "0000:02:00.2"
SET = ("switch-0", "gpu-0", 1)
OFFER = Offer(
    (
        OfferedDevice("pair-0", "pair", {}, consumes=(SET,), gpus=(GPU,), nics=(VF,)),
        OfferedDevice("gpu-0", "gpu", {}, consumes=(SET,), gpus=(GPU,)),
        OfferedDevice("vf-2", "rdma-vf", {}, nics=(OTHER,)),
    ),
    {"switch-0": {"gpu-0": 1}},
)


def drop_counters(spec: dict[str, Any]) -> None:
    spec.pop("sharedCounters", None)
    for device in spec.get("devices", []):
        device.pop("consumesCounters", None)


def drop_taints(spec: dict[str, Any]) -> None:
    for device in spec.get("devices", []):
        device.pop("taints", None)


def devices(api: FakeApi) -> list[str]:
    return [device["name"] for spec in api.specs() for device in spec.get("devices", [])]


@pytest.mark.parametrize(
    ("preference", "left"), [(Preference.PAIRS, ["pair-0", "vf-2"]), (Preference.PARTS, ["gpu-0", "vf-2"])]
)
def test_without_counters_hardware_has_one_name(
    api: FakeApi, preference: Preference, left: list[str]
) -> None:
    api.drop = drop_counters
    controller(api, OFFER, preference=preference).sync()
    assert devices(api) == left
    consistent(api)
    assert all("sharedCounters" not in spec for spec in api.specs())


def test_what_is_lost_and_which_gate_is_said_once(api: FakeApi, caplog: pytest.LogCaptureFixture) -> None:
    api.drop, said = drop_counters, []
    one = controller(api, OFFER, on_lost=said.append)
    one.sync()
    one.sync()
    (message,) = said
    assert "DRAPartitionableDevices" in message
    assert "left out: 1 GPU alone." in message
    assert "--without-counters=parts" in message
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [f"node node1: {message}"]


def test_server_that_drops_fields_is_written_to_once(api: FakeApi) -> None:
    api.drop = drop_counters
    one = controller(api, OFFER)
    one.sync()
    assert [verb for verb, _ in api.writes] == ["create"]
    api.writes.clear()
    one.sync()
    controller(api, OFFER).sync()  # nor by the next instance
    assert api.writes == []


def test_wiped_slices_come_back_also_without_the_dropped_fields(api: FakeApi) -> None:
    api.drop = drop_counters
    one = controller(api, OFFER)
    one.sync()
    api.wipe()
    one.sync()
    assert devices(api) == ["pair-0", "vf-2"]


def test_counters_that_a_write_loses_stop_it_before_the_devices(api: FakeApi) -> None:
    """The server was changed after it was asked."""
    one = controller(api, OFFER)
    one.sync()
    assert len(devices(api)) == 3
    api.drop = drop_counters
    api.wipe()
    api.after_write = lambda: written.append(devices(api))
    written: list[list[str]] = []
    one.sync()
    assert written == [[], ["pair-0", "vf-2"]]
    consistent(api)


def test_server_that_learns_counters_gets_them_without_a_restart(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.drop = drop_counters
    one = controller(api, OFFER)
    one.sync()
    api.drop = lambda spec: None
    one.sync()
    assert devices(api) == ["pair-0", "vf-2"], "it is asked from time to time, not at every look"
    monkeypatch.setattr(one, "_ask_again_at", 0.0)
    one.sync()
    assert devices(api) == ["pair-0", "gpu-0", "vf-2"]
    assert api.specs()[0]["sharedCounters"]
    consistent(api)


def test_server_that_keeps_all_is_asked_once(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    keep = api.try_slice
    monkeypatch.setattr(api, "try_slice", lambda body: asked.append(body) or keep(body))
    one = controller(api, OFFER)
    for _ in range(3):
        one.sync()
    assert len(asked) == 1


def test_server_without_taints_is_told_of_and_wanted_no_more_of(api: FakeApi) -> None:
    api.drop, said = drop_taints, []
    one = controller(api, OFFER, on_lost=said.append, taints={"gpu-0": "gpu-lost"})
    one.sync()
    (message,) = said
    assert "DRADeviceTaints" in message
    assert len(devices(api)) == 3, "counters are kept, so nothing else is left out"
    api.writes.clear()
    one.set_taints({"gpu-0": "gpu-lost", "vf-2": "nic-gone"})
    assert api.writes == []


def test_a_node_without_shared_hardware_loses_nothing_and_says_nothing(api: FakeApi) -> None:
    api.drop, said = drop_counters, []
    controller(api, Offer((OFFER.devices[2],)), on_lost=said.append).sync()
    assert said == []
    assert devices(api) == ["vf-2"]


def test_dropped_fields_are_named_at_any_depth() -> None:
    sent = {"a": 1, "devices": [{"name": "x", "consumesCounters": [1]}, {"name": "y"}], "empty": []}
    assert dropped_fields(sent, {"a": 1, "devices": [{"name": "x"}, {"name": "y"}]}) == {"consumesCounters"}
    assert dropped_fields(sent, sent) == set()
    assert dropped_fields(sent, sent | {"added": True}) == set()
    assert dropped_fields({"a": {"b": 1}}, {"a": {}}) == {"b"}
