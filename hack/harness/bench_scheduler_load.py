"""Pods of the scheduler bench: made and deleted as a window allows, each followed from creation to its node."""

from __future__ import annotations

import contextlib
import http.client
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from harness import api
from harness.bench_scheduler_forms import Pair, request
from harness.bench_scheduler_site import Site
from harness.shell import HarnessError
from railmate_api.attributes import CLASS_GPU

PODS = "/api/v1/namespaces/default/pods"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
_TEMPLATES = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"
_WATCH_SECONDS = 24 * 3600
#: Seconds without any pod getting a node after which a load is given up.
STUCK_SECONDS = 120.0
_WHOLE_NODE = "whole-node"


@dataclass
class Trace:
    """Times of one pod, seconds of the monotonic clock."""

    created: float
    bound: float | None = None

    @property
    def milliseconds(self) -> float:
        """From creation to its node, the claim's allocation included; infinite when it got none."""
        return float("inf") if self.bound is None else 1000 * (self.bound - self.created)


@dataclass
class Taken:
    """What claims hold: PCI addresses by node, and the pairs that were given as pairs."""

    hardware: dict[str, list[str]]
    pairs: list[Pair]


class Pods:
    """The pods of one site. Watches them from a thread until the site ends."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.traces: dict[str, Trace] = {}
        self.bound: queue.Queue[str] = queue.Queue()  # names, in the order in which they got their node
        self._lock = threading.Lock()
        self._number = 0
        self._templates: set[str] = set()
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="pods")
        self._writes: deque[Future[Any]] = deque()
        threading.Thread(target=self._follow, daemon=True).start()

    # --- watching
    def _follow(self) -> None:
        """Sees each pod when it has got its node, and nothing else: watching claims too would cost the API server and
        this process more than the pods themselves."""
        plane = self.site.plane
        path = f"{PODS}?fieldSelector=spec.nodeName%21%3D"
        while plane.running()["kube-apiserver"]:
            # a busy server ends watches that it cannot keep up with; the next begins with what is there
            with contextlib.suppress(OSError, http.client.HTTPException, HarnessError, ValueError):
                for event in api.watch(plane.server, plane.token(), path, _WATCH_SECONDS):
                    if event["type"] == "ADDED":
                        self._see(event["object"]["metadata"]["name"], time.monotonic())
            time.sleep(0.1)

    def _see(self, name: str, now: float) -> None:
        with self._lock:
            trace = self.traces.get(name)
            if trace is None or trace.bound is not None:
                return
            trace.bound = now
        self.bound.put(name)

    # --- making and deleting
    def create(self, kind: str, pairs: int, **spec: Any) -> str:
        """Makes a pod for so many pairs (0: without a claim), in the background; its name."""
        self._number += 1
        name = f"{kind}-{self._number:06d}"
        body = self._pod(name, self._claim_template(kind, pairs) if pairs else None, pairs, spec)
        self._writes.append(self._pool.submit(self._post, name, body))
        self._raise_failures()
        return name

    def _post(self, name: str, body: Any) -> None:
        with self._lock:
            self.traces[name] = Trace(time.monotonic())
        self.site.client.request("POST", PODS, body)

    def delete(self, name: str) -> None:
        """In the background, and at once: there is no kubelet that would confirm the end of its containers."""
        path = f"{PODS}/{name}?gracePeriodSeconds=0"
        self._writes.append(self._pool.submit(self.site.client.request, "DELETE", path))
        self._raise_failures()

    def _raise_failures(self, wait: bool = False) -> None:
        while self._writes and (wait or self._writes[0].done()):
            self._writes.popleft().result()

    def _pod(self, name: str, template: str | None, pairs: int, spec: Mapping[str, Any]) -> dict[str, Any]:
        container: dict[str, Any] = {
            "name": "main",
            "image": "none",
            "resources": {"requests": self.site.variant.resources(pairs)},
        }
        body: dict[str, Any] = {"containers": [container], **spec}
        if template:
            body["resourceClaims"] = [{"name": "devices", "resourceClaimTemplateName": template}]
            container["resources"]["claims"] = [{"name": "devices"}]
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": body}

    def _claim_template(self, kind: str, pairs: int) -> str:
        """Name of the template, made when it is first used."""
        name = kind if kind == _WHOLE_NODE else f"pairs-{pairs}"
        if name not in self._templates:
            if kind == _WHOLE_NODE:
                devices: Any = {"requests": [request("gpus", CLASS_GPU, self.site.machine.gpus)]}
            else:
                devices = self.site.variant.form.devices(pairs)
            self.site.client.request(
                "POST",
                _TEMPLATES,
                {
                    "apiVersion": "resource.k8s.io/v1",
                    "kind": "ResourceClaimTemplate",
                    "metadata": {"name": name},
                    "spec": {"spec": {"devices": devices}},
                },
            )
            self._templates.add(name)
        return name

    # --- waiting
    def bound_at(self, name: str) -> float | None:
        """When a pod got its node; None while it has none, and before it is sent to the API server."""
        trace = self.traces.get(name)
        return None if trace is None else trace.bound

    def next_bound(self, seconds: float = STUCK_SECONDS) -> str | None:
        """The next pod that got a node; None when none did for so long."""
        with contextlib.suppress(queue.Empty):
            return self.bound.get(timeout=max(seconds, 0.001))
        return None

    def fill(self, nodes: int) -> list[str]:
        """Takes so many whole nodes; the pods' names. The background of all measurements."""
        return self._place(
            [self.create(_WHOLE_NODE, self.site.machine.gpus) for _ in range(nodes)], "fill the cluster"
        )

    def one_on_each_node(self) -> list[str]:
        """One pair taken of every node; the pods' names."""
        made = [
            self.create("pinned", 1, nodeSelector={"kubernetes.io/hostname": node})
            for node in self.site.node_names
        ]
        return self._place(made, "take a pair of each node")

    def _place(self, names: Sequence[str], what: str) -> list[str]:
        waiting = set(names)
        while waiting:
            name = self.next_bound()
            if name is None:
                raise HarnessError(
                    f"{self.site.variant.name}: could not {what}: {len(waiting)} pods got no node for "
                    f"{STUCK_SECONDS:.0f} s; the scheduler's log is {self.site.plane.log('kube-scheduler')}"
                )
            waiting.discard(name)
        return list(names)

    def clear(self, names: Sequence[str]) -> None:
        """Deletes pods, and returns when they and their claims are gone: the next load finds a quiet cluster."""
        for name in names:
            self.delete(name)
        self._raise_failures(wait=True)
        gone = set(names)
        deadline = time.monotonic() + STUCK_SECONDS
        while left := [name for name in self._claims_by_pod() if name in gone]:
            if time.monotonic() > deadline:
                raise HarnessError(
                    f"{self.site.variant.name}: {len(left)} claims of deleted pods are not released; the controller's "
                    f"log is {self.site.plane.log('kube-controller-manager')}"
                )
            time.sleep(0.1)
        while not self.bound.empty():
            self.bound.get_nowait()

    def _claims_by_pod(self) -> dict[str, Any]:
        items = self.site.client.request("GET", CLAIMS)["items"]
        return {item["metadata"]["ownerReferences"][0]["name"]: item for item in items}

    def taken(self) -> Taken:
        """All that is allocated now."""
        offer, form = self.site.offer, self.site.variant.form
        taken = Taken({}, [])
        for pod, claim in self._claims_by_pod().items():
            results = (claim.get("status", {}).get("allocation") or {}).get("devices", {}).get("results", [])
            for result in results:
                device = offer.by_name[result["device"]]
                taken.hardware.setdefault(result["pool"], []).extend(device.gpus + device.nics)
            if results and not pod.startswith(_WHOLE_NODE):
                taken.pairs.extend(form.pairs(results, offer))
        return taken


def churn(pods: Pods, pairs: int, count: int, window: int, population: int) -> tuple[float, list[str]]:
    """Keeps ``window`` pods waiting and at most ``population`` placed, until ``count`` were placed after a first
    ``window`` that warms up. Pods a second, and the names of all that are left.

    Raises HarnessError when no pod gets a node for STUCK_SECONDS.
    """
    kind = f"load-{pairs}"
    waiting = {pods.create(kind, pairs) for _ in range(window)}
    placed: deque[str] = deque()
    done, began, ended = 0, 0.0, 0.0
    while done < window + count:
        name = pods.next_bound()
        if name is None:
            raise HarnessError(
                f"{pods.site.variant.name}: no pod of {pairs} pairs got a node for {STUCK_SECONDS:.0f} s; "
                f"the scheduler's log is {pods.site.plane.log('kube-scheduler')}"
            )
        if name not in waiting:
            continue
        waiting.discard(name)
        placed.append(name)
        done += 1
        ended = pods.traces[name].bound or 0.0
        if done == window:
            began = ended
        if len(placed) > population:
            pods.delete(placed.popleft())
        if done + len(waiting) < window + count:
            waiting.add(pods.create(kind, pairs))
    return count / (ended - began), [*placed, *waiting]
