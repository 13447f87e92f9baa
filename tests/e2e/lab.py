"""What the e2e tests do with the cluster: apply manifests, look into pods and into the node."""

from __future__ import annotations

import json
import re
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import yaml

from harness.cluster import Cluster
from harness.deploy import EXAMPLES, NAMESPACE, RELEASE, wait_ready
from harness.machines import Machine, list_netdevs
from harness.shell import HarnessError

PLUGIN_DIR = "/var/lib/kubelet/plugins/railmate.dev"
NRI_SOCKET = "/var/run/nri/nri.sock"
#: Seconds after which a pod that became ready is told with its events.
SLOW = 25.0

T = TypeVar("T")


def eventually(look: Callable[[], T], what: str, seconds: float = 60.0) -> T:
    """The first true value of ``look``. For conditions that nothing announces; fails with ``what``."""
    deadline = time.monotonic() + seconds
    while True:
        seen = look()
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what}; last seen: {seen!r}")
        time.sleep(0.2)


class Lab:
    def __init__(self, cluster: Cluster, node: str, machine: Machine) -> None:
        self.cluster, self.node, self.machine = cluster, node, machine

    @contextmanager
    def workspace(self) -> Iterator[Workspace]:
        name = f"e2e-{uuid.uuid4().hex[:8]}"
        self.cluster.kubectl("create", "namespace", name)
        try:
            yield Workspace(self, name)
        finally:
            self.cluster.kubectl("-n", name, "delete", "pod", "--all", "--timeout=90s", timeout=100)
            # what else is in it holds nothing of the node
            self.cluster.kubectl("delete", "namespace", name, "--wait=false")
        self.wait_home()

    # --- the node
    def on_node(self, *command: str) -> str:
        return self.cluster.node_exec(self.node, *command)

    def links(self) -> dict[str, str]:
        """Netdev name to MAC, in the node's own namespace."""
        return {link["ifname"]: link["address"] for link in json.loads(self.on_node("ip", "-j", "link"))}

    @cached_property
    def vf_links(self) -> dict[str, str]:
        """Netdev name to MAC of every VF, as the machine's facts have them."""
        return {vf.name: vf.mac for vf in list_netdevs(self.machine) if vf.physical_function}

    def wait_home(self) -> None:
        """Every VF is in the node's namespace, under its own name, and nothing is left of any claim."""
        eventually(
            lambda: self.vf_links.items() <= self.links().items(), f"all VFs home on {self.node}", seconds=30
        )
        eventually(lambda: not self.leftovers(), f"no file of a claim left on {self.node}", seconds=30)

    def leftovers(self) -> list[str]:
        """Files of claims: CDI specs, ledger entries, gate markers, metadata."""
        find = (
            f"ls -d /var/run/cdi/railmate.dev-* {PLUGIN_DIR}/claims/* {PLUGIN_DIR}/attached/* "
            f"{PLUGIN_DIR}/dra-device-metadata/* 2>/dev/null || true"
        )
        return self.on_node("sh", "-c", find).split()

    # --- the driver
    @cached_property
    def devices(self) -> dict[str, dict[str, Any]]:
        """What the node publishes: device name to attributes (plain values)."""
        found = {}
        for item in self.cluster.kubectl_json("get", "resourceslices")["items"]:
            if item["spec"].get("nodeName") == self.node:
                for device in item["spec"].get("devices") or []:
                    # a name without domain is in the driver's
                    found[device["name"]] = {
                        name if "/" in name else f"railmate.dev/{name}": next(iter(value.values()))
                        for name, value in device["attributes"].items()
                    }
        return found

    @contextmanager
    def runtime_unreachable(self) -> Iterator[None]:
        """The driver serves the kubelet but cannot reach the runtime: its NRI socket has another name.

        Ends with the socket back and the driver connected, also when the test failed.
        """
        away = f"{NRI_SOCKET}.away"
        self.on_node("mv", NRI_SOCKET, away)
        try:
            self.cluster.kubectl("-n", NAMESPACE, "delete", "pod", "-l", f"app.kubernetes.io/name={RELEASE}")
            eventually(
                self._registered_without_runtime, "driver registered with the kubelet, not with the runtime"
            )
            yield
        finally:
            self.on_node("sh", "-c", f"[ ! -e {away} ] || mv {away} {NRI_SOCKET}")
            wait_ready(self.cluster)

    def reconnect_runtime(self) -> None:
        """Within ``runtime_unreachable``: give the socket its name back."""
        self.on_node("mv", f"{NRI_SOCKET}.away", NRI_SOCKET)

    def _registered_without_runtime(self) -> bool:
        try:
            log = self.cluster.kubectl("-n", NAMESPACE, "logs", f"daemonset/{RELEASE}")
        except HarnessError:
            return False  # its container is only being made
        return "registered with the kubelet" in log and "connected to the container runtime" not in log


