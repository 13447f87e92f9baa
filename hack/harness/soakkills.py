"""kill -9 for what runs on the simulated node."""

from __future__ import annotations

import json

from e2e.lab import Lab, eventually
from harness.deploy import NAMESPACE
from harness.shell import HarnessError


def kill_driver(lab: Lab) -> int:
    """kill -9 for the driver's process on the simulated node, if it runs; the kubelet starts it anew. How many ran."""
    found = lab.on_node("crictl", "ps", "-q", "--label", f"io.kubernetes.pod.namespace={NAMESPACE}").split()
    for container in found:
        state = json.loads(lab.on_node("crictl", "inspect", "-o", "json", container))
        lab.on_node("kill", "-9", str(state["info"]["pid"]))
    return len(found)


def kill_service(lab: Lab, name: str) -> None:
    """kill -9 for the main process of a systemd unit, not for the containers in its cgroup; returns when systemd has
    started it anew (Restart= of kind's units is always), or has been asked to. Raises HarnessError when it does not
    run."""

    def main_process() -> str:
        return lab.on_node("systemctl", "show", "-p", "MainPID", "--value", name).strip()

    before = main_process()
    if before == "0":
        raise HarnessError(f"{name} does not run")
    lab.on_node("kill", "-9", before)
    try:
        eventually(lambda: main_process() not in {"0", before}, f"{name} started by systemd", seconds=20)
    except AssertionError:
        lab.on_node("systemctl", "start", name)
