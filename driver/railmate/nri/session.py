"""One connection to the runtime: registration, then its events until it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from railmate.errors import RailmateError
from railmate.nri import messages
from railmate.nri.events import ContainerInfo, NriHandler, PodSandbox
from railmate.nri.mux import PLUGIN_STREAM, RUNTIME_STREAM, Mux
from railmate.nri.ttrpc import (
    FAILED_PRECONDITION,
    INTERNAL,
    INVALID_ARGUMENT,
    UNAVAILABLE,
    UNIMPLEMENTED,
    Call,
    Client,
    Server,
    StatusError,
)
from railmate.nri.work import WorkQueue
from railmate_api.proto import nri_pb2

log = logging.getLogger(__name__)

T = TypeVar("T")

PLUGIN_SERVICE = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME_SERVICE = "nri.pkg.api.v1alpha1.Runtime"
NRI_VERSION = "v0.12.3"  # the one nri.proto was written after; runtimes only log it

# The runtime's default for all answers (containerd: plugin_request_timeout), where a call does not say.
DEFAULT_TIMEOUT = 2.0  # seconds
# An answer that comes too late makes the runtime drop the plugin *and start the pod without it*. So answer
# when this share of the time is over, whatever the work has come to.
PATIENCE = 0.9
# Seconds that the attach of a pod may keep RunPodSandbox, for which all pods of the node queue. The kernel alone takes
# longer: moving a netdev waits for RCU callbacks (rcu_barrier in __dev_change_net_namespace, net/core/dev.c), 12-20 ms
# a device. What is not done by then goes on while the runtime prepares the pod's first container, which waits for it.
# Only where that container would get what the attach is about to change is it waited for, as long as the runtime does.
RUN_PATIENCE = 0.005
# Longer than a runtime takes to give up on a silent peer that connected before us (5 s, one at a time).
REGISTRATION_TIMEOUT = 10.0

_SANDBOX_EVENTS = {
    nri_pb2.RUN_POD_SANDBOX: "RunPodSandbox",
    nri_pb2.STOP_POD_SANDBOX: "StopPodSandbox",
    nri_pb2.REMOVE_POD_SANDBOX: "RemovePodSandbox",
}
SUBSCRIPTION = sum(1 << (event - 1) for event in (*_SANDBOX_EVENTS, nri_pb2.CREATE_CONTAINER))

_Method = Callable[[Call], Awaitable[Any]]


class Session:
    """Serves the runtime on one connection.

    When the handler takes too long, the runtime gets its answer all the same and the work goes on:

    - RunPodSandbox is answered as done, after milliseconds; see ``NriHandler.must_end`` for the exception. The
      containers of the sandbox wait for its end.
    - CreateContainer is refused; the kubelet tries again some ten seconds later.
    - Synchronize, StopPodSandbox and RemovePodSandbox are answered as done. They cannot be refused: the
      runtime drops a plugin that fails to synchronize and skips the other plugins when one fails to stop.
    """

    def __init__(self, mux: Mux, handler: NriHandler, work: WorkQueue, on_ready: Callable[[], None]) -> None:
        self._mux = mux
        self._handler = handler
        self._work = work
        self._on_ready = on_ready
        self._server = Server(partial(mux.send, PLUGIN_STREAM), self._dispatch)
        self._client = Client(partial(mux.send, RUNTIME_STREAM))
        self._pods: list[PodSandbox] = []  # of a Synchronize that comes in pieces
        self._containers: list[ContainerInfo] = []
        self._methods: dict[str, _Method] = {
            "Configure": self._configure,
            "Synchronize": self._synchronize,
            "Shutdown": self._shutdown,
            "StateChange": self._state_change,
            "RunPodSandbox": self._sandbox_request,
            "StopPodSandbox": self._sandbox_request,
            "RemovePodSandbox": self._sandbox_request,
            "CreateContainer": self._create_container,
        }

    async def run(self, name: str, index: str) -> None:
        """Register as plugin ``name`` and serve until the runtime closes the connection.

        Raises StatusError when the runtime refuses the registration, ProtocolError for a malformed message,
        OSError when the connection breaks.
        """
        reading = asyncio.create_task(self._read(), name="nri reader")
        try:
            request = nri_pb2.RegisterPluginRequest(
                plugin_name=name, plugin_idx=index, NRI_version=NRI_VERSION
            )
            registering = asyncio.create_task(
                self._client.call(
                    RUNTIME_SERVICE,
                    "RegisterPlugin",
                    request.SerializeToString(),
                    within=REGISTRATION_TIMEOUT,
                )
            )
            try:
                await registering
            except StatusError:
                if reading.done():
                    await reading  # its reason is the better one
                raise
            finally:
                registering.cancel()
            await reading
        finally:
            reading.cancel()
            self._server.close()
            self._client.close()
            self._mux.close()

    async def _read(self) -> None:
        try:
            async for stream, payload in self._mux.frames():
                if stream == PLUGIN_STREAM:
                    self._server.receive(payload)
                elif stream == RUNTIME_STREAM:
                    self._client.receive(payload)
                else:
                    log.debug("%d bytes on unknown NRI stream %d ignored", len(payload), stream)
        finally:
            self._client.close()  # no answer can come any more

    async def _dispatch(self, call: Call) -> bytes:
        method = self._methods.get(call.method) if call.service == PLUGIN_SERVICE else None
        if method is None:
            raise StatusError(UNIMPLEMENTED, f"railmate does not serve {call.service}/{call.method}")
        try:
            response = await method(call)
        except DecodeError:
            raise StatusError(INVALID_ARGUMENT, f"the request of {call.method} is malformed") from None
        payload: bytes = response.SerializeToString()
        return payload

    async def _configure(self, call: Call) -> Any:
        request = nri_pb2.ConfigureRequest.FromString(call.payload)
        log.info(
            "registered with %s %s (NRI %s, answers within %d ms)",
            request.runtime_name or "the container runtime",
            request.runtime_version,
            request.NRI_version or "of unknown version",
            request.request_timeout or DEFAULT_TIMEOUT * 1e3,
        )
        return nri_pb2.ConfigureResponse(events=SUBSCRIPTION)

    async def _synchronize(self, call: Call) -> Any:
        request = nri_pb2.SynchronizeRequest.FromString(call.payload)
        self._pods += map(messages.pod_sandbox, request.pods)
        self._containers += map(messages.container_info, request.containers)
        if request.more:
            return nri_pb2.SynchronizeResponse(more=True)
        pods, self._pods = self._pods, []
        containers, self._containers = self._containers, []
        what = f"NRI Synchronize of {len(pods)} sandboxes and {len(containers)} containers"
        # What the runtime says here is as of now: work of later events must not be undone by it.
        task = self._work.submit(
            "synchronize", what, partial(self._handler.synchronize, pods, containers), barrier=True
        )
        if not await _ended(task, call):
            log.warning("%s takes long; the runtime goes on meanwhile", what)
        self._on_ready()
        return nri_pb2.SynchronizeResponse()

    async def _shutdown(self, call: Call) -> Any:
        log.info("the runtime is shutting down")
        return nri_pb2.Empty()

    async def _state_change(self, call: Call) -> Any:
        request = nri_pb2.StateChangeEvent.FromString(call.payload)
        if request.event in _SANDBOX_EVENTS:
            await self._sandbox_event(_SANDBOX_EVENTS[request.event], messages.pod_sandbox(request.pod), call)
        return nri_pb2.Empty()

    async def _sandbox_request(self, call: Call) -> Any:
        request = nri_pb2.PodSandboxRequest.FromString(call.payload)
        await self._sandbox_event(call.method, messages.pod_sandbox(request.pod), call)
        return nri_pb2.Empty()

    async def _sandbox_event(self, event: str, pod: PodSandbox, call: Call) -> None:
        handle = {
            "RunPodSandbox": self._handler.run_pod_sandbox,
            "StopPodSandbox": self._handler.stop_pod_sandbox,
            "RemovePodSandbox": self._handler.remove_pod_sandbox,
        }[event]
        what = f"NRI {event} of {pod}"
        task = self._work.submit(pod.id, what, partial(handle, pod))
        if event == "RunPodSandbox":
            if not await _ended(task, call, at_most=RUN_PATIENCE):
                await _ended(asyncio.create_task(self._end_if_it_must(task, pod)), call)
            if task.done():
                _result(task)
        elif not await _ended(task, call):
            log.warning("%s takes long; the runtime goes on meanwhile", what)

    async def _end_if_it_must(self, task: asyncio.Task[None], pod: PodSandbox) -> None:
        if await self._handler.must_end(pod):
            await asyncio.wait({task})

    async def _create_container(self, call: Call) -> Any:
        request = nri_pb2.CreateContainerRequest.FromString(call.payload)
        pod, container = messages.pod_sandbox(request.pod), messages.container_info(request.container)
        what = f"NRI CreateContainer of {container.name} in {pod}"
        task = self._work.submit(pod.id, what, partial(self._handler.create_container, pod, container))
        if not await _ended(task, call):
            log.warning("%s takes longer than the runtime waits; the container is refused", what)
            raise StatusError(
                UNAVAILABLE,
                f"railmate: the devices of pod {pod.namespace}/{pod.name} are not ready yet; "
                "the kubelet tries again in some seconds",
            )
        return messages.create_container_response(_result(task))


async def _ended(task: asyncio.Task[T], call: Call, at_most: float = float("inf")) -> bool:
    """Wait for ``task`` as long as the runtime allows, ``at_most`` seconds; whether it ended. Never cancels it."""
    timeout = DEFAULT_TIMEOUT if call.timeout is None else call.timeout
    done, _ = await asyncio.wait({task}, timeout=min(PATIENCE * timeout, at_most))
    return bool(done)


def _result(task: asyncio.Task[T]) -> T:
    """What the task returned; what it raised becomes the status the runtime shows to the user."""
    try:
        return task.result()
    except StatusError:
        raise
    except RailmateError as error:
        raise StatusError(FAILED_PRECONDITION, str(error)) from None
    except Exception as error:
        text = f"railmate: internal error ({type(error).__name__}: {error}); see the log of the railmate pod"
        raise StatusError(INTERNAL, text) from None
