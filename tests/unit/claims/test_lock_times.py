"""How long the ledger's locks have been asked for or held: what tells that a driver is stuck."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from claims_world import uid

from railmate.claims.ledger import Ledger

PAUSE = threading.Event()


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


@contextmanager
def elsewhere(lock: AbstractContextManager[None], wait: bool = True) -> Iterator[threading.Event]:
    """Another thread asks for the lock, and holds it until it is told, or the end."""
    has, end = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            has.set()
            end.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert not wait or has.wait(10)
        yield end
    finally:
        end.set()
        thread.join(10)
        assert not thread.is_alive()


def test_nobody_has_a_lock_at_first(ledger: Ledger) -> None:
    assert ledger.busy_for() < 0.1
    assert ledger.leasing_for() < 0.1


def test_claims_lock_that_is_held_grows_old_until_it_is_given_back(ledger: Ledger) -> None:
    with elsewhere(ledger.leasing(uid(1))):
        with ledger.leasing(uid(2)):
            PAUSE.wait(0.2)
        assert ledger.leasing_for() >= 0.2, "the other one ended"
        assert ledger.busy_for() < 0.1, "it is no use of the ledger's own lock"
    assert ledger.leasing_for() < 0.1


def test_who_only_waits_for_a_claims_lock_of_another_instance_is_not_stuck_himself(ledger: Ledger) -> None:
    other = Ledger(ledger.plugin_dir)
    with elsewhere(other.leasing(uid(1))) as end, elsewhere(ledger.leasing(uid(1)), wait=False):
        PAUSE.wait(0.3)
        assert other.leasing_for() >= 0.3
        assert ledger.leasing_for() < 0.1
        end.set()


def test_ledgers_lock_that_is_waited_for_grows_old(ledger: Ledger) -> None:
    other = Ledger(ledger.plugin_dir)
    with elsewhere(other.locked()) as end, elsewhere(ledger.locked(), wait=False):
        PAUSE.wait(0.3)
        assert ledger.busy_for() >= 0.2
        end.set()
    assert ledger.busy_for() < 0.1
