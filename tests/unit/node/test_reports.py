"""Reports: events and status.devices reach the API in order, repeat nothing, and hold nobody up."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import railmate.node.reports as module
from railmate.attach.model import NetdevSnapshot
from railmate.claims.records import Attachment, ClaimRef, Entry, PreparedDevice, PreparedNic
from railmate.kube.errors import ApiError
from railmate.node.reports import Reports
from unit.claims.claims_world import VFS, ref

Call = tuple[str, str, dict[str, Any]]


class Kube:
    """Takes events and statuses; fails as often as it is told to."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.failures: list[Exception] = []
        self.tries = 0
        self._news = threading.Condition()

    def create_event(self, namespace: str, event: dict[str, Any]) -> None:
        self._take("event", namespace, event)

    def apply_claim_status(self, namespace: str, name: str, body: dict[str, Any]) -> None:
        self._take("status", f"{namespace}/{name}", body)

    def _take(self, kind: str, where: str, body: dict[str, Any]) -> None:
        with self._news:
            self.tries += 1
            self._news.notify_all()
            if self.failures:
                raise self.failures.pop(0)
            self.calls.append((kind, where, body))

    def wait(self, calls: int = 1) -> list[Call]:
        self._until(lambda: len(self.calls) >= calls)
        return self.calls

    def wait_tries(self, tries: int) -> None:
        self._until(lambda: self.tries >= tries)

    def _until(self, done: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(done, 10), f"{self.tries} tries, {self.calls}"


@pytest.fixture
def kube(monkeypatch: pytest.MonkeyPatch) -> Kube:
    monkeypatch.setattr(module, "_PAUSE", 0.01)
    return Kube()


@pytest.fixture
def reports(kube: Kube) -> Iterator[Reports]:
    found = Reports(kube, "railmate.dev", "node1")  # type: ignore[arg-type]
    thread = threading.Thread(target=found.run, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.stop()
        thread.join(10)
        assert not thread.is_alive()


def entry(number: int = 1, nics: int = 1, interface: str = "net1") -> Entry:
    found = tuple(
        PreparedNic(
            VFS[n], interface, NetdevSnapshot(VFS[n], f"vf{n}", f"02:00:00:00:00:0{n}", 1500, True, VFS[n])
        )
        for n in range(nics)
    )
    device = PreparedDevice("main", "node1", "pair-0", ("0000:07:00.0",), found)
    attachment = Attachment("sandbox-1", "pod-1", "team/pod-1", "/run/netns/1", True)
    return Entry(ref(number), ("pod-1",), (device,), "boot-1", None, attachment)


def test_event_on_the_node_names_driver_reason_and_message(reports: Reports, kube: Kube) -> None:
    reports.node_event("ClaimRecordDamaged", "The record was damaged.")
    ((kind, namespace, event),) = kube.wait()
    assert (kind, namespace) == ("event", "default")
    assert event["involvedObject"]["kind"] == "Node"
    assert event["involvedObject"]["name"] == "node1"
    assert event["metadata"]["namespace"] == "default"
    assert (event["type"], event["reason"], event["message"]) == (
        "Warning", "ClaimRecordDamaged", "The record was damaged.",
    )  # fmt: skip
    assert event["source"] == {"component": "railmate.dev", "host": "node1"}
    assert event["firstTimestamp"].endswith("Z")


def test_event_on_a_claim_is_in_its_namespace(reports: Reports, kube: Kube) -> None:
    reports.claim_event(ref(1), "DeviceGone", "It is gone.")
    ((_, namespace, event),) = kube.wait()
    assert namespace == event["metadata"]["namespace"] == "team"
    assert event["involvedObject"]["uid"] == ref(1).uid


def test_same_event_is_sent_once_and_another_is_not_held_back(reports: Reports, kube: Kube) -> None:
    for _ in range(5):
        reports.node_event("A", "one")
    reports.node_event("A", "two")
    reports.claim_event(ref(1), "A", "one")
    reports.claim_event(ref(2), "A", "one")
    assert len(kube.wait(4)) == 4
    names = {event["metadata"]["name"] for _, _, event in kube.calls}
    assert len(names) == 4


def test_event_may_come_again_after_a_while(
    reports: Reports, kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SILENCE", 0.0)
    reports.node_event("A", "one")
    reports.node_event("A", "one")
    kube.wait(2)


def test_long_message_and_name_are_within_the_apis_limits(reports: Reports, kube: Kube) -> None:
    reports.claim_event(ClaimRef("u", "team", "n" * 253), "A", "x" * 5000)
    ((_, _, event),) = kube.wait()
    assert len(event["message"]) <= 1024
    assert len(event["metadata"]["name"]) <= 253
    assert event["metadata"]["name"][0].isalnum(), "a DNS subdomain starts with a letter or digit"


def test_name_of_an_event_is_one_whatever_the_claim_is_called(reports: Reports, kube: Kube) -> None:
    """Cut at a dot or dash it would be refused (RFC 1123)."""
    reports.claim_event(ClaimRef("u", "team", "a" * 16 + "-." + "b" * 235), "A", "x")
    ((_, _, event),) = kube.wait()
    assert event["metadata"]["name"][0].isalnum()


def test_attached_claim_says_where_its_netdev_is(reports: Reports, kube: Kube) -> None:
    reports.attached(entry())
    ((kind, where, body),) = kube.wait()
    assert (kind, where) == ("status", "team/claim-1")
    assert body["metadata"]["uid"] == ref(1).uid, "never the status of a claim that took its name"
    (device,) = body["status"]["devices"]
    assert (device["driver"], device["pool"], device["device"]) == ("railmate.dev", "node1", "pair-0")
    assert device["networkData"] == {"interfaceName": "net1", "hardwareAddress": "02:00:00:00:00:00"}
    assert [one["type"] for one in device["conditions"]] == ["Ready", "NetworkReady", "RDMAReady"]
    assert all(one["lastTransitionTime"].endswith("Z") for one in device["conditions"])


def test_one_pod_is_one_patch_also_when_its_sandbox_is_made_again(reports: Reports, kube: Kube) -> None:
    for _ in range(3):
        reports.attached(entry())
    reports.attached(entry(2))
    assert [where for _, where, _ in kube.wait(2)] == ["team/claim-1", "team/claim-2"]


def test_claim_that_comes_again_after_its_release_is_told_again(reports: Reports, kube: Kube) -> None:
    reports.attached(entry())
    reports.released(ref(1))
    reports.released(ref(1))
    reports.attached(entry())
    kube.wait(2)


class Heard:
    """What becomes of statuses."""

    def __init__(self, reports: Reports) -> None:
        self.ends: list[tuple[Entry, bool]] = []
        self._news = threading.Condition()
        reports.on_told = self._on_told

    def _on_told(self, one: Entry, final: bool) -> None:
        with self._news:
            self.ends.append((one, final))
            self._news.notify_all()

    def wait(self, count: int = 1) -> list[tuple[Entry, bool]]:
        with self._news:
            assert self._news.wait_for(lambda: len(self.ends) >= count, 10)
            return self.ends


@pytest.mark.parametrize(
    "failures", [[], [ApiError("busy", 500, "")], [ApiError("gone", 404, "NotFound")], [ValueError("odd")]]
)
def test_status_that_was_sent_or_never_can_be_is_said_to_be_told(
    reports: Reports, kube: Kube, failures: list[Exception]
) -> None:
    heard = Heard(reports)
    kube.failures = failures
    reports.attached(entry())
    assert heard.wait() == [(entry(), True)]


def test_status_that_was_given_up_can_be_told_again(reports: Reports, kube: Kube) -> None:
    """The server was away for longer than the tries."""
    heard = Heard(reports)
    kube.failures = [ApiError("not reachable")] * module._TRIES
    reports.attached(entry())
    assert heard.wait() == [(entry(), False)]
    reports.attached(entry())
    assert heard.wait(2)[1] == (entry(), True)
    assert len(kube.calls) == 1


def test_status_for_which_there_was_no_room_is_given_up_for_now(kube: Kube) -> None:
    reports = Reports(kube, "railmate.dev", "node1")  # type: ignore[arg-type]  # nothing sends
    heard = Heard(reports)
    for number in range(module._BACKLOG):
        reports.node_event("A", str(number))
    reports.attached(entry())
    assert heard.ends == [(entry(), False)]


def test_status_that_did_not_change_is_told_for_the_newest_sandbox(reports: Reports, kube: Kube) -> None:
    heard = Heard(reports)
    reports.attached(entry())
    heard.wait()
    again = entry()
    assert again.attachment is not None
    again = replace(again, attachment=replace(again.attachment, sandbox="sandbox-2"))
    reports.attached(again)
    assert heard.wait(2)[1] == (again, True)
    assert len(kube.calls) == 1


def test_status_of_a_released_claim_is_of_no_interest_any_more(kube: Kube) -> None:
    reports = Reports(kube, "railmate.dev", "node1")  # type: ignore[arg-type]
    heard = Heard(reports)
    reports.attached(entry(1))
    reports.released(ref(1))
    reports.attached(entry(2))
    thread = threading.Thread(target=reports.run, daemon=True)
    thread.start()
    assert [one.claim for one, _ in heard.wait()] == [ref(2)]
    reports.stop()
    thread.join(10)


def test_events_of_many_threads_are_each_sent_once(kube: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Reports(kube, "railmate.dev", "node1")  # type: ignore[arg-type]
    put: list[str] = []
    monkeypatch.setattr(reports, "_put", lambda one: put.append(one.what))
    start = threading.Barrier(8)

    def report() -> None:
        start.wait(10)
        for number in range(200):
            reports.node_event("A", str(number))

    threads = [threading.Thread(target=report) for _ in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert len(put) == 200


def test_several_netdevs_of_a_device_have_no_room(reports: Reports, kube: Kube) -> None:
    reports.attached(entry(nics=2))
    ((_, _, body),) = kube.wait()
    assert "networkData" not in body["status"]["devices"][0]


def test_claim_of_a_gpu_alone_is_not_written_to(reports: Reports, kube: Kube) -> None:
    reports.attached(entry(nics=0))
    reports.attached(entry(2))
    assert [where for _, where, _ in kube.wait()] == ["team/claim-2"]


@pytest.mark.parametrize(
    "error", [ApiError("not reachable"), ApiError("busy", 500, ""), ApiError("slow", 429, "")]
)
def test_what_may_pass_is_tried_again(reports: Reports, kube: Kube, error: ApiError) -> None:
    kube.failures = [error, error]
    reports.node_event("A", "one")
    kube.wait()
    assert kube.tries == 3


@pytest.mark.parametrize(
    "error",
    [
        ApiError("no", 403, "Forbidden"),
        ApiError("gone", 404, "NotFound"),
        ApiError("no", 422, "Invalid"),
        ValueError("odd"),
    ],
)
def test_what_no_other_try_helps_is_given_up(reports: Reports, kube: Kube, error: Exception) -> None:
    kube.failures = [error]
    reports.node_event("A", "one")
    reports.node_event("A", "two")
    assert [event["message"] for _, _, event in kube.wait()] == ["two"]
    assert kube.tries == 2


def test_server_that_stays_away_is_given_up_in_the_end(reports: Reports, kube: Kube) -> None:
    kube.failures = [ApiError("not reachable")] * module._TRIES
    reports.node_event("A", "one")
    reports.node_event("A", "two")
    assert [event["message"] for _, _, event in kube.wait()] == ["two"]
    assert kube.tries == module._TRIES + 1


def test_nobody_waits_for_a_server_that_is_away(kube: Kube) -> None:
    reports = Reports(kube, "railmate.dev", "node1")  # type: ignore[arg-type]  # nothing sends
    for number in range(2 * module._BACKLOG):
        reports.node_event("A", str(number))
        reports.attached(entry(number))
    reports.stop()


def test_stop_ends_the_wait_between_two_tries(kube: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE", 60.0)
    kube.failures = [ApiError("not reachable")] * 100
    reports = Reports(kube, "railmate.dev", "node1")  # type: ignore[arg-type]
    thread = threading.Thread(target=reports.run, daemon=True)
    thread.start()
    reports.node_event("A", "one")
    kube.wait_tries(1)
    reports.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_stop_ends_the_thread_also_when_the_backlog_is_full(
    kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    kube.failures = [ApiError("not reachable")] * 10_000
    reports = Reports(kube, "railmate.dev", "node1")  # type: ignore[arg-type]
    for number in range(2 * module._BACKLOG):
        reports.node_event("A", str(number))
    reports.stop()
    thread = threading.Thread(target=reports.run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it has nothing left to send and was told to stop"
