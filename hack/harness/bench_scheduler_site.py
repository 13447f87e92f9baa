"""A control plane with synthetic nodes for one variant of the scheduler bench, and what is read off its programs."""

from __future__ import annotations

import http.client
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from harness import api
from harness.bench_scheduler_forms import NODE_CPUS, NODE_MEMORY_GI, BenchMachine, Variant
from harness.controlplane import ControlPlane
from harness.process import ProcessRecord
from harness.shell import HarnessError, progress
from railmate.publish.slices import resource_slices
from railmate_api.attributes import DRIVER_NAME

_CLASSES = Path(__file__).resolve().parents[2] / "api" / "railmate_api" / "deviceclasses.yaml"
_SLICES = "/apis/resource.k8s.io/v1/resourceslices"
#: Requests a second of the scheduler and of each controller, unless a variant says otherwise: at their defaults (50
#: and 20) it is these limits that are measured.
_QPS, _BURST = 500, 1000
_LIMITS = [f"--kube-api-qps={_QPS}", f"--kube-api-burst={_BURST}"]
_WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE", "APPLY"})
_REQUEST_SECONDS = 60
_NODES_A_LINE = 250  # of progress
_PROTOBUF = "application/vnd.kubernetes.protobuf"


class Client:
    """Requests as admin, with more patience than a test has."""

    def __init__(self, plane: ControlPlane) -> None:
        self._server, self._token = plane.server, plane.token()

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer. Raises ApiError when the request is refused."""
        return api.request(self._server, self._token, method, path, body, seconds=_REQUEST_SECONDS)

    def raw(self, path: str, accept: str = "application/json") -> bytes:
        """What a GET answers, as it comes."""
        try:
            _, data = api.fetch(
                self._server, self._token, "GET", path, accept=accept, seconds=_REQUEST_SECONDS
            )
        except (OSError, http.client.HTTPException) as error:
            raise HarnessError(f"GET {path}: the API server does not answer: {error}") from error
        return data


class Site:
    """One control plane, ``nodes`` nodes with the variant's slices, and nothing on them."""

    def __init__(self, directory: Path, variant: Variant, machine: BenchMachine, nodes: int) -> None:
        self.variant, self.machine = variant, machine
        self.offer = variant.form.offer(machine)
        self.node_names = [f"node-{index:05d}" for index in range(nodes)]
        self._directory = directory.absolute()
        self.plane = ControlPlane(
            self._directory, nodes=(),
            # else every new node would have to be told a second time that it is ready
            apiserver_args=["--disable-admission-plugins=TaintNodesByCondition"],
            scheduler_args=self._scheduler_arguments(),
            controller_args=[] if variant.controller_limits else _LIMITS,
        )  # fmt: skip

    def __enter__(self) -> Site:
        self.plane.start()
        try:
            self.client = Client(self.plane)
            for device_class in yaml.safe_load_all(_CLASSES.read_text()):
                self.client.request("POST", "/apis/resource.k8s.io/v1/deviceclasses", device_class)
            for start in range(0, len(self.node_names), _NODES_A_LINE):
                progress(self.variant.name, f"making nodes and slices: {start} of {len(self.node_names)}")
                self.each(self._make_node, self.node_names[start : start + _NODES_A_LINE])
        except BaseException:
            self.plane.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.plane.stop()

    def each(self, do: Callable[[Any], object], items: Iterable[Any]) -> None:
        """Calls ``do`` for every item, four at a time; raises the first error."""
        with ThreadPoolExecutor(4) as pool:
            for _ in pool.map(do, items):
                pass

    def _scheduler_arguments(self) -> list[str]:
        if self.variant.config is None:
            return [] if self.variant.scheduler_limits else _LIMITS
        path = self._directory / "scheduler.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            scheduler_config(self.variant.config, self._directory / "kube-scheduler.kubeconfig", _QPS, _BURST)
        )
        return [f"--config={path}"]

    def _make_node(self, name: str) -> None:
        size = {"cpu": str(NODE_CPUS), "memory": f"{NODE_MEMORY_GI}Gi", "pods": "250"}
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
            "status": {
                "capacity": size,
                "allocatable": size,
                "conditions": [{"type": "Ready", "status": "True", "reason": "Bench"}],
            },
        }
        uid = self.client.request("POST", "/api/v1/nodes", node)["metadata"]["uid"]
        for item in resource_slices(self.offer, DRIVER_NAME, name, node_uid=uid):
            self.client.request("POST", _SLICES, item)

    # --- what is read off
    def slices_of_a_node(self) -> dict[str, int]:
        """Number and bytes of one node's slices, as JSON and as they are stored (protobuf)."""
        listed = self.client.request("GET", f"{_SLICES}?fieldSelector=spec.nodeName%3D{self.node_names[0]}")
        slices = [item["metadata"]["name"] for item in listed["items"]]
        sizes = {
            kind: sum(len(self.client.raw(f"{_SLICES}/{name}", accept)) for name in slices)
            for kind, accept in (("jsonBytes", "application/json"), ("storedBytes", _PROTOBUF))
        }
        return {"slices": len(slices), **sizes}

    def api_writes(self) -> Counter[str]:
        """Requests so far that change something, by resource; failed ones too."""
        writes: Counter[str] = Counter()
        for labels, value in _samples(self.client.raw("/metrics").decode(), "apiserver_request_total"):
            if labels.get("verb") in _WRITES:
                name = labels.get("resource", "") + (
                    f"/{labels['subresource']}" if labels.get("subresource") else ""
                )
                writes[name] += int(value)
        return writes

    def attempts(self) -> dict[str, tuple[int, float]]:
        """The scheduler's attempts so far: result to their number and seconds."""
        text = self._scheduler_metrics()
        name = "scheduler_scheduling_attempt_duration_seconds"
        found: dict[str, tuple[int, float]] = {}
        seconds = {labels["result"]: value for labels, value in _samples(text, f"{name}_sum")}
        for labels, value in _samples(text, f"{name}_count"):
            found[labels["result"]] = (int(value), seconds[labels["result"]])
        return found

    def _scheduler_metrics(self) -> str:
        status, data = api.fetch(self.plane.scheduler_server, self.plane.token(), "GET", "/metrics")
        if status != 200:
            raise HarnessError(f"the scheduler does not show its metrics: {status} {data[:200]!r}")
        return data.decode()

    def scheduler_cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._scheduler_pid()}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def scheduler_rss_mb(self) -> float:
        status = Path(f"/proc/{self._scheduler_pid()}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        return int(found[1]) / 1024 if found else 0.0

    def _scheduler_pid(self) -> int:
        record = ProcessRecord.load(self._directory / "kube-scheduler.process.json")
        if record is None or not record.alive():
            raise HarnessError(f"kube-scheduler has ended; its log is {self.plane.log('kube-scheduler')}")
        return record.pid


def scheduler_config(file: Path, kubeconfig: Path, qps: int | None = None, burst: int | None = None) -> str:
    """A KubeSchedulerConfiguration for a control plane of the harness: the file's, with the kubeconfig, and without
    leader election. ``qps`` and ``burst`` count where the file sets none."""
    config = yaml.safe_load(file.read_text())
    connection = config.setdefault("clientConnection", {})
    connection["kubeconfig"] = str(kubeconfig)
    if qps is not None and "qps" not in connection:
        connection.update(qps=qps, burst=burst)
    config["leaderElection"] = {"leaderElect": False}
    return yaml.safe_dump(config)


def _samples(text: str, metric: str) -> Iterator[tuple[dict[str, str], float]]:
    """Labels and value of a metric's samples in the Prometheus text format."""
    for line in text.splitlines():
        if line.startswith(f"{metric}{{"):
            labels, _, value = line[len(metric) + 1 :].rpartition("} ")
            yield dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)
