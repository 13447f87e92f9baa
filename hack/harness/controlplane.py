"""etcd, kube-apiserver, kube-scheduler and kube-controller-manager alone, on loopback, for component tests and benches.

No kubelet and no containers: nodes are API objects that `add_node` makes. RBAC, the Node authorizer and NodeRestriction
are on, so identities may do exactly what they may do in a cluster.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from harness import api
from harness.gobuild import CONTROL_PLANE, build, program
from harness.process import ProcessRecord, start
from harness.shell import HarnessError, need, run, tail

_READY_SECONDS = 60
_SYSTEM_USERS = {  # token name -> user and groups of the static token file
    "admin": ("admin", "system:masters"),
    "kube-scheduler": ("system:kube-scheduler", ""),
    "kube-controller-manager": ("system:kube-controller-manager", ""),
}


class ControlPlane:
    """One control plane in a directory of its own; several may run at once.

        with ControlPlane(tmp_path) as plane:
            plane.add_node("node-a")
            client = kubernetes.client.CoreV1Api(plane.api_client())

    feature_gates apply to all three Kubernetes programs; emulated_version ("1.35") makes them behave like an older
    release. nodes: names for which a kubelet's identity (`system:node:<name>`) gets a token.
    The processes end with `stop`, with the context, and when this process ends in whatever way.
    """

    def __init__(
        self, directory: Path, feature_gates: Mapping[str, bool] | None = None, *,
        nodes: Sequence[str] = ("node-a", "node-b", "node-c"), emulated_version: str | None = None,
        apiserver_args: Sequence[str] = (), scheduler_args: Sequence[str] = (),
        controller_args: Sequence[str] = (), controllers: str = "*,-node-lifecycle-controller",
    ) -> None:  # fmt: skip
        self.directory = directory.absolute()
        self.nodes = tuple(nodes)
        self.feature_gates = dict(feature_gates or {})
        self.emulated_version = emulated_version
        self._extra = {
            "kube-apiserver": list(apiserver_args),
            "kube-scheduler": list(scheduler_args),
            # Without kubelets every node would be declared dead after 40 s.
            "kube-controller-manager": [f"--controllers={controllers}", *controller_args],
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> ControlPlane:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, tied: bool = True) -> None:
        """Starts everything from an empty store and returns when all answer (about 4 s).

        `tied=False` leaves the processes running after this one; `ControlPlane(directory).stop()` ends them.
        Raises HarnessError with the end of a program's log when it ends or does not answer in time.
        """
        binaries = build(CONTROL_PLANE)
        self.stop()
        shutil.rmtree(self.directory / "certs", ignore_errors=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            # Ports stay reserved, by sockets that share them, until the programs have them.
            with ExitStack() as reserved:
                ports = {name: reserved.enter_context(_reserved_port()) for name in ("peer", *CONTROL_PLANE)}
                self._write_identities(ports)
                self._start("etcd", binaries, self._etcd_arguments(ports), tied)
                self._start("kube-apiserver", binaries, self._apiserver_arguments(ports), tied)
                self._wait("kube-apiserver", ports["kube-apiserver"], "/readyz")
                for name in ("kube-scheduler", "kube-controller-manager"):
                    self._start(name, binaries, self._client_arguments(name, ports), tied)
                for name in ("kube-scheduler", "kube-controller-manager"):
                    self._wait(name, ports[name], "/healthz")
            # Without it no pod can be made.
            next(
                self.watch(
                    "/api/v1/namespaces/default/serviceaccounts?fieldSelector=metadata.name%3Ddefault"
                ),
                None,
            )
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends all processes and waits for that; the logs stay in the directory. May be repeated."""
        records = [record for name in CONTROL_PLANE if (record := ProcessRecord.load(self._record(name)))]
        for record in records:
            record.stop(grace=0)  # nothing of the store is wanted afterwards
        for process in self._processes.values():
            process.wait()
        self._processes.clear()
        for name in CONTROL_PLANE:
            self._record(name).unlink(missing_ok=True)
        shutil.rmtree(self.directory / "etcd", ignore_errors=True)

    def restart_scheduler(self, arguments: Sequence[str]) -> None:
        """Ends the scheduler, if one runs, and starts it with these arguments instead of the former ones.

        Raises HarnessError like `start`; the other programs go on then.
        """
        name = "kube-scheduler"
        record = ProcessRecord.load(self._record(name))
        if record is not None:
            record.stop(grace=0)
        if name in self._processes:
            self._processes.pop(name).wait()
        self._extra[name] = list(arguments)
        servers: dict[str, str] = self._state()["servers"]
        ports = {program: int(url.rpartition(":")[2]) for program, url in servers.items()}
        self._start(name, build(CONTROL_PLANE), self._client_arguments(name, ports), tied=True)
        self._wait(name, ports[name], "/healthz")

    def running(self) -> dict[str, bool]:
        """Program -> whether it runs."""
        records = {name: ProcessRecord.load(self._record(name)) for name in CONTROL_PLANE}
        return {name: record is not None and record.alive() for name, record in records.items()}

    @property
    def server(self) -> str:
        """URL of the API server."""
        return str(self._state()["servers"]["kube-apiserver"])

    @property
    def scheduler_server(self) -> str:
        """URL of the scheduler's metrics and health; needs the admin token."""
        return str(self._state()["servers"]["kube-scheduler"])

    @property
    def ca_file(self) -> Path:
        return self.directory / "certs" / "apiserver.crt"

    def token(self, identity: str = "admin") -> str:
        """Static bearer token of "admin" or "system:node:<name>". Raises HarnessError for another identity."""
        tokens: dict[str, str] = self._state()["tokens"]
        if identity not in tokens:
            raise HarnessError(f"no token for {identity!r}; there are {', '.join(tokens)}")
        return tokens[identity]

    def kubeconfig(self, identity: str = "admin") -> Path:
        """A kubeconfig for an identity of `token`."""
        path = self.directory / f"{identity.replace(':', '-')}.kubeconfig"
        path.write_text(_kubeconfig(self.server, self.ca_file, self.token(identity)))
        return path

    def api_client(self, identity: str = "admin", *, token: str | None = None) -> Any:
        """A kubernetes.client.ApiClient for an identity, or for a bearer token."""
        from kubernetes import client  # half a second to import, and not every caller needs it

        configuration = client.Configuration()
        configuration.host = self.server
        configuration.ssl_ca_cert = str(self.ca_file)
        configuration.api_key = {"authorization": f"Bearer {token or self.token(identity)}"}
        return client.ApiClient(configuration)

    def request(
        self, method: str, path: str, body: Any = None, *, identity: str = "admin", token: str | None = None,
        content_type: str = "application/json",
    ) -> Any:  # fmt: skip
        """One API request; returns the decoded answer. Raises harness.api.ApiError when it is refused."""
        return api.request(self.server, token or self.token(identity), method, path, body, content_type)

    def watch(self, path: str, seconds: int = 30, *, identity: str = "admin") -> Iterator[dict[str, Any]]:
        """Watch events of a list path, beginning with one for each object there is; ends after `seconds`."""
        return api.watch(self.server, self.token(identity), path, seconds)

    def kubectl(self, *arguments: str, identity: str = "admin", input: str | None = None) -> str:
        """Runs kubectl as an identity and returns its output."""
        return run([program("kubectl"), "--kubeconfig", self.kubeconfig(identity), *arguments], stdin=input)

    def service_account_token(
        self,
        namespace: str,
        name: str,
        *,
        node: str | None = None,
        pod: str | None = None,
        seconds: int = 3600,
    ) -> str:
        """A token of a ServiceAccount, bound to a Node or a Pod if given, as the kubelet would mount it."""
        spec: dict[str, Any] = {"audiences": [], "expirationSeconds": seconds}
        if node is not None or pod is not None:
            kind, bound = ("Pod", pod) if pod is not None else ("Node", node)
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": kind, "name": bound}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        answer = self.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token", body)
        return str(answer["status"]["token"])

    def add_node(
        self, name: str, labels: Mapping[str, str] | None = None, *, cpu: int = 128, pods: int = 250
    ) -> Any:
        """Makes a Node that is Ready and takes pods; returns the object. Nothing runs on it."""
        metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}}
        self.request("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": metadata})
        size = {"cpu": str(cpu), "memory": "1Ti", "pods": str(pods)}
        ready = {"type": "Ready", "status": "True", "reason": "ControlPlaneOnly"}
        merge = "application/merge-patch+json"
        status = {"status": {"capacity": size, "allocatable": size, "conditions": [ready]}}
        self.request("PATCH", f"/api/v1/nodes/{name}/status", status, content_type=merge)
        # Admission marks a new node as not ready; the controller that takes that away is off.
        return self.request("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}}, content_type=merge)

    # How it is started.

    def _start(self, name: str, binaries: Mapping[str, Path], arguments: Sequence[str], tied: bool) -> None:
        process = start([binaries[name], *arguments], self.log(name), tied=tied)
        self._processes[name] = process
        ProcessRecord.of(process.pid).save(self._record(name))

    def log(self, name: str) -> Path:
        """Log of one of the four programs."""
        return self.directory / f"{name}.log"

    def _record(self, name: str) -> Path:
        return self.directory / f"{name}.process.json"

    def _wait(self, name: str, port: int, path: str) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        answer = "no connection"
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                status, data = api.fetch(f"https://127.0.0.1:{port}", self.token(), "GET", path)
                if status == 200:
                    return
                answer = data.decode(errors="replace").strip()
            for started, process in self._processes.items():
                if process.poll() is not None:
                    log = self.log(started)
                    raise HarnessError(
                        f"{started} ended with code {process.returncode}; end of {log}:\n{tail(log)}"
                    )
            if time.monotonic() > deadline:
                raise HarnessError(
                    f"{name} is not ready: {answer}\nend of {self.log(name)}:\n{tail(self.log(name))}"
                )
            time.sleep(0.05)

    def _write_identities(self, ports: Mapping[str, int]) -> None:
        certs = self.directory / "certs"
        certs.mkdir()
        openssl = need("openssl", "openssl")
        run([openssl, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", certs / "sa.key"])
        run([openssl, "ec", "-in", certs / "sa.key", "-pubout", "-out", certs / "sa.pub"])
        users = {
            **_SYSTEM_USERS,
            **{f"system:node:{n}": (f"system:node:{n}", "system:nodes") for n in self.nodes},
        }
        tokens = {identity: secrets.token_hex(16) for identity in users}
        rows = [f'{tokens[i]},{user},{user},"{groups}"' for i, (user, groups) in users.items()]
        (certs / "tokens.csv").write_text("\n".join(rows) + "\n")
        servers = {name: f"https://127.0.0.1:{port}" for name, port in ports.items()}
        (self.directory / "state.json").write_text(json.dumps({"servers": servers, "tokens": tokens}))

    def _state(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.directory / "state.json").read_text()))
        except OSError as error:
            raise HarnessError(
                f"no control plane was started in {self.directory}; run hack/controlplane up"
            ) from error

    def _etcd_arguments(self, ports: Mapping[str, int]) -> list[str]:
        client, peer = (f"http://127.0.0.1:{ports[name]}" for name in ("etcd", "peer"))
        return [
            f"--data-dir={self.directory}/etcd", f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync", "--socket-reuse-port", "--log-level=warn",
        ]  # fmt: skip

    def _apiserver_arguments(self, ports: Mapping[str, int]) -> list[str]:
        certs = self.directory / "certs"
        return [
            *self._common_arguments("kube-apiserver", ports),
            f"--etcd-servers=http://127.0.0.1:{ports['etcd']}", f"--cert-dir={certs}",
            f"--service-account-key-file={certs}/sa.pub", f"--service-account-signing-key-file={certs}/sa.key",
            "--service-account-issuer=https://kubernetes.default.svc", f"--token-auth-file={certs}/tokens.csv",
            "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
            "--service-cluster-ip-range=10.99.0.0/16", "--endpoint-reconciler-type=none",
            "--kubelet-preferred-address-types=InternalIP",
        ]  # fmt: skip

    def _client_arguments(self, name: str, ports: Mapping[str, int]) -> list[str]:
        own = str(self.kubeconfig(name))
        arguments = [
            *self._common_arguments(name, ports), "--leader-elect=false", f"--kubeconfig={own}",
            f"--authentication-kubeconfig={own}", f"--authorization-kubeconfig={own}",
        ]  # fmt: skip
        if name == "kube-controller-manager":
            arguments += [
                f"--service-account-private-key-file={self.directory}/certs/sa.key", f"--root-ca-file={self.ca_file}",
                "--use-service-account-credentials=true", f"--cert-dir={self.directory}/certs/{name}",
            ]  # fmt: skip
        return arguments

    def _common_arguments(self, name: str, ports: Mapping[str, int]) -> list[str]:
        arguments = [f"--secure-port={ports[name]}", "--bind-address=127.0.0.1", "--permit-port-sharing"]
        if self.feature_gates:
            gates = ",".join(f"{gate}={str(on).lower()}" for gate, on in sorted(self.feature_gates.items()))
            arguments.append(f"--feature-gates={gates}")
        if self.emulated_version:
            arguments.append(f"--emulated-version={self.emulated_version}")
        return [*arguments, *self._extra[name]]


def _kubeconfig(server: str, ca_file: Path, token: str) -> str:
    name = "controlplane"
    return yaml.safe_dump({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "clusters": [{"name": name, "cluster": {"server": server, "certificate-authority": str(ca_file)}}],
        "users": [{"name": name, "user": {"token": token}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
    })  # fmt: skip


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A loopback port that only programs which share ports (SO_REUSEPORT) can take while it is held."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
