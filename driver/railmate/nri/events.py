"""What the container runtime tells, as plain immutable data, and what a handler of it looks like.

Nothing outside this package sees the protobuf messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

UNLIMITED = 2**64 - 1  # RLIM_INFINITY, for Rlimit.soft and Rlimit.hard


@dataclass(frozen=True, slots=True)
class PodSandbox:
    """A pod's sandbox. One pod (``uid``) can have several over time, each with its own ``id`` and namespace.

    ``netns_path`` is the pod's network namespace as the runtime's mount namespace names it; None on the host
    network. ``pid`` is the pause process, 0 when it has ended or is unknown.
    """

    id: str
    name: str
    namespace: str
    uid: str
    netns_path: Path | None = None
    pid: int = 0
    annotations: Mapping[str, str] = field(default_factory=dict)

    def is_live(self) -> bool:
        """Whether the sandbox still has its network namespace.

        The runtime lists sandboxes whose pause process has ended, too. The path of a live one is a namespace
        (a file of the one nsfs file system of the kernel); what is left of a stopped one is no file or a plain
        file. For a pod on the host network only the pause process can tell.

        A sandbox whose pause process was killed keeps its namespace until the kubelet stops it. containerd says
        ``pid`` 0 then, but CRI-O may run sandboxes without a pause process: so ``pid`` does not decide here, yet
        of two live sandboxes of one pod the one with a ``pid`` is the pod's.
        """
        if self.netns_path is None:
            return self.pid > 0
        try:
            return self.netns_path.stat().st_dev == Path("/proc/self/ns/net").stat().st_dev
        except OSError:
            return False

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name} (sandbox {self.id[:12]})"


@dataclass(frozen=True, slots=True)
class Rlimit:
    """A resource limit as the OCI runtime specification names it, for example ``RLIMIT_MEMLOCK`` in bytes."""

    type: str
    soft: int
    hard: int


@dataclass(frozen=True, slots=True)
class ContainerInfo:
    """A container. ``cdi_devices`` are its fully qualified CDI names, ``vendor/class=device``.

    ``env`` is what image and pod say, ``rlimits`` and ``annotations`` what the runtime was going to set; each with what
    plugins that were asked before have added. ``pid`` is the first process as the runtime numbers it, 0 when the
    container does not run. ``hooks`` are the arguments of its createRuntime hooks, the program's name first.
    """

    id: str
    name: str
    pod_sandbox_id: str
    cdi_devices: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    rlimits: tuple[Rlimit, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    pid: int = 0
    hooks: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class ContainerAdjustment:
    """What a container gets on top of what its pod asks for.

    Nothing in it may be there already: the runtime fails a container for which two plugins set one limit, variable or
    annotation, also to the same value and also two of one name (``claimCompound`` in pkg/api/owners.go of
    github.com/containerd/nri). While a driver is being updated there are two of it.
    """

    rlimits: tuple[Rlimit, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)


class NriHandler(Protocol):
    """Answers the runtime's events.

    Events of one sandbox come one after the other. Events of different sandboxes, and ``synchronize``, may
    overlap: the runtime stops waiting after two seconds, the work does not end by that. So what two sandboxes
    could both touch (a claim, a VF) needs the handler's own lock. Blocking work belongs in a thread.
    """

    async def synchronize(self, pods: list[PodSandbox], containers: list[ContainerInfo]) -> None:
        """All sandboxes and containers there are, dead sandboxes included. Called after every (re)connect.

        An exception is logged and kept from the runtime, which would drop the plugin for it.
        """

    async def run_pod_sandbox(self, pod: PodSandbox) -> None:
        """The sandbox and its network exist, its containers do not yet, nor will they before this returns.

        An exception within milliseconds, or where ``must_end`` within the runtime's time, refuses the sandbox; the
        message of a RailmateError reaches the user in the pod's events. Of a later one the runtime does not hear:
        ``create_container`` must see to what is missing.
        """

    async def must_end(self, pod: PodSandbox) -> bool:
        """Whether what the runtime reads for the pod's containers before it asks ``create_container`` is right only
        when ``run_pod_sandbox`` has ended. Then the runtime is kept waiting for that, as far as it does. Asked only
        where it takes more than milliseconds.
        """

    async def stop_pod_sandbox(self, pod: PodSandbox) -> None:
        """The sandbox's processes have ended, its network namespace is still there. Must be idempotent.

        Also called after a ``run_pod_sandbox`` that was refused.
        """

    async def remove_pod_sandbox(self, pod: PodSandbox) -> None:
        """The sandbox is gone. Must be idempotent."""

    async def create_container(self, pod: PodSandbox, container: ContainerInfo) -> ContainerAdjustment | None:
        """The container is about to be made. An exception refuses it, as for ``run_pod_sandbox``."""
