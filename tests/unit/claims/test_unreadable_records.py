"""Records that cannot be read here: of a newer railmate after a rollback, or on a bad block of the disk."""

from __future__ import annotations

import errno
import json
from collections import Counter
from pathlib import Path

import pytest
from claims_netdevs import World
from claims_world import BOOT, DRIVER, PF, VFS, claim, ref, sandbox, uid
from test_reconcile import new_process

from railmate.attach.errors import AttachError
from railmate.claims.holdings import Holdings
from railmate.claims.ledger import Ledger
from railmate.claims.records import NewerRecordError
from railmate.errors import RailmateError


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


@pytest.fixture
def bad_block(world: World, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Files, by name, that the disk no longer gives out."""
    names: set[str] = set()
    real = Path.read_bytes

    def read(path: Path) -> bytes:
        if path.name in names:
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    return names


def test_the_rest_of_the_node_goes_on(world: World, bad_block: set[str]) -> None:
    world.prepared(1, "vf-0")
    world.api.put(claim(2, "vf-1", pods=("pod-2",)))
    bad_block |= {f"{uid(1)}.json", f"{uid(1)}.prepared"}
    assert world.state.prepare(ref(2), patience=0).devices
    assert [device.name for device in Holdings(world.ledger, BOOT).now().devices] == ["vf-1"]


def test_the_second_copy_stands_in(world: World, bad_block: set[str]) -> None:
    world.prepared(1, "vf-0")
    bad_block.add(f"{uid(1)}.json")
    assert [device.name for device in Holdings(world.ledger, BOOT).now().devices] == ["vf-0"]
    world.state.attach(sandbox())  # writes the record anew
    bad_block.clear()
    entry = world.ledger.get(uid(1))
    assert entry is not None
    assert entry.attached_to("sandbox-1")
    world.state.unprepare(ref())
    assert world.clean()


def test_without_a_copy_people_are_told_once_and_its_files_are_kept(
    world: World, bad_block: set[str]
) -> None:
    world.prepared(1, "vf-0")
    before = files_of(world)
    bad_block |= {f"{uid(1)}.json", f"{uid(1)}.prepared"}
    told: list[str] = []
    ledger = Ledger(world.root / "plugins" / DRIVER, told.append)
    assert ledger.entries() == ledger.entries() == {}
    (message,) = told
    assert uid(1) in message
    assert "Input/output error" in message
    assert "delete its pod" in message
    new_process(world, Counter()).run()
    bad_block.clear()
    assert files_of(world) == before


def test_its_own_prepare_and_unprepare_name_the_file(world: World, bad_block: set[str]) -> None:
    world.prepared(1, "vf-0")
    bad_block |= {f"{uid(1)}.json", f"{uid(1)}.prepared"}
    for verb in (world.state.prepare, world.state.unprepare):
        with pytest.raises(RailmateError, match=rf"{uid(1)}.json cannot be read.*Input/output error"):
            verb(ref())


def test_no_vf_is_made_or_ended_while_it_may_be_in_a_pod_that_nobody_knows_of(
    world: World, bad_block: set[str]
) -> None:
    world.prepared(1, "vf-0")
    bad_block |= {f"{uid(1)}.json", f"{uid(1)}.prepared"}
    holdings = Holdings(world.ledger, BOOT)
    with pytest.raises(AttachError, match=uid(1)), holdings.kept_from_claims(PF):
        pass
    bad_block.clear()
    with holdings.kept_from_claims(PF) as held:
        assert held == {VFS[0]}


def test_out_of_descriptors_nobody_is_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """That passes, and all records are whole: prepare is not to give out what they hold."""
    world.prepared(1, "vf-0")

    def read(path: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_bytes", read)
    with pytest.raises(RailmateError, match="Too many open files"):
        world.ledger.entries()
