"""Attached claims are looked at in a thread of their own and told once, and containers wait for that, not for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

import railmate.node.attached as module
from railmate.attach.rdmamodel import Gid, RdmaDeviceRef, SeenNic
from railmate.claims.records import Attachment, ClaimRef, Entry, PreparedDevice, PreparedNic, Seen
from railmate.claims.surroundings import ClaimObserver
from railmate.errors import RailmateError
from railmate.node.attached import AttachedClaims
from unit.claims.claims_world import ref, uid

PENDING = SeenNic("0000:0c:00.1", "net1", ("10.9.0.1/24",), "mlx5_2", "Ethernet", "ACTIVE")
SETTLED = replace(PENDING, gid=Gid(3, "0000:0000:0000:0000:0000:ffff:0a09:0001", "RoCE v2", "net1"))
LINK_LOCAL = replace(PENDING, gid=Gid(1, "fe80:0000:0000:0000:0000:00ff:fe00:0102", "RoCE v2", "net1"))


def entry(number: int = 1, seen: SeenNic | None = None) -> Entry:
    nic = PreparedNic("0000:0c:00.1", "net1", rdma=(RdmaDeviceRef("mlx5_2"),))
    at = Attachment("s1", "pod-1", "team/p", "/run/netns/1", True)
    device = PreparedDevice("main", "node1", "vf-0", (), (nic,))
    return Entry(ref(number), ("pod-1",), (device,), "boot", None, at, Seen("s1", (seen,)) if seen else None)


class Observed:
    """Answers each look at a claim with the next of its views; the last one stays."""

    def __init__(self) -> None:
        self.views: dict[str, list[SeenNic | Exception | None]] = {}
        self.looks: list[str] = []
        self.known: dict[str, Entry] = {}
        self.noted: list[Entry] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def observe(self, claim: str) -> Entry | None:
        assert self.go_on.wait(10)
        self.looks.append(claim)
        views = self.views[claim]
        view = views.pop(0) if len(views) > 1 else views[0]
        if isinstance(view, Exception):
            raise view
        if view is None:
            return None
        number = int(claim[-12:])
        self.known[claim] = entry(number, view)
        return self.known[claim]

    def note_told(self, one: Entry) -> None:
        self.noted.append(one)

    def get(self, claim: str) -> Entry | None:
        return self.known.get(claim)


class Told(ClaimObserver):
    def __init__(self) -> None:
        self.attached_entries: list[Entry] = []
        self.released_claims: list[ClaimRef] = []
        self.news = threading.Condition()

    def attached(self, entry: Entry) -> None:
        with self.news:
            self.attached_entries.append(entry)
            self.news.notify_all()

    def released(self, claim: ClaimRef) -> None:
        self.released_claims.append(claim)

    def wait(self, count: int = 1) -> list[Entry]:
        with self.news:
            assert self.news.wait_for(lambda: len(self.attached_entries) >= count, 10)
            return self.attached_entries


@pytest.fixture
def observed() -> Observed:
    return Observed()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def claims(observed: Observed, told: Told, monkeypatch: pytest.MonkeyPatch) -> Iterator[AttachedClaims]:
    monkeypatch.setattr(module, "_PAUSES", (0.0, 0.01, 0.01))
    found = AttachedClaims(observed, observed, told)  # type: ignore[arg-type]
    thread = threading.Thread(target=found.run, daemon=True)
    thread.start()
    yield found
    found.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_claim_is_told_once_with_what_its_pod_sees(
    claims: AttachedClaims, observed: Observed, told: Told
) -> None:
    observed.views[uid(1)] = [SETTLED]
    claims.attached(entry())
    (one,) = told.wait()
    assert one.seen == Seen("s1", (SETTLED,))
    assert observed.looks == [uid(1)]


@pytest.mark.parametrize("first", [PENDING, LINK_LOCAL])
def test_gid_that_comes_late_is_waited_for(
    claims: AttachedClaims, observed: Observed, told: Told, first: SeenNic
) -> None:
    observed.views[uid(1)] = [first, SETTLED]
    claims.attached(entry())
    (one,) = told.wait()
    assert one.seen == Seen("s1", (SETTLED,))


def test_gid_that_never_comes_is_told_after_a_while(
    claims: AttachedClaims, observed: Observed, told: Told
) -> None:
    observed.views[uid(1)] = [PENDING]
    claims.attached(entry())
    told.wait()
    assert len(observed.looks) == 3


def test_claim_that_waits_holds_no_other_up(
    claims: AttachedClaims, observed: Observed, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSES", (0.0, 3600.0))
    observed.views = {uid(1): [PENDING], uid(2): [SETTLED]}
    claims.attached(entry(1))
    claims.attached(entry(2))
    assert [one.claim.uid for one in told.wait()] == [uid(2)]


def test_pod_that_cannot_be_looked_at_is_attached_all_the_same(
    claims: AttachedClaims, observed: Observed, told: Told
) -> None:
    observed.views[uid(1)] = [RailmateError("the namespace has ended")]
    observed.known[uid(1)] = entry()
    claims.attached(entry())
    (one,) = told.wait()
    assert one.seen is None


def test_claim_that_was_detached_meanwhile_is_not_told(
    claims: AttachedClaims, observed: Observed, told: Told
) -> None:
    observed.views = {uid(1): [None], uid(2): [SETTLED]}
    claims.attached(entry(1))
    claims.attached(entry(2))
    assert [one.claim.uid for one in told.wait()] == [uid(2)]


def test_container_gets_what_was_seen(claims: AttachedClaims, observed: Observed) -> None:
    observed.views[uid(1)] = [PENDING, SETTLED]
    claims.attached(entry())
    (one,) = claims.entries([uid(1)], patience=10)
    assert one.seen == Seen("s1", (SETTLED,))


def test_container_does_not_wait_for_long(claims: AttachedClaims, observed: Observed) -> None:
    observed.views[uid(1)] = [SETTLED]
    observed.known[uid(1)] = entry()
    observed.go_on.clear()
    claims.attached(entry())
    start = time.monotonic()
    (one,) = claims.entries([uid(1)], patience=0.05)
    assert time.monotonic() - start < 5
    assert one.seen is None
    observed.go_on.set()


def test_container_of_a_claim_long_attached_does_not_wait(claims: AttachedClaims, observed: Observed) -> None:
    observed.known[uid(1)] = entry(1, SETTLED)
    assert claims.entries([uid(1), uid(7)], patience=3600) == [observed.known[uid(1)]]


def test_released_claim_is_looked_at_no_more(
    claims: AttachedClaims, observed: Observed, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed.go_on.clear()
    observed.views = {uid(1): [SETTLED], uid(2): [SETTLED]}
    claims.attached(entry(1))
    claims.released(ref(1))
    claims.attached(entry(2))
    observed.go_on.set()
    assert [one.claim.uid for one in told.wait()] == [uid(2)]
    assert told.released_claims == [ref(1)]


@pytest.mark.parametrize(
    ("seen", "told_before", "looked_at"),
    [(None, None, True), (SETTLED, False, True), (SETTLED, True, False), (SETTLED, None, False)],
    ids=["not looked at", "not told", "told", "by a railmate that did not say"],
)
def test_what_an_earlier_process_did_not_come_to_is_done(
    claims: AttachedClaims,
    observed: Observed,
    told: Told,
    seen: SeenNic | None,
    told_before: bool | None,
    looked_at: bool,
) -> None:
    observed.views = {uid(1): [SETTLED], uid(2): [SETTLED]}
    one = entry(1, seen)
    if one.seen is not None:
        one = replace(one, seen=replace(one.seen, told=told_before))
    claims.catch_up([one, replace(entry(1), attachment=None)])
    claims.attached(entry(2))
    told.wait(2 if looked_at else 1)
    assert (uid(1) in observed.looks) is looked_at


# --- another instance beside this one (rolling update)
def untold(number: int = 1, sandbox: str = "s1") -> Entry:
    one = entry(number, SETTLED)
    assert one.seen is not None
    assert one.attachment is not None
    return replace(
        one,
        attachment=replace(one.attachment, sandbox=sandbox),
        seen=replace(one.seen, sandbox=sandbox, told=False),
    )


def told_now(one: Entry) -> Entry:
    assert one.seen is not None
    return replace(one, seen=replace(one.seen, told=True))


def test_what_the_other_instance_ended_over_is_told_by_this_one(
    claims: AttachedClaims, observed: Observed, told: Told
) -> None:
    observed.views = {uid(1): [SETTLED], uid(2): [SETTLED]}
    claims.take_over([untold(1), untold(2)])
    claims.take_over([untold(1), told_now(untold(2))])
    assert [one.claim.uid for one in told.wait(1)] == [uid(1)]
    assert observed.looks == [uid(1)]


@pytest.mark.parametrize(
    "later",
    [[], [told_now(untold())], [untold(sandbox="s2")]],
    ids=["released", "told", "in another sandbox since"],
)
def test_what_the_other_instance_is_about_to_tell_is_left_to_it(
    claims: AttachedClaims, observed: Observed, told: Told, later: list[Entry]
) -> None:
    observed.views = {uid(1): [SETTLED], uid(2): [SETTLED]}
    claims.take_over([untold()])
    claims.take_over(later)
    claims.attached(entry(2))
    told.wait(1)
    assert observed.looks == [uid(2)]


def test_what_waits_to_be_told_again_is_taken_over_by_nobody(
    claims: AttachedClaims, observed: Observed, told: Told
) -> None:
    observed.views = {uid(1): [SETTLED], uid(2): [SETTLED]}
    claims.told(untold(), False)
    for _ in range(3):
        claims.take_over([untold()])
    claims.attached(entry(2))
    told.wait(1)
    assert observed.looks == [uid(2)]


def test_report_that_was_sent_is_remembered(claims: AttachedClaims, observed: Observed) -> None:
    claims.told(entry(1, SETTLED), True)
    assert observed.noted == [entry(1, SETTLED)]


def test_report_that_was_given_up_is_made_again_when_it_is_time(
    claims: AttachedClaims, observed: Observed, told: Told
) -> None:
    observed.views = {uid(1): [SETTLED], uid(2): [SETTLED], uid(3): [SETTLED]}
    claims.told(entry(1, SETTLED), False)
    claims.told(entry(3, SETTLED), False)
    claims.released(ref(3))
    claims.retry()
    told.wait(1)
    claims.retry()
    claims.attached(entry(2))
    assert [one.claim.uid for one in told.wait(2)] == [uid(1), uid(2)], "once, and of no released claim"
    assert observed.noted == []
