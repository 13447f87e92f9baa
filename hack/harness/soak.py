"""hack/soak: pods come and go in random order, driver, containerd and kubelet die in between, nothing stays behind.

Every pod looks for its devices itself before it does anything else, so one that runs without them is noticed at once.
The random choices follow from the seed; what the cluster does in between does not.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import urllib3
from kubernetes import client, config

from e2e.lab import PLUGIN_DIR, Lab, Workspace, eventually, template
from harness.cluster import Cluster
from harness.deploy import NAMESPACE, RELEASE, install_driver, simulated_node, wait_ready
from harness.shell import HarnessError, UsageError, main_guard, progress
from harness.soakkills import kill_driver, kill_service
from harness.soakpods import KINDS, MISSING, Kind, pod_of

#: Seconds that a pod may take to run: a kubelet that finds no driver asks again after 60 to 90, and kills may follow.
_PATIENCE = 240.0
_GPUS = 8  # of the node; a pod is made only when enough of them are free
_KILL_EVERY = 12  # pods, about
#: Each once, in random order, before any comes again.
VICTIMS = ("driver", "containerd", "kubelet")
_FORCE_EVERY = 6  # deletions; this one does not wait, so devices are given out while their pod still runs


class Watched:
    """The namespace's pods as the API server tells of them, from a thread of its own."""

    def __init__(self, api: client.CoreV1Api, namespace: str) -> None:
        self._api, self._namespace = api, namespace
        self._news = threading.Condition()
        self.ended = False
        self.running: dict[str, float] = {}  # name to when it was first seen to run
        self.gone: set[str] = set()
        self.wrong: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name="pods", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        with self._news:
            self._news.wait(seconds)

    def _run(self) -> None:
        seen: set[str] = set()
        while not self.ended:
            try:
                listed = self._list()
                names = {one["metadata"]["name"] for one in listed["items"]}
                for one in listed["items"]:
                    self._heard("ADDED", one)
                with self._news:
                    self.gone |= seen - names
                seen |= names
                for event in self._events(listed["metadata"]["resourceVersion"]):
                    seen.add(event["object"]["metadata"].get("name", ""))
                    self._heard(event["type"], event["object"])
            except (client.ApiException, urllib3.exceptions.HTTPError, ValueError, KeyError):
                time.sleep(0.5)  # the API server's own trouble is not the subject

    def _list(self) -> dict[str, Any]:
        answer = self._api.list_namespaced_pod(self._namespace, _preload_content=False)
        listed: dict[str, Any] = json.loads(answer.data)
        return listed

    def _events(self, version: str) -> Iterator[dict[str, Any]]:
        answer = self._api.list_namespaced_pod(
            self._namespace, watch=True, resource_version=version, timeout_seconds=20, _preload_content=False
        )
        try:
            pending = b""
            for chunk in answer.stream(65536):
                *lines, pending = (pending + chunk).split(b"\n")
                yield from (json.loads(line) for line in lines if line)
        finally:
            answer.close()

    def _heard(self, event: str, pod: dict[str, Any]) -> None:
        name, status = pod["metadata"]["name"], pod.get("status", {})
        with self._news:
            if event == "DELETED":
                self.gone.add(name)
            for one in status.get("containerStatuses", ()):
                ended = [
                    one[key]["terminated"]
                    for key in ("state", "lastState")
                    if "terminated" in one.get(key, {})
                ]
                if any(state["exitCode"] == MISSING for state in ended):
                    self.wrong[name] = "ran without its devices"
                if "running" in one.get("state", {}):
                    self.running.setdefault(name, time.monotonic())
            if status.get("phase") == "Failed" and "deletionTimestamp" not in pod["metadata"]:
                self.wrong.setdefault(name, f"failed: {status.get('reason')} {status.get('message')}")
            self._news.notify_all()


#: A runc that was killed while it changed a container's devices leaves it frozen (cgroup v1), and what is frozen cannot
#: be killed: without this the kubelet would wait for it for ever.
_THAW = """\
for state in $(find /sys/fs/cgroup/freezer -path '*kubepods*' -name freezer.state 2> /dev/null); do
  grep -qs FROZEN "$state" && echo THAWED > "$state" && echo "$state"
done
true
"""


@dataclass
class Figures:
    seed: int
    pods: int = 0
    seconds: float = 0.0
    starts: list[float] = field(default_factory=list)  # seconds from create to Running
    forced: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    thawed: int = 0  # containers that a killed runc had left frozen
    repairs: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        deciles = statistics.quantiles(self.starts, n=10) if len(self.starts) > 1 else [0.0] * 9
        longest = max(self.starts, default=0.0)
        return (
            f"soak with seed {self.seed}: {self.pods} pods in {self.seconds:.0f} s "
            f"({self.pods / self.seconds * 60:.0f} pods/min), {self.forced} deleted by force\n"
            f"  create to Running: p50 {deciles[4]:.2f} s, p90 {deciles[8]:.2f} s, max {longest:.2f} s\n"
            f"  kills: {_counts(self.kills)}; {self.thawed} containers of a killed runc thawed\n"
            f"  repairs: {_counts(self.repairs)}"
        )


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{number} × {name}" for name, number in sorted(counter.items())) or "none"


