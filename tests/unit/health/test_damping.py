"""A function that changes all the time gets a steady answer; one that is broken for good gets a quick one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railmate.health.damping import Damped, Damping, damp
from railmate.health.model import HEALTHY, Health, Reason, Verdict

DOWN = Verdict(Health.UNHEALTHY, Reason.LINK_DOWN, "has no carrier.")
SLOW = Verdict(Health.UNHEALTHY, Reason.PCIE_LINK_DEGRADED, "is slow.")
GONE = Verdict(Health.UNHEALTHY, Reason.GONE, "is gone.")
UNKNOWN = Verdict(Health.UNKNOWN, None, "cannot be seen.")
RULE = Damping(settle=10, falls=3, window=120, hold=300)


def run(looks: Sequence[tuple[float, Verdict]], rule: Damping = RULE) -> list[Damped]:
    """The states after looks at (time, verdict)."""
    states: list[Damped] = []
    for now, raw in looks:
        states.append(damp(states[-1] if states else None, raw, now, rule))
    return states


def every(seconds: float, start: float, end: float, raw: Verdict) -> list[tuple[float, Verdict]]:
    return [(start + i * seconds, raw) for i in range(int((end - start) / seconds))]


@pytest.mark.parametrize("raw", [HEALTHY, DOWN, UNKNOWN])
def test_first_look_is_shown_as_it_is(raw: Verdict) -> None:
    assert damp(None, raw, 0, RULE).shown == raw


def test_fault_is_shown_at_once_and_its_end_after_some_calm() -> None:
    states = run([(0, HEALTHY), (5, DOWN), (10, HEALTHY), (15, HEALTHY), (19.9, HEALTHY), (20, HEALTHY)])
    assert [state.shown.ill for state in states] == [False, True, True, True, True, False]
    assert states[1].shown == DOWN
    assert states[2].shown.reason is Reason.LINK_DOWN
    assert "well again" in states[2].shown.message
    assert states[-1].shown == HEALTHY


def test_another_fall_starts_the_calm_anew() -> None:
    states = run(
        [(0, HEALTHY), (5, DOWN), (10, HEALTHY), (15, DOWN), (20, HEALTHY), (25, HEALTHY), (30, HEALTHY)]
    )
    assert [state.shown.ill for state in states] == [False, True, True, True, True, True, False]


def test_third_fall_within_the_window_holds() -> None:
    looks = [(0.0, HEALTHY)]
    for fall in (10.0, 40.0, 70.0):
        looks += [(fall, DOWN), (fall + 5, HEALTHY)]
    looks += every(5, 80, 400, HEALTHY)
    states = run(looks)
    assert [state.shown.ill for (now, _), state in zip(looks, states, strict=True) if 70 <= now < 370] == [
        True
    ] * sum(70 <= now < 370 for now, _ in looks)
    assert states[5].shown.reason is Reason.FLAPPING
    assert not next(s for (now, _), s in zip(looks, states, strict=True) if now >= 370).shown.ill


def test_falls_further_apart_than_the_window_do_not_hold() -> None:
    looks = [(0.0, HEALTHY)]
    for fall in (10.0, 100.0, 190.0, 280.0):
        looks += [(fall, DOWN), (fall + 5, HEALTHY), (fall + 15, HEALTHY)]
    assert not run(looks)[-1].shown.ill


def test_any_fall_while_held_lengthens_the_hold() -> None:
    looks = [(0.0, HEALTHY)]
    for fall in (10.0, 20.0, 30.0, 300.0):
        looks += [(fall, DOWN), (fall + 5, HEALTHY)]
    looks += [(335.0, HEALTHY), (599.0, HEALTHY), (600.0, HEALTHY)]
    assert [state.shown.ill for state in run(looks)[-3:]] == [True, True, False]


def test_falls_between_two_looks_are_counted_by_the_kernel() -> None:
    state = damp(None, HEALTHY, 0, RULE, link_downs=4)
    state = damp(state, HEALTHY, 5, RULE, link_downs=5)
    assert not state.shown.ill  # one alone is no reason
    state = damp(state, HEALTHY, 10, RULE, link_downs=7)
    assert state.shown.reason is Reason.FLAPPING


def test_fall_that_is_seen_and_counted_is_one() -> None:
    state = damp(None, HEALTHY, 0, RULE, link_downs=0)
    for number in (1, 2):
        state = damp(state, DOWN, number * 20, RULE, link_downs=number)
        state = damp(state, HEALTHY, number * 20 + 10, RULE, link_downs=number)
    assert len(state.falls) == 2
    assert state.held_until is None


@pytest.mark.parametrize("counts", [(5, 0), (5, None), (None, 900)])
def test_count_that_began_anew_or_is_new_is_no_fall(counts: tuple[int | None, int | None]) -> None:
    state = damp(damp(None, HEALTHY, 0, RULE, link_downs=counts[0]), HEALTHY, 5, RULE, link_downs=counts[1])
    assert state.falls == ()
    assert not state.shown.ill


def test_reason_gets_worse_but_not_better_until_the_device_is_well() -> None:
    looks = [(0, HEALTHY), (5, SLOW), (10, DOWN), (15, SLOW), (20, GONE), (25, DOWN)]
    assert [state.shown.reason for state in run(looks)[1:]] == [
        Reason.PCIE_LINK_DEGRADED, Reason.LINK_DOWN, Reason.LINK_DOWN, Reason.GONE, Reason.GONE,
    ]  # fmt: skip
    assert run(looks)[-1].shown.message == DOWN.message  # the message is of this moment


def test_unknown_is_shown_but_does_not_end_an_illness_early() -> None:
    states = run([(0, HEALTHY), (5, UNKNOWN), (10, DOWN), (15, UNKNOWN), (25, UNKNOWN)])
    assert [state.shown.health for state in states] == [
        Health.HEALTHY, Health.UNKNOWN, Health.UNHEALTHY, Health.UNHEALTHY, Health.UNKNOWN,
    ]  # fmt: skip


@pytest.mark.parametrize("bad", [{"falls": 0}, {"hold": -1}, {"settle": -0.1}, {"window": -5}])
def test_rule_that_makes_no_sense_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="falls"):
        Damping(**bad)  # type: ignore[arg-type]


# --- for every history
VERDICTS = st.sampled_from([HEALTHY, HEALTHY, DOWN, SLOW, GONE, UNKNOWN])
STEPS = st.lists(st.tuples(st.floats(0.1, 60), VERDICTS, st.integers(0, 2)), max_size=120)
RULES = st.builds(
    Damping,
    settle=st.floats(0, 30),
    falls=st.integers(1, 5),
    window=st.floats(0, 200),
    hold=st.floats(0, 500),
)


@settings(max_examples=400, deadline=None)
@given(STEPS, RULES)
def test_every_history_is_answered_steadily(steps: list[tuple[float, Verdict, int]], rule: Damping) -> None:
    now, downs = 0.0, 0
    state = damp(None, HEALTHY, now, rule, downs)
    well_since, falls, was_ill, held_until = 0.0, [], False, -1.0
    for step, raw, unseen in steps:
        now, downs = now + step, downs + unseen
        before, state = state, damp(state, raw, now, rule, downs)
        fell = max(int(raw.ill and not was_ill), unseen)
        was_ill = raw.ill
        falls = [time for time in falls if now - time <= rule.window] + [now] * fell
        if fell and (len(falls) >= rule.falls or (now - step < held_until and now < held_until)):
            held_until = now + rule.hold
        if raw.ill or fell:
            well_since = now
        # a fault is never hidden, and what is shown as a fault has a reason
        assert state.shown.ill or not raw.ill
        assert (state.shown.reason is not None) == state.shown.ill
        # shown well again only after the calm, and never during a hold
        if before.shown.ill and not state.shown.ill:
            assert now - well_since >= rule.settle
            assert now >= held_until
        # within one illness the reason changes for the worse only
        if before.shown.reason and state.shown.reason:
            assert state.shown.reason.severity >= before.shown.reason.severity
    # and calm long enough ends every illness
    for _ in range(2):
        now += max(rule.settle, rule.hold, rule.window) + 1
        state = damp(state, HEALTHY, now, rule, downs)
    assert state.shown == HEALTHY


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.1, 60), min_size=1, max_size=200))
def test_a_flapping_link_changes_its_answer_rarely(steps: list[float]) -> None:
    """Falls at every second look: within any hold time at most as many answers "well" as falls are allowed."""
    now, state, cleared = 0.0, damp(None, HEALTHY, 0.0, RULE), []
    for index, step in enumerate(steps):
        now += step
        before, state = state, damp(state, HEALTHY if index % 2 else DOWN, now, RULE)
        if before.shown.ill and not state.shown.ill:
            cleared.append(now)
    for start in cleared:
        assert sum(start <= time <= start + RULE.window for time in cleared) <= RULE.falls
