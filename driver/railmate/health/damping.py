"""Makes a steady answer of one that changes all the time. Pure: a verdict and a time in, a state out.

An unhealthy function is shown at once. It is shown as well again only after some calm, and after a long one when it
fell often: each change of a taint is a write to the API, and a pod placed between two falls is lost work.
"""

from __future__ import annotations

from dataclasses import dataclass

from railmate.health.model import Health, Reason, Verdict


@dataclass(frozen=True, slots=True)
class Damping:
    """All but ``falls`` in seconds.

    ``settle``: how long a function must be well before it is shown so.
    ``falls`` within ``window`` make it flapping: it is then shown unhealthy until ``hold`` passed without another.
    """

    settle: float = 10.0
    falls: int = 3
    window: float = 120.0
    hold: float = 300.0

    def __post_init__(self) -> None:
        if self.falls < 1 or min(self.settle, self.window, self.hold) < 0:
            raise ValueError(f"{self}: falls must be at least 1, times must not be negative")


@dataclass(frozen=True, slots=True)
class Damped:
    """``shown`` is the answer; the rest is what the next one needs."""

    shown: Verdict
    raw: Verdict
    well_since: float | None = None
    falls: tuple[float, ...] = ()  # times, those within the window
    held_until: float | None = None
    link_downs: int | None = None


def damp(
    before: Damped | None, raw: Verdict, now: float, rule: Damping, link_downs: int | None = None
) -> Damped:
    """The next state. ``now``: seconds on a clock that never goes back. ``link_downs``: the kernel's count, which
    also knows the falls between two looks; None where there is none.

    The first look is shown as it is.
    """
    if before is None:
        return Damped(raw, raw, None if raw.ill else now, link_downs=link_downs)
    fell = _falls(before, raw, link_downs)
    falls = tuple(time for time in before.falls if now - time <= rule.window)
    falls = (falls + (now,) * min(fell, rule.falls))[-rule.falls :]
    held_until = before.held_until
    if held_until is not None and now >= held_until:
        held_until = None
    if fell and (len(falls) >= rule.falls or held_until is not None):
        held_until = now + rule.hold
    well_since = None if raw.ill else before.well_since if before.well_since is not None and not fell else now
    return Damped(
        shown=_shown(before.shown, raw, held_until, well_since, now, rule),
        raw=raw,
        well_since=well_since,
        falls=falls,
        held_until=held_until,
        link_downs=before.link_downs if link_downs is None else link_downs,
    )


def _falls(before: Damped, raw: Verdict, link_downs: int | None) -> int:
    """The larger of what was seen and what was counted: most falls are both. A count that went back began anew."""
    seen = int(raw.ill and not before.raw.ill)
    if link_downs is None or before.link_downs is None:
        return seen
    return max(seen, link_downs - before.link_downs)


def _shown(
    shown: Verdict,
    raw: Verdict,
    held_until: float | None,
    well_since: float | None,
    now: float,
    rule: Damping,
) -> Verdict:
    calm = well_since is not None and now - well_since >= rule.settle
    if not raw.ill and held_until is None and (not shown.ill or calm):
        return raw
    # Until it is shown well again its reason changes for the worse only: a taint must not change back and forth.
    reasons = [one.reason for one in (shown, raw) if one.reason is not None]
    messages = [raw.message] if raw.message else []
    if held_until is not None:
        reasons.append(Reason.FLAPPING)
        messages.append(
            f"It fell {rule.falls} times or more within {rule.window:g} s, and counts as unhealthy until it did not "
            f"fall for {rule.hold:g} s."
        )
    elif not raw.ill:
        messages.append(f"It is well again, and counts as such after {rule.settle:g} s.")
    reason = max(reasons, key=lambda one: one.severity)
    return Verdict(Health.UNHEALTHY, reason, " ".join(messages))
