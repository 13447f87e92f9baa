"""The controller that keeps the API right, against an API server in memory."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from railmate.kube.errors import ApiError
from railmate.publish.controller import SliceController
from railmate.publish.model import Offer, OfferedDevice

DRIVER, NODE = "railmate.dev", "node1"
#: Seconds that a test waits for what should come at once.
PATIENCE = 5.0


def offer(devices: int = 3, counted: bool = True) -> Offer:
    consumes = (("switch-0", "gpu-0", 1),) if counted else ()
    return Offer(
        tuple(
            OfferedDevice(f"gpu-{i}", "gpu", {"railmate.dev/rail": i}, consumes=consumes)
            for i in range(devices)
        ),
        {"switch-0": {"gpu-0": 1}} if counted else {},
    )


class FakeApi:
    """Slices as the API server keeps them: versions, preconditions, a watch; counts what is written."""

    def __init__(self) -> None:
        self.slices: dict[str, dict[str, Any]] = {}
        self.version = 100
        self.node_uid = "node-uid-1"
        self.node_gets = 0
        self.writes: list[tuple[str, str]] = []
        self.drop: Callable[[dict[str, Any]], None] = lambda spec: None
        self.fail: list[ApiError] = []
        self.events: list[dict[str, Any]] = []
        self.changed = threading.Condition()
        self.watches = 0
        self.end_watch_at_once = False
        self.expire: list[ApiError | dict[str, Any]] = []  # how the next watches end
        self.after_write: Callable[[], None] = lambda: None

    def get_node(self, name: str) -> dict[str, Any]:
        self.node_gets += 1
        return {"metadata": {"name": name, "uid": self.node_uid}}

    def list_slices(self, driver: str, node: str) -> tuple[list[dict[str, Any]], str]:
        if self.fail:
            raise self.fail.pop(0)
        with self.changed:
            return copy.deepcopy(list(self.slices.values())), str(self.version)

    def create_slice(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["metadata"]["name"] in self.slices:
            raise ApiError("exists", 409)
        return self._store("create", body)

    def try_slice(self, body: dict[str, Any]) -> dict[str, Any]:
        body = copy.deepcopy(body)
        self.drop(body["spec"])
        return body

    def update_slice(self, body: dict[str, Any]) -> dict[str, Any]:
        stored = self.slices.get(body["metadata"]["name"])
        if stored is None:
            raise ApiError("not found", 404)
        if stored["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            raise ApiError("conflict", 409)
        return self._store("update", body)

    def delete_slice(self, existing: dict[str, Any]) -> None:
        self.writes.append(("delete", existing["metadata"]["name"]))
        self._remove(existing["metadata"]["name"])

    def watch_slices(self, driver: str, node: str, version: str, seconds: int) -> Iterator[dict[str, Any]]:
        with self.changed:
            self.watches += 1
            self.changed.notify_all()
            if self.expire:
                end = self.expire.pop(0)
                if isinstance(end, ApiError):
                    raise end
                yield end
                return
            sent = int(version)
            while not self.end_watch_at_once:
                for event in [event for event in self.events if event["version"] > sent]:
                    sent = event["version"]
                    yield event
                if not self.changed.wait(PATIENCE):
                    return

    # --- what other people do
    def _store(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        body = copy.deepcopy(body)
        self.drop(body["spec"])
        with self.changed:
            self.version += 1
            body["metadata"] |= {
                "resourceVersion": str(self.version),
                "uid": f"uid-{body['metadata']['name']}",
            }
            self.slices[body["metadata"]["name"]] = body
            self.writes.append((verb, body["metadata"]["name"]))
            self._tell("MODIFIED")
            answer = copy.deepcopy(body)
        self.after_write()
        return answer

    def _remove(self, name: str) -> None:
        with self.changed:
            self.version += 1
            self.slices.pop(name, None)
            self._tell("DELETED")

    def _tell(self, kind: str) -> None:
        self.events.append({"type": kind, "object": {}, "version": self.version})
        self.changed.notify_all()

    def wipe(self) -> None:
        """As the kubelet does at its start."""
        for name in list(self.slices):
            self._remove(name)

    def alter(self, name: str, change: Callable[[dict[str, Any]], None]) -> None:
        with self.changed:
            self.version += 1
            change(self.slices[name])
            self.slices[name]["metadata"]["resourceVersion"] = str(self.version)
            self._tell("MODIFIED")

    def wait_until(self, what: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(what, PATIENCE), "it did not come to that"

    def specs(self) -> list[dict[str, Any]]:
        return [self.slices[name]["spec"] for name in sorted(self.slices)]


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


def controller(api: FakeApi, what: Offer | None = None, **more: Any) -> SliceController:
    return SliceController(api, DRIVER, NODE, what or offer(), **more)  # type: ignore[arg-type]


@pytest.fixture
def running(api: FakeApi) -> Iterator[SliceController]:
    one = controller(api)
    thread = threading.Thread(target=one.run, daemon=True)
    thread.start()
    api.wait_until(lambda: api.watches > 0)
    yield one
    one.stop()
    api.end_watch_at_once = True
    with api.changed:
        api._tell("BOOKMARK")
    thread.join(PATIENCE)
    assert not thread.is_alive()


def consistent(api: FakeApi) -> None:
    """All slices of one generation and as many as they say: else the scheduler ignores the pool."""
    pools = [spec["pool"] for spec in api.specs()]
    assert {pool["resourceSliceCount"] for pool in pools} == {len(pools)}
    assert len({pool["generation"] for pool in pools}) == 1


# --- one look
def test_first_sync_publishes_everything(api: FakeApi) -> None:
    published = []
    controller(api, on_published=lambda: published.append(True)).sync()
    assert [verb for verb, _ in api.writes] == ["create", "create"]
    consistent(api)
    assert published == [True]
    assert api.slices["00000-railmate.dev-node1"]["metadata"]["ownerReferences"][0]["uid"] == api.node_uid


def test_nothing_is_written_when_nothing_changed(api: FakeApi) -> None:
    one = controller(api)
    one.sync()
    api.writes.clear()
    one.sync()
    controller(api).sync()  # nor by the next instance
    assert api.writes == []


def test_nothing_is_written_for_what_the_server_adds(api: FakeApi) -> None:
    """Defaults and bookkeeping of the server are no change."""
    controller(api).sync()
    for item in api.slices.values():
        item["metadata"] |= {
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "generation": 1,
            "managedFields": [],
        }
    api.writes.clear()
    controller(api).sync()
    assert api.writes == []


def add_to_devices(spec: dict[str, Any]) -> None:
    """As a newer server does with its defaults, or somebody's admission webhook."""
    for device in spec.get("devices", []):
        device["bindsToNode"] = False
        device.setdefault("attributes", {})["example.com/rack"] = {"string": "r1"}


