"""Nothing of one claim is in what the runtime is told to give to a container that references another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from railmate.claims.plan import make_plan
from railmate.claims.records import Entry
from railmate.claims.runtime_files import NCCL_TOPOLOGY, RuntimeFiles
from unit.claims.claims_world import BOOT, DRIVER, claim, config, ref, uid, view

ALL = {1: "pair-0", 2: "pair-1"}


@pytest.fixture
def specs(tmp_path: Path) -> dict[int, Any]:
    """The CDI specs of two claims of one pod, by the claims' numbers."""
    files = RuntimeFiles(DRIVER, tmp_path / "plugin", tmp_path / "cdi", tmp_path / "gate")
    found = {}
    for number, device in ALL.items():
        plan = make_plan(claim(number, device), ref(number), view(), ())
        files.write(Entry(ref(number), plan.pods, plan.devices, BOOT))
        (path,) = (tmp_path / "cdi").glob(f"*{uid(number)}*")
        found[number] = json.loads(path.read_text())
    return found


def nodes(spec: Any) -> set[str]:
    return {
        node["path"] for device in spec["devices"] for node in device["containerEdits"].get("deviceNodes", [])
    }


def test_device_nodes_are_the_claims_own_and_the_connection_managers(specs: dict[int, Any]) -> None:
    """``rdma_cm`` belongs to no device: whoever may use RDMA gets it."""
    assert nodes(specs[1]) >= {"/dev/infiniband/uverbs0", "/dev/infiniband/umad0", "/dev/nvidia0"}
    assert nodes(specs[2]) >= {"/dev/infiniband/uverbs1", "/dev/infiniband/umad1", "/dev/nvidia1"}
    shared = nodes(specs[1]) & nodes(specs[2])
    assert "/dev/infiniband/rdma_cm" in shared
    assert {path for path in shared if path.startswith("/dev/infiniband")} == {"/dev/infiniband/rdma_cm"}


@pytest.mark.parametrize(("one", "other"), [(1, 2), (2, 1)])
def test_no_word_of_the_other_claim_is_in_a_claims_spec(specs: dict[int, Any], one: int, other: int) -> None:
    text = json.dumps(specs[one])
    assert uid(one) in text
    assert uid(other) not in text
    assert f"claim-{other}/" not in text, "its metadata file is not mounted"


def test_edits_are_for_devices_and_never_for_all_containers(specs: dict[int, Any]) -> None:
    """``containerEdits`` beside the devices would apply to whatever else names this kind."""
    assert all("containerEdits" not in spec for spec in specs.values())
    assert all("env" not in device["containerEdits"] for spec in specs.values() for device in spec["devices"])


def test_claim_of_a_gpu_alone_has_no_rdma(tmp_path: Path) -> None:
    plan = make_plan(claim(3, "gpu-0"), ref(3), view(), ())
    assert not any("infiniband" in node.path for device in plan.devices for node in device.nodes)


def test_topology_file_is_mounted_for_those_who_ask_for_hints(tmp_path: Path) -> None:
    files = RuntimeFiles(DRIVER, tmp_path / "plugin", tmp_path / "cdi", tmp_path / "gate")
    (tmp_path / "plugin").mkdir()
    files.write_nccl_topology("<system/>")
    node = view(nccl_topology=True)
    for number, more in ((1, {"envHints": True}), (2, {})):
        plan = make_plan(claim(number, ALL[number], configs=[config(**more)]), ref(number), node, ())
        files.write(Entry(ref(number), plan.pods, plan.devices, BOOT))
        (path,) = (tmp_path / "cdi").glob(f"*{uid(number)}*")
        (device,) = json.loads(path.read_text())["devices"]
        mounts = {one["containerPath"]: one["hostPath"] for one in device["containerEdits"]["mounts"]}
        assert mounts.get(NCCL_TOPOLOGY) == (str(tmp_path / "plugin/nccl-topology.xml") if more else None)
