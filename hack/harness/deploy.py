"""Puts the driver on the cluster: image, simulated GPU node, Helm release. Shared by the demo and the tests."""

from __future__ import annotations

from pathlib import Path

from harness import driverimage
from harness.cluster import Cluster
from harness.machines import DEMO_MACHINE, DEMO_VFS_PER_RAIL, load_machine
from harness.shell import HarnessError, progress
from harness.simnode import SimNode

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "driver" / "chart"
EXAMPLES = ROOT / "examples"
RELEASE, NAMESPACE = "railmate", "railmate"
SIMULATION = "/var/lib/railmate-sim"
_READY_SECONDS = 120


def simulated_node(cluster: Cluster) -> SimNode:
    """The demo's GPU node: a DGX A100 with VFs on each rail, on the first worker."""
    machine = load_machine(DEMO_MACHINE, vfs_per_rail=DEMO_VFS_PER_RAIL)
    return SimNode(cluster, cluster.workers()[0], machine)


def install_driver(cluster: Cluster, *extra: str) -> None:
    """Build and load the image, install or upgrade the chart, wait until the driver is ready.

    ``extra`` are further arguments of ``helm upgrade``. Raises HarnessError with the driver's own log
    when it does not become ready.
    """
    image = driverimage.build()
    progress("driver", f"loading {image.ref} into the nodes")
    cluster.load_image(image.archive)
    progress("driver", "installing the chart")
    cluster.helm(
        "upgrade", "--install", RELEASE, str(CHART), "--namespace", NAMESPACE, "--create-namespace",
        "--set", f"image.repository={image.ref.rpartition(':')[0]},image.tag={image.tag}",
        "--set", f"sysfsRoot={SIMULATION}/sys,procRoot={SIMULATION}/proc,devRoot={SIMULATION}/dev",
        "--set-string", "nodeSelector.railmate\\.dev/simulated=true",
        *extra,
    )  # fmt: skip
    wait_ready(cluster)


def wait_ready(cluster: Cluster, timeout: int = _READY_SECONDS) -> None:
    """Return when the driver's pods of the present release are ready: registered, published, connected."""
    daemonset = f"daemonset/{RELEASE}"
    status = ("rollout", "status", daemonset, f"--timeout={timeout}s")
    try:
        cluster.kubectl("-n", NAMESPACE, *status, timeout=timeout + 10)
    except HarnessError as error:
        log = cluster.kubectl("-n", NAMESPACE, "logs", daemonset, "--tail=25")
        raise HarnessError(f"the driver is not ready: {error}\nits log ends with:\n{log}") from error