def test_field_that_the_server_adds_to_a_device_is_written_against_once_and_no_more(api: FakeApi) -> None:
    api.drop = add_to_devices
    one = controller(api)
    one.sync()
    api.writes.clear()
    for _ in range(3):
        one.sync()
    assert api.writes == []
    another = controller(api)  # knows of no answer yet
    another.sync()
    api.writes.clear()
    another.sync()
    assert api.writes == []
    consistent(api)


def test_change_beside_a_field_that_the_server_adds_is_put_right(api: FakeApi) -> None:
    api.drop = add_to_devices
    one = controller(api)
    one.sync()
    api.alter("00001-railmate.dev-node1", lambda item: item["spec"]["devices"].pop())
    one.sync()
    assert [device["name"] for device in api.specs()[1]["devices"]] == ["gpu-0", "gpu-1", "gpu-2"]
    api.alter("00001-railmate.dev-node1", lambda item: item["metadata"].pop("ownerReferences"))
    one.sync()
    assert api.slices["00001-railmate.dev-node1"]["metadata"]["ownerReferences"]


def test_taints_beside_a_field_that_the_server_adds_do_not_raise_the_generation(api: FakeApi) -> None:
    api.drop = add_to_devices
    one = controller(api, offer(200))
    one.sync()
    api.writes.clear()
    one.set_taints({"gpu-0": "lost", "gpu-199": "lost"})
    assert [verb for verb, _ in api.writes] == ["update", "update"]
    assert {spec["pool"]["generation"] for spec in api.specs()} == {1}


