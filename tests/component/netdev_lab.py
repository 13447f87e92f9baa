"""Network namespaces that play pods, and veth ends that play VFs, for tests of what is done to netdevs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@dataclass
class Pod:
    """A network namespace under a name of its own, as a runtime would make one for a pod."""

    name: str

    @property
    def path(self) -> Path:
        return Path("/run/netns") / self.name

    def ip(self, *arguments: str) -> str:
        return run("ip", "-netns", self.name, *arguments)

    def json(self, *arguments: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.ip("-json", *arguments) or "[]")
        return found

    def links(self) -> dict[str, dict[str, Any]]:
        return {link["ifname"]: link for link in self.json("link", "show")}

    def sysctl(self, path: str) -> str:
        return run("ip", "netns", "exec", self.name, "cat", f"/proc/sys/net/{path}").strip()

    def write(self, path: str, value: str, netdev: str = "net1") -> None:
        """What a privileged container can write below its /sys, which shows this namespace."""
        run("ip", "netns", "exec", self.name, "sh", "-c", f"echo {value} > /sys/class/net/{netdev}/{path}")

    def end(self) -> None:
        run("ip", "netns", "delete", self.name)


def host_links() -> dict[str, dict[str, Any]]:
    return {link["ifname"]: link for link in json.loads(run("ip", "-json", "link", "show"))}


MakeVf = Callable[..., str]


@contextmanager
def pods(*names: str) -> Iterator[list[Pod]]:
    """Namespaces that are gone afterwards, whoever has ended them."""
    made = [Pod(f"rm{name}{os.getpid()}") for name in names]
    for pod in made:
        run("ip", "netns", "add", pod.name)
    try:
        yield made
    finally:
        for pod in made:
            if pod.path.exists():
                pod.end()


@contextmanager
def veths(prefix: str | None = None) -> Iterator[MakeVf]:
    """Makes VF number n: netdev ``<prefix>vf<n>`` with MTU 4000, its other end ``<prefix>pf<n>`` up on the host. Its
    MAC is no other process's: without a PCI function it is what a netdev is found by."""
    prefix = prefix or f"rm{os.getpid()}"
    own = ":".join(f"{byte:02x}" for byte in os.getpid().to_bytes(4, "big"))
    made: list[str] = []

    def make(number: int, queues: int = 1) -> str:
        vf, peer = f"{prefix}vf{number}", f"{prefix}pf{number}"
        many = ["numrxqueues", str(queues), "numtxqueues", str(queues)] if queues > 1 else []
        run("ip", "link", "add", vf, "address", f"02:{own}:{number:02x}", *many,
            "type", "veth", "peer", "name", peer)  # fmt: skip
        made.append(peer)
        run("ip", "link", "set", vf, "mtu", "4000")
        run("ip", "link", "set", peer, "up")
        return vf

    try:
        yield make
    finally:
        for peer in made:  # the other end goes with it, wherever it is
            subprocess.run(["ip", "link", "delete", peer], capture_output=True)
