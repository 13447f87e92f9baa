"""The health stream: the kubelet shows it in ``status.containerStatuses[].allocatedResourcesStatus`` (KEP-4680).

Display only: what keeps pods from a device is its taint. Versions v1 and v1alpha1 carry the same messages; the
kubelet takes the newest that it knows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from types import ModuleType
from typing import Any, Protocol

from railmate.health.model import DeviceHealth, Health
from railmate_api.proto import dra_health_v1_pb2, dra_health_v1alpha1_pb2

#: Names to announce at registration beside the DRA services'.
HEALTH_VERSIONS = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
#: Seconds after which everything is sent again. When the stream of another instance of the driver ends (rolling
#: update), the kubelet forgets the health of all its devices (pkg/kubelet/cm/dra, HandleWatchResourcesStream).
REFRESH = 8.0
#: Seconds without news after which the kubelet says Unknown; three refreshes and some.
_TIMEOUT = 30
#: Characters of a message; the kubelet cuts what is longer (dra-health/v1).
_MAX_MESSAGE = 1024
#: Enum values of both versions.
_STATUS = {Health.UNKNOWN: 0, Health.HEALTHY: 1, Health.UNHEALTHY: 2}


class HealthSource(Protocol):
    """What the stream tells; railmate.health.monitor.HealthMonitor is one."""

    def devices(self) -> Sequence[DeviceHealth]: ...

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]: ...


class HealthService:
    """One version of the service; ``messages`` is the module compiled from its description.

    ``pool``: the node's name. Belongs to one event loop. ``close`` ends its streams.
    """

    def __init__(
        self, source: HealthSource, pool: str, messages: ModuleType, refresh: float = REFRESH
    ) -> None:
        self._source, self._pool, self._messages, self._refresh = source, pool, messages, refresh
        self._streams: set[asyncio.Event] = set()
        self._closed = False

    async def NodeWatchResources(self, request: object, context: object) -> AsyncIterator[Any]:
        """All devices at once, then again at every change and after ``refresh`` seconds without one."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def changed() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the stream with it
                loop.call_soon_threadsafe(news.set)

        self._streams.add(news)
        unsubscribe = self._source.subscribe(changed)
        try:
            while not self._closed:
                news.clear()
                yield self._report()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._refresh):
                        await news.wait()
        finally:
            unsubscribe()
            self._streams.discard(news)

    def close(self) -> None:
        """End all streams, and those that come later at once. Call in the loop."""
        self._closed = True
        for news in self._streams:
            news.set()

    def _report(self) -> Any:
        report = self._messages.NodeWatchResourcesResponse()
        for one in self._source.devices():
            report.devices.add(
                device=self._messages.DeviceIdentifier(pool_name=self._pool, device_name=one.name),
                health=_STATUS[one.health],
                last_updated_time=int(one.checked),
                health_check_timeout_seconds=_TIMEOUT,
                message=_cut(one.message),
            )
        return report


def _cut(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 1] + "…"


def health_v1(source: HealthSource, pool: str) -> HealthService:
    return HealthService(source, pool, dra_health_v1_pb2)


def health_v1alpha1(source: HealthSource, pool: str) -> HealthService:
    return HealthService(source, pool, dra_health_v1alpha1_pb2)
