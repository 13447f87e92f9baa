"""The container engine that the kind cluster runs on: the machine's own, or a private one without any footprint.

The private engine is Debian's or Ubuntu's dockerd, unpacked into the cache, in mount, pid and network namespaces of
its own: ending one process ends everything it started, and the machine's firewall and links never change.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from harness import cgroups, debian
from harness.cache import cache_dir, content_key, locked, log_file, run_dir
from harness.gobuild import program
from harness.process import ProcessRecord, start
from harness.shell import HarnessError, UsageError, need, progress, run, tail

# kind's own default node image for its pinned version; the engine's default registry serves it.
UPSTREAM_NODE_IMAGE = "kindest/node:v1.37.0"
_START_SECONDS = 60
_UNIX_PATH_LIMIT = 107  # unix(7): sun_path


@dataclass(frozen=True)
class Engine:
    """A running engine. `environment` lets the docker command and kind find it."""

    kind: str  # "system" or "private"
    environment: Mapping[str, str] = field(default_factory=dict)
    pid: int | None = None  # of the private dockerd; its network namespace holds the published ports

    def docker(
        self, *arguments: str | Path, stdin: str | bytes | None = None, timeout: float | None = None
    ) -> str:
        """Runs a docker command against this engine. Raises HarnessError when it fails."""
        return run([self.docker_command, *arguments], env=self.environment, stdin=stdin, timeout=timeout)

    @property
    def docker_command(self) -> str:
        path = shutil.which("docker", path=self.environment.get("PATH", os.environ.get("PATH")))
        if path is None:
            raise HarnessError("docker is missing; install it (Debian, Ubuntu: apt-get install docker.io)")
        return path

    def has_image(self, name: str) -> bool:
        with contextlib.suppress(HarnessError):
            self.docker("image", "inspect", name)
            return True
        return False


class Probe(Protocol):
    """What the choice of an engine depends on."""

    def answers(self) -> bool: ...
    def obtains(self, image: str) -> bool: ...


class SystemProbe:
    """Asks the machine's own docker."""

    def answers(self) -> bool:
        if shutil.which("docker") is None:
            return False
        try:
            return bool(run(["docker", "info", "--format", "{{.ServerVersion}}"], timeout=20).strip())
        except HarnessError:
            return False

    def obtains(self, image: str) -> bool:
        """Whether the node image is there or can be pulled (it is needed right after, so it is pulled)."""
        if Engine("system").has_image(image):
            return True
        progress("engine", f"pulling {image}")
        return (
            subprocess.run(["docker", "pull", "-q", image], capture_output=True, check=False).returncode == 0
        )


def choose(wanted: str, probe: Probe) -> str:
    """ "system" or "private". `wanted` is "auto" or one of the two.

    The machine's engine is taken when it answers and the node image is there or can be pulled.
    Raises HarnessError when "system" is demanded and cannot be had.
    """
    if wanted not in ("auto", "system", "private"):
        raise UsageError(f"no engine {wanted!r}; choose auto, system or private")
    if wanted == "private":
        return "private"
    if not probe.answers():
        if wanted == "system":
            raise HarnessError(
                "no container engine answers `docker info`; start one, or use --engine private"
            )
        return "private"
    if not probe.obtains(UPSTREAM_NODE_IMAGE):
        if wanted == "system":
            raise HarnessError(
                f"the engine has no image {UPSTREAM_NODE_IMAGE} and cannot pull it; load it, or use --engine private"
            )
        return "private"
    return "system"