def test_generation_stays_when_one_slice_changes_in_place(api: FakeApi) -> None:
    controller(api, offer(3)).sync()
    api.writes.clear()
    controller(api, offer(4)).sync()
    assert api.writes == [("update", "00001-railmate.dev-node1")]
    assert {spec["pool"]["generation"] for spec in api.specs()} == {1}


def test_generation_rises_when_the_number_of_slices_changes(api: FakeApi) -> None:
    controller(api, offer(3, counted=False)).sync()
    controller(api, offer(3)).sync()
    consistent(api)
    assert {spec["pool"]["generation"] for spec in api.specs()} == {2}


def test_stale_slices_are_deleted(api: FakeApi) -> None:
    controller(api, offer(200)).sync()
    assert len(api.slices) == 5
    controller(api, offer(3)).sync()
    assert len(api.slices) == 2
    consistent(api)


def test_one_deleted_slice_is_restored_with_a_new_generation(api: FakeApi) -> None:
    one = controller(api)
    one.sync()
    api._remove("00001-railmate.dev-node1")
    one.sync()
    consistent(api)
    assert {spec["pool"]["generation"] for spec in api.specs()} == {2}


def test_devices_in_another_order_are_a_change(api: FakeApi) -> None:
    one = controller(api)
    one.sync()
    api.alter("00001-railmate.dev-node1", lambda item: item["spec"]["devices"].reverse())
    one.sync()
    assert [device["name"] for device in api.specs()[1]["devices"]] == ["gpu-0", "gpu-1", "gpu-2"]


def test_foreign_owner_is_put_right(api: FakeApi) -> None:
    one = controller(api)
    one.sync()
    api.alter("00000-railmate.dev-node1", lambda item: item["metadata"].pop("ownerReferences"))
    one.sync()
    assert api.slices["00000-railmate.dev-node1"]["metadata"]["ownerReferences"]


def test_slices_follow_a_node_that_was_made_anew(api: FakeApi) -> None:
    """The garbage collector deletes what belongs to a Node UID that is gone: keeping it would be a fight for ever."""
    one = controller(api)
    one.sync()
    api.node_uid = "node-uid-2"
    api.wipe()
    one.sync()
    owners = {item["metadata"]["ownerReferences"][0]["uid"] for item in api.slices.values()}
    assert owners == {"node-uid-2"}


def test_restored_slice_belongs_to_the_node_that_was_made_anew(api: FakeApi) -> None:
    """The garbage collector deletes the slices of the Node that is gone one after the other."""
    one = controller(api)
    one.sync()
    api.node_uid = "node-uid-2"
    api._remove("00001-railmate.dev-node1")
    one.sync()
    owners = {item["metadata"]["ownerReferences"][0]["uid"] for item in api.slices.values()}
    assert owners == {"node-uid-2"}
    consistent(api)


def test_node_is_not_asked_for_while_all_is_as_it_should_be(api: FakeApi) -> None:
    one = controller(api)
    one.sync()
    asked = api.node_gets
    for _ in range(3):
        one.sync()
    assert (asked, api.node_gets) == (1, 1)


def test_what_somebody_altered_between_write_and_look_is_put_right(api: FakeApi) -> None:
    """It is no dropped field: only what the server answered to the write tells that."""

    def meddle() -> None:
        api.after_write = lambda: None
        api.alter("00000-railmate.dev-node1", lambda item: item["spec"].pop("sharedCounters", None))

    one = controller(api)
    api.after_write = meddle
    one.sync()
    one.sync()
    assert api.specs()[0]["sharedCounters"]


# --- the loop
def test_wiped_slices_are_restored(api: FakeApi, running: SliceController) -> None:
    api.wipe()
    api.wait_until(lambda: len(api.slices) == 2)


