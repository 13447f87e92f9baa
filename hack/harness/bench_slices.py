"""``hack/bench slices``: how much of a node is in the API: slices, devices and bytes, for each machine of the tests.

Bytes are those of the JSON as the driver sends it. The API server stores about three quarters of that, and every
scheduler and controller that looks at devices holds it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

from harness.bench_topology import big_machine
from harness.machines import MACHINES, Machine, load_machine
from harness.sysfs import write_tree
from railmate.inventory.scan import scan
from railmate.publish.devices import OfferOptions, build_offer
from railmate.publish.slices import resource_slices
from railmate.topology.analyze import analyze

#: Slices and bytes of a node with 8 pairs, 8 GPUs and 24 lone VFs: what kube-scheduler was measured with.
LIMIT_SLICES, LIMIT_BYTES = 2, 19_200
_LIMITED = "dgx-a100, 4 VFs a NIC"


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = benches.add_parser(
        "slices",
        help="slices and bytes a node",
        description=f"Slices, devices and bytes a node; fails where {_LIMITED}, takes more than {LIMIT_BYTES} bytes.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    worst = 0
    print(f"{'machine':34} {'slices':>6} {'bytes':>8}  devices")
    for name, machine, options in machines():
        slices, size, kinds = measure(machine, options)
        devices = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        print(f"{name:34} {slices:6} {size:8}  {devices}")
        if name == _LIMITED:
            worst = int(slices > LIMIT_SLICES or size > LIMIT_BYTES)
            print(f"{'  limit':34} {LIMIT_SLICES:6} {LIMIT_BYTES:8}")
    return worst


def machines() -> list[tuple[str, Machine, OfferOptions]]:
    found = []
    for vfs in (0, 1, 4, 16):
        found.append(
            (f"dgx-a100, {vfs} VFs a NIC", load_machine(MACHINES / "dgx-a100.yaml", vfs), OfferOptions())
        )
    dgx = load_machine(MACHINES / "dgx-a100.yaml", 4)
    found.append(("  with switch groups", dgx, OfferOptions(switch_groups=True)))
    found.append(("  with 1 lone VF a NIC", dgx, OfferOptions(lone_vfs=1)))
    found.append(("  with no lone VF", dgx, OfferOptions(lone_vfs=0)))
    for path in sorted(MACHINES.glob("*.yaml")):
        if path.stem != "dgx-a100":
            found.append((path.stem, load_machine(path), OfferOptions()))
    found.append(("8 GPUs, 32 NICs, 16 VFs a NIC", big_machine(16), OfferOptions()))
    found.append(("  with no lone VF", big_machine(16), OfferOptions(lone_vfs=0)))
    return found


def measure(machine: Machine, options: OfferOptions) -> tuple[int, int, Counter[str]]:
    """Slices, bytes, and devices by kind."""
    with tempfile.TemporaryDirectory(prefix="railmate-bench-") as directory:
        root = Path(directory)
        write_tree(machine, root)
        inventory = scan(root / "sys", root / "proc")
    offer = build_offer(inventory, analyze(inventory), options)
    slices = resource_slices(offer, "railmate.dev", "node-0001", node_uid="0" * 36)
    size = sum(len(json.dumps(item, separators=(",", ":"))) for item in slices)
    return len(slices), size, Counter(device.kind for device in offer.devices)
