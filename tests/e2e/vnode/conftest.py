"""One virtual node, joined to a control plane, with the driver on it, for all tests here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from e2e.vnode.lab import PROVISIONING, VnodeLab
from harness.vnode import VirtualNode, acceleration, lasting_directory
from harness.vnode_join import join, leave, start_plane
from harness.vnode_machine import Settings
from harness.vnode_packages import UnavailableError


@pytest.fixture(scope="package")  # it ends with the last test here, not with the run
def virtual_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualNode]:
    """The node; one that was up before (hack/vnode up, hack/vnode join) is used and stays up."""
    lasting = VirtualNode(lasting_directory())
    if lasting.up:
        lasting.sync()
        yield lasting
        return
    node = VirtualNode(tmp_path_factory.mktemp("vnode") / "node")
    try:
        with ThreadPoolExecutor(1) as beside:
            plane = beside.submit(start_plane, node)
            node.start()
            plane.result()
        yield node
    except UnavailableError as error:
        pytest.skip(f"no virtual node on this machine: {error}")
    finally:
        leave(node)
        node.stop()


@pytest.fixture(scope="package")
def iommu_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualNode]:
    """Another machine: an IOMMU, two NICs, no GPUs, and no process of the driver in it but those of the tests."""
    settings = Settings(vfs=2, memory=2048, acceleration=acceleration(), iommu=True)
    node = VirtualNode(tmp_path_factory.mktemp("iommu") / "node", settings)
    try:
        node.start()
        yield node
    except UnavailableError as error:
        pytest.skip(f"no virtual node on this machine: {error}")
    finally:
        leave(node)
        node.stop()


@pytest.fixture(scope="package")  # it ends with the last test here, not with the run
def vlab(virtual_node: VirtualNode) -> VnodeLab:
    tied = virtual_node.directory != lasting_directory()
    values = ("--set-json", f"provisioning={json.dumps(PROVISIONING)}")
    return VnodeLab(join(virtual_node, tied=tied, driver_values=values))
