"""Serves the kubelet's calls until it is stopped."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from grpc import aio

from railmate.errors import RailmateError
from railmate.kubelet.calls import Calls
from railmate.kubelet.health import HEALTH_VERSIONS, HealthService, HealthSource, health_v1, health_v1alpha1
from railmate.kubelet.services import SUPPORTED_VERSIONS, ClaimVerbs, Registration, v1, v1beta1
from railmate.kubelet.sockets import Sockets, remove_dead
from railmate.kubelet.workers import WorkerPools
from railmate_api.proto import (
    dra_health_v1_pb2_grpc,
    dra_health_v1alpha1_pb2_grpc,
    dra_v1_pb2,
    dra_v1_pb2_grpc,
    dra_v1beta1_pb2_grpc,
    pluginregistration_pb2_grpc,
)

log = logging.getLogger(__name__)


class KubeletServer:
    """The service server first, then the registration server: the kubelet calls as soon as it knows us."""

    def __init__(
        self,
        driver: str,
        paths: Sockets,
        verbs: ClaimVerbs,
        on_registered: Callable[[bool], None],
        health: HealthSource | None = None,
        pool: str = "",
    ) -> None:
        """``health``: what the health streams tell, about the devices of ``pool`` (the node's name); without it
        the health service is neither served nor announced."""
        self._driver, self._paths, self._verbs, self._on_registered = driver, paths, verbs, on_registered
        self._source, self._pool = health, pool
        self._health: list[HealthService] = []
        self._pools = WorkerPools()
        self._workers, self._calls = self._pools.workers, Calls()
        self._service: aio.Server | None = None
        self._registrar: aio.Server | None = None

    async def start(self) -> None:
        """Raises RailmateError when a socket cannot be made."""
        for path in remove_dead(self._paths, self._driver):
            log.info("removed %s: the instance that made it has ended", path)
        # made here and not before: a server belongs to the event loop it was made in
        self._service = aio.server()
        dra_v1_pb2_grpc.add_DRAPluginServicer_to_server(
            v1(self._verbs, self._workers, self._calls), self._service
        )
        dra_v1beta1_pb2_grpc.add_DRAPluginServicer_to_server(
            v1beta1(self._verbs, self._workers, self._calls), self._service
        )
        versions: tuple[str, ...] = SUPPORTED_VERSIONS
        if self._source is not None:
            self._serve_health(self._service, self._source)
            versions += HEALTH_VERSIONS
        await _listen(self._service, self._paths.service)
        self._registrar = aio.server()
        pluginregistration_pb2_grpc.add_RegistrationServicer_to_server(
            Registration(self._driver, str(self._paths.service), self._on_registered, versions),
            self._registrar,
        )
        await _listen(self._registrar, self._paths.registration)
        log.info("serving the kubelet on %s", self._paths.service)

    def _serve_health(self, server: aio.Server, source: HealthSource) -> None:
        one, other = health_v1(source, self._pool), health_v1alpha1(source, self._pool)
        dra_health_v1_pb2_grpc.add_DRAResourceHealthServicer_to_server(one, server)
        dra_health_v1alpha1_pb2_grpc.add_DRAResourceHealthServicer_to_server(other, server)
        self._health = [one, other]

    async def answered(self, seconds: float) -> bool:
        """Wait, at most so long, until no call is without its answer; whether none is.

        Before ``stop``: the kubelet closes its connection when it sees the registration socket gone, and so fails the
        calls on it (pkg/kubelet/cm/dra/plugin, DRAPluginManager.remove). New calls are served meanwhile: where there is
        a successor, registered later, the kubelet calls that; where there is none it has us alone.
        """
        return await self._calls.answered(seconds)

    async def stop(self, grace: float) -> None:
        """The registration socket goes first, so that no new call comes; calls in flight get ``grace`` seconds,
        health streams, which never end by themselves, none."""
        if self._registrar:
            await self._registrar.stop(grace=0)
            _remove_socket(self._paths.registration)
        for service in self._health:
            service.close()
        if self._service:
            await self._service.stop(grace=grace)
            _remove_socket(self._paths.service)
        self._pools.shutdown()

    def stuck_for(self) -> dict[str, float]:
        """See `WorkerPools.stuck_for`."""
        return self._pools.stuck_for()


async def probe(socket: Path, seconds: float = 3.0) -> None:
    """Call our own service as the kubelet does. Raises RailmateError when it does not answer."""
    request = dra_v1_pb2.NodePrepareResourcesRequest()
    async with aio.insecure_channel(f"unix:{socket}") as channel:
        try:
            await dra_v1_pb2_grpc.DRAPluginStub(channel).NodePrepareResources(request, timeout=seconds)
        except aio.AioRpcError as error:
            raise RailmateError(f"the service on {socket} does not answer: {error.details()}") from error


def _make_room(path: Path) -> None:
    """A socket left behind by a process that was killed would refuse ours."""
    path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
    if path.is_socket():
        path.unlink()


def _remove_socket(path: Path) -> None:
    """The server has closed it; what is left of it may be gone, or never have been ours."""
    with contextlib.suppress(OSError):
        if path.is_socket():
            path.unlink()


async def _listen(server: aio.Server, path: Path) -> None:
    try:
        _make_room(path)
        server.add_insecure_port(f"unix:{path}")
        await server.start()
    except (RuntimeError, OSError) as error:
        raise RailmateError(
            f"socket {path} cannot be made ({error}). Is {path.parent} mounted into this pod, and writable?"
        ) from error
