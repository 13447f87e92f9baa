"""The control plane of the component tests: real programs, real authorization, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.api import ApiError
from harness.controlplane import ControlPlane
from harness.gobuild import CONTROL_PLANE
from harness.process import ProcessRecord
from harness.shell import HarnessError

SLICES = "/apis/resource.k8s.io/v1/resourceslices"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("plane"), nodes=["node-a", "node-b"]) as started:
        started.add_node("node-a")
        started.add_node("node-b")
        yield started


def resource_slice(node: str) -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"generateName": "slice-"},
        "spec": {
            "driver": "test.example",
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "device-0"}],
        },
    }


def test_all_four_programs_answer(plane: ControlPlane) -> None:
    assert plane.running() == dict.fromkeys(CONTROL_PLANE, True)
    assert plane.request("GET", "/version")["gitVersion"] == "v1.37.2"


def test_python_client_works_with_an_identity(plane: ControlPlane) -> None:
    from kubernetes import client

    nodes = client.CoreV1Api(plane.api_client()).list_node()
    assert sorted(node.metadata.name for node in nodes.items) == ["node-a", "node-b"]
    with pytest.raises(client.ApiException) as refused:
        client.CoreV1Api(plane.api_client("system:node:node-a")).list_secret_for_all_namespaces()
    assert refused.value.status == 403


def test_node_writes_its_own_slice_and_no_other_nodes(plane: ControlPlane) -> None:
    own = plane.request("POST", SLICES, resource_slice("node-a"), identity="system:node:node-a")
    assert own["spec"]["nodeName"] == "node-a"
    with pytest.raises(ApiError, match="same NodeName") as refused:
        plane.request("POST", SLICES, resource_slice("node-b"), identity="system:node:node-a")
    assert refused.value.status == 403


def test_scheduler_binds_a_pod_to_a_node(plane: ControlPlane) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "placed"},
        "spec": {"containers": [{"name": "c", "image": "busybox:stable"}]},
    }
    plane.request("POST", "/api/v1/namespaces/default/pods", pod)
    events = plane.watch("/api/v1/namespaces/default/pods?fieldSelector=metadata.name%3Dplaced", 20)
    bound = [event["object"]["spec"].get("nodeName") for event in _until(events, "nodeName")]
    assert bound[-1] in ("node-a", "node-b")


def test_service_account_token_carries_its_node(plane: ControlPlane) -> None:
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "driver"}}
    plane.request("POST", "/api/v1/namespaces/default/serviceaccounts", account)
    token = plane.service_account_token("default", "driver", node="node-b")
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    user = plane.request("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", review, token=token)
    info = user["status"]["userInfo"]
    assert info["username"] == "system:serviceaccount:default:driver"
    assert info["extra"]["authentication.kubernetes.io/node-name"] == ["node-b"]


def test_unknown_identity_is_named(plane: ControlPlane) -> None:
    with pytest.raises(HarnessError, match="no token for 'system:node:stranger'"):
        plane.token("system:node:stranger")


def test_second_control_plane_runs_beside_the_first_with_other_gates_and_leaves_nothing(
    plane: ControlPlane, tmp_path: Path
) -> None:
    with ControlPlane(tmp_path, {"DRAPartitionableDevices": False}) as other:
        assert other.server != plane.server
        assert other.request("GET", "/api/v1/nodes")["items"] == []
        metrics = other.request("GET", "/metrics")
        assert 'kubernetes_feature_enabled{name="DRAPartitionableDevices",stage="BETA"} 0' in metrics
        records = _records(other)
        assert all(record.alive() for record in records)
    assert not any(record.alive() for record in records)
    assert all(record.alive() for record in _records(plane))


def test_failing_program_is_shown_with_its_log_and_the_rest_is_ended(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, apiserver_args=["--no-such-flag"])
    with pytest.raises(HarnessError, match=r"(?s)kube-apiserver ended with code 1.*no-such-flag"):
        plane.start()
    assert not any(plane.running().values())


def test_killed_parent_leaves_no_processes(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c",
         "import pathlib, signal, sys; from harness.controlplane import ControlPlane;"
         "ControlPlane(pathlib.Path(sys.argv[1])).start(); print('up', flush=True); signal.pause()", tmp_path],
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    records = _records(ControlPlane(tmp_path))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    assert all(record.wait(deadline - time.monotonic()) for record in records)


def _records(plane: ControlPlane) -> list[ProcessRecord]:
    records = [ProcessRecord.load(plane.directory / f"{name}.process.json") for name in CONTROL_PLANE]
    assert None not in records
    return [record for record in records if record is not None]


def _until(events: Iterator[dict[str, Any]], field: str) -> Iterator[dict[str, Any]]:
    """Events up to the first whose object's spec has the field."""
    for event in events:
        yield event
        if event["object"]["spec"].get(field):
            return