@dataclass
class Made:
    kind: Kind
    at: float
    deleted: float | None = None
    counted: bool = False


class Soak:
    def __init__(
        self, lab: Lab, pods: int, seed: int, kills: bool = True, minutes: float | None = None
    ) -> None:
        """``minutes``: after so many no further pod is made; those there are end as usual."""
        self.lab, self._wanted, self._kills = lab, pods, kills
        self._seconds = float("inf") if minutes is None else minutes * 60
        self._latest = float("inf")
        self._random = random.Random(seed)
        self._next: list[str] = []  # who is killed, the last first
        self.figures = Figures(seed)
        self._made: dict[str, Made] = {}
        self._logs: dict[str, Counter[str]] = {}  # repairs by log file
        self._api = client.CoreV1Api(config.new_client_from_config(str(lab.cluster.kubeconfig)))

    def run(self) -> Figures:
        """Raises AssertionError or HarnessError that says what went wrong, with the seed."""
        progress("soak", f"{self._wanted} pods, seed {self.figures.seed}")
        before, repairs = self._slices(), self._repairs()
        try:
            with self.lab.workspace() as workspace:
                workspace.apply(*(template(kind.name, kind.spec) for kind in KINDS))
                began = time.monotonic()
                self._latest = began + self._seconds
                with self._watched(workspace) as pods:
                    self._churn(workspace, pods)
                self.figures.seconds = time.monotonic() - began
                # an unprepare that found no driver comes again after a minute
                eventually(lambda: not self.lab.leftovers(), "all claims given back", seconds=100)
            progress("soak", "all pods are gone; looking for what is left")
            wait_ready(self.lab.cluster)
            self._nothing_left()
            eventually(lambda: self._slices() == before, "slices as they were in the beginning", seconds=30)
            self.figures.repairs = self._repairs() - repairs
            self._all_free()
        except (AssertionError, HarnessError) as error:
            raise AssertionError(
                f"soak with seed {self.figures.seed}: {error}\n{self.figures.kills}"
            ) from error
        return self.figures

    # --- coming and going
    def _churn(self, workspace: Workspace, pods: Watched) -> None:
        until_kill = self._random.randint(4, _KILL_EVERY)
        while self._more() or any(name not in pods.gone for name in self._made):
            self._look(workspace, pods)
            if self._make(workspace, pods):
                until_kill -= 1
                if len(self._made) % 20 == 0:
                    progress("soak", f"{len(self._made)} pods made, {len(pods.gone)} gone")
            elif not self._delete(workspace, pods):
                pods.wait(1.0)
            if self._kills and until_kill <= 0 and self._more():
                killed = self._kill()
                until_kill = self._random.randint(_KILL_EVERY // 2, _KILL_EVERY * 3 // 2) if killed else 1

    def _more(self) -> bool:
        return len(self._made) < self._wanted and time.monotonic() < self._latest

    def _make(self, workspace: Workspace, pods: Watched) -> bool:
        if not self._more():
            return False
        taken = sum(made.kind.gpus for name, made in self._made.items() if name not in pods.gone)
        possible = [kind for kind in KINDS if kind.gpus <= _GPUS - taken and (kind.gpus or taken < _GPUS)]
        if not possible or (taken and self._random.random() < 0.3):
            return False
        kind = self._random.choices(possible, [kind.weight for kind in possible])[0]
        name = f"{kind.name}-{len(self._made)}"
        self._made[name] = Made(kind, time.monotonic())
        self._api.create_namespaced_pod(workspace.namespace, pod_of(kind, name), _preload_content=False)
        self.figures.pods += 1
        return True

    def _delete(self, workspace: Workspace, pods: Watched) -> bool:
        """One of those that run, now and then one that does not yet."""
        there = [name for name, made in self._made.items() if made.deleted is None and name not in pods.gone]
        ready = [name for name in there if name in pods.running]
        choice = there if there and self._random.random() < 0.1 else ready
        if not choice:
            return False
        name = self._random.choice(choice)
        force = self._random.randrange(_FORCE_EVERY) == 0
        self._made[name].deleted = time.monotonic()
        self.figures.forced += force
        options = client.V1DeleteOptions(grace_period_seconds=0 if force else None)
        self._api.delete_namespaced_pod(name, workspace.namespace, body=options, _preload_content=False)
        return True

    def _look(self, workspace: Workspace, pods: Watched) -> None:
        now = time.monotonic()
        for name, made in self._made.items():
            if name in pods.running and not made.counted:
                made.counted = True
                self.figures.starts.append(pods.running[name] - made.at)
            if name in pods.gone:
                continue
            if name in pods.wrong:
                raise AssertionError(f"pod {name} {pods.wrong[name]}\n{workspace.describe(name)}")
            waits, what = made.at, "does not run"
            if made.deleted is not None:
                waits, what = made.deleted, "does not end"
            elif name in pods.running:
                continue
            if now - waits > _PATIENCE:
                raise AssertionError(
                    f"pod {name} {what} after {now - waits:.0f} s\n{workspace.describe(name)}"
                )

    @contextmanager
    def _watched(self, workspace: Workspace) -> Iterator[Watched]:
        pods = Watched(self._api, workspace.namespace)
        try:
            yield pods
        finally:
            pods.ended = True

    # --- killing
    def _kill(self) -> bool:
        """The next of those that can be killed; False when it was not there, and its turn comes again."""
        if not self._next:
            self._next = self._random.sample(VICTIMS, len(VICTIMS))
        what = self._next[-1]
        progress("soak", f"killing {what}")
        try:
            if what == "driver":
                self._kill_driver()
            else:
                kill_service(self.lab, what)
                self.figures.thawed += len(self.lab.on_node("sh", "-c", _THAW).split())
        except HarnessError as error:  # a driver that is only being made cannot be killed
            progress("soak", f"{what} was not there: {error}")
            return False
        self._next.pop()
        self.figures.kills[what] += 1
        return True

    def _kill_driver(self) -> None:
        kubectl = self.lab.cluster.kubectl
        found = kubectl(
            "-n", NAMESPACE, "get", "pods", "-l", f"app.kubernetes.io/name={RELEASE}", "-o",
            'jsonpath={range .items[*]}{.metadata.name}={.status.containerStatuses[0].restartCount}{"\\n"}{end}',
        ).split()  # fmt: skip
        if not found:
            raise HarnessError("there is no pod of the driver")
        name, _, restarts = found[0].partition("=")
        self._repairs()
        if not kill_driver(self.lab):
            raise HarnessError("no process of the driver runs")
        if restarts not in {
            "",
            "0",
            "1",
        }:  # the kubelet's back-off doubles with each restart; a new pod has none
            kubectl("-n", NAMESPACE, "delete", "pod", name, "--force", "--grace-period=0", "--wait=false")

    # --- the end
    def _nothing_left(self) -> None:
        hidden = (
            f"find {PLUGIN_DIR}/claims {PLUGIN_DIR}/attached {PLUGIN_DIR}/strays /var/run/cdi "
            "-type f \\( -name '*railmate*' -o -path '*/plugins/*' \\)"
        )
        eventually(
            lambda: not self.lab.on_node("sh", "-c", hidden).split(),
            f"no file of a claim left, hidden ones included, on {self.lab.node}", seconds=90,
        )  # fmt: skip

    def _all_free(self) -> None:
        """Every pair can be given out once more."""
        kind = next(kind for kind in KINDS if kind.gpus == _GPUS)
        with self.lab.workspace() as workspace:
            workspace.apply(template(kind.name, kind.spec), pod_of(kind, kind.name))
            workspace.wait_ready(kind.name)

    def _slices(self) -> list[Any]:
        """What the node publishes, but for the pool's generation."""
        items = self.lab.cluster.kubectl_json("get", "resourceslices")["items"]
        specs = [one["spec"] for one in items if one["spec"].get("nodeName") == self.lab.node]
        for spec in specs:
            del spec["pool"]["generation"]
        return sorted(specs, key=json.dumps)

    def _repairs(self) -> Counter[str]:
        """All repairs that were seen in logs of this node's drivers. Logs go with their pod: look before a kill."""
        logs = f"grep -Ho 'repaired: [^(]*' /var/log/pods/{NAMESPACE}_{RELEASE}-*/*/*.log || true"
        found: dict[str, Counter[str]] = {}
        for line in self.lab.on_node("sh", "-c", logs).splitlines():
            log, _, kind = line.partition(":repaired: ")
            found.setdefault(log, Counter())[kind.strip()] += 1
        self._logs |= found
        return sum(self._logs.values(), Counter())


def lab_of(cluster: Cluster) -> Lab:
    node = simulated_node(cluster)
    node.up()
    install_driver(cluster)
    return Lab(cluster, node.node, node.machine)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="hack/soak", description=__doc__)
    parser.add_argument("pods", type=int, metavar="N", help="pods to make and delete")
    parser.add_argument("--seed", type=int, default=None, help="repeats the choices of an earlier run")
    parser.add_argument(
        "--minutes", type=float, default=None, metavar="M", help="make no pod after M minutes"
    )
    parser.add_argument("--no-kills", action="store_true", help="nothing dies in between")
    options = parser.parse_args(argv)
    if options.pods < 1:
        raise UsageError(f"{options.pods} pods are none; give a number from 1 on")
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    cluster = Cluster()
    cluster.up()
    try:
        lab = lab_of(cluster)
        print(Soak(lab, options.pods, seed, not options.no_kills, options.minutes).run())
    except AssertionError as error:
        raise HarnessError(str(error)) from error
    return 0


if __name__ == "__main__":
    main_guard(main)
