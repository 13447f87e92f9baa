"""Netdevs that did not come home with their claim, and the gate's markers."""

from __future__ import annotations

import errno
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from claims_world import BOOT, VFS, Clock, ref, uid
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from repairs_world import World, world

from railmate.attach.model import (
    NetdevReturn,
    ReturnRequest,
    ReturnState,
)
from railmate.claims.attempt import attempt
from railmate.claims.backoff import PROMPT
from railmate.claims.strays import Strays
from railmate.claims.surroundings import Surroundings

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
    assert world.moves.strays.fetch() == 0
    assert world.kernel.asked == []


def test_what_is_gone_with_its_function_is_looked_for_every_minute_and_not_every_second(world: World) -> None:
    world.attached()
    world.kernel.lose(VFS[0])
    world.state.unprepare(ref(1))
    assert world.reconciler.await_ends()
    world.kernel.off_bus.add(VFS[0])
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


# --- how often
def looks(strays: Strays, clock: Clock, world: World, seconds: float) -> list[float]:
    """When the kernel was asked, if one looks again whenever that is worth it, as the node's loop does."""
    began, found = clock.now, []
    while clock.now - began < seconds:
        before = len(world.kernel.asked)
        assert strays.fetch_due() == 0
        if len(world.kernel.asked) > before:
            found.append(clock.now - began)
        pause = strays.pause()
        assert pause is not None
        clock.now += pause
    return found


def test_what_does_not_come_home_is_looked_for_every_second_at_first_and_then_ever_less(world: World) -> None:
    clock = Clock()
    strays = Strays(world.ledger, BOOT, Surroundings(), clock)
    world.ledger.put_stray(world.kernel.snapshot("vf0", VFS[0]))
    world.kernel.lose(VFS[0])
    found = looks(strays, clock, world, 600)
    assert found[:10] == [float(second) for second in range(10)]
    assert found[10:15] == [11, 15, 23, 39, 71]
    pauses = [later - earlier for earlier, later in pairwise(found[15:])]
    assert set(pauses) == {60.0}, "as often as the rounds of repairs, which look for all"


def test_one_that_was_lost_since_does_not_wait_for_those_that_were_tried_in_vain(world: World) -> None:
    clock = Clock()
    strays = Strays(world.ledger, BOOT, Surroundings(), clock)
    world.ledger.put_stray(world.kernel.snapshot("vf0", VFS[0]))
    world.kernel.lose(VFS[0])
    looks(strays, clock, world, 300)
    clock.now -= 1  # its turn has not come
    world.ledger.put_stray(world.kernel.snapshot("vf1", VFS[1]))
    world.kernel.asked.clear()
    assert strays.pause() == PROMPT
    assert strays.fetch_due() == 1
    assert world.kernel.asked == [[VFS[1]]]


def test_one_that_is_lost_again_is_looked_for_promptly_again(world: World) -> None:
    clock = Clock()
    strays = Strays(world.ledger, BOOT, Surroundings(), clock)
    world.attached()
    entry = world.ledger.get(uid(1))
    assert entry is not None
    world.kernel.lose(VFS[0])
    strays.remember(
        entry, world.kernel.return_all([ReturnRequest(world.kernel.snapshot("vf0", VFS[0]))], None)
    )
    world.state.unprepare(ref(1))
    looks(strays, clock, world, 300)
    strays.remember(
        entry, world.kernel.return_all([ReturnRequest(world.kernel.snapshot("vf0", VFS[0]))], None)
    )
    assert looks(strays, clock, world, 5) == [0, 1, 2, 3, 4]


def test_a_prepare_and_the_round_of_repairs_look_whatever_was_tried(world: World) -> None:
    clock = Clock()
    strays = Strays(world.ledger, BOOT, Surroundings(), clock)
    world.ledger.put_stray(world.kernel.snapshot("vf0", VFS[0]))
    world.kernel.lose(VFS[0])
    looks(strays, clock, world, 300)
    world.kernel.returns.clear()
    assert strays.fetch() == 1
    assert strays.pause() is None
