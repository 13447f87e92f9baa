"""hack/cluster: a kind cluster of one control plane and two workers, on the machine's engine or on a private one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness import cgroups, gobuild, nodeimage
from harness.cache import locked, log_file, run_dir
from harness.engine import UPSTREAM_NODE_IMAGE, Engine, PrivateEngine, SystemProbe, choose, enter_network
from harness.kindconfig import NAME, cluster_config, network_script, node_networks
from harness.process import ProcessRecord, start
from harness.shell import HarnessError, progress, run

_LABEL = f"io.x-k8s.kind.cluster={NAME}"
_NODES = 3
_READY_SECONDS = 180


class Cluster:
    """The cluster of this cache directory. Making the object touches nothing.

    `engine`: "auto", "system" or "private"; None takes RAILMATE_ENGINE, else "auto".
    All methods raise HarnessError with the failed command's own words.
    """

    def __init__(self, engine: str | None = None) -> None:
        self.wanted = engine or os.environ.get("RAILMATE_ENGINE") or "auto"
        self.directory = run_dir("cluster")
        self.kubeconfig = self.directory / "kubeconfig"
        self._created = (
            self.directory / "created.json"
        )  # written when kind was done: what kind made, and with what
        self._forwarder = self.directory / "forward.json"
        self._engine: Engine | None = None

    # What tests use.

    def up(self) -> None:
        """Makes the cluster, or repairs what is missing of it; returns when all nodes are Ready."""
        with locked("cluster"):
            engine = self._choose_engine()
            self._engine = engine
            if self._nodes_running() < _NODES or not self._created.exists():
                self._create(engine)
            if engine.kind == "private":
                self._forward(engine)
                self._set_up_pod_network()
            self._wait_ready()
        if engine.kind == "private" and nodeimage.present() != self._creation()["image"]:
            progress(
                "cluster", "its node image is not the one of this tree; hack/cluster down and up renews it"
            )
        progress("cluster", f"ready; KUBECONFIG={self.kubeconfig}")

    def down(self, purge: bool = False) -> None:
        """Ends the cluster and, if it is ours, the engine. `purge` deletes the engine's loaded images as well."""
        with locked("cluster"):
            private = PrivateEngine()
            self._engine = private.running()
            if self._engine is None and SystemProbe().answers():
                self._engine = Engine("system")
            if record := ProcessRecord.load(self._forwarder):
                record.stop()
            if self._engine is not None:
                try:
                    self._remove_nodes(self._engine)
                except HarnessError as error:
                    if self._engine.kind != "private":
                        raise
                    progress("cluster", f"the nodes end with their engine: {error}")
            private.down(purge)
            shutil.rmtree(self.directory, ignore_errors=True)
        progress("cluster", "down")

    def kubectl(self, *arguments: str, input: str | None = None, timeout: float | None = None) -> str:
        """Runs kubectl against the cluster and returns its output."""
        return run(
            [self._kubectl(), "--kubeconfig", self.kubeconfig, *arguments], stdin=input, timeout=timeout
        )

    def kubectl_json(self, *arguments: str) -> Any:
        """Runs kubectl with `-o json` and returns the parsed output."""
        return json.loads(self.kubectl(*arguments, "-o", "json"))

    def helm(self, *arguments: str, timeout: float | None = None) -> str:
        """Runs helm against the cluster and returns its output."""
        installed = shutil.which("helm") if self.engine.kind == "system" else None
        program = installed or gobuild.program("helm")
        return run([program, "--kubeconfig", self.kubeconfig, *arguments], timeout=timeout)

    def node_exec(
        self, node: str, *command: str, input: str | bytes | None = None, timeout: float | None = None
    ) -> str:
        """Runs a command as root inside a node and returns its output."""
        interactive = ["-i"] if input is not None else []
        return self.engine.docker("exec", *interactive, node, *command, stdin=input, timeout=timeout)

    def load_image(self, archive: Path) -> None:
        """Loads an image archive into every node's containerd."""
        self._kind("load", "image-archive", str(archive), "--name", NAME)

    def nodes(self) -> list[str]:
        """Names of the nodes, control plane first."""
        return [f"{NAME}-control-plane", *self.workers()]

    def workers(self) -> list[str]:
        return [f"{NAME}-worker", f"{NAME}-worker2"]

    @property
    def engine(self) -> Engine:
        """The engine that runs the cluster. Raises HarnessError when the cluster is not up."""
        if self._engine is None:
            made_with = self._creation().get("engine")
            self._engine = Engine("system") if made_with == "system" else PrivateEngine().running()
        if self._engine is None:
            raise HarnessError("the cluster is not up; run hack/cluster up")
        return self._engine

    def environment(self) -> dict[str, str]:
        """What a command needs to use the cluster: KUBECONFIG, DOCKER_HOST, PATH with kubectl, helm, kind, docker."""
        engine = self.engine
        names = [name for name in ("kubectl", "helm", "kind") if gobuild.built(name)]
        path = engine.environment.get("PATH", "")
        ours = [str(gobuild.bin_dir(names))] if names else []
        return {
            **engine.environment,
            "KUBECONFIG": str(self.kubeconfig),
            "KIND_EXPERIMENTAL_PROVIDER": "docker",
            "KIND_EXPERIMENTAL_DOCKER_NETWORK": NAME,
            "PATH": ":".join([*ours, os.environ.get("PATH", ""), *([path] if path else [])]),
        }

    def status(self) -> tuple[bool, list[str]]:
        """Whether the cluster is usable, and lines that say what runs."""
        private = PrivateEngine()
        lines = [f"node image: {'built' if nodeimage.present() else 'not built (hack/cluster build)'}"]
        try:
            engine = self.engine
        except HarnessError:
            lines += [
                "engine: none of ours runs",
                "cluster: down",
                *(f"left over: {x}" for x in private.remains()),
            ]
            return False, lines
        lines.append(f"engine: {engine.kind}" + (f", dockerd is process {engine.pid}" if engine.pid else ""))
        for line in engine.docker(
            "ps", "-a", "--filter", f"label={_LABEL}", "--format", "{{.Names}}: {{.Status}}"
        ).splitlines():
            lines.append(f"container {line}")
        if not self._created.exists():
            return False, [*lines, "cluster: not complete; hack/cluster up makes it, or is about to"]
        if engine.kind == "private":
            record = ProcessRecord.load(self._forwarder)
            alive = record is not None and record.alive()
            lines.append(
                f"API port forwarder: {f'process {record.pid}' if record and alive else 'not running'}"
            )
        lines.append(f"KUBECONFIG: {self.kubeconfig}")
        try:
            ready = self.kubectl("get", "nodes", "--no-headers", timeout=20).splitlines()
        except HarnessError as error:
            return False, [*lines, f"API server: does not answer ({str(error).splitlines()[-1].strip()})"]
        lines += [f"node {' '.join(line.split()[:2])}" for line in ready]
        return sum(line.split()[1] == "Ready" for line in ready) == _NODES, lines

    # How it is made.

    def _choose_engine(self) -> Engine:
        made_with = self._creation().get("engine")
        wanted = self.wanted if self.wanted != "auto" or made_with is None else str(made_with)
        if made_with not in (None, wanted):
            raise HarnessError(
                f"the cluster runs on the {made_with} engine; run hack/cluster down before changing it"
            )
        if choose(wanted, SystemProbe()) == "system":
            return Engine("system")
        if made_with is None:
            nodeimage.build()  # the long part comes before anything runs
        return PrivateEngine().up()

    def _creation(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._created.read_text()))
        except (OSError, ValueError):
            return {}

    def _create(self, engine: Engine) -> None:
        self._created.unlink(missing_ok=True)
        self._remove_nodes(engine)  # of an attempt that was interrupted, or of before a reboot
        private = engine.kind == "private"
        image = self._load_node_image(engine) if private else UPSTREAM_NODE_IMAGE
        with _reserved_port() as port:
            api_port = port if private else None
        configuration = self.directory / "kind.yaml"
        self.directory.mkdir(parents=True, exist_ok=True)
        configuration.write_text(cluster_config(private, api_port, _bounding_set()))
        progress("cluster", "creating the nodes with kind (about 40 s)")
        arguments = [
            "create",
            "cluster",
            "--config",
            str(configuration),
            "--image",
            image,
            "--wait",
            "0s",
            "--retain",
        ]
        try:
            self._kind(*arguments, log=log_file("kind-create"))
        except HarnessError:
            logs = log_file("kind-nodes").with_suffix("")
            with contextlib.suppress(HarnessError):
                self._kind("export", "logs", str(logs), "--name", NAME)
                progress("cluster", f"the nodes' logs are in {logs}")
            raise
        self._created.write_text(json.dumps({"engine": engine.kind, "port": api_port, "image": image}))

    def _load_node_image(self, engine: Engine) -> str:
        archive, name = nodeimage.build()
        if not engine.has_image(name):
            progress("cluster", "loading the node image into the engine")
            engine.docker("load", "-q", "-i", archive)
            images = engine.docker(
                "images", "--format", "{{.Repository}}:{{.Tag}}", nodeimage.REPOSITORY
            ).split()
            for old in images:
                if old != name:
                    with contextlib.suppress(HarnessError):  # a container that is not ours uses it
                        engine.docker("rmi", old)
        return name

    def _kind(self, *arguments: str, log: Path | None = None) -> None:
        engine = self.engine if self._engine is None else self._engine
        environment = {
            **engine.environment,
            "KUBECONFIG": str(self.kubeconfig),
            "KIND_EXPERIMENTAL_PROVIDER": "docker",
            "KIND_EXPERIMENTAL_DOCKER_NETWORK": NAME,  # a network of our own, that `down` can remove
        }
        installed = shutil.which("kind") if engine.kind == "system" else None
        run([installed or gobuild.program("kind"), *arguments], env=environment, log=log)

    def _kubectl(self) -> str | Path:
        """kubectl: ours if it is built, else the machine's, else a copy of the node's."""
        if found := gobuild.built("kubectl"):
            return found
        if installed := shutil.which("kubectl"):
            return installed
        copy = self.directory / "kubectl"
        if not copy.exists():
            self.engine.docker("cp", f"{NAME}-control-plane:/usr/bin/kubectl", copy)
        return copy

    def _nodes_running(self) -> int:
        assert self._engine is not None
        return len(self._engine.docker("ps", "-q", "--filter", f"label={_LABEL}").split())

    @staticmethod
    def _remove_nodes(engine: Engine) -> None:
        for tries_left in (2, 1, 0):
            containers = engine.docker("ps", "-aq", "--filter", f"label={_LABEL}").split()
            if not containers:
                break
            progress("cluster", "removing the nodes")
            if engine.kind == "private":
                cgroups.thaw(PrivateEngine().cgroup)  # what a killed runc has left frozen cannot be killed
            try:
                engine.docker("rm", "-f", "-v", *containers)
            except HarnessError:
                # the engine waits ten seconds for a node to end; on a busy machine that is not always enough
                if not tries_left:
                    raise
        if NAME in engine.docker("network", "ls", "--format", "{{.Name}}").split():
            engine.docker("network", "rm", NAME)

    def _forward(self, engine: Engine) -> None:
        """Makes the API server's port reachable from the machine, under the same number."""
        record = ProcessRecord.load(self._forwarder)
        if engine.pid is None or (record is not None and record.alive()):
            return
        port = int(self._creation()["port"])
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError as error:
                raise HarnessError(
                    f"port {port}, which the cluster's kubeconfig names, is taken by another program; "
                    "end that or run hack/cluster down and up"
                ) from error
            listener.listen(128)
            process = start(
                [*enter_network(engine, [sys.executable]), "-m", "harness.forward",
                 "--listener", str(listener.fileno()), "--port", str(port), "--while-pid", str(engine.pid)],
                log_file("forward"), tied=False, pass_fds=[listener.fileno()],
                env={"PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
            )  # fmt: skip
        ProcessRecord.of(process.pid).save(self._forwarder)

    def _set_up_pod_network(self) -> None:
        self.kubectl(
            "wait", "--for=jsonpath={.spec.podCIDR}", "nodes", "--all", f"--timeout={_READY_SECONDS}s"
        )
        nodes = node_networks(self.kubectl_json("get", "nodes"))
        for node in nodes:
            self.node_exec(node.name, "sh", "-s", input=network_script(node, nodes))

    def _wait_ready(self) -> None:
        limit = f"--timeout={_READY_SECONDS}s"
        self.kubectl("wait", "--for=condition=Ready", "nodes", "--all", limit)
        self.kubectl("-n", "kube-system", "rollout", "status", "daemonset/kube-proxy", limit)
        self.kubectl("-n", "default", "wait", "--for=create", "serviceaccount/default", limit)


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


def _bounding_set(status: Path = Path("/proc/self/status")) -> int:
    fields: Mapping[str, str] = dict(
        line.split(":", 1) for line in status.read_text().splitlines() if ":" in line
    )
    return int(fields["CapBnd"].strip(), 16)
