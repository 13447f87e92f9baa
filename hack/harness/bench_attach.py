"""``hack/bench attach``: what a pod's start waits for when its NICs move into its network namespace.

Real namespaces, real netlink, real ledger, and the runtime's calls over a real socket; VFs are played by veth ends. The
kernel's own share is told apart: each move waits for RCU callbacks (rcu_barrier in __dev_change_net_namespace,
net/core/dev.c), one device after the other and whoever asks for it; how long that takes is a matter of the kernel's
tick and of what else the machine does. The hook is not kept for it: the pod's first container waits. So both are timed,
the hook and until a container may start, and both are held to the limit, the second without the kernel's moves.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.bench_runtime import runtime_of
from railmate.attach import links
from railmate.attach.netdev import snapshot
from railmate.attach.settings import NetdevSettings, Route
from railmate.claims.ledger import Ledger
from railmate.claims.plan import NodeView
from railmate.claims.records import ClaimRef, Entry, PreparedDevice, PreparedNic
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.sandbox import Sandbox
from railmate.claims.state import ClaimState
from railmate.inventory.model import Inventory
from railmate.nri.events import ContainerAdjustment, ContainerInfo, PodSandbox
from railmate.publish.model import Offer
from railmate_api.proto import nri_pb2

#: Milliseconds in the RunPodSandbox hook, where all pods of a node queue, by number of VFs; and, without the kernel's
#: moves, until a container of the pod may start.
HOOK_LIMITS_MS = {1: 10.0, 8: 40.0}
#: Milliseconds of the driver's own share of an attach, without the kernel's moves.
OWN_LIMITS_MS = {1: 5.0, 8: 25.0}
_NAMESPACE = f"rmbench{os.getpid()}"
_UID = "00000000-0000-4000-8000-000000000001"


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = benches.add_parser(
        "attach",
        help="the runtime's hook for pods with 1 and 8 VFs, until the pod's container may start, and the way back",
        description="Elapsed time in real namespaces; needs root. Fails when half of the hooks, or half of the waits "
        "until a container may start less the kernel's moves, take longer than "
        f"{_words(HOOK_LIMITS_MS)}, or the driver's own share of an attach is above {_words(OWN_LIMITS_MS)} in the "
        "best of all runs.",
    )
    parser.add_argument("--runs", type=int, default=30, help="pods of each kind (default: 30)")
    parser.set_defaults(run=run)


def _words(limits: Mapping[int, float]) -> str:
    return " or ".join(f"{ms:.0f} ms ({count} VF)" for count, ms in limits.items())


@dataclass
class Times:
    """Milliseconds, one value a pod."""

    hook: list[float] = field(default_factory=list)  # until RunPodSandbox is answered
    ready: list[float] = field(default_factory=list)  # until a container asked for at once is let go
    cpu: list[float] = field(default_factory=list)  # CPU time of that, of this whole process
    attach: list[float] = field(default_factory=list)
    moves: list[float] = field(default_factory=list)  # the kernel's part of it
    detach: list[float] = field(default_factory=list)  # until StopPodSandbox is answered

    @property
    def ready_own(self) -> list[float]:
        """Until a container may start, without the kernel's moves."""
        return [whole - kernel for whole, kernel in zip(self.ready, self.moves, strict=True)]

    @property
    def own(self) -> list[float]:
        return [whole - kernel for whole, kernel in zip(self.attach, self.moves, strict=True)]


def run(args: argparse.Namespace) -> int:
    if os.geteuid() != 0:
        raise SystemExit("hack/bench attach: makes network namespaces; run it as root")
    failures = []
    print(f"{'ms':30}{'least':>8}{'p50':>8}{'p90':>8}{'p99':>8}")
    for count in HOOK_LIMITS_MS:
        times = measure(count, args.runs)
        show(count, times)
        failures += exceeded(count, times)
    print("\n".join(failures), end="\n" if failures else "")
    return 1 if failures else 0


def measure(count: int, runs: int) -> Times:
    """``runs`` pods (2 at least), each with ``count`` VFs, one after the other; and one before that does not count."""
    with _namespace(), tempfile.TemporaryDirectory(prefix="railmate-bench-") as directory, _vfs(count) as vfs:
        return asyncio.run(_measure(Path(directory), vfs, max(runs, 2)))


def show(count: int, times: Times) -> None:
    _print(f"hook, {count} VF", times.hook)
    _print("until a container may start", times.ready)
    _print("  without the kernel's moves", times.ready_own)
    _print("  CPU time", times.cpu)
    _print("  attach", times.attach)
    _print("    the kernel's moves", times.moves)
    _print("    all else", times.own)
    _print(f"detach, {count} VF", times.detach)


def exceeded(count: int, times: Times) -> list[str]:
    """What is over its limit, on a machine with little else to do."""
    limit, found = HOOK_LIMITS_MS[count], []
    for what, values in (
        ("the hook", times.hook),
        ("what a container waits for, less the kernel's moves,", times.ready_own),
    ):
        if (half := statistics.median(values)) > limit:
            found.append(f"{what} takes {half:.1f} ms for {count} VF, more than {limit:.0f}")
    if (own := min(times.own)) > OWN_LIMITS_MS[count]:  # other work on the machine only ever adds
        found.append(f"attach of {count} VF takes {own:.1f} ms beside the kernel's moves")
    return found


