"""A handler that notes what it is told, and a plugin that runs with it for the time of a test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from nri_runtime import Connection, FakeRuntime, fake_runtime, running

from railmate.nri.events import ContainerAdjustment, ContainerInfo, PodSandbox
from railmate.nri.plugin import NriPlugin

Hook = Callable[..., Awaitable[Any]]


class Recorder:
    """A handler that notes its calls; ``hooks`` says what an event does beyond that."""

    def __init__(self, **hooks: Hook) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.hooks = hooks
        self.happened = asyncio.Condition()
        self.must = False

    async def _event(self, event: str, *arguments: Any) -> Any:
        await self._note(event, arguments[0])
        try:
            return await self.hooks[event](*arguments) if event in self.hooks else None
        finally:
            await self._note(f"{event} ended", arguments[0])

    async def _note(self, event: str, about: Any) -> None:
        async with self.happened:
            self.calls.append((event, about))
            self.happened.notify_all()

    async def synchronize(self, pods: list[PodSandbox], containers: list[ContainerInfo]) -> None:
        await self._event("synchronize", pods, containers)

    async def run_pod_sandbox(self, pod: PodSandbox) -> None:
        await self._event("run", pod)

    async def must_end(self, pod: PodSandbox) -> bool:
        if "must" in self.hooks:
            await self.hooks["must"](pod)
        return self.must

    async def stop_pod_sandbox(self, pod: PodSandbox) -> None:
        await self._event("stop", pod)

    async def remove_pod_sandbox(self, pod: PodSandbox) -> None:
        await self._event("remove", pod)

    async def create_container(self, pod: PodSandbox, container: ContainerInfo) -> ContainerAdjustment | None:
        adjustment: ContainerAdjustment | None = await self._event("create", pod, container)
        return adjustment

    def names(self) -> list[str]:
        return [event for event, _ in self.calls]

    async def until(self, event: str, count: int = 1) -> None:
        async with self.happened:
            await asyncio.wait_for(self.happened.wait_for(lambda: self.names().count(event) >= count), 10)


def with_plugin(
    tmp_path: Path, handler: Recorder, scenario: Callable[[FakeRuntime, NriPlugin], Awaitable[None]]
) -> None:
    async def run() -> None:
        path = tmp_path / "nri.sock"
        async with fake_runtime(path) as runtime:
            plugin = NriPlugin("railmate", "10", path, handler)
            async with running(plugin.run_forever()):
                await scenario(runtime, plugin)

    asyncio.run(run())


def with_session(
    tmp_path: Path, handler: Recorder, scenario: Callable[[Connection], Awaitable[None]]
) -> None:
    async def started(runtime: FakeRuntime, plugin: NriPlugin) -> None:
        connection = await runtime.plugin()
        await connection.start()
        await scenario(connection)

    with_plugin(tmp_path, handler, started)


def fails(error: Exception) -> Hook:
    async def hook(*_: Any) -> None:
        raise error

    return hook


def sleeps(seconds: float) -> Hook:
    async def hook(*_: Any) -> None:
        await asyncio.sleep(seconds)

    return hook
