"""``hack/bench scheduler``: a real kube-scheduler, API server, controller manager and etcd with synthetic nodes.

Each variant (a way to ask for pairs, or a setting) has a control plane of its own, and the variants take turns, so that
what else goes on on this machine meets all of them. Nodes are objects with the slices that the driver would publish;
pods come and go as users make them, from ResourceClaimTemplates, and no kubelet ever starts one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness.bench_scheduler_forms import BenchMachine, parse_variant
from harness.bench_scheduler_load import Pods
from harness.bench_scheduler_measure import Load, measure_churn, measure_waiting
from harness.bench_scheduler_report import failures, report
from harness.bench_scheduler_site import Site
from harness.shell import HarnessError, UsageError, progress

_PACE = 10.0  # other pods a second beside infeasible ones


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = benches.add_parser(
        "scheduler",
        help="pods a second and time to allocation on the real scheduler, forms and settings side by side",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nodes", type=int, default=100, help="synthetic nodes (default: %(default)s)")
    add(
        "--forms",
        default="pairs,constraint",
        metavar="FORM[+WORD…],…",
        help="variants: pairs, node (eight pairs as one device), groups (whole switches) or constraint, with the words "
        "scheduler-limits, controller-limits (requests a second at their defaults, not raised), proportional (pods' "
        "CPU and memory in proportion to GPUs) and files with a "
        "KubeSchedulerConfiguration (default: %(default)s)",
    )
    add("--sizes", default="1,2,8", help="pairs a pod asks for (default: %(default)s; '' for no churn)")
    add("--rounds", type=int, default=3, help="how often all variants take their turn (default: %(default)s)")
    add("--pods", type=int, default=60, help="pods measured in a round (default: %(default)s)")
    add("--window", type=int, default=16, help="pods that wait at any time (default: %(default)s)")
    add("--alone", type=int, default=20, help="pods a round made one after the other (default: %(default)s)")
    add("--fill", type=float, default=0.25, help="share of nodes taken as a whole (default: %(default)s)")
    add(
        "--infeasible",
        type=int,
        default=100,
        help="pods that fit nowhere; 0 leaves that out (default: %(default)s)",
    )
    add("--clusters", default="oneShort", metavar="oneShort,full", help="where they fit nowhere: each node lacks one "
        "pair, or all (default: %(default)s)")  # fmt: skip
    add("--seconds", type=float, default=20, help="how long others are watched (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured to a file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        results = measure(args)
    except HarnessError as error:
        print(f"hack/bench scheduler: {error}")
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("hack/bench scheduler: interrupted; its control planes have ended")
        return 130
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(report(results)))
    missed = failures(results)
    print("\n".join(["", *(f"NOT KEPT: {one}" for one in missed)]) if missed else "")
    return 1 if missed else 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All that was measured, as ``--json`` writes it."""
    variants = [parse_variant(text) for text in args.forms.split(",")]
    sizes = [int(size) for size in args.sizes.split(",") if size]
    clusters = [kind for kind in args.clusters.split(",") if kind] if args.infeasible else []
    if unknown := set(clusters) - {"oneShort", "full"}:
        raise UsageError(f"--clusters {unknown.pop()}: there are oneShort and full")
    load = Load(args.pods, args.window, args.alone, args.nodes - round(args.fill * args.nodes))
    for pairs in sizes:
        load.population(pairs)
    machine = BenchMachine()
    results: dict[str, Any] = {
        "nodes": args.nodes, "fill": args.fill, "rounds": args.rounds, "sizes": sizes, "infeasible": args.infeasible,
        "load": vars(load), "sites": {}, "churn": {}, "waiting": {},
    }  # fmt: skip
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="railmate-bench-")))
        sites = [
            stack.enter_context(Site(directory / str(index), variant, machine, args.nodes))
            for index, variant in enumerate(variants)
        ]
        loads = [Pods(site) for site in sites]
        for pods in loads:
            results["sites"][pods.site.variant.name] = pods.site.slices_of_a_node()
        if sizes:
            _churn(results, loads, sizes, args, load)
        for kind in clusters:
            for pods in loads:
                name = pods.site.variant.name
                progress(name, f"{args.infeasible} infeasible pods, cluster {kind}")
                found = measure_waiting(pods, args.infeasible, args.seconds, _PACE, kind == "full")
                results["waiting"].setdefault(name, {})[kind] = found
        for pods in loads:
            results["sites"][pods.site.variant.name]["rss"] = pods.site.scheduler_rss_mb()
    return results


def _churn(
    results: dict[str, Any], loads: list[Pods], sizes: list[int], args: argparse.Namespace, load: Load
) -> None:
    background = {}
    for pods in loads:
        progress(pods.site.variant.name, f"taking {args.fill:.0%} of the nodes")
        background[pods] = pods.fill(round(args.fill * args.nodes))
    for number in range(args.rounds):
        for pairs in sizes:
            for pods in loads:
                name = pods.site.variant.name
                one = measure_churn(pods, pairs, load)
                results["churn"].setdefault(name, {}).setdefault(str(pairs), []).append(one)
                progress(
                    name,
                    f"round {number + 1} of {args.rounds}, {pairs} pairs: {one['podsPerSecond']:.1f} pods/s",
                )
    for pods, names in background.items():
        pods.clear(names)
