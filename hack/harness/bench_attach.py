"""``hack/bench attach``: what a pod's start waits for when its NICs move into its network namespace.

Real namespaces, real netlink, real ledger; VFs are played by veth ends. The kernel's own share is told apart: each move
waits for an RCU grace period (rcu_barrier in __dev_change_net_namespace, net/core/dev.c), one device after the other
and whoever asks for it; how long that takes is a matter of the kernel's tick and of what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from railmate.attach import links
from railmate.attach.netdev import snapshot
from railmate.attach.settings import NetdevSettings, Route
from railmate.claims.attachments import Sandbox
from railmate.claims.ledger import Ledger
from railmate.claims.plan import NodeView
from railmate.claims.records import ClaimRef, Entry, PreparedDevice, PreparedNic
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.state import ClaimState
from railmate.inventory.model import Inventory
from railmate.publish.model import Offer

#: Milliseconds of the driver's own, without the kernel's moves, by number of VFs.
LIMITS_MS = {1: 5.0, 8: 25.0}
_NAMESPACE = f"rmbench{os.getpid()}"


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = benches.add_parser(
        "attach",
        help="the runtime's hook for pods with 1 and 8 VFs, and the way back",
        description="Elapsed time of attach and detach in real namespaces; needs root. Fails when the driver's own "
        f"share of an attach is above {' or '.join(f'{ms:.0f} ms ({n} VF)' for n, ms in LIMITS_MS.items())} "
        "in the best of all runs.",
    )
    parser.add_argument("--runs", type=int, default=30, help="pods of each kind (default: 30)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if os.geteuid() != 0:
        raise SystemExit("hack/bench attach: makes network namespaces; run it as root")
    code = 0
    print(f"{'ms':26}{'least':>8}{'p50':>8}{'p90':>8}{'p99':>8}")
    for count, limit in LIMITS_MS.items():
        with (
            _namespace(),
            tempfile.TemporaryDirectory(prefix="railmate-bench-") as directory,
            _vfs(count) as vfs,
        ):
            attach, moves, detach = _measure(Path(directory), vfs, max(args.runs, 2))
        own = [whole - kernel for whole, kernel in zip(attach, moves, strict=True)]
        _print(f"attach, {count} VF", attach)
        _print("  the kernel's moves", moves)
        _print("  all else", own)
        _print(f"detach, {count} VF", detach)
        # the least: other work on the machine only ever adds
        if min(own) > limit:
            print(
                f"attach of {count} VF takes {min(own):.1f} ms beside the kernel's moves, more than {limit:.0f}"
            )
            code = 1
    return code


def _print(what: str, values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    print(f"{what:26}{min(values):8.1f}{cuts[49]:8.1f}{cuts[89]:8.1f}{cuts[98]:8.1f}")


def _measure(root: Path, names: list[str], runs: int) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of each attach, of the kernel's moves in it, and of each detach."""
    ledger = Ledger(root / "plugin")
    files = RuntimeFiles("railmate.dev", root / "plugin", root / "cdi", root / "gate")
    node = NodeView(
        driver="railmate.dev", pool="bench", offer=Offer(()), inventory=Inventory(), dev_root=root,
        node_exists=Path.exists, netdev_of=lambda address: None,
    )  # fmt: skip
    state = ClaimState(_NoApi(), node, ledger, files, "boot")
    ledger.put(_entry(names))
    attach, moves, detach = [], [], []
    for number in range(runs + 1):
        sandbox = Sandbox(f"sandbox-{number}", "pod-1", "team/pod-1", Path("/run/netns") / _NAMESPACE)
        with _timed_moves() as spent:
            began = time.perf_counter()
            state.attach(sandbox)
            middle = time.perf_counter()
        state.detach(sandbox.id)
        if number:  # the first one loads code
            attach.append(1000 * (middle - began))
            moves.append(1000 * sum(spent))
            detach.append(1000 * (time.perf_counter() - middle))
    return attach, moves, detach


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
    uid = "00000000-0000-4000-8000-000000000001"
    device = PreparedDevice("main", "bench", "vfs", nics=tuple(nics))
    return Entry(ClaimRef(uid, "team", "claim-1"), ("pod-1",), (device,), "boot")


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
