"""hack/demo: from nothing to a running pod that holds an aligned GPU–NIC pair, on a real cluster."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from harness.cluster import Cluster
from harness.deploy import EXAMPLES, install_driver, simulated_node
from harness.shell import HarnessError, main_guard, progress

_EXAMPLE = EXAMPLES / "one-pair" / "manifest.yaml"
_POD = "one-pair"
_DESCRIPTION = """\
Makes a real Kubernetes cluster, turns one of its workers into a simulated DGX A100 with RDMA VFs, installs railmate
there, runs examples/one-pair and shows what the pod holds. The first run builds Kubernetes from source where no
container registry is in reach (about half an hour); later runs take a minute. The cluster stays up.
"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="hack/demo", description=_DESCRIPTION)
    parser.add_argument(
        "--down", action="store_true", help="end the demo and its cluster; leaves nothing running"
    )
    options = parser.parse_args(argv)
    cluster = Cluster()
    if options.down:
        cluster.down()
        return 0
    cluster.up()
    simulated_node(cluster).up()
    install_driver(cluster)
    run_example(cluster)
    show(cluster)
    return 0


def run_example(cluster: Cluster) -> None:
    progress("demo", f"applying {_EXAMPLE.relative_to(EXAMPLES.parent)}")
    cluster.kubectl("delete", "--ignore-not-found", "-f", str(_EXAMPLE), timeout=60)
    cluster.kubectl("apply", "-f", str(_EXAMPLE))
    try:
        cluster.kubectl("wait", "--for=condition=Ready", f"pod/{_POD}", "--timeout=60s", timeout=70)
    except HarnessError as error:
        raise HarnessError(f"{error}\n{cluster.kubectl('describe', 'pod', _POD)}") from error


def show(cluster: Cluster) -> None:
    """The allocation as the scheduler made it, and the devices as the pod sees them."""
    claim = cluster.kubectl(
        "get", "pod", _POD, "-o", "jsonpath={.status.resourceClaimStatuses[0].resourceClaimName}"
    )
    _section("What the scheduler allocated")
    print(
        cluster.kubectl("get", "resourceclaim", claim, "-o", "jsonpath={.status.allocation.devices.results}")
    )
    for title, command in (
        ("The pod's interfaces", "ip -o link"),
        ("The pod's device nodes", "ls -l /dev/nvidia* /dev/infiniband"),
        (
            "The metadata file",
            "cat /var/run/kubernetes.io/dra-device-attributes/*/*/*/*-metadata.json | head -n 1",
        ),
    ):
        _section(f"{title}: {command}")
        print(cluster.kubectl("exec", _POD, "--", "sh", "-c", command))
    _section("Look around")
    print(
        "hack/cluster kubectl get resourceslices,deviceclasses\n"
        f"hack/cluster kubectl describe pod {_POD}\n"
        "hack/cluster kubectl -n railmate logs daemonset/railmate\n"
        "hack/cluster kubectl apply -f examples/eight-pairs/manifest.yaml\n"
        "hack/demo --down          # ends the cluster, leaves nothing running"
    )


def _section(title: str) -> None:
    print(f"\n── {title}")


if __name__ == "__main__":
    main_guard(main)
