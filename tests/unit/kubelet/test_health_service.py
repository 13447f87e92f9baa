"""The health stream over a unix socket, to a client as the kubelet is one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from railmate.health.model import DeviceHealth, Health
from railmate.kubelet.health import HEALTH_VERSIONS, HealthService
from railmate.kubelet.server import KubeletServer
from railmate.kubelet.services import SUPPORTED_VERSIONS
from railmate.kubelet.sockets import Sockets
from railmate_api.proto import (
    dra_health_v1_pb2,
    dra_health_v1_pb2_grpc,
    dra_health_v1alpha1_pb2,
    dra_health_v1alpha1_pb2_grpc,
    pluginregistration_pb2,
    pluginregistration_pb2_grpc,
)

PATIENCE = 10.0
VERSIONS = [
    pytest.param(dra_health_v1_pb2, dra_health_v1_pb2_grpc, id="v1"),
    pytest.param(dra_health_v1alpha1_pb2, dra_health_v1alpha1_pb2_grpc, id="v1alpha1"),
]
both = pytest.mark.parametrize(("messages", "stubs"), VERSIONS)


class Source:
    def __init__(self, *devices: DeviceHealth) -> None:
        self._devices = devices
        self.listeners: list[Callable[[], None]] = []
        self.left = asyncio.Event()

    def devices(self) -> tuple[DeviceHealth, ...]:
        return self._devices

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        self.listeners.append(listener)

        def unsubscribe() -> None:
            self.listeners.remove(listener)
            self.left.set()

        return unsubscribe

    async def change(self, *devices: DeviceHealth) -> None:
        """From another thread, as the monitor does."""
        self._devices = devices
        for listener in list(self.listeners):
            await asyncio.get_running_loop().run_in_executor(None, listener)


WELL = DeviceHealth("pair-0", Health.HEALTHY, checked=1764400000.7)
ILL = DeviceHealth(
    "pair-0", Health.UNHEALTHY, "NIC 0000:4b:00.2: has no carrier.", "nic-link-down", 1764400005.0
)
DIM = DeviceHealth("gpu-1", Health.UNKNOWN, "cannot be seen", checked=1.0)


class Verbs:
    def prepare(self, ref: Any, *, given_up: threading.Event) -> Any:
        raise AssertionError("not called here")

    def unprepare(self, ref: Any) -> None:
        raise AssertionError("not called here")


def run(steps: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await steps

    asyncio.run(bounded())


@asynccontextmanager
async def served(directory: Path, source: Source | None) -> AsyncIterator[tuple[KubeletServer, Sockets]]:
    paths = Sockets(directory / "reg.sock", directory / "dra.sock")
    server = KubeletServer("railmate.dev", paths, Verbs(), lambda registered: None, source, "node1")
    await server.start()
    try:
        yield server, paths
    finally:
        await server.stop(0)


@asynccontextmanager
async def stream(paths: Sockets, messages: Any, stubs: Any) -> AsyncIterator[Any]:
    async with aio.insecure_channel(f"unix:{paths.service}") as channel:
        call = stubs.DRAResourceHealthStub(channel).NodeWatchResources(messages.NodeWatchResourcesRequest())
        yield call


async def next_of(call: Any) -> Any:
    return await asyncio.wait_for(call.read(), PATIENCE)


@both
def test_whole_list_comes_at_once(tmp_path: Path, messages: Any, stubs: Any) -> None:
    async def steps() -> None:
        async with served(tmp_path, Source(ILL, DIM)) as (_, paths), stream(paths, messages, stubs) as call:
            one, other = (await next_of(call)).devices
            assert (one.device.pool_name, one.device.device_name) == ("node1", "pair-0")
            assert one.health == messages.UNHEALTHY
            assert one.message == "NIC 0000:4b:00.2: has no carrier."
            assert one.last_updated_time == 1764400005
            assert 10 < one.health_check_timeout_seconds <= 60
            assert (other.device.device_name, other.health) == ("gpu-1", messages.UNKNOWN)

    run(steps())


@both
def test_every_change_is_sent_with_the_whole_list(tmp_path: Path, messages: Any, stubs: Any) -> None:
    async def steps() -> None:
        source = Source(WELL, DIM)
        async with served(tmp_path, source) as (_, paths), stream(paths, messages, stubs) as call:
            assert (await next_of(call)).devices[0].health == messages.HEALTHY
            for state in (ILL, WELL, ILL):
                await source.change(state, DIM)
                devices = (await next_of(call)).devices
                assert [one.device.device_name for one in devices] == ["pair-0", "gpu-1"]
                assert devices[0].health == (messages.UNHEALTHY if state is ILL else messages.HEALTHY)

    run(steps())


def test_list_is_sent_again_while_nothing_changes(tmp_path: Path) -> None:
    """The kubelet says Unknown of what it has not heard of for long."""
    from railmate.kubelet import health

    assert health.REFRESH <= 10

    async def steps() -> None:
        service = HealthService(Source(WELL), "node1", dra_health_v1_pb2, refresh=0.05)
        reports = service.NodeWatchResources(None, None)
        seen = [await asyncio.wait_for(anext(reports), PATIENCE) for _ in range(4)]
        assert [len(report.devices) for report in seen] == [1, 1, 1, 1]
        await reports.aclose()  # type: ignore[attr-defined]

    run(steps())


def test_many_streams_of_both_versions_at_once(tmp_path: Path) -> None:
    """Two instances of the kubelet never are, but a connection that it gave up may linger."""

    async def steps() -> None:
        source = Source(WELL)
        async with served(tmp_path, source) as (_, paths), contextlib.AsyncExitStack() as stack:
            kinds = [
                (dra_health_v1_pb2, dra_health_v1_pb2_grpc),
                (dra_health_v1alpha1_pb2, dra_health_v1alpha1_pb2_grpc),
            ] * 15
            calls = [await stack.enter_async_context(stream(paths, *kind)) for kind in kinds]
            for call in calls:
                assert (await next_of(call)).devices[0].health == 1
            await source.change(ILL)
            for call in calls:
                assert (await next_of(call)).devices[0].health == 2

    run(steps())


@both
def test_stream_that_the_client_leaves_is_forgotten(tmp_path: Path, messages: Any, stubs: Any) -> None:
    async def steps() -> None:
        source = Source(WELL)
        async with served(tmp_path, source) as (_, paths):
            async with stream(paths, messages, stubs) as call:
                await next_of(call)
                assert len(source.listeners) == 1
                call.cancel()
            await asyncio.wait_for(source.left.wait(), PATIENCE)
            assert source.listeners == []

    run(steps())


@both
def test_shutdown_ends_streams_cleanly_and_does_not_wait_for_them(
    tmp_path: Path, messages: Any, stubs: Any
) -> None:
    async def steps() -> None:
        source = Source(WELL)
        async with served(tmp_path, source) as (server, paths), stream(paths, messages, stubs) as call:
            await next_of(call)
            began = asyncio.get_running_loop().time()
            await server.stop(grace=20)
            assert asyncio.get_running_loop().time() - began < 5
            assert await next_of(call) is aio.EOF
            assert (await call.code()).name == "OK"
            assert source.listeners == []

    run(steps())


def test_change_after_the_loop_has_ended_does_no_harm() -> None:
    source = Source(WELL)

    async def steps() -> None:
        service = HealthService(source, "node1", dra_health_v1_pb2)
        await anext(service.NodeWatchResources(None, None))

    listeners = source.listeners
    asyncio.run(steps())
    for listener in [*listeners]:
        listener()


@pytest.mark.parametrize("length", [1024, 1025, 5000])
def test_message_is_as_long_as_the_kubelet_takes(length: int) -> None:
    async def steps() -> None:
        source = Source(DeviceHealth("pair-0", Health.UNKNOWN, "ä" * length))
        reports = HealthService(source, "node1", dra_health_v1_pb2).NodeWatchResources(None, None)
        message = (await anext(reports)).devices[0].message
        assert len(message) == 1024
        assert message.endswith("…") == (length > 1024)
        await reports.aclose()  # type: ignore[attr-defined]

    run(steps())


@pytest.mark.parametrize("with_health", [True, False])
def test_health_is_announced_when_it_is_served(tmp_path: Path, with_health: bool) -> None:
    async def steps() -> None:
        async with (
            served(tmp_path, Source(WELL) if with_health else None) as (_, paths),
            aio.insecure_channel(f"unix:{paths.registration}") as channel,
        ):
            info = await pluginregistration_pb2_grpc.RegistrationStub(channel).GetInfo(
                pluginregistration_pb2.InfoRequest()
            )
            announced = SUPPORTED_VERSIONS + (HEALTH_VERSIONS if with_health else ())
            assert tuple(info.supported_versions) == announced

    run(steps())


def test_wire_names_are_the_kubelets() -> None:
    assert HEALTH_VERSIONS == ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
    for name, messages in zip(HEALTH_VERSIONS, (dra_health_v1_pb2, dra_health_v1alpha1_pb2), strict=True):
        assert name in {one.full_name for one in messages.DESCRIPTOR.services_by_name.values()}
