"""A prepare that the kubelet has given up on must not land after the unprepare: nobody would ever give it back."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from claims_netdevs import World
from claims_world import BOOT, PF, VFS, claim, ref, share, uid

from railmate.claims.allocation import ClaimError
from railmate.claims.holdings import Holdings
from railmate.claims.ledger import Ledger
from railmate.kube.errors import ApiError

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


# --- VFs that are made anew meanwhile, by whichever instance
def test_a_claim_that_is_there_before_the_vfs_are_made_anew_is_seen_by_who_makes_them(world: World) -> None:
    world.prepared(1, "vf-0")
    other = Holdings(Ledger(world.ledger.plugin_dir), BOOT)
    with other.kept_from_claims(PF) as held:
        assert held == {VFS[0]}


@pytest.mark.parametrize("device", ["vf-0", "pair-0", "port", share(1)])
def test_prepare_waits_while_the_vfs_of_its_physical_function_are_made(world: World, device: object) -> None:
    world.netdevs.where[PF] = ("host", "enp12s0np0")
    world.api.put(claim(1, device))  # type: ignore[arg-type]
    world.prepared(2, "gpu-1", pods=("pod-2",))
    other = Holdings(Ledger(world.ledger.plugin_dir), BOOT)
    with ThreadPoolExecutor(1) as workers:
        with other.kept_from_claims(PF):
            with pytest.raises(ClaimError, match=f"the VFs of {PF} are being made"):
                world.state.prepare(ref(1), patience=0)
            waiting = workers.submit(world.state.prepare, ref(1), PATIENCE)
            while not world.state._preparing:
                pass
            world.prepared(3, "gpu-0", pods=("pod-3",))  # what has nothing of it does not wait
            assert not waiting.done()
            assert uid(1) not in world.ledger.entries()
            world.state.unprepare(ref(3))
        assert waiting.result(PATIENCE).devices
    assert uid(1) in world.ledger.entries()


def test_who_makes_vfs_waits_for_a_claim_that_is_being_written_and_sees_it(world: World) -> None:
    """Prepare asks, and writes its claim, under the ledger's lock; who reserves afterwards reads under it."""
    world.api.put(claim(1, "vf-0"))
    other = Holdings(Ledger(world.ledger.plugin_dir), BOOT)
    asked, go_on = threading.Event(), threading.Event()
    is_reserved = world.ledger.is_reserved
    found: list[frozenset[str]] = []

    def slowly(function: str) -> bool:
        answer = is_reserved(function)
        asked.set()
        assert go_on.wait(PATIENCE)
        return answer

    def make_vfs() -> None:
        with other.kept_from_claims(PF) as held:
            found.append(held)

    world.state._ledger.is_reserved = slowly  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as workers:
        prepared = workers.submit(world.state.prepare, ref(1), PATIENCE)
        assert asked.wait(PATIENCE)
        making = workers.submit(make_vfs)
        while not is_reserved(PF):
            pass
        assert found == []
        go_on.set()
        prepared.result(PATIENCE)
        making.result(PATIENCE)
    assert found == [{VFS[0]}]


# --- an API server that restarts, or is overloaded
@pytest.mark.parametrize("status", [0, 429, 500, 503])
def test_an_api_server_that_does_not_answer_for_a_moment_costs_the_pod_no_minute(
    world: World, status: int
) -> None:
    world.api.put(claim(1, "pair-0"))
    world.api.errors = [ApiError("not now", status)] * 2
    assert world.state.prepare(ref(1), PATIENCE).devices
    assert world.api.gets == 3


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_it_refuses_for_good_is_told_at_once(world: World, status: int) -> None:
    world.api.errors = [ApiError("no", status)]
    with pytest.raises(ApiError, match="no"):
        world.state.prepare(ref(1), PATIENCE)
    assert world.api.gets == 1


def test_one_that_stays_away_is_told_when_the_patience_is_over(world: World) -> None:
    world.api.errors = [ApiError("not reachable")] * 100
    began = time.monotonic()
    with pytest.raises(ApiError, match="not reachable"):
        world.state.prepare(ref(1), 1.0)
    assert time.monotonic() - began < 2
    assert 2 <= world.api.gets <= 4


def test_who_waits_for_it_ends_with_its_call(world: World) -> None:
    world.api.errors = [ApiError("not reachable")] * 100
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(ClaimError, match="given up"):
        world.state.prepare(ref(1), PATIENCE, given_up=given_up)
    assert world.api.gets == 1


def test_who_waits_for_it_is_told_at_once_when_the_instance_ends(world: World) -> None:
    """The pauses between its tries grow to seconds by then."""
    world.api.errors = [ApiError("not reachable")] * 100
    with ThreadPoolExecutor(1) as workers:
        late = workers.submit(world.state.prepare, ref(1), PATIENCE)
        while world.api.gets < 3:  # after the third comes a second's pause
            time.sleep(0.01)
        began = time.monotonic()
        world.state.stop()
        with pytest.raises(ApiError, match="not reachable"):
            late.result(PATIENCE)
        assert time.monotonic() - began < 0.5