class Workspace:
    """A namespace on the cluster."""

    def __init__(self, lab: Lab, namespace: str) -> None:
        self.lab, self.namespace = lab, namespace

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout: float = 120) -> str:
        return self.lab.cluster.kubectl("-n", self.namespace, *arguments, input=stdin, timeout=timeout)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", kind, name, "-o", "json"))
        return found

    def apply(self, *objects: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))

    def apply_example(self, name: str) -> None:
        """The example as it is in the tree."""
        self.kubectl("apply", "-f", str(EXAMPLES / name / "manifest.yaml"))

    def wait_ready(self, pod: str, seconds: int = 60) -> dict[str, Any]:
        """What takes long is told in the run's summary: it may be a wait that a user would have, too."""
        start = time.monotonic()
        try:
            self.kubectl(
                "wait", "--for=condition=Ready", f"pod/{pod}", f"--timeout={seconds}s", timeout=seconds + 10
            )
        except HarnessError as error:
            raise AssertionError(f"{error}\n{self.describe(pod)}") from error
        if (took := time.monotonic() - start) > SLOW:
            warnings.warn(f"pod {pod} was ready after {took:.0f} s:\n{self.describe(pod)}", stacklevel=2)
        return self.get("pod", pod)

    def delete_pod(self, pod: str) -> None:
        self.kubectl("delete", "pod", pod, "--timeout=60s")

    def describe(self, pod: str) -> str:
        return self.kubectl("describe", "pod", pod)

    def in_pod(self, pod: str, command: str) -> str:
        return self.kubectl("exec", pod, "--", "sh", "-c", command)

    def claim_of(self, pod: str) -> dict[str, Any]:
        """The pod's first claim."""
        name = self.get("pod", pod)["status"]["resourceClaimStatuses"][0]["resourceClaimName"]
        return self.get("resourceclaim", name)

    def allocated(self, pod: str) -> list[str]:
        """Names of the devices of the pod's first claim."""
        results = self.claim_of(pod)["status"]["allocation"]["devices"]["results"]
        return [result["device"] for result in results]

    def links(self, pod: str) -> dict[str, dict[str, Any]]:
        """Interfaces in the pod: name to its MAC and whether it is up."""
        found = {}
        for line in self.in_pod(pod, "ip -o link").splitlines():
            match = re.match(r"\d+: ([^@:]+)[@:].*<([^>]*)>.*link/\w+ ([0-9a-f:]+)", line)
            if match:
                found[match[1]] = {"mac": match[3], "up": "UP" in match[2].split(",")}
        return found

    def device_nodes(self, pod: str) -> tuple[set[str], set[str]]:
        """GPU nodes in /dev, and all of /dev/infiniband."""
        listing = self.in_pod(
            pod, "cd /dev; ls -1d nvidia* 2>/dev/null; echo --; ls -1 infiniband 2>/dev/null || true"
        )
        gpus, _, rdma = listing.partition("--\n")
        return set(gpus.split()), set(rdma.split())

    def metadata(self, pod: str) -> list[dict[str, Any]]:
        """All metadata files of the pod, in their newest version."""
        pattern = "/var/run/kubernetes.io/dra-device-attributes/*/*/*/railmate.dev-metadata.json"
        text = self.in_pod(pod, f"for f in {pattern}; do head -n 1 $f; done")
        return [json.loads(line) for line in text.splitlines()]


def pod(name: str, *, template: str | None = None, claim: str | None = None, **spec: Any) -> dict[str, Any]:
    """A pod that sleeps, with at most one claim."""
    container: dict[str, Any] = {
        "name": "main",
        "image": "busybox:stable",
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", "trap exit TERM; sleep 2147483647 & wait"],
    }
    body: dict[str, Any] = {"terminationGracePeriodSeconds": 2, "containers": [container], **spec}
    if template or claim:
        source = {"resourceClaimTemplateName": template} if template else {"resourceClaimName": claim}
        body["resourceClaims"] = [{"name": "devices", **source}]
        container["resources"] = {"claims": [{"name": "devices"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": body}


def claim_spec(
    device_class: str, *, count: int = 1, where: str | None = None, config: Any = None
) -> dict[str, Any]:
    """One request; ``where`` is a CEL expression over the device."""
    exactly: dict[str, Any] = {"deviceClassName": device_class, "count": count}
    if where:
        exactly["selectors"] = [{"cel": {"expression": where}}]
    devices: dict[str, Any] = {"requests": [{"name": "main", "exactly": exactly}]}
    if config:
        devices["config"] = [{"opaque": {"driver": "railmate.dev", "parameters": config}}]
    return {"devices": devices}


def template(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": spec},
    }


def claim(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": spec,
    }
