"""The virtual node as a node of a control plane on this machine, with the driver installed from its chart.

The node reaches the API server at 10.0.2.2, the API server the kubelet at a forwarded port of loopback; so the Node
object has the address 127.0.0.1, which an external cloud provider (this module) has given it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness import driverimage
from harness.controlplane import ControlPlane
from harness.deploy import CHART, NAMESPACE, RELEASE
from harness.gobuild import build, program
from harness.shell import HarnessError, need, progress, run
from harness.vnode import VirtualNode
from harness.vnode_disk import GUEST_FILES
from harness.vnode_images import PAUSE_IMAGE, store_disk
from harness.vnode_machine import HOST
from harness.vnode_machine import store_disk as store_commands

NODE = "vnode"
_ETC = "/etc/kubernetes"
_READY_SECONDS = 900  # usually below 60, but emulation on a busy machine is slow
_CNI = {
    "cniVersion": "1.0.0",
    "name": "pods",
    "plugins": [{
        "type": "bridge", "bridge": "cni0", "isGateway": True,
        "ipam": {
            "type": "host-local", "ranges": [[{"subnet": "10.244.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]
        },
    }],
}  # fmt: skip


@dataclass(frozen=True)
class Joined:
    """A virtual node in a control plane."""

    node: VirtualNode
    plane: ControlPlane

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.plane.kubeconfig()


def join(node: VirtualNode, *, tied: bool = True, driver_values: tuple[str, ...] = ()) -> Joined:
    """Makes a running node a Ready node of a control plane of its own, and installs the driver on it.

    `driver_values` are further arguments of `helm upgrade`. `tied=False` leaves the control plane running after this
    process. A node that has joined already only gets the driver as it is now.
    Raises HarnessError with what the kubelet or the driver said when one is not ready in time.
    """
    plane = start_plane(node, tied=tied)
    joined = Joined(node, plane)
    image = driverimage.build()
    if not _has_joined(plane):
        disk = store_disk(image)
        build(["kubectl", "helm"])
        _add_node_object(plane)
        progress("vnode", "starting containerd and the kubelet in the node")
        _start_node(joined, disk)
        await_object(
            joined, f"/api/v1/nodes?fieldSelector=metadata.name%3D{NODE}", _is_ready, "the node is Ready"
        )
        # The controller that would take the taint of a new node away is off: it would declare a slow node dead.
        _patch_node(plane, "", {"spec": {"taints": None}})
    else:
        _bring_image(node, image)
    install_driver(joined, image, *driver_values)
    return joined


def start_plane(node: VirtualNode, *, tied: bool = True) -> ControlPlane:
    """The control plane for a node, which need not run yet: the two may start side by side. One that runs is taken."""
    plane = ControlPlane(_plane_directory(node), nodes=(NODE,), apiserver_args=_apiserver_arguments(node))
    if not all(plane.running().values()):
        _write_client_certificate(_pki_directory(node))
        progress("vnode", "starting a control plane on this machine")
        plane.start(tied=tied)
    return plane


def leave(node: VirtualNode) -> None:
    """Ends the control plane that the node had joined; the node itself is left alone. May be repeated."""
    for directory in (_plane_directory(node), _pki_directory(node)):
        if directory.exists():
            ControlPlane(_plane_directory(node)).stop()
            shutil.rmtree(directory)


def install_driver(joined: Joined, image: driverimage.DriverImage, *values: str) -> None:
    """Installs or upgrades the chart and waits until the driver is ready."""
    progress("vnode", "installing the driver from its chart")
    name = ("--set", f"image.repository={image.ref.rpartition(':')[0]},image.tag={image.tag}")
    text = run([program("helm"), "template", RELEASE, CHART, "--namespace", NAMESPACE, *name, *values])
    objects = [item for item in yaml.safe_load_all(text) if item]
    for item in objects:
        if item["kind"] == "DaemonSet":
            give_probes_time(item["spec"]["template"]["spec"]["containers"])
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    apply = ("apply", "--server-side", "--force-conflicts", "-f", "-")
    joined.plane.kubectl(*apply, input=yaml.safe_dump_all([namespace, *objects]))
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets?fieldSelector=metadata.name%3D{RELEASE}"
    await_object(joined, path, _is_rolled_out, "the driver is ready")
    progress("vnode", "the driver is ready")


def give_probes_time(containers: list[dict[str, Any]]) -> None:
    """The node is ten times slower than a real one: probes come less often and wait longer, else as in the chart.

    Each is a process in the container, which costs the node seconds of its processors.
    """
    for container in containers:
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            if name in container:
                # a kubelet that has just started waits for a random part of the period before its first probe
                period = 300 if name == "livenessProbe" else 30
                container[name] |= {"periodSeconds": period, "timeoutSeconds": 290, "failureThreshold": 10}
        for name in ("startupProbe", "readinessProbe"):
            if name in container:  # the last argument: for how many seconds it goes on asking
                container[name]["exec"]["command"][-1] = "280"
        if "livenessProbe" in container:  # not beside the start
            container["livenessProbe"]["initialDelaySeconds"] = 300


def await_object(
    joined: Joined,
    path: str,
    done: Callable[[dict[str, Any]], bool],
    what: str,
    seconds: int = _READY_SECONDS,
) -> dict[str, Any]:
    """The first state of an object of a list path that is `done`. The node's logs are in the error when none comes."""
    deadline = time.monotonic() + seconds
    while (left := int(deadline - time.monotonic())) > 0:
        with contextlib.closing(joined.plane.watch(path, left)) as events:  # type: ignore[type-var]
            for event in events:
                if event["type"] in ("ADDED", "MODIFIED") and done(event["object"]):
                    return dict(event["object"])
    logs = joined.node.channel.run(
        "sh", "-c", "tail -n 15 /var/log/kubelet.log; tail -n 25 /var/log/pods/*/*/*.log"
    )
    raise HarnessError(f"not within {seconds} s: {what}; the virtual node's logs end with:\n{logs}")


