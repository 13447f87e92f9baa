"""The command line of hack/controlplane."""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import gobuild
from harness.cache import run_dir
from harness.controlplane import ControlPlane
from harness.shell import HarnessError, UsageError, main_guard, progress

_DESCRIPTION = """\
etcd, kube-apiserver, kube-scheduler and kube-controller-manager alone, on loopback: no containers, no root.

  up          start them and leave them running
  down        end them
  status      say what runs; exit code 1 when not all do
  run CMD...  start another set in a temporary directory, run CMD with KUBECONFIG and kubectl, end them
"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="hack/controlplane",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--feature-gates", default="", metavar="A=true,B=false")
    parser.add_argument("--emulated-version", metavar="1.35", help="behave like an older Kubernetes")
    parser.add_argument("command", choices=("up", "down", "status", "run"))
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    if options.arguments and options.command != "run":
        parser.error(f"{options.command}: unknown argument {options.arguments[0]!r}")

    def plane(directory: Path) -> ControlPlane:
        gates = parse_gates(options.feature_gates)
        return ControlPlane(directory, gates, emulated_version=options.emulated_version)

    lasting = plane(run_dir("controlplane"))
    match options.command:
        case "up":
            if not all(lasting.running().values()):
                lasting.start(tied=False)
            progress("controlplane", f"ready; KUBECONFIG={lasting.kubeconfig()}")
        case "down":
            lasting.stop()
            progress("controlplane", "down")
        case "status":
            running = lasting.running()
            for name, alive in running.items():
                print(f"{name}: {'running' if alive else 'not running'}")
            if not all(running.values()):
                return 1
            print(f"server: {lasting.server}\nKUBECONFIG: {lasting.kubeconfig()}")
        case "run":
            if not options.arguments:
                raise UsageError("run: give a command")
            return _run(options.arguments, plane)
    return 0


def parse_gates(text: str) -> dict[str, bool]:
    """ "A=true,B=false" as a mapping. Raises UsageError for anything else."""
    gates = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if not name or value not in ("true", "false"):
            raise UsageError(f"feature gate {item!r} is not of the form Name=true or Name=false")
        gates[name] = value == "true"
    return gates


def _run(command: list[str], plane: Callable[[Path], ControlPlane]) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="railmate-controlplane-") as directory,
        plane(Path(directory)) as started,
    ):
        tools = gobuild.bin_dir(["kubectl"])
        environment = {
            **os.environ,
            "KUBECONFIG": str(started.kubeconfig()),
            "PATH": f"{tools}:{os.environ.get('PATH', '')}",
        }
        try:
            return subprocess.run(command, env=environment, check=False).returncode
        except OSError as error:
            raise HarnessError(f"{command[0]}: {error.strerror}") from error


if __name__ == "__main__":
    main_guard(main)