def _print(what: str, values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    print(f"{what:30}{min(values):8.1f}{cuts[49]:8.1f}{cuts[89]:8.1f}{cuts[98]:8.1f}")


async def _measure(root: Path, names: list[str], runs: int) -> Times:
    ledger = Ledger(root / "plugin")
    files = RuntimeFiles("railmate.dev", root / "plugin", root / "cdi", root / "gate")
    node = NodeView(
        driver="railmate.dev", pool="bench", offer=Offer(()), inventory=Inventory(), dev_root=root,
        node_exists=Path.exists, netdev_of=lambda address: None,
    )  # fmt: skip
    state = ClaimState(_NoApi(), node, ledger, files, "boot")
    ledger.put(_entry(names))
    times = Times()
    handler = _Timed(state, times)
    async with runtime_of(handler, root / "nri.sock") as runtime:
        for number in range(runs + 1):
            pod = nri_pb2.PodSandbox(id=f"sandbox-{number}", uid="pod-1", namespace="team", name="pod-1")
            pod.linux.namespaces.add(type="network", path=f"/run/netns/{_NAMESPACE}")
            with _timed_moves() as spent:
                began, spent_before = time.perf_counter(), time.process_time()
                await runtime.sandbox("RunPodSandbox", pod)
                times.hook.append(_since(began))
                await runtime.container(pod)
                times.ready.append(_since(began))
                times.cpu.append(1000 * (time.process_time() - spent_before))
            times.moves.append(1000 * sum(spent))
            began = time.perf_counter()
            await runtime.sandbox("StopPodSandbox", pod)
            times.detach.append(_since(began))
    for values in vars(times).values():
        del values[0]  # it loads code
    return times


def _since(began: float) -> float:
    return 1000 * (time.perf_counter() - began)


class _Timed:
    """An NriHandler as the driver's, that measures attach itself."""

    def __init__(self, state: ClaimState, times: Times) -> None:
        self._state, self._times = state, times

    async def synchronize(self, pods: list[PodSandbox], containers: list[ContainerInfo]) -> None:
        pass

    async def run_pod_sandbox(self, pod: PodSandbox) -> None:
        await asyncio.to_thread(self._attach, Sandbox(pod.id, pod.uid, pod.name, pod.netns_path))

    def _attach(self, sandbox: Sandbox) -> None:
        began = time.perf_counter()
        self._state.attach(sandbox)
        self._times.attach.append(_since(began))

    async def must_end(self, pod: PodSandbox) -> bool:
        return False  # the bench's NICs have no RDMA devices

    async def stop_pod_sandbox(self, pod: PodSandbox) -> None:
        await asyncio.to_thread(self._state.detach, pod.id)

    async def remove_pod_sandbox(self, pod: PodSandbox) -> None:
        pass

    async def create_container(self, pod: PodSandbox, container: ContainerInfo) -> ContainerAdjustment | None:
        sandbox = Sandbox(pod.id, pod.uid, pod.name, pod.netns_path)
        await asyncio.to_thread(self._state.check, sandbox, [_UID])
        return None


class _NoApi:
    def get_claim(self, namespace: str, name: str) -> dict[str, Any]:
        raise AssertionError("the hook asks no API server")


def _entry(names: list[str]) -> Entry:
    nics = []
    for n, name in enumerate(names):
        route = Route(f"10.78.{n}.0/24", f"10.77.{n}.1")
        settings = NetdevSettings(mtu=1400, addresses=(f"10.77.{n}.2/24",), routes=(route,))
        address = f"0000:c1:00.{n}"
        nics.append(PreparedNic(address, f"net{n}", snapshot(name, address), settings))
    device = PreparedDevice("main", "bench", "vfs", nics=tuple(nics))
    return Entry(ClaimRef(_UID, "team", "claim-1"), ("pod-1",), (device,), "boot")


@contextmanager
def _timed_moves() -> Iterator[list[float]]:
    """Seconds that each message took which moves an interface."""
    spent: list[float] = []
    real = links.change

    def timed(netlink: Any, index: int, **what: Any) -> None:
        began = time.perf_counter()
        real(netlink, index, **what)
        if what.get("namespace_fd") is not None:
            spent.append(time.perf_counter() - began)

    links.change = timed
    try:
        yield spent
    finally:
        links.change = real


@contextmanager
def _namespace() -> Iterator[None]:
    _ip("netns", "add", _NAMESPACE)
    try:
        yield
    finally:
        _ip("netns", "delete", _NAMESPACE)


@contextmanager
def _vfs(count: int) -> Iterator[list[str]]:
    made: list[str] = []
    try:
        for n in range(count):
            _ip("link", "add", f"rmbv{n}", "type", "veth", "peer", "name", f"rmbp{n}")
            made.append(f"rmbv{n}")
            _ip("link", "set", f"rmbp{n}", "up")
        yield made
    finally:
        for n in range(len(made)):
            _ip("link", "delete", f"rmbp{n}")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
