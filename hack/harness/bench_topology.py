"""``hack/bench topology``: CPU time from a big node's sysfs tree to its ResourceSlices.

CPU time, not elapsed time, and the least of several runs: other work on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from harness.known import P5, one_switch_each
from harness.machines import Machine, with_vfs
from harness.sysfs import write_tree
from railmate.inventory.scan import scan
from railmate.publish.devices import build_offer
from railmate.publish.slices import resource_slices
from railmate.topology.analyze import analyze

LIMIT_MS = 300
_MODELS = {"15b3:1021": {"driver": "mlx5_core", "vf": "15b3:101e", "rate": 400}}


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = benches.add_parser(
        "topology",
        help="discovery, topology and slices of a node with 8 GPUs, 32 NICs and 512 VFs",
        description=f"CPU time of discovery, topology and slices; fails above {LIMIT_MS} ms in sum.",
    )
    parser.add_argument("--runs", type=int, default=7, help="the least of so many runs counts (default: 7)")
    parser.set_defaults(run=run)


def big_machine(vfs_per_nic: int = 16) -> Machine:
    """AWS p5's layout with ConnectX-7: 8 switches, each with a GPU and four NICs."""
    machine = one_switch_each(P5, "gpu", "nic")
    rails = [address for address, function in machine.functions.items() if function.rdma_devices]
    able = {
        a: replace(f, max_virtual_functions=vfs_per_nic) if a in rails else f
        for a, f in machine.functions.items()
    }
    return with_vfs(replace(machine, functions=able), rails, vfs_per_nic, _MODELS)


def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="railmate-bench-") as directory:
        write_tree(big_machine(), Path(directory))
        steps = [_once(Path(directory)) for _ in range(max(args.runs, 1))]
    sums = [sum(step.values()) for step in steps]
    best = steps[sums.index(min(sums))]
    for name, milliseconds in best.items():
        print(f"{name:12} {milliseconds:7.1f} ms CPU")
    median = statistics.median(sums)
    print(f"{'sum':12} {min(sums):7.1f} ms CPU (limit {LIMIT_MS}; median of {len(sums)} runs {median:.1f})")
    return 0 if min(sums) <= LIMIT_MS else 1


def _once(root: Path) -> dict[str, float]:
    """Milliseconds of CPU, user and system, by step."""
    marks = [time.process_time()]
    inventory = scan(root / "sys", root / "proc")
    marks.append(time.process_time())
    topology = analyze(inventory)
    marks.append(time.process_time())
    slices = resource_slices(build_offer(inventory, topology), "railmate.dev", "node")
    marks.append(time.process_time())
    vfs = sum(nic.is_vf for nic in inventory.nics)
    if (len(inventory.gpus), len(inventory.nics) - vfs, vfs, len(topology.pairs)) != (
        8,
        32,
        512,
        8,
    ) or not slices:
        raise SystemExit(
            "hack/bench topology: the machine was not read as it was written; nothing was measured"
        )
    names = ("discovery", "topology", "slices")
    return {name: 1000 * (end - start) for name, start, end in zip(names, marks, marks[1:], strict=False)}
