"""The measurements of the scheduler bench: steady churn, and pods that fit nowhere beside pods that do."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.bench_scheduler_forms import BenchMachine
from harness.bench_scheduler_load import Pods, churn
from harness.shell import HarnessError, UsageError

_WHOLE = 8  # pairs of a pod that takes a node
#: Seconds that pods get at the end of a measurement beside infeasible ones before they count as not placed.
_GRACE_SECONDS = 30.0
#: How many of the others stay placed.
_KEPT = 10


@dataclass(frozen=True)
class Load:
    """``count`` pods are measured, ``window`` wait at any time, ``alone`` more are made one after the other.
    ``free_nodes``: how many nodes have no background."""

    count: int
    window: int
    alone: int
    free_nodes: int

    def population(self, pairs: int) -> int:
        """How many pods may be placed while others wait: never so many that the cluster is full."""
        room = self.free_nodes * (_WHOLE // pairs) - self.window
        if room < 1:
            raise UsageError(
                f"{self.free_nodes} free nodes have no room for {self.window} pods of {pairs} pairs that wait beside "
                "one that is placed; take more --nodes, a smaller --window or a smaller --fill"
            )
        return min(2 * self.window, room)


def measure_churn(pods: Pods, pairs: int, load: Load) -> dict[str, Any]:
    """Pods of so many pairs come and go. Milliseconds, shares between 0 and 1."""
    site = pods.site
    writes, cpu = site.api_writes(), site.scheduler_cpu_seconds()
    rate, left = churn(pods, pairs, load.count, load.window, load.population(pairs))
    made = load.count + load.window
    cpu = site.scheduler_cpu_seconds() - cpu
    taken = pods.taken()
    pods.clear(left)
    writes = site.api_writes() - writes
    busy = [
        trace.milliseconds
        for name, trace in pods.traces.items()
        if name.startswith("load-") and trace.bound is not None
    ]
    pods.traces.clear()
    alone = [_one_alone(pods, pairs) for _ in range(load.alone)]
    stranded, free = stranded_gpus(site.machine, site.node_names, taken.hardware)
    return {
        "podsPerSecond": rate,
        "aloneMs": alone,
        "busyMs": busy,
        "writesPerPod": writes.total() / made,
        "writesByResource": {name: count / made for name, count in writes.most_common(8)},
        "schedulerCpuMsPerPod": 1000 * cpu / made,
        "pairs": len(taken.pairs),
        "alignedShare": sum(map(site.machine.aligned, taken.pairs)) / len(taken.pairs),
        "strandedShare": stranded / free if free else 0.0,
        "nodesPartlyTaken": partly_taken(site.machine, taken.hardware),
    }


def _one_alone(pods: Pods, pairs: int) -> float:
    """Milliseconds of a pod that nothing competes with."""
    name = pods.create("alone", pairs)
    if pods.next_bound() != name:
        raise HarnessError(f"{pods.site.variant.name}: pod {name} of {pairs} pairs, alone, got no node")
    pods.clear([name])
    return pods.traces.pop(name).milliseconds


def stranded_gpus(
    machine: BenchMachine, nodes: Sequence[str], taken: Mapping[str, Sequence[str]]
) -> tuple[int, int]:
    """GPUs that are free and find no free NIC below their own switch, and all that are free."""
    nics = [nic.address for nic in machine.inventory.nics if nic.is_vf]
    stranded = free = 0
    for node in nodes:
        held = set(taken.get(node, ()))
        nics_left: dict[str | None, int] = {}
        for nic in nics:
            if nic not in held:
                nics_left[machine.switch(nic)] = nics_left.get(machine.switch(nic), 0) + 1
        for gpu in machine.inventory.gpus:
            if gpu.address in held:
                continue
            free += 1
            switch = machine.switch(gpu.address)
            if nics_left.get(switch, 0):
                nics_left[switch] -= 1
            else:
                stranded += 1
    return stranded, free


def partly_taken(machine: BenchMachine, taken: Mapping[str, Sequence[str]]) -> int:
    """Nodes with both taken and free GPUs: those that a pod for a whole node cannot use."""
    gpus = {gpu.address for gpu in machine.inventory.gpus}
    return sum(0 < len(gpus.intersection(held)) < len(gpus) for held in taken.values())


def measure_waiting(pods: Pods, infeasible: int, seconds: float, pace: float, full: bool) -> dict[str, Any]:
    """What ``infeasible`` pods for eight pairs, of which each node has seven, do to others that come ``pace`` a second.

    Others are watched for ``seconds`` each: alone; while as many pods arrive at once that do fit, which costs them time
    whatever is asked for; while the infeasible ones arrive at once; and while these wait. ``full``: no node has any
    pair, and neither the others nor those that fit ask for one. Latencies are from creation to the node.
    """
    site = pods.site
    nodes = len(site.node_names)
    background = pods.fill(nodes) if full else pods.one_on_each_node()
    others = 0 if full else 1
    before = _paced(pods, others, seconds, pace, {})
    room = infeasible if full else min(infeasible, nodes * (_WHOLE - 1) - _KEPT - int(seconds * pace))
    fitting = {pods.create("fitting", others): None for _ in range(max(room, 1))}
    beside_fitting = _paced(pods, others, seconds, pace, fitting)
    pods.clear(list(fitting))
    attempts, cpu = site.attempts(), site.scheduler_cpu_seconds()
    began = time.monotonic()
    waiting = {pods.create("infeasible", _WHOLE): None for _ in range(infeasible)}
    arriving = _paced(pods, others, seconds, pace, waiting)
    beside_waiting = _paced(pods, others, seconds, pace, waiting)
    took = time.monotonic() - began
    after, cpu = site.attempts(), site.scheduler_cpu_seconds() - cpu
    placed = [name for name in waiting if pods.traces[name].bound is not None]
    pods.clear(list(waiting))
    pods.clear(background)
    pods.traces.clear()
    return {
        "beforeMs": before,  # here and below infinite: not placed
        "besideFittingMs": beside_fitting,
        "arrivingMs": arriving,
        "waitingMs": beside_waiting,
        "notPlaced": sum(one == float("inf") for one in arriving + beside_waiting),
        "infeasiblePlaced": len(placed),
        "seconds": took,
        "schedulerCpuSeconds": cpu,
        "attempts": {
            result: {
                "count": count - attempts.get(result, (0, 0.0))[0],
                "seconds": spent - attempts.get(result, (0, 0.0))[1],
            }
            for result, (count, spent) in after.items()
        },
    }


def _paced(
    pods: Pods, pairs: int, seconds: float, pace: float, bystanders: Mapping[str, None]
) -> list[float]:
    """Pods at a fixed pace, whatever becomes of them; all but the last _KEPT are deleted. Milliseconds to the node."""
    made: list[str] = []
    placed: deque[str] = deque()
    deleted: set[str] = set()
    began = time.monotonic()
    while True:
        due = began + len(made) / pace
        if due >= began + seconds:
            break
        if (wait := due - time.monotonic()) > 0:
            name = pods.next_bound(wait)
            if name is not None and name not in bystanders:
                placed.append(name)
                if len(placed) > _KEPT:
                    deleted.add(placed[0])
                    pods.delete(placed.popleft())
            continue
        made.append(pods.create("other", pairs))
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline and any(pods.bound_at(name) is None for name in made):
        pods.next_bound(0.2)
    traces = [pods.traces[name] for name in made]
    pods.clear([name for name in made if name not in deleted])
    return [trace.milliseconds for trace in traces]
