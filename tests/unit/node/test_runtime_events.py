"""The runtime's events become the claims' verbs, in threads of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from railmate.claims.attachments import Sandbox
from railmate.errors import RailmateError
from railmate.node.events import RuntimeEvents
from railmate.nri.events import ContainerInfo, PodSandbox

UID = "00000000-0000-4000-8000-000000000001"
OTHER = "00000000-0000-4000-8000-000000000002"
NETNS = Path("/proc/self/ns/net")


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.threads: set[str] = set()
        self.error: Exception | None = None

    def __getattr__(self, verb: str) -> Any:
        def call(*arguments: Any) -> None:
            self.threads.add(threading.current_thread().name)
            self.calls.append((verb, arguments))
            if self.error:
                raise self.error

        return call


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def events(recorder: Recorder) -> Iterator[RuntimeEvents]:
    one = RuntimeEvents("railmate.dev", recorder)  # type: ignore[arg-type]
    yield one
    one.close()


def do(what: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(what)


def pod(netns: Path | None = NETNS, **more: Any) -> PodSandbox:
    return PodSandbox(
        **({"id": "s1", "name": "p", "namespace": "team", "uid": "pod-1", "netns_path": netns} | more)
    )


def container(*cdi: str) -> ContainerInfo:
    return ContainerInfo("c1", "main", "s1", cdi)


def test_sandbox_is_attached_when_it_runs_and_detached_when_it_stops(
    events: RuntimeEvents, recorder: Recorder
) -> None:
    do(events.run_pod_sandbox(pod()))
    do(events.stop_pod_sandbox(pod()))
    do(events.remove_pod_sandbox(pod()))
    assert recorder.calls == [
        ("attach", (Sandbox("s1", "pod-1", "team/p", NETNS),)),
        ("detach", ("s1",)),
        ("detach", ("s1",)),
    ]


def test_verbs_do_not_run_on_the_event_loop(events: RuntimeEvents, recorder: Recorder) -> None:
    do(events.run_pod_sandbox(pod()))
    assert threading.current_thread().name not in recorder.threads


def synchronized(events: RuntimeEvents, recorder: Recorder, *pods: PodSandbox) -> list[str]:
    do(events.synchronize(list(pods), []))
    ((verb, (live,)),) = recorder.calls
    assert verb == "synchronize"
    return [sandbox.id for sandbox in live]


def test_only_live_sandboxes_are_synchronized(events: RuntimeEvents, recorder: Recorder) -> None:
    pods = [
        pod(id="a", uid="1"),
        pod(Path("/nonexistent"), id="ended", uid="2"),
        pod(None, id="host", uid="3", pid=1),
        pod(None, id="host-ended", uid="4"),
    ]
    assert synchronized(events, recorder, *pods) == ["a", "host"]


@pytest.mark.parametrize("newest_first", [True, False])
def test_of_two_sandboxes_of_a_pod_the_one_with_a_process_counts(
    events: RuntimeEvents, recorder: Recorder, newest_first: bool
) -> None:
    """A killed pause process leaves its namespace behind, and the runtime lists both sandboxes."""
    pods = [pod(id="new", pid=7), pod(id="old", pid=0)]
    assert synchronized(events, recorder, *(pods if newest_first else reversed(pods))) == ["new"]


def test_container_with_our_devices_is_checked_once_a_claim(
    events: RuntimeEvents, recorder: Recorder
) -> None:
    ids = [f"railmate.dev/claim={OTHER}-b", f"railmate.dev/claim={UID}-a", f"railmate.dev/claim={UID}-b"]
    do(events.create_container(pod(), container(*ids, "nvidia.com/gpu=0")))
    ((verb, (_, claims)),) = recorder.calls
    assert (verb, list(claims)) == ("check", [UID, OTHER])


def test_other_containers_are_none_of_our_business(events: RuntimeEvents, recorder: Recorder) -> None:
    do(events.create_container(pod(), container("nvidia.com/gpu=0", "other.dev/claim=x")))
    do(events.create_container(pod(), container()))
    assert recorder.calls == []


def test_refusal_reaches_the_runtime(events: RuntimeEvents, recorder: Recorder) -> None:
    recorder.error = RailmateError("not attached")
    with pytest.raises(RailmateError, match="not attached"):
        do(events.create_container(pod(), container(f"railmate.dev/claim={UID}-a")))
