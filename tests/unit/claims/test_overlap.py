"""Hardware is with one claim at a time, and a claim waits for what is about to come free."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from claims_netdevs import World
from claims_world import (
    claim,
    ref,
    sandbox,
    state,
    uid,
)

from railmate.claims.allocation import ClaimError, Holder
from railmate.claims.ledger import Ledger
from railmate.claims.records import Entry
from railmate.claims.waiting import Waiting
from railmate.errors import RailmateError


@pytest.mark.parametrize("device", ["pair-0", "gpu-0", "vf-0", "wide"])
def test_held_hardware_is_refused_under_every_name(world: World, device: str) -> None:
    world.prepared(1, "pair-0")
    world.api.put(claim(2, device))
    with pytest.raises(ClaimError) as caught:
        world.state.prepare(ref(2), patience=0)
    assert "claim-1" in str(caught.value)
    assert "claim-2" in str(caught.value)
    assert set(world.ledger.entries()) == {uid(1)}
    assert world.specs == [f"railmate.dev-claim-{uid(1)}.json"]


def test_neighbours_are_no_overlap(world: World) -> None:
    for number, device in enumerate(["pair-0", "pair-1", "vf-2", "vf-3"], start=1):
        world.prepared(number, device, pods=(f"pod-{number}",))
    assert len(world.specs) == 4


def test_prepare_waits_for_the_claim_that_is_about_to_end(world: World) -> None:
    """After a force delete the scheduler hands a device on at once; an error would cost the pod a minute."""
    world.prepared(1, "pair-0")
    world.api.put(claim(2, "pair-0", pods=("pod-2",)))
    timer = threading.Timer(0.3, world.state.unprepare, (ref(1),))
    began = time.monotonic()
    timer.start()
    world.state.prepare(ref(2), patience=20)
    assert time.monotonic() - began < 5
    timer.join()
    assert set(world.ledger.entries()) == {uid(2)}


def test_prepare_sees_what_another_instance_frees(world: World) -> None:
    """Rolling update: unprepare goes to the new instance while the old one waits."""
    world.prepared(1, "pair-0")
    world.api.put(claim(2, "pair-0", pods=("pod-2",)))
    other = state(world.root, world.api)
    timer = threading.Timer(0.3, other.unprepare, (ref(1),))
    timer.start()
    world.state.prepare(ref(2), patience=20)
    timer.join()


def test_waiting_prepare_keeps_nobody_else_waiting(world: World) -> None:
    world.prepared(1, "pair-0")
    world.api.put(claim(2, "pair-0"), claim(3, "pair-1", pods=("pod-3",)))
    waiting = threading.Thread(target=lambda: _swallow(lambda: world.state.prepare(ref(2), patience=1.5)))
    waiting.start()
    began = time.monotonic()
    world.state.prepare(ref(3), patience=0)
    world.state.attach(sandbox("sandbox-3", "pod-3", "/run/netns/3"))
    assert time.monotonic() - began < 1.0
    waiting.join()


def test_who_waits_for_a_claims_device_does_not_read_the_ledger_again_and_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a mass deletion a claim waits for each device of the node, and the runtime's hook needs the lock, too."""
    looks: list[str] = []
    real = Ledger.entries

    def entries(ledger: Ledger, mentioning: str = "") -> dict[str, Entry]:
        looks.append(mentioning)
        return real(ledger, mentioning)

    monkeypatch.setattr(Ledger, "entries", entries)
    world.prepared(1, "pair-0")
    world.api.put(claim(2, "pair-0"))
    looks.clear()
    with pytest.raises(ClaimError, match="still held by"):
        world.state.prepare(ref(2), patience=2)
    assert looks == [""], "once"


@pytest.mark.parametrize("change", ["given back", "given another device"])
def test_it_looks_as_soon_as_the_record_of_that_claim_has_changed(world: World, change: str) -> None:
    """By another instance of the driver, which tells nobody."""
    world.prepared(1, "pair-0")
    world.api.put(claim(2, "pair-0"))
    with ThreadPoolExecutor(1) as workers:
        waiting = workers.submit(world.state.prepare, ref(2), 20)
        while not world.state._preparing:
            pass
        began = time.monotonic()
        other = state(world.root, world.api)
        if change == "given back":
            other.unprepare(ref(1))
        else:
            world.api.put(claim(1, "pair-1"))
            other.prepare(ref(1), patience=0)
        waiting.result(20)
    assert time.monotonic() - began < 2


def test_error_after_the_wait_says_how_long(world: World) -> None:
    world.prepared(1, "pair-0")
    world.api.put(claim(2, "pair-0"))
    began = time.monotonic()
    with pytest.raises(ClaimError, match="Waited"):
        world.state.prepare(ref(2), patience=0.5)
    assert 0.4 < time.monotonic() - began < 3


def test_of_two_claims_for_one_device_exactly_one_is_prepared(world: World) -> None:
    world.api.put(*(claim(n, "pair-0", pods=(f"pod-{n}",)) for n in range(1, 9)))
    outcomes: list[bool] = []

    def prepare(number: int) -> None:
        try:
            state(world.root, world.api).prepare(ref(number), patience=0)
            outcomes.append(True)
        except ClaimError:
            outcomes.append(False)

    threads = [threading.Thread(target=prepare, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False] * 7 + [True]


def _swallow(what: Any) -> None:
    try:
        what()
    except RailmateError:
        pass


def test_a_record_that_has_changed_before_the_wait_begins_is_not_waited_for(world: World) -> None:
    """Between the look, under the ledger's lock, and the wait another instance may have had the lock."""
    world.prepared(1, "pair-0")
    seen = world.ledger.mark(uid(1))
    world.state.attach(sandbox())
    began = time.monotonic()
    assert Waiting(world.ledger).pause(Holder(uid(1), seen), began + 20, threading.Event())
    assert time.monotonic() - began < 1
