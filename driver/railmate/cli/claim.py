"""``railmate claim``: a ResourceClaimTemplate for so many pairs, GPUs or VFs, and a workload around it."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from railmate.cli.objects import Object, read_objects, world_of
from railmate.compose.ask import FALLBACKS, Ask, Spec, can_be_whole_node, class_names, compose, rails_of
from railmate.compose.workloads import KINDS, Workload, template
from railmate.errors import RailmateError, UsageError

if TYPE_CHECKING:
    from railmate.explain.verdict import World

#: For trying the claim, and what would fit instead, on the given slices.
_SECONDS = 20.0
_EXAMPLES = """\
examples:
  railmate claim --pairs 8                                eight GPUs, each with its NIC
  railmate claim --pairs 8 --whole-node                   the same on nodes with eight, as one device
  railmate claim --gpus 2 --vfs 2 --same-switch           two pairs of one PCIe switch
  railmate claim --pairs 4 --fallback numa,any            on a switch, else on a NUMA node, else anywhere
  railmate claim --pairs 2 --rail-aligned --for job       a gang whose pods all have rails 0 and 1
  railmate claim --pairs 8 --slices slices.yaml           refused if no node of these slices could ever take it

exit codes: 0 done, 1 no node of the slices could take it, 2 bad usage or input
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "claim",
        help="write a ResourceClaimTemplate that the scheduler answers fast",
        description="Print a ResourceClaimTemplate for pairs, GPUs or VFs in the form that costs the scheduler least.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--pairs", type=int, metavar="N", help="GPUs, each with its NIC under the same PCIe switch")
    add("--gpus", type=int, metavar="N", help="GPUs")
    add("--vfs", type=int, metavar="M", help="RDMA VFs (whole ports where NICs have none)")
    add("--groups", type=int, metavar="N", help="groups: GPUs that share NICs, with those NICs")
    add("--gpus-per-group", type=int, metavar="K", help="only groups of K GPUs")
    add(
        "--class",
        action="append",
        default=[],
        dest="classes",
        metavar="CLASS[=N]",
        help="devices of another DeviceClass; repeatable",
    )
    add(
        "--whole-node",
        action="store_true",
        help="the pairs are all that a node has, and asked for as one device; with --slices that is found out",
    )
    add("--same-switch", action="store_true", help="everything under one PCIe switch")
    add(
        "--rail-aligned",
        action="store_true",
        help="the pairs of rails 0 to N-1, one each, the same on every node: for gangs",
    )
    add("--rails", default="", metavar="LIST", help="a pair of each of these rails (pairRail), like 4,5,6,7")
    add(
        "--fallback",
        default="",
        metavar="LIST",
        help=f"where pairs may come from if none is on a switch: {', '.join(FALLBACKS)}, in the order given",
    )
    add("--name", default="gpu-rdma", help="of all objects (default: gpu-rdma)")
    add("-n", "--namespace", default="", help="default: none is written")
    add("--for", choices=list(KINDS), dest="workload", help="add a workload that uses it")
    add(
        "--nodes",
        type=int,
        default=2,
        metavar="N",
        help="pods of the job, jobset or kueue job, one a node (default: 2)",
    )
    add("--image", default="IMAGE", help="of the workload's container")
    add("--queue", default="LOCAL-QUEUE", help="Kueue LocalQueue of --for kueue")
    add(
        "--slices",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="saved ResourceSlices (and DeviceClasses) that the claim must suit; repeatable",
    )
    add("-o", "--output", choices=["yaml", "json"], default="yaml", help="default: yaml")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises UsageError; RailmateError where the slices could never take the claim."""
    ask = _ask(args)
    spec = compose(ask)
    if args.nodes < 1:
        raise UsageError(f"--nodes {args.nodes}: must be 1 or more.")
    _check_name(args.name)
    if args.slices:
        spec = _check_slices(args, ask, spec)
    objects = [template(args.name, args.namespace, spec.devices)]
    if args.workload:
        about = Workload(args.name, args.namespace, args.image, args.nodes, spec.gpus, args.queue)
        objects += KINDS[args.workload](about)
    sys.stdout.write(_text(args, spec, objects))
    return 0


def _ask(args: argparse.Namespace) -> Ask:
    return Ask(
        pairs=args.pairs,
        gpus=args.gpus,
        vfs=args.vfs,
        groups=args.groups,
        group_gpus=args.gpus_per_group,
        classes=tuple(_class(text) for text in args.classes),
        same_switch=args.same_switch,
        rail_aligned=args.rail_aligned,
        rails=_rails(args.rails),
        whole_node=args.whole_node,
        fallback=tuple(word for word in args.fallback.split(",") if word),
        counted=args.workload == "kueue",
    )


def _class(text: str) -> tuple[str, int]:
    name, equals, count = text.partition("=")
    if not name or (equals and not count.lstrip("-").isdigit()):
        raise UsageError(f"--class {text}: must be a DeviceClass, or CLASS=N like nic.example.com=2.")
    return name, int(count) if equals else 1


def _rails(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdigit() for word in words) or len(set(words)) < len(words):
        raise UsageError(f"--rails {text}: must be different numbers, like 4,5,6,7.")
    return tuple(map(int, words))


def _check_name(name: str) -> None:
    import re

    if len(name) > 50 or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        raise UsageError(
            f"--name {name!r}: must be lower-case letters, digits and dashes, begin with a letter and have 50 at most."
        )


# --- against slices
def _check_slices(args: argparse.Namespace, ask: Ask, spec: Spec) -> Spec:
    """The claim in the form that suits the slices best. Raises RailmateError where they could never take it."""
    from railmate.compose.check import classes_without_devices, is_whole_node, on_empty_nodes, pair_rails
    from railmate.explain.cel import Selectors
    from railmate.explain.parse import parse_claim

    world: World = world_of([one for path in args.slices for one in read_objects(path)])
    where = ", ".join(map(str, args.slices))
    if not world.slices:
        raise UsageError(
            f"{where}: holds no ResourceSlice. Save them with kubectl get resourceslices -o yaml."
        )
    selectors = Selectors()
    if can_be_whole_node(ask) and is_whole_node(ask.pairs or 0, world, selectors):
        spec = compose(replace(ask, whole_node=True))
    wanted = class_names(spec)
    missing, there = classes_without_devices(wanted, world, selectors)
    # of alternatives one is enough
    if len(missing) == len(wanted) or (missing and not _has_alternatives(spec)):
        raise RailmateError(
            f"{where}: no device is of class {', '.join(missing)}. "
            f"Classes with devices: {', '.join(sorted(there)) or 'none'}."
        )
    made = template(args.name, args.namespace, spec.devices)
    verdict = on_empty_nodes(parse_claim(made), world, _SECONDS, selectors)
    if not verdict.fits:
        if verdict.stopped:
            raise RailmateError(f"{where}: the scheduler would stop with an error: {verdict.stopped}")
        _check_rails(where, ask, pair_rails(world, selectors))
        near = verdict.nearest()
        way = (
            f"It would fit with {near[1].sentence}, on {near[0].node}."
            if near
            else "No change of it was found that fits."
        )
        if verdict.fits is None:
            raise RailmateError(
                f"{where}: whether a node could take this claim was not found out within {_SECONDS:.0f} s. Ask for it "
                "in a simpler form, or give the slices of fewer nodes."
            )
        raise RailmateError(f"{where}: no node could take this claim, even with nothing on it. {way}")
    return spec


def _check_rails(where: str, ask: Ask, there: Sequence[int]) -> None:
    """Raises RailmateError where the pairs of no node have such rails."""
    missing = [rail for rail in rails_of(ask) if rail not in there]
    if missing:
        have = (
            f"are on rails {', '.join(map(str, there))}: name those with --rails"
            if there
            else "have no rails"
        )
        raise RailmateError(
            f"{where}: no pair is on rail {', '.join(map(str, missing))}. The pairs there {have}, or leave "
            f"{'--rails' if ask.rails else '--rail-aligned'} out."
        )


def _has_alternatives(spec: Spec) -> bool:
    return any("firstAvailable" in one for one in spec.devices["requests"])


# --- output
def _text(args: argparse.Namespace, spec: Spec, objects: list[Object]) -> str:
    if args.output == "json":
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2) + "\n"
    import yaml

    documents = [yaml.safe_dump(one, sort_keys=False) for one in objects]
    sentences = list(spec.why)
    if args.workload:
        sentences.append(
            "CPU and memory are placeholders: give a pod what is its GPUs' share of a node, and the scheduler leaves "
            "out full nodes before it looks at their devices."
        )
    if args.workload == "kueue":
        sentences.append(
            f"Kueue counts this claim by deviceClassMappings in its Configuration, for {', '.join(class_names(spec))}."
        )
    return "".join(_comment(one) for one in sentences) + "---\n".join(documents)


def _comment(sentence: str) -> str:
    return "".join(f"# {line}\n" for line in textwrap.wrap(sentence, 110, break_on_hyphens=False))
