"""Devices that are neither on the host nor where they were put: looked for in every network namespace in reach.

A privileged container can move its NIC into a namespace of its own, and the file of a pod's namespace can go while its
processes live on. Reading all processes' namespaces takes milliseconds, entering one about one: not for the hook.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from railmate.attach import rdmalink
from railmate.attach.errors import AttachError
from railmate.attach.home import bring_home, in_pod
from railmate.attach.model import NetdevReturn, ReturnRequest
from railmate.attach.namespaces import Sides, open_namespace, with_namespace
from railmate.attach.rdma import take_back
from railmate.attach.rdmamodel import RdmaDeviceRef, RdmaReturn

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """``proc`` is the node's, ``directories`` are where runtimes mount namespaces."""

    proc: Path
    directories: tuple[Path, ...] = (Path("/run/netns"), Path("/var/run/netns"))

    def namespaces(self) -> list[Path]:
        """A path of each network namespace in reach, but for the driver's own."""
        own = Path("/proc/thread-self/ns/net").stat()
        found: dict[int, Path] = {}
        for path in self._paths():
            try:
                stat = path.stat()
            except OSError:
                continue  # the process has ended, or is not to be looked at
            if stat.st_dev == own.st_dev and stat.st_ino != own.st_ino:
                found.setdefault(stat.st_ino, path)
        return list(found.values())

    def _paths(self) -> Iterator[Path]:
        for directory in self.directories:
            yield from directory.glob("*")
        yield from self.proc.glob("[0-9]*/ns/net")

    def fetch_netdevs(self, requests: Sequence[ReturnRequest]) -> list[NetdevReturn]:
        """Bring home those that are found, and put them right. Never raises."""
        left = list(requests)
        found: list[NetdevReturn] = []

        def work(sides: Sides) -> None:
            for request in [one for one in left if in_pod(one, sides) is not None]:
                found.append(bring_home(request, sides))
                left.remove(request)

        self._in_each(work, left)
        return found

    def fetch_rdma(self, devices: Sequence[RdmaDeviceRef]) -> list[RdmaReturn]:
        """The same for RDMA devices, which only exclusive mode puts into one namespace."""
        left = [device for device in devices if device.soft is None]
        found: list[RdmaReturn] = []

        def work(sides: Sides) -> None:
            with rdmalink.open_sides(sides) as rdma:
                links = rdma.pod.links() if rdma is not None and rdma.pod is not None else []
            here = [device for device in left if rdmalink.find(links, device) is not None]
            found.extend(take_back(here, sides))
            for device in here:
                left.remove(device)

        self._in_each(work, left)
        return found

    def _in_each(self, work: Callable[[Sides], None], left: Sequence[object]) -> None:
        """``work`` in each namespace, until it has taken all out of ``left``."""
        if not left:
            return
        for path in self.namespaces():
            try:
                with open_namespace(path) as fd:
                    with_namespace(fd, work)
            except (AttachError, OSError) as error:
                log.debug("%s is not searched: %s", path, error)
            if not left:
                return
