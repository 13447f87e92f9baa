"""VFs bound to vfio-pci for a claim, and back, on a real kernel with an IOMMU: by the driver's own verbs, and for the
pod of the example. Beside it the mode of a NIC's embedded switch.

In another machine than the GPU node of the other tests, which has switches without ACS, below which no group can be
given to a program. QEMU's IOMMU is Intel's; the VFs are igb's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.vnode.lab import PATIENCE, VnodeLab
from harness.vnode import VirtualNode
from harness.vnode_join import join

_SCRIPT, _ESWITCH = (Path(__file__).with_name(f"{name}_in_guest.py") for name in ("vfio", "eswitch"))
_MANIFEST = Path(__file__).resolve().parents[3] / "examples/vfio-pci/manifest.yaml"


def _example() -> dict[str, Any]:
    """The config of examples/vfio-pci."""
    template = next(yaml.safe_load_all(_MANIFEST.read_text()))
    (entry,) = template["spec"]["spec"]["devices"]["config"]
    return dict(entry["opaque"]["parameters"])


def _walk(node: VirtualNode, script: Path, **environment: str) -> dict[str, Any]:
    variables = [f"{name}={value}" for name, value in environment.items()]
    path = "PYTHONPATH=/usr/lib/railmate/own:/usr/lib/railmate/packages"
    said = node.channel.run("env", path, *variables, "python3", "-", stdin=script.read_bytes(), timeout=900)
    return dict(json.loads(said))


@pytest.fixture(scope="module")
def seen(iommu_node: VirtualNode) -> dict[str, Any]:
    """What one walk through the verbs has shown; see the script."""
    found = _walk(iommu_node, _SCRIPT, EXAMPLE=json.dumps(_example()))
    print(
        f"prepare {found['prepare_seconds']:.2f} s, unprepare {found['unprepare_seconds']:.2f} s, "
        f"{found['sweep']['cases']} kills, emulated"
    )
    return found


@pytest.fixture(scope="module")
def switched(iommu_node: VirtualNode, seen: dict[str, Any]) -> dict[str, Any]:
    """The same for the embedded switch of the NIC whose VFs no program can have: it has none afterwards."""
    return _walk(iommu_node, _ESWITCH)


@pytest.fixture(scope="module")
def joined(iommu_node: VirtualNode, switched: dict[str, Any]) -> VnodeLab:
    """The machine as a node of a cluster, whose only VFs are in groups of their own."""
    return VnodeLab(join(iommu_node, driver_values=("--set", "rebindVFs=true")))


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


def test_what_ethtool_changes_of_a_real_nic_is_seen_and_set_back(switched: dict[str, Any]) -> None:
    changed, left = switched["ethtool"]
    assert changed["coalescing"]
    assert changed["private_flags"] == {"legacy-rx": False}
    assert changed["pause"].keys() >= {"rx", "tx"}
    assert not any(left.values())


def test_without_devlink_a_nic_has_no_mode_and_takes_none(switched: dict[str, Any]) -> None:
    mode, said = switched["without"]
    assert mode is None
    assert said.startswith(f"the embedded switch of {switched['nic']} cannot be set to switchdev: ")


def test_the_mode_is_read_as_iproute2_reads_it(switched: dict[str, Any]) -> None:
    assert switched["at_first"] == ["legacy", "legacy"]
    assert switched["back"] == ["legacy", "legacy"]


def test_what_the_nics_driver_refuses_is_told_in_its_words(switched: dict[str, Any]) -> None:
    said, mode = switched["with_vfs"]
    assert said.startswith(f"the embedded switch of {switched['nic']} cannot be set to switchdev: ")
    assert "the mode is changed only while there are no VFs" in said
    assert mode == "legacy"


def test_a_rule_with_another_mode_takes_no_vfs_away_but_those_it_makes_anew(switched: dict[str, Any]) -> None:
    assert switched["as_it_is"] == [[], 2, "legacy"]
    (said,), *rest = switched["its_vfs_would_go"]
    assert "not switchdev: its 2 VFs would go; set vfs to 0 first" in said
    assert rest == [2, "legacy"]
    (said,), *rest = switched["held"]
    assert "a claim holds the whole port" in said
    assert rest == [2, "legacy"]
    assert switched["with_other_vfs"] == [[], 1, "switchdev", "switchdev"]
    assert switched["repeated"] == [[], 1, "switchdev"]
    assert switched["none"] == [[], 0, "switchdev"]


@pytest.mark.long  # makes a cluster node of a second machine
def test_the_example_as_it_is_gets_a_vf_through_the_kubelet_and_the_node_has_it_back(
    joined: VnodeLab,
) -> None:
    before = joined.state()
    with joined.workspace() as workspace:
        workspace.kubectl("apply", "-f", str(_MANIFEST))
        workspace.await_ready("vfio-pci")
        address = workspace.in_pod("vfio-pci", "echo $PCIDEVICE_RAILMATE_DEV_VF").strip()
        function = f"/sys/bus/pci/devices/{address}"
        assert joined.guest.run("sh", "-c", f"basename $(readlink {function}/driver)").strip() == "vfio-pci"
        group = joined.guest.run("sh", "-c", f"basename $(readlink {function}/iommu_group)").strip()
        assert set(workspace.in_pod("vfio-pci", "ls /dev/vfio").split()) == {"vfio", group}
        assert workspace.in_pod("vfio-pci", f": <> /dev/vfio/{group} && echo opened").strip() == "opened"
        assert set(workspace.in_pod("vfio-pci", "ls /sys/class/net").split()) == {"lo", "eth0"}
        assert f" {group}\n" in workspace.kubectl("logs", "vfio-pci"), "what the example lists"
        assert joined.state() != before
        workspace.kubectl("delete", "-f", str(_MANIFEST), timeout=PATIENCE)
        joined.await_state(before)
    assert joined.guest.run("sh", "-c", f"basename $(readlink {function}/driver)").strip() == "igbvf"
