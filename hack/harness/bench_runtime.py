"""The runtime's end of an NRI connection, as far as a bench needs it: one plugin, one call after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from railmate.nri.events import NriHandler
from railmate.nri.mux import PLUGIN_STREAM, RUNTIME_STREAM, Mux
from railmate.nri.plugin import NriPlugin
from railmate.nri.session import PLUGIN_SERVICE
from railmate.nri.ttrpc import Call, Client, Server
from railmate_api.proto import nri_pb2

_PATIENCE = 10.0  # seconds that an answer may take before the bench gives up


class Runtime:
    """What calls a plugin. Raises StatusError for a refusal."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def sandbox(self, event: str, pod: Any) -> None:
        """``event`` is RunPodSandbox, StopPodSandbox or RemovePodSandbox; ``pod`` an nri_pb2.PodSandbox."""
        await self._call(event, nri_pb2.PodSandboxRequest(pod=pod))

    async def container(self, pod: Any, name: str = "main") -> None:
        container = nri_pb2.Container(id=f"{pod.id}-{name}", name=name, pod_sandbox_id=pod.id)
        await self._call("CreateContainer", nri_pb2.CreateContainerRequest(pod=pod, container=container))

    async def _call(self, method: str, request: Any) -> None:
        await self._client.call(PLUGIN_SERVICE, method, request.SerializeToString(), within=_PATIENCE)


@asynccontextmanager
async def runtime_of(handler: NriHandler, socket: Path) -> AsyncIterator[Runtime]:
    """A runtime that listens at ``socket``, with a plugin of ours connected that passes its events to ``handler``."""
    connected: asyncio.Future[Runtime] = asyncio.get_running_loop().create_future()
    registered = asyncio.Event()

    async def register(call: Call) -> bytes:
        registered.set()
        return nri_pb2.Empty().SerializeToString()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mux = Mux(reader, writer)
        client = Client(partial(mux.send, PLUGIN_STREAM))
        server = Server(partial(mux.send, RUNTIME_STREAM), register)
        connected.set_result(Runtime(client))
        async for stream, payload in mux.frames():
            (client if stream == PLUGIN_STREAM else server).receive(payload)

    listener = await asyncio.start_unix_server(serve, socket)
    plugin = asyncio.create_task(NriPlugin("railmate.dev", "10", socket, handler).run_forever())
    try:
        async with asyncio.timeout(_PATIENCE):
            runtime = await connected
            await registered.wait()
            await runtime._call("Synchronize", nri_pb2.SynchronizeRequest())
        yield runtime
    finally:
        plugin.cancel()
        await asyncio.gather(plugin, return_exceptions=True)
        listener.close()
