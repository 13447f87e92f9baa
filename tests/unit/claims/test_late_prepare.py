"""A prepare that the kubelet has given up on must not land after the unprepare: nobody would ever give it back."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from claims_netdevs import World
from claims_world import claim, ref, uid

from railmate.claims.plan import ClaimError

PATIENCE = 20.0


def test_prepare_that_waits_for_a_device_ends_when_its_claim_is_given_back(world: World) -> None:
    world.prepared(1, "pair-0")
    world.api.put(claim(2, "pair-0", pods=("pod-2",)))
    with ThreadPoolExecutor(1) as workers:
        late = workers.submit(world.state.prepare, ref(2), PATIENCE)
        while not world.state._preparing:
            pass
        world.state.unprepare(ref(2))
        world.state.unprepare(ref(1))  # what it waited for
        with pytest.raises(ClaimError, match="given back while it was being prepared"):
            late.result(PATIENCE)
    assert world.ledger.entries() == {}


@pytest.mark.parametrize("first", ["prepare", "unprepare"])
def test_whoever_gets_the_lock_first_nothing_stays(world: World, first: str) -> None:
    """Both wait for the ledger's lock, which another instance holds."""
    world.api.put(claim(1, "pair-0"))
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with world.ledger.locked():
            entered.set()
            leave.wait(PATIENCE)

    holder = threading.Thread(target=hold)
    holder.start()
    assert entered.wait(PATIENCE)
    with ThreadPoolExecutor(2) as workers:
        late = workers.submit(world.state.prepare, ref(1), 0)
        while not world.state._preparing:
            pass
        if first == "prepare":
            leave.set()
            late.exception(PATIENCE)
            world.state.unprepare(ref(1))
        else:
            given_back = workers.submit(world.state.unprepare, ref(1))
            leave.set()
            given_back.result(PATIENCE)
            late.exception(PATIENCE)
    holder.join(PATIENCE)
    assert world.ledger.entries() == {}
    assert not list((world.root / "cdi").iterdir())


def test_claim_that_was_given_back_is_prepared_when_it_is_asked_for_again(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.unprepare(ref(1))
    world.state.prepare(ref(1), patience=0)
    assert set(world.ledger.entries()) == {uid(1)}
    assert not world.state._preparing