class PrivateEngine:
    """The private dockerd of one cache directory."""

    def __init__(self) -> None:
        self.directory = run_dir("engine")
        self.data = cache_dir() / "engine"
        self.socket = self.directory / "docker.sock"
        # Below one common name, so that what is left over is easy to find; one each, so that no engine ends another.
        self.cgroup = f"railmate/{content_key(str(cache_dir()))[:8]}"
        self.log = log_file("dockerd")

    def running(self) -> Engine | None:
        """The engine if it runs and answers."""
        record = ProcessRecord.load(self.directory / "dockerd.json")
        if record is None or not record.alive() or not self._pings():
            return None
        return Engine("private", self._environment(), record.pid)

    def up(self) -> Engine:
        """Starts the engine unless it runs. Raises HarnessError with the end of its log when it does not come up."""
        if engine := self.running():
            return engine
        self._check_machine()
        with locked("engine"):
            if engine := self.running():
                return engine
            self._end_processes()
            return self._start()

    def down(self, purge: bool = False) -> None:
        """Ends the engine and all containers; takes its cgroups away. `purge` deletes its images too."""
        cgroups.thaw(self.cgroup)
        self._end_processes()
        cgroups.thaw(self.cgroup)
        cgroups.remove(self.cgroup)
        shutil.rmtree(self.directory, ignore_errors=True)
        if purge:
            shutil.rmtree(self.data, ignore_errors=True)

    def remains(self) -> list[str]:
        """What of the engine is still there, for `status`: processes and cgroups."""
        found = []
        for name in ("dockerd", "unshare"):
            record = ProcessRecord.load(self.directory / f"{name}.json")
            if record is not None and record.alive():
                found.append(f"process {record.pid} ({name})")
        return found + [f"cgroup {path}" for path in cgroups.find(self.cgroup)]

    def _check_machine(self) -> None:
        if os.geteuid() != 0:
            raise HarnessError("the private engine needs root; run as root, or start a Docker engine")
        if len(str(self.socket)) > _UNIX_PATH_LIMIT:
            raise HarnessError(
                f"{self.socket} is too long for a socket; set RAILMATE_CACHE to a shorter path"
            )
        if self.directory.is_relative_to("/run") or self.directory.is_relative_to("/var/run"):
            raise HarnessError(
                "RAILMATE_CACHE may not be below /run: the private engine has a /run of its own"
            )
        filesystem = run(["stat", "-f", "-c", "%T", cache_dir()]).strip()
        if filesystem in ("overlayfs", "tmpfs"):
            raise HarnessError(
                f"{cache_dir()} is on {filesystem}, where no overlay can be mounted; "
                "set RAILMATE_CACHE to a directory on ext4, xfs or btrfs"
            )

    def _tools(self) -> debian.Unpacked:
        return debian.unpacked(
            "engine", ("docker.io", "iptables", "iproute2", "procps", "kmod"), optional=("docker-cli",)
        )

    def _environment(self) -> dict[str, str]:
        environment = self._tools().environment()
        return {"DOCKER_HOST": f"unix://{self.socket}", "PATH": environment["PATH"]}

    def _start(self) -> Engine:
        tools = self._tools().environment()
        runc = shutil.which("runc", path=tools["PATH"])
        if runc is None:
            raise HarnessError(
                "the unpacked docker.io came without runc; delete deb-engine-* in the cache and repeat"
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.data / "docker").mkdir(parents=True, exist_ok=True)
        configuration = self.directory / "daemon.json"
        configuration.write_text(
            json.dumps(
                daemon_configuration(self.directory, self.data, self.cgroup, program("runc-within-bounds"))
            )
        )
        progress("engine", "starting a private dockerd")
        # /run becomes a tmpfs: dockerd, containerd and iptables keep sockets and locks there.
        inner = (
            "mount -t tmpfs -o mode=0755 tmpfs /run && ip link set lo up && "
            'echo 1 > /proc/sys/net/ipv4/ip_forward && exec dockerd --config-file "$0"'
        )
        outer = start(
            [need("unshare", "util-linux"), "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc",
             "--propagation", "private", "sh", "-c", inner, configuration],
            self.log, env={**tools, "RAILMATE_RUNC": runc}, tied=False,
        )  # fmt: skip
        ProcessRecord.of(outer.pid).save(self.directory / "unshare.json")
        deadline = time.monotonic() + _START_SECONDS
        while not self._pings():
            if outer.poll() is not None:
                raise HarnessError(
                    f"the private dockerd ended with code {outer.returncode}; end of {self.log}:\n{tail(self.log)}"
                )
            if time.monotonic() > deadline:
                self._end_processes()
                raise HarnessError(
                    f"the private dockerd does not answer; end of {self.log}:\n{tail(self.log)}"
                )
            time.sleep(0.05)
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        ProcessRecord.of(int(children[0])).save(self.directory / "dockerd.json")
        return Engine("private", self._environment(), int(children[0]))

    def _pings(self) -> bool:
        connection = _UnixConnection(self.socket)
        try:
            connection.request("GET", "/_ping")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _end_processes(self) -> None:
        # dockerd stops its containers when asked to; unshare, its parent, takes what is left with the pid namespace.
        for name in ("dockerd", "unshare"):
            path = self.directory / f"{name}.json"
            if record := ProcessRecord.load(path):
                record.stop(grace=20)
            path.unlink(missing_ok=True)
        self.socket.unlink(missing_ok=True)


def daemon_configuration(directory: Path, data: Path, cgroup: str, runtime: Path) -> dict[str, object]:
    """dockerd's daemon.json. The machine's own file is not read, so that nothing of it interferes."""
    return {
        "hosts": [f"unix://{directory}/docker.sock"],
        "group": "root",
        "data-root": str(data / "docker"),
        "exec-root": str(directory / "exec"),
        "pidfile": str(directory / "dockerd.pid"),
        "storage-driver": "overlay2",
        "features": {"containerd-snapshotter": False},
        "exec-opts": ["native.cgroupdriver=cgroupfs"],
        "cgroup-parent": f"/{cgroup}",
        "runtimes": {"within-bounds": {"path": str(runtime)}},
        "default-runtime": "within-bounds",
    }


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=5)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))


def enter_network(engine: Engine, command: Sequence[str]) -> list[str]:
    """The command, made to run in the engine's network namespace, where the nodes' addresses are reachable."""
    if engine.pid is None:
        return list(command)
    return [need("nsenter", "util-linux"), "-t", str(engine.pid), "-n", "--", *command]
