"""What goes wrong on a node, made to go wrong: a lock that is held, a kubelet that is away, a disk that is full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from e2e.lab import PLUGIN_DIR, Lab, Workspace, eventually
from harness.deploy import NAMESPACE, RELEASE, wait_ready
from harness.simnode import LABEL

_LOCK = f"{PLUGIN_DIR}/serialize.lock"
_HOLDER = "railmate-e2e-lock"
_KUBELET_STATE = "/var/lib/kubelet/dra_manager_state"


class Held:
    """The ledger's lock, in other hands: whatever changes a claim waits. ``release`` gives it back."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def take(self) -> None:
        self._lab.on_node(
            "systemd-run", "-q", f"--unit={_HOLDER}", "flock", _LOCK, "sh", "-c", "echo held; exec sleep 600"
        )
        eventually(lambda: not self._free(), "the ledger's lock is held")

    def release(self) -> None:
        self._lab.on_node("sh", "-c", f"systemctl stop {_HOLDER} 2>/dev/null || true")

    def _free(self) -> bool:
        return "free" in self._lab.on_node("sh", "-c", f"flock -n {_LOCK} echo free || true")


@contextmanager
def ledger_held(lab: Lab) -> Iterator[Held]:
    held = Held(lab)
    held.take()
    try:
        yield held
    finally:
        held.release()


def prepare_under_way(lab: Lab, workspace: Workspace, pod: str) -> None:
    """Within ``ledger_held``: wait until the kubelet has called prepare for the pod's first claim."""
    eventually(lambda: workspace.get("pod", pod)["spec"].get("nodeName"), f"pod {pod} is scheduled")
    uid = workspace.claim_of(pod)["metadata"]["uid"]
    # written before the call; and the driver waits for the lock
    look = f"grep -c {uid} {_KUBELET_STATE} || true"
    eventually(
        lambda: lab.on_node("sh", "-c", look).strip() not in {"", "0"}, f"the kubelet knows claim {uid}"
    )
    eventually(lambda: lock_waited_for(lab), "the driver waits for the ledger")


def lock_waited_for(lab: Lab) -> bool:
    """Whether somebody waits for the ledger's lock (proc_locks(5))."""
    inode = lab.on_node("stat", "-c", "%i", _LOCK).strip()
    lines = lab.on_node("cat", "/proc/locks").splitlines()
    return any("-> FLOCK" in line and f":{inode} " in line for line in lines)


@contextmanager
def kubelet_stopped(lab: Lab) -> Iterator[None]:
    lab.on_node("systemctl", "stop", "kubelet")
    try:
        yield
    finally:
        lab.on_node("systemctl", "start", "kubelet")


@contextmanager
def disk_full(lab: Lab) -> Iterator[None]:
    """A file system of its own for the ledger, without a free byte. Ends with the driver back on the real one.

    Nothing may be prepared on the node.
    """
    claims = f"{PLUGIN_DIR}/claims"
    lab.on_node("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", claims)
    try:
        lab.on_node("sh", "-c", f"cat /dev/zero > {claims}/filler 2>/dev/null || true")
        renew_driver(lab)  # it sees mounts of the time of its start
        yield
    finally:
        lab.on_node("umount", "-l", claims)
        renew_driver(lab)


def make_room(lab: Lab) -> None:
    """Within ``disk_full``."""
    lab.on_node("rm", f"{PLUGIN_DIR}/claims/filler")


def renew_driver(lab: Lab) -> None:
    """Delete the driver's pod; return when its successor is ready."""
    lab.cluster.kubectl("-n", NAMESPACE, "delete", "pod", "-l", f"app.kubernetes.io/name={RELEASE}")
    wait_ready(lab.cluster)


@contextmanager
def no_driver(lab: Lab) -> Iterator[None]:
    """The node is none of the driver's for a while."""
    lab.cluster.kubectl("label", "node", lab.node, f"{LABEL}-")
    try:
        eventually(lambda: not driver_pods(lab), "the driver's pod is gone")
        yield
    finally:
        lab.cluster.kubectl("label", "node", lab.node, f"{LABEL}=true")
        eventually(lambda: driver_pods(lab), "a new pod of the driver")
        wait_ready(lab.cluster)


def driver_pods(lab: Lab) -> list[str]:
    """Names of the driver's pods on the node."""
    listed = lab.cluster.kubectl_json(
        "-n", NAMESPACE, "get", "pods", "-l", f"app.kubernetes.io/name={RELEASE}",
        "--field-selector", f"spec.nodeName={lab.node}",
    )  # fmt: skip
    return [one["metadata"]["name"] for one in listed["items"]]


def driver_restarts(lab: Lab) -> int:
    """How often containers of the driver's pods on the node were started again."""
    return sum(
        status["restartCount"]
        for name in driver_pods(lab)
        for status in lab.cluster.kubectl_json("-n", NAMESPACE, "get", "pod", name)["status"].get(
            "containerStatuses", []
        )
    )
