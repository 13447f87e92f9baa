"""Netdevs that did not come home with their claim, and the gate's markers."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest
from claims_world import VFS, ref, uid, view
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from repairs_world import World, world

from railmate.attach.model import (
    NetdevReturn,
    ReturnState,
)
from railmate.claims.attachments import attempt

__all__ = ["world"]  # a fixture


def test_lost_netdev_is_put_right_when_it_is_back(world: World) -> None:
    world.attached()
    world.kernel.lose(VFS[0])
    world.state.unprepare(ref(1))
    assert [stray.name for stray in world.ledger.strays()] == ["vf0"]
    world.start()  # whatever process there is by then
    world.reconciler.run()
    assert world.ledger.strays() != [], "it is not back yet"
    assert world.repairs == []
    world.kernel.returns.clear()
    world.reconciler.run()
    assert world.ledger.strays() == []
    assert world.repairs == ["stray netdev"]


def test_only_the_lost_netdev_of_a_claim_is_a_stray(world: World) -> None:
    world.attached(device="wide")
    world.kernel.lose(VFS[1])
    world.state.unprepare(ref(1))
    assert [stray.pci_address for stray in world.ledger.strays()] == [VFS[1]]


def test_whoever_looks_for_strays_hears_of_a_new_one_at_once(world: World) -> None:
    heard: list[int] = []
    world.ledger.on_stray = lambda: heard.append(len(world.ledger.strays()))
    world.ledger.put_stray(world.kernel.snapshot("vf0", VFS[0]))
    assert heard == [1], "after it was written"


def test_no_strays_ask_the_kernel_nothing(world: World) -> None:
    assert world.moves.fetch_strays() == 0
    assert world.kernel.asked == []


def test_what_is_gone_with_its_function_is_looked_for_every_minute_and_not_every_second(world: World) -> None:
    world.attached()
    world.kernel.lose(VFS[0])
    world.state.unprepare(ref(1))
    assert world.reconciler.await_ends()
    world.state.update(view(on_bus=lambda address: address != VFS[0]))
    assert not world.reconciler.await_ends()
    world.kernel.returns.clear()  # its physical function has got its VFs back
    world.reconciler.run()
    assert world.ledger.strays() == []
    assert world.repairs == ["stray netdev"]


def test_netdev_that_came_home_under_a_wrong_name_is_tried_again(world: World) -> None:
    world.attached()
    world.kernel.returns[VFS[0]] = NetdevReturn(
        VFS[0], ReturnState.ALREADY_HOME, "rm00000c001", ("its name vf0 is taken by another device",)
    )
    world.state.unprepare(ref(1))
    world.reconciler.run()
    assert [stray.name for stray in world.ledger.strays()] == ["vf0"]
    world.kernel.returns.clear()
    world.reconciler.run()
    assert world.ledger.strays() == []


@pytest.mark.parametrize("netns", [None, "/run/netns/1"])
def test_stray_that_a_pod_uses_again_is_left_to_it_until_the_pod_ends(
    world: World, netns: str | None
) -> None:
    """Its link would go down and its MTU back under the pod, every second."""
    world.ledger.put_stray(world.kernel.snapshot("vf0", VFS[0]))
    world.ledger.put_stray(world.kernel.snapshot("vf1", VFS[1]))
    name_taken = ("its name vf0 is taken by another device",)
    world.kernel.returns[VFS[0]] = NetdevReturn(VFS[0], ReturnState.ALREADY_HOME, "rm00000c001", name_taken)
    world.attached(netns=netns)
    world.kernel.asked.clear()
    world.ledger.put_stray(world.kernel.snapshot("vf1", VFS[1]))
    world.reconciler.await_ends()
    assert world.kernel.asked == [[VFS[1]]]
    world.state.unprepare(ref(1))
    world.kernel.returns.clear()
    world.reconciler.await_ends()
    assert world.ledger.strays() == []


def test_next_claim_remembers_what_a_netdev_was_before_it_came_home_not_put_right(world: World) -> None:
    """Else a MAC of the last pod would be the VF's own from then on."""
    world.attached()
    known = world.ledger.get(uid(1))
    assert known is not None
    world.kernel.returns[VFS[0]] = NetdevReturn(
        VFS[0], ReturnState.ALREADY_HOME, "vf0", ("MAC cannot be set",)
    )
    world.state.unprepare(ref(1))
    (stray,) = world.ledger.strays()
    world.ledger.put_stray(replace(stray, mac="02:00:00:00:55:55", parent=VFS[0]))
    world.prepared()
    entry = world.ledger.get(uid(1))
    assert entry is not None
    assert entry.nics[0].snapshot is not None
    assert entry.nics[0].snapshot.mac == "02:00:00:00:55:55"


def test_stray_that_is_no_record_is_removed(world: World) -> None:
    for number, text in enumerate(["", "{", "[]", "5", "{}", '{"pci_address": "x"}', "\xff", "[" * 100_000]):
        (world.plugin / "strays" / f"{number}.json").write_text(text, "latin-1")
    assert world.ledger.strays() == []
    assert list((world.plugin / "strays").iterdir()) == []


def test_stray_that_cannot_be_read_at_the_moment_is_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ledger.put_stray(world.kernel.snapshot("vf0", VFS[0]))
    with monkeypatch.context() as patch:

        def busy(path: Path) -> bytes:
            raise OSError(errno.EMFILE, "Too many open files")

        patch.setattr(Path, "read_bytes", busy)
        attempt(world.ledger.strays)
    assert [stray.name for stray in world.ledger.strays()] == ["vf0"]


def test_stray_is_written_once_an_address(world: World) -> None:
    for _ in range(2):
        world.ledger.put_stray(world.kernel.snapshot("vf0", VFS[0]))
    world.ledger.drop_stray(VFS[0])
    world.ledger.drop_stray(VFS[0])
    assert world.ledger.strays() == []


# --- markers
def test_markers_are_read_as_they_were_written(world: World) -> None:
    world.ledger.open_gate(uid(1), "a")
    world.ledger.open_gate(uid(1), "b.c")
    world.ledger.open_gate(uid(2), "a")
    (world.plugin / "attached" / ".hidden").touch()
    (world.plugin / "attached" / "nodot").touch()
    assert world.ledger.markers() == {uid(1): {"a", "b.c"}, uid(2): {"a"}}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=40)
)
def test_no_file_among_the_markers_stops_a_round(world: World, name: str) -> None:
    if not world.api.claims:
        world.prepared()
    try:
        (world.plugin / "attached" / name).touch()
    except OSError:
        return
    world.reconciler.run()
    assert world.ledger.get(uid(1)) is not None
    assert world.spec().exists()


def test_the_marker_and_spec_of_an_earlier_railmate_agree_after_the_start(world: World) -> None:
    """Else the pod's containers could not be started again: see the gate's second line."""
    world.attached()
    (marker,) = (world.plugin / "attached").iterdir()
    word = marker.read_text()
    assert word.startswith("\n")
    marker.write_text("")
    world.spec().write_text(world.spec().read_text().replace(word.strip(), "x"))
    world.start()
    world.reconciler.run()
    assert marker.read_text() == word
    assert word.strip() in world.spec().read_text()
