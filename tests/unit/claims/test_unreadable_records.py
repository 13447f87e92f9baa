"""Records that cannot be read here: of a newer railmate after a rollback."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from claims_netdevs import World
from claims_world import DRIVER, ref, sandbox, uid
from test_reconcile import new_process

from railmate.claims.records import NewerRecordError


def record(world: World, number: int = 1) -> Path:
    return world.root / "plugins" / DRIVER / "claims" / f"{uid(number)}.json"


def files_of(world: World, number: int = 1) -> dict[Path, bytes]:
    """All that the claim's running pod, and who knows its record, need."""
    return {
        path: path.read_bytes()
        for path in world.root.rglob("*")
        if path.is_file() and uid(number) in str(path) and path != record(world, number)
    }


@pytest.fixture
def newer(world: World) -> World:
    """A claim in a running pod, whose record a newer railmate has written before the rollback."""
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    path = record(world)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 3}))
    return world


def test_what_a_newer_railmates_claim_needs_is_left_alone(newer: World) -> None:
    before = files_of(newer)
    assert {path.name for path in before} >= {f"{DRIVER}-claim-{uid(1)}.json", "metadata.json"}
    repaired: Counter[str] = Counter()
    new_process(newer, repaired).run()
    assert files_of(newer) == before
    assert newer.gates == [f"{uid(1)}.sandbox-1"]
    assert repaired == Counter()


def test_a_newer_railmates_record_is_not_written_over(newer: World) -> None:
    before = record(newer).read_bytes()
    with pytest.raises(NewerRecordError, match="Run that railmate"):
        newer.state.prepare(ref(), patience=0)
    assert record(newer).read_bytes() == before
