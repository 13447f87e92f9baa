"""``railmate explain``: where a pod or claim would go, or what keeps it from everywhere."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from railmate.cli.objects import Object, read_objects, world_of
from railmate.errors import UsageError
from railmate_api.attributes import DRIVER_NAME

if TYPE_CHECKING:  # the classes behind them are imported only when the command runs
    from railmate.explain.gang import Batch
    from railmate.explain.verdict import World
    from railmate.kube.client import KubeClient

_RESOURCE = "/apis/resource.k8s.io/v1"
_NOT_CERTAIN = 3
#: The part of the time that is for judging, however long reading took: without an answer that would be for nothing.
_LEAST = 0.25
_WORKLOADS = ("Pod", "ResourceClaim", "ResourceClaimTemplate")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "explain",
        help="tell why a pod or claim fits where it does, or nowhere",
        description="Tell on which node the scheduler would place a pod's or a claim's devices; or for each node which "
        "request fails, on what, who has the devices and what would have to change. Of a workload with several "
        "pods also how many of them fit now, and where. CPU, memory and affinity among pods are not looked at.",
        epilog="Each workload, pod or claim of a file is judged as if it were alone; of a DaemonSet one pod is. "
        "Exit codes: 0 it fits, all pods of a workload (or --cluster); 1 it does not, 2 bad input, 3 not "
        "certain: the time was over before all nodes were looked at, and it fits on none of the others (--timeout "
        "gives more), or the pods of a workload ask for different things, or share a claim or devices of several "
        "nodes, and were not all placed.",
    )
    add = parser.add_argument
    add("object", nargs="?", help="pod/NAME, claim/NAME, or NAME of a pod or else a claim, in the cluster")
    add("-n", "--namespace", default="default", help="of the object (default: default)")
    add(
        "-f",
        "--file",
        type=Path,
        help="explain the pods, workloads (one pod of each template, then all of them) and claims in FILE (YAML, JSON; "
        "-: standard input)",
    )
    add("--cluster", action="store_true", help="show what is free and what is stranded on every node instead")
    add(
        "--slices",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="saved ResourceSlices (and Nodes, DeviceClasses), no cluster then; of many nodes save them with -o json, "
        "which is read a hundred times as fast; repeatable",
    )
    add(
        "--claims",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="saved ResourceClaims of all namespaces, with --slices; repeatable",
    )
    add(
        "--driver-name",
        default=DRIVER_NAME,
        help=f"the DRA driver's name (chart value driverName), for --cluster and where no DeviceClasses are saved "
        f"(default: {DRIVER_NAME})",
    )
    add("--kubeconfig", default=None, help="default: KUBECONFIG, ~/.kube/config, or the pod's ServiceAccount")
    add(
        "--timeout",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="for all nodes together, reading included; judging has a quarter of it at least (default: 2)",
    )
    add("-o", "--output", choices=["text", "json"], default="text", help="default: text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # a large cluster is millions of objects, all of which stay until the end: looking for garbage among them takes as
    # long as reading them
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _run(args)
    finally:
        if collecting:
            gc.enable()


def _run(args: argparse.Namespace) -> int:
    from railmate.explain.cluster import cluster_state
    from railmate.explain.render import cluster_json, cluster_text

    _check(args)
    began = time.monotonic()
    client = None if args.slices else _connect(args.kubeconfig)
    given = read_objects(args.file) if args.file else []
    objects = list(_saved(args)) if client is None else list(_live(client))
    world = world_of([*objects, *given], args.driver_name)
    if not world.nodes:
        raise UsageError(
            "no node has a ResourceSlice. See whether the driver runs: "
            "kubectl get pods -A -l app.kubernetes.io/name=railmate"
        )
    if args.cluster:
        states = cluster_state(world, args.driver_name)
        if not states:
            others = ", ".join(sorted({one.driver for one in world.slices})) or "none"
            raise UsageError(
                f"no node has a pool of driver {args.driver_name}. Drivers with slices: {others}. If railmate has "
                "another name here (chart value driverName), give it with --driver-name."
            )
        _write(args, cluster_json(states), lambda: cluster_text(states))
        return 0
    workloads = list(_workloads(args, client, objects, given, world))
    left = args.timeout - (time.monotonic() - began)
    return _explain(args, world, workloads, max(left, args.timeout * _LEAST))


def _explain(args: argparse.Namespace, world: World, workloads: list[list[Batch]], seconds: float) -> int:
    from railmate.explain.cel import Selectors
    from railmate.explain.gang import judge_gang
    from railmate.explain.render import verdict_json, verdict_text
    from railmate.explain.rendergang import gang_json, gang_text
    from railmate.explain.verdict import judge

    selectors = Selectors()
    each = seconds / sum(map(len, workloads))
    documents, texts, met = [], [], []
    for batches in workloads:
        gang = [one for one in batches if one.wish.open_claims]
        if sum(one.count for one in gang) < 2:
            gang = []
        judged = judge_gang(world, gang, each * len(gang), selectors)
        for batch in batches:
            whole = next((one for one in judged if one.batch is batch), None)
            if whole is not None:
                documents.append(gang_json(whole))
                texts.append(gang_text(whole))
                met.append(whole.fits)
            else:
                verdict = judge(world, batch.wish, each, selectors)
                documents.append(verdict_json(verdict))
                texts.append(verdict_text(verdict))
                met.append(verdict.fits if batch.wish.open_claims else True)
    _write(args, documents[0] if len(documents) == 1 else documents, lambda: "\n".join(texts))
    if all(met):
        return 0
    return 1 if False in met else _NOT_CERTAIN


def _write(args: argparse.Namespace, document: Any, text: Any) -> None:
    sys.stdout.write(json.dumps(document, indent=2) + "\n" if args.output == "json" else text())


def _check(args: argparse.Namespace) -> None:
    if args.cluster and (args.object or args.file):
        raise UsageError("--cluster is about all nodes: give it without a pod or claim.")
    if args.claims and not args.slices:
        raise UsageError(
            "--claims goes with --slices: without saved slices everything is read from the cluster."
        )
    if not args.cluster and bool(args.object) == bool(args.file):
        raise UsageError("give either pod/NAME (or claim/NAME) or --file FILE, or --cluster.")
    if args.timeout <= 0:
        raise UsageError(f"--timeout {args.timeout}: must be above 0 seconds.")


# --- reading
def _saved(args: argparse.Namespace) -> Iterator[Object]:
    for path in (*args.slices, *args.claims):
        yield from read_objects(path)


def _connect(kubeconfig: str | None) -> KubeClient:
    from railmate.kube.client import KubeClient

    usual = Path.home() / ".kube" / "config"
    path = kubeconfig or os.environ.get("KUBECONFIG") or (str(usual) if usual.exists() else None)
    return KubeClient.connect(path)


def _live(client: KubeClient) -> Iterator[Object]:
    for kind, path in (
        ("ResourceSlice", f"{_RESOURCE}/resourceslices"),
        ("DeviceClass", f"{_RESOURCE}/deviceclasses"),
        ("ResourceClaim", f"{_RESOURCE}/resourceclaims"),
        ("ResourceClaimTemplate", f"{_RESOURCE}/resourceclaimtemplates"),
        ("Node", "/api/v1/nodes"),
    ):
        yield from ({"kind": kind, **item} for item in client.read(path)["items"])


# --- what to explain
def _workloads(
    args: argparse.Namespace,
    client: KubeClient | None,
    objects: list[Object],
    given: list[Object],
    world: World,
) -> Iterator[list[Batch]]:
    """Each a pod, a claim, or the templates of a workload."""
    from railmate.explain.gang import Batch
    from railmate.explain.wish import wish_of_claim, wish_of_pod
    from railmate.explain.workload import pods_of

    everything = [*objects, *given]
    claims = {_key(one): one for one in everything if one["kind"] == "ResourceClaim"}
    templates = {_key(one): one for one in everything if one["kind"] == "ResourceClaimTemplate"}
    if args.object:
        given = [_named(args, client, claims, everything)]
    workloads = [pods_of(one) for one in given if one["kind"] not in _WORKLOADS[1:]]
    found = [
        [
            Batch(one.together, one.count, wish_of_pod(one.title, one.pod, claims, templates, world.classes))
            for one in pods
        ]
        for pods in workloads
        if pods
    ]
    if not found:
        wishes = [wish_of_claim(one) for one in given if one["kind"] in _WORKLOADS[1:]]
        found = [[Batch(one.title, 1, one)] for one in wishes]
    if not found:
        raise UsageError(f"{args.file}: holds no pod, no workload with a pod template and no claim.")
    yield from found


def _named(
    args: argparse.Namespace,
    client: KubeClient | None,
    claims: dict[tuple[str, str], Object],
    everything: list[Object],
) -> Object:
    from railmate.kube.errors import ApiError

    kind, _, name = args.object.rpartition("/")
    if kind not in ("", "pod", "pods", "po", "claim", "resourceclaim", "resourceclaims"):
        raise UsageError(
            f"{args.object}: only pod/NAME and claim/NAME can be explained; a workload with --file."
        )
    key = (args.namespace, name)
    if kind in ("", "pod", "pods", "po"):
        if client is None:
            pod = next((one for one in everything if one["kind"] == "Pod" and _key(one) == key), None)
        else:
            try:
                pod = {"kind": "Pod", **client.read(f"/api/v1/namespaces/{args.namespace}/pods/{name}")}
            except ApiError as error:
                if not error.not_found:
                    raise
                pod = None
        if pod is not None:
            return pod
    if kind not in ("pod", "pods", "po") and key in claims:
        return claims[key]
    what = {"": "pod or claim"}.get(kind, kind)
    raise UsageError(f"there is no {what} {name} in namespace {args.namespace}. Name another one with -n.")


def _key(item: Object) -> tuple[str, str]:
    metadata = item.get("metadata") or {}
    return str(metadata.get("namespace") or "default"), str(metadata.get("name") or "?")
