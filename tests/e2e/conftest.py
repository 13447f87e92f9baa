"""A real cluster with a simulated DGX A100 and the driver on it, once for all e2e tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.footprint import Footprint
from e2e.lab import Lab, Workspace
from harness.cluster import Cluster
from harness.deploy import EXAMPLES, install_driver, simulated_node


@pytest.fixture(scope="package")  # it ends with the last test here, not with the run
def cluster() -> Iterator[Cluster]:
    """The cluster; one that was up before (hack/demo, hack/cluster up) stays up afterwards."""
    found = Cluster()
    was_up, _ = found.status()
    footprint: Footprint | None = None
    try:
        found.up()
        footprint = Footprint(found.engine)
        yield found
    finally:
        if not was_up:
            found.down()
            assert footprint is None or footprint.left() == [], "hack/cluster down leaves nothing"


@pytest.fixture(scope="package")  # it ends with the last test here, not with the run
def lab(cluster: Cluster) -> Lab:
    # the demo's pod would hold a pair that a test counts on
    cluster.kubectl("delete", "--ignore-not-found", "-f", str(EXAMPLES / "one-pair" / "manifest.yaml"))
    node = simulated_node(cluster)
    node.up()
    install_driver(cluster)
    return Lab(cluster, node.node, node.machine)


@pytest.fixture
def workspace(lab: Lab) -> Iterator[Workspace]:
    """A namespace of the test's own. Afterwards its pods are gone and all VFs are home again."""
    with lab.workspace() as one:
        yield one
