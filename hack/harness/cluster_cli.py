"""The command line of hack/cluster."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from harness import gobuild, nodeimage
from harness.cluster import Cluster
from harness.engine import SystemProbe, choose, enter_network
from harness.shell import HarnessError, UsageError, main_guard, progress

_DESCRIPTION = """\
A real Kubernetes cluster (kind: one control plane, two workers) for demos and tests. Where a Docker engine and a
registry are in reach they are used; elsewhere a private engine is run and the node image is built from source.
All state is kept in RAILMATE_CACHE (default ~/.cache/railmate).

  up                make the cluster, or repair it; may be repeated after any interruption
  down [--purge]    end it and leave nothing running; --purge deletes the private engine's images too
  status            say what runs; exit code 1 when the cluster is not usable
  build             build everything that `up` needs, without starting anything
  exec CMD...       run a command with KUBECONFIG and PATH (kubectl, helm, docker) set and node addresses in reach
  kubectl ARGS...   run kubectl
"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="hack/cluster", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engine", choices=("auto", "system", "private"), help="default: RAILMATE_ENGINE, else auto"
    )
    parser.add_argument("command", choices=("up", "down", "status", "build", "exec", "kubectl"))
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    cluster = Cluster(options.engine)
    rest: list[str] = options.arguments
    if options.command in ("exec", "kubectl"):
        return _replace_process(cluster, rest if options.command == "exec" else ["kubectl", *rest])
    if rest and (options.command, rest) != ("down", ["--purge"]):
        parser.error(f"{options.command}: unknown argument {rest[0]!r}")
    match options.command:
        case "up":
            cluster.up()
        case "down":
            cluster.down(purge=bool(rest))
        case "build":
            build(cluster.wanted)
        case "status":
            usable, lines = cluster.status()
            print("\n".join(lines))
            return 0 if usable else 1
    return 0


def build(wanted: str) -> None:
    """Everything that `up`, the tests and the demo take from the cache."""
    if choose(wanted, SystemProbe()) == "system":
        progress("cluster", "the machine's engine has the node image")
        return
    nodeimage.build()
    gobuild.build(
        name for name, one in gobuild.PROGRAMS.items() if one.family != "whereabouts"
    )  # of long tests


def _replace_process(cluster: Cluster, command: list[str]) -> int:
    if not command:
        raise UsageError("exec: give a command")
    environment = {**os.environ, **cluster.environment()}
    words = enter_network(cluster.engine, command)
    sys.stdout.flush()
    try:
        os.execvpe(words[0], words, environment)
    except OSError as error:
        raise HarnessError(f"{words[0]}: {error.strerror}") from error


if __name__ == "__main__":
    main_guard(main)
