"""The kubelet plugin ends when it is told to, at any time."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

_STARTS = """
import sys, time
import railmate.kube.client as kube
import railmate.node.agent as agent
from railmate.cli.main import main

class Agent:
    def __init__(self, settings, client):
        print("it looks at the machine", flush=True)
        time.sleep(60)

kube.KubeClient.connect = lambda path: None
agent.Agent = Agent
sys.exit(main(sys.argv[1:]))
"""


def test_told_to_end_while_it_starts_it_does(tmp_path: Path) -> None:
    """In a container it is the first process, which the kernel spares every signal that it has no handler for; without
    one the pod would end by SIGKILL, after all of its grace period."""
    gate = tmp_path / "gate"
    gate.touch()
    command = [sys.executable, "-c", _STARTS, "node", "--node-name", "n", "--gate-binary", str(gate)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "it looks at the machine\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0, "by itself; by the signal it would be -15"
