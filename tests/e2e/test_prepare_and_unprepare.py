"""Prepare and unprepare that are cut short, slow, late or refused, before the real kubelet.

After Kubernetes' own node e2e tests for DRA (test/e2e_node/dra_test.go). A prepare that failed is asked again after 60
to 90 s, or by a kubelet that was restarted; that is how most tests here are kept short.
"""

from __future__ import annotations

import time

import pytest

from e2e.faults import (
    disk_full,
    driver_restarts,
    kubelet_stopped,
    ledger_held,
    lock_waited_for,
    make_room,
    prepare_under_way,
)
from e2e.lab import Lab, Workspace, eventually
from e2e.test_kubelet_scenarios import delete_by_force, exists, failures, links_again, record_of
from harness.deploy import wait_ready
from harness.soakkills import kill_driver

#: Seconds that the kubelet gives a call (pkg/kubelet/cm/dra/plugin).
CALL_TIMEOUT = 45
#: Seconds until the kubelet asks again after a failure: 60 to 90, and a busy machine.
ASKED_AGAIN = 150


def runs_with_its_nic(lab: Lab, workspace: Workspace, name: str, seconds: int = 60) -> None:
    """And afterwards nothing of it is left."""
    workspace.wait_ready(name, seconds)
    assert links_again(workspace, name)["net1"]["up"]
    workspace.delete_pod(name)
    lab.wait_home()


def restart_kubelet(lab: Lab) -> None:
    lab.on_node("systemctl", "restart", "kubelet")


# --- prepare
def test_a_pod_made_while_the_kubelet_is_away_starts_when_it_is_back(lab: Lab, workspace: Workspace) -> None:
    with kubelet_stopped(lab):
        workspace.apply_example("one-pair")
        eventually(lambda: workspace.get("pod", "one-pair")["spec"].get("nodeName"), "the pod is scheduled")
    runs_with_its_nic(lab, workspace, "one-pair")


def test_a_kubelet_that_restarts_during_prepare_asks_again(lab: Lab, workspace: Workspace) -> None:
    with ledger_held(lab) as held:
        workspace.apply_example("one-pair")
        prepare_under_way(lab, workspace, "one-pair")
        restart_kubelet(lab)
        held.release()
    runs_with_its_nic(lab, workspace, "one-pair")


def test_a_driver_that_dies_during_prepare(lab: Lab, workspace: Workspace) -> None:
    restarts = driver_restarts(lab)
    with ledger_held(lab) as held:
        workspace.apply_example("one-pair")
        prepare_under_way(lab, workspace, "one-pair")
        kill_driver(lab)
        held.release()
    eventually(lambda: driver_restarts(lab) > restarts, "the driver is started again")
    wait_ready(lab.cluster)
    restart_kubelet(lab)
    runs_with_its_nic(lab, workspace, "one-pair")


@pytest.mark.long
def test_a_driver_that_dies_during_prepare_is_asked_again_without_a_kubelet_restart(
    lab: Lab, workspace: Workspace
) -> None:
    with ledger_held(lab) as held:
        workspace.apply_example("one-pair")
        prepare_under_way(lab, workspace, "one-pair")
        kill_driver(lab)
        held.release()
        runs_with_its_nic(lab, workspace, "one-pair", ASKED_AGAIN)


@pytest.mark.long
def test_a_prepare_that_times_out_is_no_harm_to_the_next(lab: Lab, workspace: Workspace) -> None:
    with ledger_held(lab) as held:
        workspace.apply_example("one-pair")
        prepare_under_way(lab, workspace, "one-pair")
        said = eventually(lambda: failures(workspace, "one-pair"), "the call timed out", CALL_TIMEOUT + 20)
        assert "DeadlineExceeded" in said[0]
        assert workspace.get("pod", "one-pair")["status"]["phase"] == "Pending"
        held.release()
        runs_with_its_nic(lab, workspace, "one-pair", ASKED_AGAIN)