def _plane_directory(node: VirtualNode) -> Path:
    return node.directory.with_name(f"{node.directory.name}-plane")


def _pki_directory(node: VirtualNode) -> Path:
    return node.directory.with_name(f"{node.directory.name}-pki")


def _apiserver_arguments(node: VirtualNode) -> list[str]:
    pki = _pki_directory(node)
    return [
        f"--advertise-address={HOST}",  # the certificate is made out to it
        f"--kubelet-client-certificate={pki}/client.crt",
        f"--kubelet-client-key={pki}/client.key",
    ]


def _write_client_certificate(directory: Path) -> None:
    """What the API server shows the kubelet; the kubelet trusts this one certificate."""
    directory.mkdir(parents=True, exist_ok=True)
    run([
        need("openssl", "openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
        "-nodes", "-days", "2", "-subj", "/O=system:masters/CN=railmate-vnode",
        "-addext", "extendedKeyUsage=clientAuth", "-keyout", directory / "client.key", "-out", directory / "client.crt",
    ])  # fmt: skip


def _has_joined(plane: ControlPlane) -> bool:
    return bool(plane.request("GET", f"/api/v1/nodes?fieldSelector=metadata.name%3D{NODE}")["items"])


def _add_node_object(plane: ControlPlane) -> None:
    metadata = {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}}
    plane.request("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": metadata})
    addresses = [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": NODE}]
    _patch_node(plane, "/status", {"status": {"addresses": addresses}})


def _patch_node(plane: ControlPlane, part: str, change: dict[str, Any]) -> None:
    merge = "application/merge-patch+json"
    plane.request("PATCH", f"/api/v1/nodes/{NODE}{part}", change, content_type=merge)


def _bring_image(node: VirtualNode, image: driverimage.DriverImage) -> None:
    """The driver's image into the node, where the disk has an older one. That takes a minute or two."""
    if image.ref in node.channel.run("ctr", "-n", "k8s.io", "images", "ls", "-q").split():
        return
    progress("vnode", "importing the driver's image in the node")
    node.channel.run(
        "ctr", "-n", "k8s.io", "images", "import", "-", stdin=image.archive.read_bytes(), timeout=600
    )


def _start_node(joined: Joined, disk: Path) -> None:
    node, plane = joined.node, joined.plane
    node.monitor(store_commands(disk))
    kubelet_port = _forward_port(node)
    api_port = plane.server.rpartition(":")[2]
    configuration = (GUEST_FILES / "containerd.toml").read_text()
    if PAUSE_IMAGE not in configuration:
        raise HarnessError(f"{GUEST_FILES}/containerd.toml names another sandbox image than {PAUSE_IMAGE}")
    for path, text in (
        (f"{_ETC}/containerd.toml", configuration),
        (f"{_ETC}/kubelet.yaml", json.dumps(kubelet_configuration(kubelet_port))),
        (f"{_ETC}/kubelet.kubeconfig", _kubelet_kubeconfig(plane, api_port)),
        (f"{_ETC}/clients.crt", (_pki_directory(node) / "client.crt").read_text()),
        ("/etc/cni/net.d/10-pods.conflist", json.dumps(_CNI)),
    ):
        write = 'mkdir -p "${1%/*}" && cat > "$1"'
        node.channel.run("sh", "-c", write, "sh", path, stdin=text.encode())
    node.channel.run("/usr/lib/vnode/node", "start", str(kubelet_port), api_port)


def kubelet_configuration(port: int) -> dict[str, Any]:
    """KubeletConfiguration (kubelet.config.k8s.io/v1beta1) of the virtual node."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "port": port,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{_ETC}/clients.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        # Disk and memory of the virtual node are what the test gives it; nothing is to be evicted.
        "evictionHard": {"memory.available": "10Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,
        # Everything takes ten times as long here, so what repeats itself does so less often.
        "runtimeRequestTimeout": "10m",
        "containerLogMonitorInterval": "1m",
        "volumeStatsAggPeriod": "-1s",
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "resolvConf": "",
    }


def _kubelet_kubeconfig(plane: ControlPlane, api_port: str) -> str:
    authority = base64.b64encode(plane.ca_file.read_bytes()).decode()
    cluster = {"server": f"https://{HOST}:{api_port}", "certificate-authority-data": authority}
    return yaml.safe_dump({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": NODE,
        "clusters": [{"name": NODE, "cluster": cluster}],
        "users": [{"name": NODE, "user": {"token": plane.token(f"system:node:{NODE}")}}],
        "contexts": [{"name": NODE, "context": {"cluster": NODE, "user": NODE}}],
    })  # fmt: skip


def _forward_port(node: VirtualNode) -> int:
    """A port of loopback that leads to the same port of the node."""
    for _ in range(5):
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            port = int(holder.getsockname()[1])
        line = f"hostfwd_add own tcp:127.0.0.1:{port}-:{port}"
        (said,) = node.monitor([("human-monitor-command", {"command-line": line})])
        if not said:
            return port
    raise HarnessError(f"no port of this machine can be forwarded to the virtual node: {said}")


def _is_ready(item: dict[str, Any]) -> bool:
    conditions = item.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _is_rolled_out(item: dict[str, Any]) -> bool:
    status = item["status"]
    wanted = status.get("desiredNumberScheduled", 0)
    return (
        status.get("observedGeneration") == item["metadata"]["generation"]
        and wanted > 0
        and status.get("updatedNumberScheduled", 0) == wanted == status.get("numberReady", 0)
        and not status.get("numberUnavailable", 0)
    )
