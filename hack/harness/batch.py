"""Controllers of batch workloads beside a control plane of the harness: Kueue, JobSet, LeaderWorkerSet, MPI operator.

They run as processes on loopback, as admin, with their own CustomResourceDefinitions and webhooks; only where a webhook
is found is changed: by address instead of by Service.
"""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from harness.controlplane import ControlPlane
from harness.gobuild import PROGRAMS, build, module_source
from harness.process import start
from harness.shell import HarnessError, need, run, tail

_READY_SECONDS = 60


@dataclass(frozen=True)
class _Controller:
    """``webhooks``: its manifest of webhooks in the module, of which those for ``resources`` are installed. ``config``:
    version of its configuration file; the MPI operator has none."""

    module: str
    crds: str
    config: str = ""
    webhooks: str = ""
    resources: tuple[str, ...] = ()


CONTROLLERS = {
    "kueue": _Controller(
        "sigs.k8s.io/kueue", "config/components/crd/bases", "config.kueue.x-k8s.io/v1beta2",
        "config/components/webhook/manifests.yaml",
        ("jobs", "clusterqueues", "localqueues", "resourceflavors", "workloads", "workloads/status"),
    ),
    "jobset": _Controller(
        "sigs.k8s.io/jobset", "config/components/crd/bases", "config.jobset.x-k8s.io/v1alpha1",
        "config/components/webhook/manifests.yaml", ("jobsets",),
    ),
    "lws": _Controller(
        "sigs.k8s.io/lws", "config/crd/bases", "config.lws.x-k8s.io/v1alpha1",
        "config/webhook/manifests.yaml", ("leaderworkersets", "pods"),
    ),
    "mpi-operator": _Controller("github.com/kubeflow/mpi-operator", "manifests/base/kubeflow.org_mpijobs.yaml"),
}  # fmt: skip


def install_crds(plane: ControlPlane, names: Sequence[str] = tuple(CONTROLLERS)) -> None:
    """Installs the projects' resource definitions, and returns when the API server serves them."""
    for name in names:
        source = _source(name) / CONTROLLERS[name].crds
        files = [source] if source.is_file() else sorted(source.glob("*.yaml"))
        # server-side: some are too large for the annotation that a client-side apply writes
        plane.kubectl("apply", "--server-side", *(word for file in files for word in ("-f", str(file))))
    plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")


class BatchController:
    """One of CONTROLLERS, running while the context is open. Its definitions must be installed.

    ``config``: what its configuration file says beside where it listens. Raises HarnessError with the end of its log
    when it is not ready in time.
    """

    def __init__(
        self, plane: ControlPlane, directory: Path, name: str, config: Mapping[str, Any] | None = None
    ) -> None:
        self._plane, self._name, self._config = plane, name, dict(config or {})
        self._directory = directory.absolute() / name
        self._what = CONTROLLERS[name]
        self.log = self._directory / "log"

    def __enter__(self) -> BatchController:
        program = build([self._name])[self._name]
        (self._directory / "certs").mkdir(parents=True)
        # a copy: the control plane's own file is written anew whenever somebody asks for it
        kubeconfig = self._directory / "kubeconfig"
        kubeconfig.write_text(self._plane.kubeconfig().read_text())
        webhooks, health = _free_port(), _free_port()
        if self._what.config:
            self._certificate()
            (self._directory / "config.yaml").write_text(
                yaml.safe_dump(self._configuration(webhooks, health))
            )
            arguments = [f"--config={self._directory}/config.yaml"]
        else:
            arguments = [
                f"--kubeConfig={kubeconfig}", "--lock-namespace=default",
                "--kube-api-qps=100", "--kube-api-burst=100",
            ]  # fmt: skip
        command: list[str | Path] = [program, *arguments]
        if self._name == "kueue":
            command = self._with_metrics_certificate(command)
        environment = {
            "KUBECONFIG": str(kubeconfig),
            "TMPDIR": str(self._directory),
            "KUBEFLOW_NAMESPACE": "",
        }
        self._process = start(command, self.log, env=environment)
        try:
            if self._what.webhooks:
                self._wait(health, "/healthz", tls=False)
                self._wait(webhooks, "/", tls=True)
                self._install_webhooks(webhooks)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _configuration(self, webhooks: int, health: int) -> dict[str, Any]:
        wanted = dict(self._config)
        if self._name == "kueue":
            # its visibility server takes certificates from the root directory only
            wanted["featureGates"] = {**wanted.get("featureGates", {}), "VisibilityOnDemand": False}
        return {
            "apiVersion": self._what.config,
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"host": "127.0.0.1", "port": webhooks, "certDir": str(self._directory / "certs")},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            **wanted,
        }

    def _certificate(self) -> None:
        certs = self._directory / "certs"
        run([
            need("openssl", "openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
            "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
            "-keyout", certs / "tls.key", "-out", certs / "tls.crt",
        ])  # fmt: skip

    def _with_metrics_certificate(self, command: Sequence[str | Path]) -> list[str | Path]:
        """Kueue takes one certificate from below /etc, whatever its configuration says: it gets an /etc of its own."""
        upper, work = self._directory / "etc", self._directory / "work"
        held = upper / "kueue" / "metrics" / "certs"
        held.mkdir(parents=True)
        work.mkdir()
        for file in ("tls.key", "tls.crt"):
            (held / file).write_bytes((self._directory / "certs" / file).read_bytes())
        script = (
            'mount -t overlay -o "lowerdir=/etc,upperdir=$0,workdir=$1" overlay /etc && shift && exec "$@"'
        )
        unshare = [need("unshare", "util-linux"), "--mount", "--propagation", "private"]
        return [*unshare, "sh", "-c", script, upper, work, *command]

    def _install_webhooks(self, port: int) -> None:
        bundle = base64.b64encode((self._directory / "certs" / "tls.crt").read_bytes()).decode()
        text = (_source(self._name) / self._what.webhooks).read_text()
        for manifest in yaml.safe_load_all(text):
            if not manifest:
                continue
            manifest["metadata"]["name"] = f"{self._name}-{manifest['kind'].lower()}"
            manifest["webhooks"] = [
                {**hook, "clientConfig": {"url": f"https://127.0.0.1:{port}{path}", "caBundle": bundle}}
                for hook in manifest["webhooks"]
                if (path := hook["clientConfig"]["service"]["path"])
                and set(self._what.resources).intersection(hook["rules"][0]["resources"])
            ]
            if self._name == "lws":  # as the project's own kustomization narrows it
                for hook in manifest["webhooks"]:
                    if hook["rules"][0]["resources"] == ["pods"]:
                        hook["objectSelector"] = {
                            "matchExpressions": [
                                {"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}
                            ]
                        }
            self._plane.kubectl("apply", "-f", "-", input=yaml.safe_dump(manifest))

    def _wait(self, port: int, path: str, tls: bool) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            try:
                connection = (
                    http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=ssl._create_unverified_context())
                    if tls
                    else http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                )  # fmt: skip
                connection.request("GET", path)
                connection.getresponse()
                return
            except (OSError, http.client.HTTPException):
                ended = self._process.poll()
                if ended is not None or time.monotonic() > deadline:
                    state = "is not ready" if ended is None else f"ended with code {ended}"
                    raise HarnessError(
                        f"{self._name} {state}; end of {self.log}:\n{tail(self.log)}"
                    ) from None
                time.sleep(0.1)


def _source(name: str) -> Path:
    return module_source(PROGRAMS[name].family, CONTROLLERS[name].module)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
