"""The plugin's connection: slow work, malformed messages, a runtime that comes and goes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from nri_handler import Recorder, sleeps, with_plugin, with_session
from nri_runtime import RUNTIME, Connection, FakeRuntime, Refused, fake_runtime, frame, pod, running

from railmate.errors import RailmateError
from railmate.nri.events import PodSandbox
from railmate.nri.plugin import NriPlugin
from railmate.nri.ttrpc import UNAVAILABLE
from railmate_api.proto import nri_pb2


@pytest.mark.parametrize(
    "garbage",
    [
        frame(1, b"\xff" * 10),
        frame(1, b"\0\0\0\x01\0\0\0\x01\x01\0\xff"),
        frame(RUNTIME, b"\0" * 10),
        b"\xff" * 8,
    ],
    ids=["too long", "no request", "no response", "no frame"],
)
def test_a_malformed_message_ends_the_connection_with_a_reason_and_the_plugin_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, garbage: bytes
) -> None:
    async def scenario(runtime: FakeRuntime, plugin: NriPlugin) -> None:
        connection = await runtime.plugin()
        await connection.start()
        connection.writer.write(garbage)
        await asyncio.wait_for(connection.closed.wait(), 5)
        assert not plugin.connected
        await (await runtime.plugin()).start()
        assert plugin.connected

    with_plugin(tmp_path, Recorder(), scenario)
    [reason] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "a ttrpc" in reason or "a frame of" in reason


def test_a_slow_attach_does_not_keep_the_other_pods_and_the_pods_containers_wait_for_it(
    tmp_path: Path,
) -> None:
    gate = asyncio.Event()

    async def run(pod: PodSandbox) -> None:
        await gate.wait()

    handler = Recorder(run=run)

    async def scenario(connection: Connection) -> None:
        await connection.sandbox("RunPodSandbox", pod())
        assert handler.names()[2:] == ["run"]
        request = nri_pb2.CreateContainerRequest(pod=pod(), container=nri_pb2.Container(id="c1"))
        creating = asyncio.ensure_future(connection.call("CreateContainer", request))
        await connection.sandbox("StopPodSandbox", pod("other", sandbox="0" * 64))
        assert "create" not in handler.names()
        gate.set()
        await creating

    with_session(tmp_path, handler, scenario)
    assert handler.names()[2:] == ["run", "stop", "stop ended", "run ended", "create", "create ended"]


def test_an_attach_that_changes_what_the_runtime_reads_next_is_waited_for(tmp_path: Path) -> None:
    """It reads a container's CDI spec before it asks for the container."""
    handler = Recorder(run=sleeps(0.2))
    handler.must = True

    async def scenario(connection: Connection) -> None:
        await connection.sandbox("RunPodSandbox", pod())
        assert handler.names()[2:] == ["run", "run ended"]

    with_session(tmp_path, handler, scenario)


def test_what_goes_wrong_in_an_attach_that_is_waited_for_refuses_the_sandbox(tmp_path: Path) -> None:
    async def run(pod: PodSandbox) -> None:
        await asyncio.sleep(0.2)
        raise RailmateError("the VF is lost")

    handler = Recorder(run=run)
    handler.must = True

    async def scenario(connection: Connection) -> None:
        with pytest.raises(Refused, match="the VF is lost"):
            await connection.sandbox("RunPodSandbox", pod())

    with_session(tmp_path, handler, scenario)


