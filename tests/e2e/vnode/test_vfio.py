"""VFs bound to vfio-pci for a claim, and back, by the driver's own verbs on a real kernel with an IOMMU.

In a virtual machine of its own: the GPU node of the other tests has switches without ACS, below which no group can be
given to a program. QEMU's IOMMU is Intel's; the VFs are igb's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.vnode import VirtualNode, acceleration
from harness.vnode_machine import Settings
from harness.vnode_packages import UnavailableError

_SCRIPT = Path(__file__).with_name("vfio_in_guest.py")


def _example() -> dict[str, Any]:
    """The config of examples/vfio-pci."""
    manifest = Path(__file__).resolve().parents[3] / "examples/vfio-pci/manifest.yaml"
    template = next(yaml.safe_load_all(manifest.read_text()))
    (entry,) = template["spec"]["spec"]["devices"]["config"]
    return dict(entry["opaque"]["parameters"])


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What one walk through the verbs has shown; see the script."""
    settings = Settings(vfs=2, memory=1024, acceleration=acceleration(), iommu=True)
    node = VirtualNode(tmp_path_factory.mktemp("iommu") / "node", settings)
    try:
        node.start()
    except UnavailableError as error:
        pytest.skip(f"no virtual node on this machine: {error}")
    try:
        path = "PYTHONPATH=/usr/lib/railmate/own:/usr/lib/railmate/packages"
        script, config = _SCRIPT.read_bytes(), f"EXAMPLE={json.dumps(_example())}"
        said = node.channel.run("env", path, config, "python3", "-", stdin=script, timeout=900)
        found: dict[str, Any] = json.loads(said)
        print(
            f"prepare {found['prepare_seconds']:.2f} s, unprepare {found['unprepare_seconds']:.2f} s, "
            f"{found['sweep']['cases']} kills, emulated"
        )
        yield found
    finally:
        node.stop()


def test_the_claim_gets_the_control_node_and_its_groups(seen: dict[str, Any]) -> None:
    assert seen["before"] == ["igbvf", ""]
    assert seen["driver"] == "vfio-pci"
    assert seen["netdev"] is None
    assert seen["nodes"] == ["/dev/vfio/vfio", "/dev/vfio/N"]
    assert seen["exist"] == [True, True]


def test_the_physical_function_was_told_mac_and_vlan(seen: dict[str, Any]) -> None:
    assert seen["told"] == ["52:54:00:ee:77:77", 100]


def test_what_is_published_does_not_change(seen: dict[str, Any]) -> None:
    assert seen["offer_is_the_same"]


def test_a_program_opens_group_iommu_and_device(seen: dict[str, Any]) -> None:
    used = seen["used"]
    assert (used["version"], used["viable"], used["is_pci"]) == (0, True, True)
    assert used["regions"] >= 8, "BARs, ROM, configuration space"
    assert used["interrupts"] >= 3


def test_while_a_program_has_it_open_it_is_not_taken_away_and_nobody_hangs(seen: dict[str, Any]) -> None:
    assert "a process still has it open" in seen["while_open"]


def test_afterwards_everything_is_as_before(seen: dict[str, Any]) -> None:
    """Names, MACs, MTUs, what the physical function keeps, RDMA devices, driver and override."""
    assert seen["after"] == []
    assert seen["left"] == []


def test_a_kill_at_any_write_to_the_kernel_changes_nothing_of_the_end(seen: dict[str, Any]) -> None:
    assert seen["sweep"]["failures"] == []
    assert seen["sweep"]["cases"] >= 14


def test_a_vf_that_shares_its_group_with_a_driver_of_the_node_is_refused(seen: dict[str, Any]) -> None:
    said, pf, driver = seen["crowded"]
    assert f"{pf} (driver igb)" in said
    assert "ACS" in said
    assert driver == "igbvf"


def test_the_kernels_ipoib_reads_our_message_as_it_reads_that_of_iproute2(seen: dict[str, Any]) -> None:
    """There is no InfiniBand link here, so it refuses both; a message that it cannot read it refuses otherwise."""
    ours, theirs = seen["ipoib"]
    assert "Operation not supported" not in theirs, "ib_ipoib is loaded"
    assert ours.rpartition(": ")[2] == theirs.rpartition(": ")[2]