def test_altered_slice_is_restored(api: FakeApi, running: SliceController) -> None:
    api.alter("00001-railmate.dev-node1", lambda item: item["spec"]["devices"].pop())
    api.wait_until(lambda: len(api.specs()[1]["devices"]) == 3)


def test_own_writes_cause_no_further_ones(api: FakeApi, running: SliceController) -> None:
    writes, watches = len(api.writes), api.watches
    with api.changed:
        api.version += 1
        api._tell("MODIFIED")
    api.wait_until(lambda: api.watches > watches)
    assert len(api.writes) == writes


def test_slices_are_restored_at_once_also_after_a_time_of_changes(
    api: FakeApi, running: SliceController
) -> None:
    """The driver hears of its own writes, too; they are no quarrel."""
    for number in range(4, 10):
        watches = api.watches
        running.update(offer(number))
        api.wait_until(lambda watches=watches: api.watches > watches)  # type: ignore[misc]
    began = time.monotonic()
    api.wipe()
    api.wait_until(lambda: len(api.slices) == 2)
    assert time.monotonic() - began < 2.0


def test_loop_outlives_errors(api: FakeApi) -> None:
    api.fail = [ApiError("connection refused"), ApiError("conflict", 409)]
    one = controller(api)
    thread = threading.Thread(target=one.run, daemon=True)
    thread.start()
    api.wait_until(lambda: len(api.slices) == 2)
    one.stop()


@pytest.mark.parametrize("error", [KeyError("metadata"), ValueError("not JSON"), OSError("reset")])
def test_loop_outlives_what_nobody_thought_of(api: FakeApi, error: Exception) -> None:
    """A dead publishing thread would leave a node without slices, and nobody the wiser."""
    api.fail = [error]  # type: ignore[list-item]
    one = controller(api)
    thread = threading.Thread(target=one.run, daemon=True)
    thread.start()
    api.wait_until(lambda: len(api.slices) == 2)
    one.stop()


def test_an_offer_that_is_refused_as_invalid_does_not_hold_up_the_next_one(api: FakeApi) -> None:
    refused: list[str] = []
    one = controller(api, on_refused=refused.append)
    api.fail = [ApiError("spec.devices[0].name: Invalid value", 422)]
    one.update(offer(3))
    assert "Invalid value" in refused[0]
    assert api.slices == {}
    one.update(offer(4))
    assert len(api.slices) == 2


def test_two_instances_that_disagree_do_not_flood_the_server(api: FakeApi) -> None:
    """A rolling update whose versions publish different things: both run for some seconds."""
    both = [controller(api, offer(3)), controller(api, offer(4))]
    threads = [threading.Thread(target=one.run, daemon=True) for one in both]
    for thread in threads:
        thread.start()
    finished = threading.Event()
    finished.wait(1.0)  # how much is written in this time is the question
    for one in both:
        one.stop()
    assert len(api.writes) < 40


@pytest.mark.parametrize(
    "end",
    [
        ApiError("too old resource version", 410, "Expired"),
        {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}},
    ],
    ids=["refused", "ended"],
)
def test_watch_whose_version_has_expired_is_begun_anew_and_misses_nothing(
    api: FakeApi, end: ApiError | dict[str, Any]
) -> None:
    api.expire = [end]
    api.after_write = lambda: api.slices.clear() if len(api.writes) == 2 else None  # and no event tells of it
    one = controller(api)
    thread = threading.Thread(target=one.run, daemon=True)
    thread.start()
    api.wait_until(lambda: api.watches >= 2 and len(api.slices) == 2)
    one.stop()
    assert api.expire == []


def test_watch_that_ends_at_once_does_not_flood_the_server(api: FakeApi) -> None:
    """A proxy that closes every watch must not make us ask without pause."""
    api.end_watch_at_once = True
    one = controller(api)
    thread = threading.Thread(target=one.run, daemon=True)
    thread.start()
    threading.Event().wait(1.0)
    one.stop()
    assert api.watches < 40