@pytest.mark.parametrize("stuck", ["run", "must"])
def test_it_is_waited_for_no_longer_than_the_runtime_waits(tmp_path: Path, stuck: str) -> None:
    """A plugin that does not answer in time is dropped, and the pod started without it."""
    gate = asyncio.Event()

    async def wait(pod: PodSandbox) -> None:
        await gate.wait()

    handler = Recorder(run=wait, must=wait) if stuck == "must" else Recorder(run=wait)
    handler.must = True

    async def scenario(connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await connection.sandbox("RunPodSandbox", pod(), patience=0.6)
        assert 0.5 < loop.time() - start < 0.6
        gate.set()
        await handler.until("run ended")

    with_session(tmp_path, handler, scenario)


def test_a_container_is_refused_when_the_attach_takes_longer_than_the_runtime_waits(tmp_path: Path) -> None:
    handler = Recorder(run=sleeps(0.5))

    async def scenario(connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        await connection.sandbox("RunPodSandbox", pod())
        start = loop.time()
        request = nri_pb2.CreateContainerRequest(pod=pod(), container=nri_pb2.Container(id="c1"))
        with pytest.raises(Refused, match="not ready yet") as refused:
            await connection.call("CreateContainer", request, patience=0.3)
        assert loop.time() - start < 0.3
        assert refused.value.code == UNAVAILABLE
        assert "run ended" not in handler.names(), "the work is not cut off"
        await handler.until("create ended")

    with_session(tmp_path, handler, scenario)
    assert handler.names()[2:] == ["run", "run ended", "create", "create ended"]


def test_a_stop_waits_for_the_attach_of_its_sandbox_but_not_for_others(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def run(pod: PodSandbox) -> None:
        if pod.name == "slow":
            await gate.wait()

    handler = Recorder(run=run)

    async def scenario(connection: Connection) -> None:
        slow, other = pod("slow", sandbox="5" * 64), pod("other", sandbox="0" * 64)
        await connection.sandbox("RunPodSandbox", slow)
        await connection.sandbox("StopPodSandbox", slow, patience=0.1)  # answered although it has not begun
        await connection.sandbox("RunPodSandbox", other)
        await handler.until("run ended")
        assert [(event, one.name) for event, one in handler.calls[2:]] == [
            ("run", "slow"),
            ("run", "other"),
            ("run ended", "other"),
        ]
        gate.set()
        await handler.until("stop ended")

    with_session(tmp_path, handler, scenario)
    assert [(event, one.name) for event, one in handler.calls[5:]] == [
        ("run ended", "slow"),
        ("stop", "slow"),
        ("stop ended", "slow"),
    ]


def test_a_slow_synchronize_does_not_hold_the_runtime_up(tmp_path: Path) -> None:
    handler = Recorder(synchronize=sleeps(0.4))

    async def scenario(runtime: FakeRuntime, plugin: NriPlugin) -> None:
        connection = await runtime.plugin()
        await connection.accept_registration()
        await connection.call("Synchronize", nri_pb2.SynchronizeRequest(), patience=0.1)
        assert handler.names() == ["synchronize"]
        await handler.until("synchronize ended")

    with_plugin(tmp_path, handler, scenario)


def test_work_goes_on_when_the_connection_breaks(tmp_path: Path) -> None:
    handler = Recorder(run=sleeps(0.2))

    async def scenario(runtime: FakeRuntime, plugin: NriPlugin) -> None:
        connection = await runtime.plugin()
        await connection.start()
        await connection.sandbox("RunPodSandbox", pod())
        connection.writer.close()
        await handler.until("run ended")
        await (await runtime.plugin()).start()

    with_plugin(tmp_path, handler, scenario)
    assert "stop" not in handler.names(), "nobody refused this sandbox"


def test_ending_the_plugin_lets_work_in_progress_end(tmp_path: Path) -> None:
    done = []

    async def attach(pod: PodSandbox) -> None:
        await asyncio.sleep(0.3)
        done.append(pod.name)  # not reached by a task that is cancelled

    handler = Recorder(run=attach)

    async def scenario(connection: Connection) -> None:
        call = asyncio.ensure_future(connection.sandbox("RunPodSandbox", pod()))
        call.add_done_callback(lambda future: future.exception())
        await handler.until("run")

    with_session(tmp_path, handler, scenario)
    assert done == ["train-0"]


def test_the_plugin_waits_for_a_runtime_that_is_not_there_yet(tmp_path: Path) -> None:
    async def run() -> None:
        path = tmp_path / "nri.sock"
        plugin = NriPlugin("railmate", "10", path, Recorder())
        async with running(plugin.run_forever()):
            await asyncio.sleep(0.3)
            async with fake_runtime(path) as runtime:
                await (await runtime.plugin()).start()
                assert plugin.connected

    asyncio.run(run())


def test_after_a_restart_of_the_runtime_the_plugin_is_back_at_once_and_says_so(tmp_path: Path) -> None:
    changes: list[bool] = []

    async def run() -> None:
        path = tmp_path / "nri.sock"
        loop = asyncio.get_running_loop()
        plugin = NriPlugin("railmate", "10", path, Recorder(), on_connection_change=changes.append)
        async with fake_runtime(path) as first, running(plugin.run_forever()):
            await (await first.plugin()).start()
            await first.stop()
            await asyncio.sleep(1.0)  # so long that the plugin's delay between attempts has grown
            assert not plugin.connected
            async with fake_runtime(path) as second:
                start = loop.time()
                await (await second.plugin()).start()
                assert loop.time() - start < 0.25
                assert plugin.connected

    asyncio.run(run())
    assert changes == [True, False, True, False]
