"""Repairs when everything is against them: odd files, failing kernel and API, claims that outlive their pods."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from claims_world import DRIVER, GPUS, VFS, offer, ref, uid, view
from repairs_world import World, world

from railmate import files
from railmate.attach.errors import AttachError
from railmate.claims.reconcile import Reconciler
from railmate.claims.records import ClaimRef
from railmate.errors import RailmateError
from railmate.kube.errors import ApiError
from railmate.publish.model import Offer

__all__ = ["world"]  # a fixture


# --- nothing to do
def test_right_state_is_left_alone_and_the_api_is_asked_once_a_claim(world: World) -> None:
    world.attached()
    world.start()
    before, asked = world.picture(), world.api.gets
    for _ in range(3):
        world.reconciler.run()
    assert world.picture() == before
    assert world.repairs == []
    assert world.api.gets == asked + 1


def test_what_prepare_wrote_needs_no_repair(world: World) -> None:
    """Whatever the order of a device's attributes is."""
    attributes = {"zone": "z", "railmate.dev/distance": "PXB", "alpha": 1, "middle": True}
    devices = tuple(replace(device, attributes=attributes) for device in offer().devices)
    world.state.update(view(offer=Offer(devices)))
    world.attached()
    world.reconciler.run()
    assert world.repairs == []


def test_idle_node_asks_the_api_nothing(world: World) -> None:
    world.reconciler.run()
    world.attached()  # by this process: the kubelet will release it
    asked = world.api.gets
    world.reconciler.run()
    assert world.api.gets == asked


# --- files and gates
@pytest.mark.parametrize(
    "damage",
    [
        lambda world: world.spec().unlink(),
        lambda world: world.spec().write_text("{}"),
        lambda world: world.spec().write_bytes(b""),
        lambda world: next(world.metadata().rglob("metadata.json")).unlink(),
        lambda world: next(world.metadata().rglob("metadata.json")).write_text("changed"),
    ],
)
def test_what_the_runtime_reads_is_written_again(world: World, damage: Callable[[World], None]) -> None:
    world.attached()
    before = world.picture()
    damage(world)
    world.reconciler.run()
    assert world.picture() == before
    assert world.repairs == ["CDI spec"]


def test_cdi_directory_that_is_gone_is_made_again(world: World) -> None:
    world.attached()
    before = world.picture()
    world.spec().unlink()
    world.cdi.rmdir()
    world.reconciler.run()
    assert world.picture() == before


def test_gate_that_was_lost_opens_again(world: World) -> None:
    world.attached()
    before = world.gates
    world.ledger.close_gate(uid(1))
    world.reconciler.run()
    assert world.gates == before
    assert world.repairs == ["missing gate marker"]


def test_gate_of_an_attachment_that_is_not_complete_stays_closed(world: World) -> None:
    world.attached()
    entry = world.ledger.get(uid(1))
    assert entry is not None
    assert entry.attachment is not None
    world.ledger.put(entry.with_attachment(replace(entry.attachment, complete=False)))
    world.reconciler.run()
    assert world.gates == []
    assert world.repairs == ["stale gate marker"]


def test_claim_of_a_gpu_alone_gets_no_gate(world: World) -> None:
    world.attached(device="gpu-0")
    world.reconciler.run()
    assert world.gates == []
    assert world.repairs == []


@pytest.mark.parametrize("odd", ["", ".", "..", "x y", "*", "..."])
def test_odd_names_in_the_cdi_directory_delete_nothing_else(world: World, odd: str) -> None:
    world.attached()
    before = world.picture()
    (world.cdi / f"{DRIVER}-claim-{odd}.json").write_text("{}")
    world.reconciler.run()
    assert {path: data for path, data in world.picture().items() if path in before} == before