def test_a_full_disk_is_told_and_the_pod_starts_when_there_is_room(lab: Lab, workspace: Workspace) -> None:
    with disk_full(lab):
        workspace.apply_example("one-pair")
        (said, *_) = eventually(lambda: failures(workspace, "one-pair"), "prepare has failed")
        assert "No space left on device" in said
        assert "Free space" in said
        make_room(lab)
        restart_kubelet(lab)
        runs_with_its_nic(lab, workspace, "one-pair")


@pytest.mark.long
def test_a_prepare_that_failed_is_asked_again_and_succeeds(lab: Lab, workspace: Workspace) -> None:
    with disk_full(lab):
        workspace.apply_example("one-pair")
        eventually(lambda: failures(workspace, "one-pair"), "prepare has failed")
        make_room(lab)
        runs_with_its_nic(lab, workspace, "one-pair", ASKED_AGAIN)


@pytest.mark.long  # the kubelet gives back what pods that are gone held, once a minute
def test_a_pod_deleted_while_it_is_prepared_and_the_kubelet_is_away_leaves_nothing(
    lab: Lab, workspace: Workspace
) -> None:
    with ledger_held(lab) as held:
        workspace.apply_example("one-pair")
        prepare_under_way(lab, workspace, "one-pair")
        with kubelet_stopped(lab):
            delete_by_force(workspace, "pod", "one-pair")
            held.release()  # what nobody waits for any more is prepared all the same
    eventually(lambda: not lab.leftovers(), "nothing of the claim is left", seconds=100)
    lab.wait_home()


# --- unprepare
def test_a_slow_unprepare_keeps_the_pod_until_it_is_done(lab: Lab, workspace: Workspace) -> None:
    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    record = record_of(workspace, "one-pair")
    with ledger_held(lab) as held:
        workspace.kubectl("delete", "pod", "one-pair", "--wait=false")
        eventually(lambda: lock_waited_for(lab), "the driver waits for the ledger")
        began = time.monotonic()
        while time.monotonic() - began < 6:  # the pod's grace period is 2 s
            assert exists(lab, f"{record}.json")
            assert workspace.get("pod", "one-pair")["metadata"]["deletionTimestamp"]
        held.release()
        workspace.kubectl("wait", "--for=delete", "pod/one-pair", "--timeout=20s")
    assert not exists(lab, f"{record}.json")
    lab.wait_home()


def test_a_kubelet_that_restarts_during_unprepare_asks_again(lab: Lab, workspace: Workspace) -> None:
    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    with ledger_held(lab) as held:
        workspace.kubectl("delete", "pod", "one-pair", "--wait=false")
        eventually(lambda: lock_waited_for(lab), "the driver waits for the ledger")
        restart_kubelet(lab)
        held.release()
        workspace.kubectl("wait", "--for=delete", "pod/one-pair", "--timeout=60s")
    lab.wait_home()


def test_a_driver_that_dies_during_unprepare(lab: Lab, workspace: Workspace) -> None:
    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    with ledger_held(lab) as held:
        workspace.kubectl("delete", "pod", "one-pair", "--wait=false")
        eventually(lambda: lock_waited_for(lab), "the driver waits for the ledger")
        kill_driver(lab)
        held.release()
        workspace.kubectl("wait", "--for=delete", "pod/one-pair", "--timeout=100s")
    lab.wait_home()


@pytest.mark.long
def test_an_unprepare_that_times_out_is_asked_again(lab: Lab, workspace: Workspace) -> None:
    workspace.apply_example("one-pair")
    workspace.wait_ready("one-pair")
    with ledger_held(lab) as held:
        workspace.kubectl("delete", "pod", "one-pair", "--wait=false")
        eventually(lambda: lock_waited_for(lab), "the driver waits for the ledger")
        time.sleep(CALL_TIMEOUT + 3)  # nothing tells that the call has ended
        assert workspace.get("pod", "one-pair")["metadata"]["deletionTimestamp"]
        held.release()
        workspace.kubectl(
            "wait", "--for=delete", "pod/one-pair", f"--timeout={ASKED_AGAIN}s", timeout=ASKED_AGAIN + 10
        )
    lab.wait_home()
