"""What the slice controller does with taints: one write a change, none without."""

from __future__ import annotations

from typing import Any

import pytest

from railmate.publish.controller import SliceController
from unit.publish.test_controller import DRIVER, NODE, FakeApi, controller, offer


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


def timed(spec: dict[str, Any]) -> None:
    """The server notes when a taint was added."""
    for device in spec.get("devices", []):
        for taint in device.get("taints", []):
            taint.setdefault("timeAdded", f"2026-11-29T12:00:{len(spec['devices']) % 60:02}Z")


def tainted(api: FakeApi) -> dict[str, str]:
    return {
        device["name"]: device["taints"][0]["value"]
        for spec in api.specs()
        for device in spec.get("devices", [])
        if "taints" in device
    }


def test_taint_is_one_write_and_clearing_it_another(api: FakeApi) -> None:
    api.drop = timed
    one = controller(api)
    one.sync()
    before = api.specs()
    for taints in ({"gpu-1": "gpu-lost"}, {}):
        api.writes.clear()
        one.set_taints(taints)
        assert tainted(api) == taints
        assert api.writes == [("update", "00001-railmate.dev-node1")]
        one.sync()
        assert len(api.writes) == 1  # the time that the server added is no change
    assert api.specs() == before


def test_taints_in_several_slices_leave_the_generation_alone(api: FakeApi) -> None:
    """A new generation would take all of the node's devices from the scheduler until the last slice is written."""
    api.drop = timed
    one = SliceController(api, DRIVER, NODE, offer(200))  # type: ignore[arg-type]
    one.sync()
    api.writes.clear()
    one.set_taints({"gpu-0": "gpu-lost", "gpu-199": "gpu-lost"})
    assert set(tainted(api)) == {"gpu-0", "gpu-199"}
    assert len(api.writes) == 2
    assert {spec["pool"]["generation"] for spec in api.specs()} == {1}


def test_taints_outlive_another_offer_and_a_wipe(api: FakeApi) -> None:
    api.drop = timed
    one = SliceController(api, DRIVER, NODE, offer(), taints={"gpu-1": "gpu-lost"})  # type: ignore[arg-type]
    one.sync()
    assert tainted(api) == {"gpu-1": "gpu-lost"}  # from the first write on
    api.wipe()
    one.update(offer(5))
    assert tainted(api) == {"gpu-1": "gpu-lost"}


def test_server_without_taints_is_told_of_them_once(api: FakeApi, caplog: pytest.LogCaptureFixture) -> None:
    def drop(spec: dict[str, Any]) -> None:
        for device in spec.get("devices", []):
            device.pop("taints", None)

    api.drop = drop
    one = controller(api)
    one.sync()
    one.set_taints({"gpu-1": "gpu-lost"})
    api.writes.clear()
    one.set_taints({})
    one.set_taints({"gpu-2": "gpu-lost"})
    assert api.writes == []
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "DRADeviceTaints" in warnings[0]
    assert "DRAPartitionableDevices" not in warnings[0]