@pytest.mark.parametrize("place", ["claims", "attached", "strays", "metadata", "cdi"])
def test_files_that_a_killed_writer_left_are_removed(world: World, place: str) -> None:
    world.attached()
    before = world.picture()
    directories = {"cdi": world.cdi, "metadata": next(world.metadata().iterdir())}
    directory = directories.get(place, world.plugin / place)
    targets = {"cdi": world.spec(), "metadata": directory / "metadata.json"}

    def killed(path: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
        with pytest.raises(KeyboardInterrupt):
            files.write_bytes(targets.get(place, directory / f"{uid(1)}.json"), b"half", durable=False)
    assert world.picture() != before
    world.reconciler.run()
    assert world.picture() == before


# --- namespaces
def test_netdevs_of_an_ended_namespace_are_brought_home(world: World) -> None:
    world.attached()
    world.kernel.namespaces.clear()
    world.reconciler.run()
    assert world.kernel.asked == [[VFS[0]]]
    assert world.gates == []
    entry = world.ledger.get(uid(1))
    assert entry is not None
    assert entry.attachment is None
    assert world.repairs == ["ended namespace"]
    world.reconciler.run()
    assert world.repairs == ["ended namespace"]


def test_pod_on_the_host_network_has_no_namespace_that_could_end(world: World) -> None:
    world.attached(netns=None)
    before = world.picture()
    world.kernel.namespaces.clear()
    world.reconciler.run()
    assert world.picture() == before


def test_trouble_with_one_claim_does_not_keep_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.attached(1)
    world.attached(2, "pair-1")
    world.spec(2).unlink()
    world.kernel.namespaces.clear()
    world.kernel.error = AttachError("no")
    world.reconciler.run()
    entries = world.ledger.entries().values()
    assert all(entry.attachment for entry in entries), "what could not be brought home is not forgotten"
    world.kernel.error = None
    world.reconciler.run()
    assert not any(entry.attachment for entry in world.ledger.entries().values())
    assert world.spec(2).exists()


@pytest.mark.parametrize("error", [RailmateError("no"), OSError(errno.EMFILE, "many"), KeyError("odd")])
def test_a_round_never_raises(world: World, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail() -> Any:
        raise error

    monkeypatch.setattr(world.ledger, "entries", fail)
    world.reconciler.run()


# --- claims that ended while no driver ran


def test_inherited_claim_that_is_no_longer_allocated_is_released(world: World) -> None:
    """A ResourceClaim of its own outlives its pods, under the same UID."""
    world.attached()
    world.kernel.namespaces.clear()
    world.api.claims["claim-1"]["status"] = {}
    world.start()
    world.reconciler.run()
    assert world.ledger.entries() == {}


def test_inherited_claim_that_is_allocated_elsewhere_by_now_is_released(world: World) -> None:
    world.attached()
    world.kernel.namespaces.clear()
    (result,) = world.api.claims["claim-1"]["status"]["allocation"]["devices"]["results"]
    result["pool"] = "node2"
    world.start()
    world.reconciler.run()
    assert world.ledger.entries() == {}


@pytest.mark.parametrize(
    "error", [ApiError("not reachable"), ApiError("no", 403, "Forbidden"), ApiError("no", 500, "")]
)
def test_api_that_does_not_know_is_asked_again_and_nothing_is_released(world: World, error: ApiError) -> None:
    world.attached()
    world.start()
    world.api.error, before = error, world.picture()
    world.reconciler.run()
    assert world.picture() == before
    world.api.error, world.api.claims = None, {}
    world.kernel.namespaces.clear()
    world.reconciler.run()
    assert world.ledger.entries() == {}


def test_answer_that_is_no_claim_releases_nothing(world: World) -> None:
    world.attached()
    world.api.claims["claim-1"] = {"kind": "Status"}
    world.start()
    before = world.picture()
    world.reconciler.run()
    assert world.picture() == before


def test_release_that_fails_is_tried_again(world: World) -> None:
    world.attached()
    world.api.claims.clear()
    world.kernel.namespaces.clear()
    world.start()
    world.kernel.error = AttachError("busy")
    world.reconciler.run()
    assert world.ledger.entries().keys() == {uid(1)}
    world.kernel.error = None
    world.reconciler.run()
    assert world.ledger.entries() == {}


def test_claim_that_was_released_in_time_is_not_asked_about(world: World) -> None:
    world.attached()
    world.start()
    world.api.error = ApiError("not reachable")
    world.reconciler.run()
    world.state.unprepare(ref(1))
    asked = world.api.gets
    world.reconciler.run()
    assert world.api.gets == asked


def test_released_claim_is_the_one_that_was_recorded(world: World) -> None:
    world.attached(1)
    world.attached(2, "pair-1")
    del world.api.claims["claim-2"]
    world.kernel.namespaces.clear()
    released: list[ClaimRef] = []
    world.start()
    reconciler = Reconciler(world.api, world.ledger, world.files, world.moves, released.append)
    reconciler.run()
    assert released == [ref(2)]


# --- both
def test_after_a_reboot_nothing_is_held(world: World) -> None:
    world.prepared(1, "pair-0")
    assert world.state.holdings.now().addresses == {GPUS[0], VFS[0]}
    entry = world.ledger.get(uid(1))
    assert entry is not None
    world.ledger.put(replace(entry, boot_id="another boot"))
    assert world.state.holdings.now().addresses == set()


def test_a_reboot_leaves_no_open_gate_and_no_attachment(world: World) -> None:
    """All namespaces and the CDI directory are gone; the ledger is from before."""
    world.attached()
    world.spec().unlink()
    world.kernel.namespaces.clear()
    world.start()
    world.reconciler.run()
    assert world.gates == []
    assert json.loads((world.plugin / "claims" / f"{uid(1)}.json").read_text())["attachment"] is None
