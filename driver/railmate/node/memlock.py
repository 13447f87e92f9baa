"""RLIMIT_MEMLOCK of containers with RDMA devices: RDMA pins the memory it registers.

CAP_IPC_LOCK does nothing for a process that is not root, and Kubernetes has no field for the limit. The gate raises
it for each container that starts. Through NRI it becomes part of the container's specification and so counts for
``kubectl exec`` too; but a runtime without CAP_SYS_RESOURCE would fail to start such a container, so that is done
only where it is known to work.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable, Iterable
from pathlib import Path

from railmate.node.gateword import GateWord
from railmate.nri.events import UNLIMITED, ContainerInfo, Rlimit

log = logging.getLogger(__name__)

_TYPE = "RLIMIT_MEMLOCK"
_CAP_SYS_RESOURCE = 24  # include/uapi/linux/capability.h
_WORDS = (
    "The container runtime may not raise RLIMIT_MEMLOCK: it lacks CAP_SYS_RESOURCE. Pods start, but programs in them "
    "can register little memory for RDMA (ibv_reg_mr: ENOMEM, and NCCL falls back to TCP). Let the runtime have "
    "CAP_SYS_RESOURCE, or an unlimited RLIMIT_MEMLOCK of its own (systemd: LimitMEMLOCK=infinity)."
)


class Memlock:
    """``report`` is called once with words for people when the limit cannot be raised on this node. ``proc`` is the
    node's: it numbers processes as the runtime does."""

    def __init__(self, plugin_dir: Path, report: Callable[[str], None], proc: Path = Path("/proc")) -> None:
        self._plugin_dir, self._proc = plugin_dir, proc
        self._refused = GateWord(plugin_dir / "memlock-refused", _WORDS, report)

    def limits(self, container: ContainerInfo, sandbox_pid: int, sandbox_id: str) -> tuple[Rlimit, ...]:
        """What to ask the runtime for, when a container with RDMA devices is made."""
        self.look()
        for limit in container.rlimits:
            if limit.type == _TYPE and limit.soft == limit.hard == UNLIMITED:
                return ()  # another plugin of the runtime may have set it, and it takes no second one
        may = self._runtime_may(sandbox_pid, sandbox_id)
        if may is None:
            may = (self._plugin_dir / "memlock-raised").exists()  # the gate has tried
        return (Rlimit(_TYPE, UNLIMITED, UNLIMITED),) if may else ()

    def look(self) -> None:
        """Tell, once, what the gate had to find out."""
        self._refused.look()

    def repair(self, containers: Iterable[ContainerInfo]) -> int:
        """Raise the limit of running containers that started without; of how many processes. Only where this process
        counts as the node does: outside of a pod, or with the chart's ``hostPID``."""
        count = 0
        if not self._counts_alike():
            return count
        for container in containers:
            for pid in self._processes(container):
                try:
                    if resource.prlimit(pid, resource.RLIMIT_MEMLOCK) == (resource.RLIM_INFINITY,) * 2:
                        continue
                    resource.prlimit(pid, resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY,) * 2)
                    count += 1
                except ProcessLookupError:
                    continue
                except (PermissionError, ValueError) as error:
                    log.warning("RLIMIT_MEMLOCK of container %s cannot be raised: %s", container.name, error)
                    break
        return count

    def _runtime_may(self, sandbox_pid: int, sandbox_id: str) -> bool | None:
        """Whether the parent of the sandbox's process, which will run the OCI runtime, has CAP_SYS_RESOURCE; None
        when it is not visible from here."""
        if not self._is_of(sandbox_pid, sandbox_id):
            return None
        parent = self._status(sandbox_pid, "PPid")
        capabilities = self._status(int(parent), "CapEff") if parent and int(parent) else None
        if capabilities is None:
            return None
        may = bool(int(capabilities, 16) >> _CAP_SYS_RESOURCE & 1) or self._is_unlimited(int(parent or 0))
        if not may:
            self._refused.tell()
        return may

    def _processes(self, container: ContainerInfo) -> list[int]:
        if not self._is_of(container.pid, container.id):
            return []
        numbers = [int(entry.name) for entry in self._proc.iterdir() if entry.name.isdigit()]
        return [number for number in numbers if self._is_of(number, container.id)]

    def _counts_alike(self) -> bool:
        try:
            return (self._proc / "self").readlink().name == str(os.getpid())
        except OSError:
            return False

    def _is_of(self, pid: int, container_id: str) -> bool:
        """Whether the process belongs to the container: without the node's proc the number means another, or none."""
        try:
            return pid > 0 and container_id in (self._proc / str(pid) / "cgroup").read_text()
        except OSError:
            return False

    def _is_unlimited(self, pid: int) -> bool:
        """Whether the process's own hard limit is none: then what it starts needs no capability."""
        try:
            lines = (self._proc / str(pid) / "limits").read_text().splitlines()
        except OSError:
            return False
        return any(line.startswith("Max locked memory") and line.split()[4] == "unlimited" for line in lines)

    def _status(self, pid: int, field: str) -> str | None:
        try:
            for line in (self._proc / str(pid) / "status").read_text().splitlines():
                if line.startswith(f"{field}:"):
                    return line.split()[1]
        except OSError:
            pass
        return None
