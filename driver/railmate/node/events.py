"""The runtime's events, handed to the claims' verbs in threads of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from railmate.cdi.spec import claim_uid_of, nodes_words_of
from railmate.claims.attempt import attempt
from railmate.claims.records import Entry
from railmate.claims.sandbox import Sandbox
from railmate.claims.state import ClaimState
from railmate.errors import RailmateError
from railmate.node.attached import AttachedClaims
from railmate.node.hints import environment
from railmate.node.memlock import Memlock
from railmate.node.rdmacgroup import RdmaCgroup
from railmate.nri.events import ContainerAdjustment, ContainerInfo, PodSandbox

log = logging.getLogger(__name__)


class RuntimeEvents:
    """An ``NriHandler``. A pod without our claims costs a look into the ledger's directory."""

    def __init__(
        self,
        driver: str,
        state: ClaimState,
        attached: AttachedClaims,
        memlock: Memlock,
        rdma_cgroup: RdmaCgroup,
    ) -> None:
        self._driver, self._state, self._attached = driver, state, attached
        self._memlock, self._rdma_cgroup = memlock, rdma_cgroup
        self._sandboxes: dict[str, Sandbox] = {}  # by ID, all that have not ended
        # not the kubelet's threads: those may all be waiting for a device that only an event here frees
        self._workers = ThreadPoolExecutor(4, thread_name_prefix="nri")
        # what ends frees devices that those that begin may be waiting for, so it stands behind none of them
        self._ending = ThreadPoolExecutor(2, thread_name_prefix="nri-end")
        # asks the API server, which may take as long as it likes
        self._adopting = ThreadPoolExecutor(1, thread_name_prefix="nri-adopt")
        # the runtime waits for the answer, so it stands behind nothing that waits itself
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="nri-ask")

    async def synchronize(self, pods: list[PodSandbox], containers: list[ContainerInfo]) -> None:
        live = [_sandbox(pod) for pod in await self._run(live_sandboxes, pods)]
        self._sandboxes = {sandbox.id: sandbox for sandbox in live}
        await self._run(self._state.synchronize, live)
        await self._run(self._raise_limits, containers)

    def _raise_limits(self, containers: list[ContainerInfo]) -> None:
        """Of containers that started while nobody heard of it."""
        running = [container for container in containers if container.pid and self._claims(container)]
        concerned = [one for one in running if _pins_memory(self._attached.entries(self._claims(one), 0.0))]
        repaired = self._memlock.repair(concerned)
        if repaired:
            log.info("RLIMIT_MEMLOCK of %d running processes was raised", repaired)

    async def run_pod_sandbox(self, pod: PodSandbox) -> None:
        sandbox = _sandbox(pod)
        # of a pod's sandboxes the newest counts: the end of an older one may never be told
        self._sandboxes = {key: one for key, one in self._sandboxes.items() if one.pod_uid != sandbox.pod_uid}
        self._sandboxes[pod.id] = sandbox
        await self._run(self._state.attach, sandbox)

    async def must_end(self, pod: PodSandbox) -> bool:
        question = partial(self._state.renews_nodes, _sandbox(pod))
        return await asyncio.get_running_loop().run_in_executor(self._asking, question)

    async def stop_pod_sandbox(self, pod: PodSandbox) -> None:
        self._sandboxes.pop(pod.id, None)
        await self._end(pod)

    async def remove_pod_sandbox(self, pod: PodSandbox) -> None:
        await self._end(pod)

    async def _end(self, pod: PodSandbox) -> None:
        await asyncio.get_running_loop().run_in_executor(self._ending, self._state.detach, pod.id)

    async def create_container(self, pod: PodSandbox, container: ContainerInfo) -> ContainerAdjustment | None:
        claims = self._claims(container)
        if not claims:
            return None
        sandbox = _sandbox(pod)
        try:
            await self._run(self._checked, sandbox, claims)
        except RailmateError:
            # the runtime does not wait for the API; the kubelet tries this container again in some seconds
            asyncio.get_running_loop().run_in_executor(self._adopting, self._adopt, sandbox, claims)
            raise
        await self._run(self._refuse_outdated, container, claims)
        adjustment: ContainerAdjustment = await self._run(self._adjustment, pod, container, claims)
        return adjustment

    def _claims(self, container: ContainerInfo) -> list[str]:
        """UIDs of our claims that the container references."""
        found = (claim_uid_of(self._driver, cdi_id) for cdi_id in container.cdi_devices)
        return sorted({uid for uid in found if uid is not None})

    def _adjustment(
        self, pod: PodSandbox, container: ContainerInfo, claims: list[str]
    ) -> ContainerAdjustment:
        """Limits and hints, from the claims that this container references and no others."""
        entries = self._attached.entries(claims)
        limits = self._memlock.limits(container, pod.pid, pod.id) if _pins_memory(entries) else ()
        return ContainerAdjustment(
            rlimits=limits,
            env=environment(entries, container.env),
            annotations=self._rdma_cgroup.annotations(entries, container.annotations),
        )

    def _checked(self, sandbox: Sandbox, claims: list[str]) -> None:
        """Raises what keeps the claims' devices from the sandbox, after one more try."""
        try:
            self._state.check(sandbox, claims)
        except RailmateError:
            if sandbox.id not in self._sandboxes:
                raise  # its pod has a newer one, or it has ended
            self._state.attach(sandbox)  # the runtime may not have heard that it failed when the sandbox came
            self._state.check(sandbox, claims)

    def _refuse_outdated(self, container: ContainerInfo, claims: list[str]) -> None:
        """Raises where the runtime has read a claim's device nodes before they changed: it reads CDI specs before it
        asks here. So it is where this attached the sandbox only now: the driver was away when it came, a NIC had left
        it, or the attach took longer than the runtime waits for RunPodSandbox (`must_end`; 2 s in containerd). The gate
        refuses such a container, too, but then it has failed to start, which a pod that is never restarted does not
        survive."""
        said = nodes_words_of(self._driver, container.hooks)
        for entry in self._attached.entries(claims, 0.0):
            if said.get(entry.claim.uid, entry.nodes_word) != entry.nodes_word:
                raise RailmateError(
                    f"{self._driver}: the device nodes of {entry.claim} have changed since the container runtime read "
                    "which they are: an RDMA device gets other ones when it moves into the pod. The container gets "
                    "them when it is tried again, which happens by itself."
                )

    def _adopt(self, sandbox: Sandbox, claims: list[str]) -> None:
        attempt(lambda: self._state.adopt(sandbox, claims))

    def sandboxes(self) -> dict[str, Sandbox]:
        """The live sandboxes by pod UID, as of the last event."""
        return {sandbox.pod_uid: sandbox for sandbox in list(self._sandboxes.values())}

    def close(self) -> None:
        for pool in (self._workers, self._ending, self._adopting, self._asking):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._workers, verb, *arguments)


def _pins_memory(entries: Iterable[Entry]) -> bool:
    """RDMA and VFIO pin the memory that a NIC reads and writes."""
    return any(nic.rdma or nic.passes_through for entry in entries for nic in entry.nics)


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
