"""/healthz says what only a restart mends, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import railmate.node.agent as module
from railmate.errors import RailmateError
from railmate.node.agent import Agent


class Probed:
    """A stand-in for our own service: answers, or does not."""

    def __init__(self) -> None:
        self.error: RailmateError | None = None
        self.asked: list[Path] = []

    async def __call__(self, socket: Path) -> None:
        self.asked.append(socket)
        if self.error:
            raise self.error


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Probed:
    found = Probed()
    monkeypatch.setattr(module, "probe", found)
    return found


@pytest.fixture
def agent() -> Iterator[Any]:
    """An agent with one thread that lives and a ledger that nobody waits for; nothing else of it is needed."""
    ending = threading.Event()
    thread = threading.Thread(target=ending.wait, name="slices", daemon=True)
    thread.start()
    found: Any = Agent.__new__(Agent)
    found._threads = [thread]
    found._ledger = SimpleNamespace(busy_for=lambda: 0.0, leasing_for=lambda: 0.0)
    found._kubelet = SimpleNamespace(stuck_for=dict)
    found._paths = SimpleNamespace(service=Path("/plugins/dra.sock"))
    yield found
    ending.set()
    thread.join()


def dead(agent: Any) -> list[str]:
    return asyncio.run(agent._dead())


def test_all_is_well_when_the_service_answers_and_all_threads_live(agent: Any, probed: Probed) -> None:
    assert dead(agent) == []
    assert probed.asked == [Path("/plugins/dra.sock")], "it goes the kubelet's way"


def test_service_that_does_not_answer_is_told(agent: Any, probed: Probed) -> None:
    probed.error = RailmateError("the service on /plugins/dra.sock does not answer")
    assert dead(agent) == ["the service on /plugins/dra.sock does not answer"]


def test_thread_that_has_ended_is_named(agent: Any, probed: Probed) -> None:
    ended = threading.Thread(target=lambda: None, name="machine")
    ended.start()
    ended.join()
    agent._threads.append(ended)
    assert dead(agent) == ["thread machine has ended"]


@pytest.mark.parametrize(("seconds", "stuck"), [(0.0, False), (module._LOCK_PATIENCE + 1, True)])
def test_ledger_that_stays_locked_is_told(agent: Any, probed: Probed, seconds: float, stuck: bool) -> None:
    agent._ledger.busy_for = lambda: seconds
    assert any("ledger" in sentence for sentence in dead(agent)) == stuck


@pytest.mark.parametrize(("seconds", "stuck"), [(20.0, False), (module._LEASE_PATIENCE + 1, True)])
def test_claim_whose_addresses_or_functions_never_get_done_is_told(
    agent: Any, probed: Probed, seconds: float, stuck: bool
) -> None:
    agent._ledger.leasing_for = lambda: seconds
    assert any("addresses or functions" in sentence for sentence in dead(agent)) == stuck


@pytest.mark.parametrize(("seconds", "stuck"), [(30.0, False), (module._WORKERS_PATIENCE + 1, True)])
@pytest.mark.parametrize("verb", ["prepare", "unprepare"])
def test_threads_that_are_all_stuck_are_told(
    agent: Any, probed: Probed, verb: str, seconds: float, stuck: bool
) -> None:
    agent._kubelet.stuck_for = lambda: {verb: seconds}
    assert any(f"no {verb} has begun" in sentence for sentence in dead(agent)) == stuck


def test_everything_that_is_wrong_is_told_at_once(agent: Any, probed: Probed) -> None:
    probed.error = RailmateError("no answer")
    agent._ledger.busy_for = lambda: 10_000.0
    assert len(dead(agent)) == 2
