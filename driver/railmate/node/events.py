"""The runtime's events, handed to the claims' verbs in threads of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from railmate.cdi.spec import claim_uid_of
from railmate.claims.attachments import Sandbox, attempt
from railmate.claims.state import ClaimState
from railmate.errors import RailmateError
from railmate.nri.events import ContainerAdjustment, ContainerInfo, PodSandbox


class RuntimeEvents:
    """An ``NriHandler``. A pod without our claims costs a look into the ledger's directory."""

    def __init__(self, driver: str, state: ClaimState) -> None:
        self._driver, self._state = driver, state
        self._sandboxes: dict[str, Sandbox] = {}  # by ID, all that have not ended
        # not the kubelet's threads: those may all be waiting for a device that only an event here frees
        self._workers = ThreadPoolExecutor(4, thread_name_prefix="nri")

    async def synchronize(self, pods: list[PodSandbox], containers: list[ContainerInfo]) -> None:
        live = [_sandbox(pod) for pod in await self._run(live_sandboxes, pods)]
        self._sandboxes = {sandbox.id: sandbox for sandbox in live}
        await self._run(self._state.synchronize, live)

    async def run_pod_sandbox(self, pod: PodSandbox) -> None:
        sandbox = self._sandboxes[pod.id] = _sandbox(pod)
        await self._run(self._state.attach, sandbox)

    async def stop_pod_sandbox(self, pod: PodSandbox) -> None:
        self._sandboxes.pop(pod.id, None)
        await self._run(self._state.detach, pod.id)

    async def remove_pod_sandbox(self, pod: PodSandbox) -> None:
        await self._run(self._state.detach, pod.id)

    async def create_container(self, pod: PodSandbox, container: ContainerInfo) -> ContainerAdjustment | None:
        found = (claim_uid_of(self._driver, cdi_id) for cdi_id in container.cdi_devices)
        claims = sorted({uid for uid in found if uid is not None})
        if claims:
            try:
                await self._run(self._state.check, _sandbox(pod), claims)
            except RailmateError:
                # the runtime does not wait for the API; the kubelet tries this container again in some seconds
                asyncio.get_running_loop().run_in_executor(self._workers, self._adopt, _sandbox(pod), claims)
                raise
        return None

    def _adopt(self, sandbox: Sandbox, claims: list[str]) -> None:
        attempt(lambda: self._state.adopt(sandbox, claims))

    def sandboxes(self) -> dict[str, Sandbox]:
        """The live sandboxes by pod UID, as of the last event."""
        return {sandbox.pod_uid: sandbox for sandbox in list(self._sandboxes.values())}

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def _run(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._workers, verb, *arguments)


def live_sandboxes(pods: Iterable[PodSandbox]) -> list[PodSandbox]:
    """One sandbox a pod. After a pause process was killed the runtime lists the old sandbox, whose namespace is
    still there, beside the new one; only the new one has a process."""
    best: dict[str, PodSandbox] = {}
    for pod in pods:
        if pod.is_live() and (pod.uid not in best or pod.pid > 0):
            best[pod.uid] = pod
    return list(best.values())


def _sandbox(pod: PodSandbox) -> Sandbox:
    return Sandbox(pod.id, pod.uid, f"{pod.namespace}/{pod.name}", pod.netns_path)
