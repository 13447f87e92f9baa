"""Gangs as text for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from railmate.explain.gang import BatchVerdict
from railmate.explain.render import placed_json, verdict_json, verdict_text

_MOST_NODES = 8


def gang_text(verdict: BatchVerdict) -> str:
    return verdict_text(verdict.one) + "".join(f"{line}\n" for line in _lines(verdict))


def _lines(verdict: BatchVerdict) -> Iterator[str]:
    batch, seats = verdict.batch, len(verdict.seats)
    if verdict.one.stopped or not batch.count:
        return
    what = f"{batch.count} pod{'s' if batch.count > 1 else ''} of {batch.title}"
    if seats == batch.count:
        yield f"{'all' if seats > 1 else 'the'} {what} fit{'s' if seats == 1 else ''}, for example so:"
    elif batch.crowded:
        yield (
            f"a claim is for {batch.most} pods at most, and {what} share one; {seats} fit"
            + (" for certain" if seats < batch.most and verdict.by_order else "")
            + (":" if seats else "")
        )
    elif verdict.fits is None:
        why = "another order may place more" if verdict.by_order else "of more it is not certain"
        yield f"{seats} of {what} fit for certain, {why}" + (":" if seats else "")
    elif not seats:
        yield f"0 of {what} fit"
    else:
        yield f"{seats} of {what} fit:"
    yield from _places(verdict)
    if verdict.following is not None:
        yield from verdict_text(verdict.following).splitlines()


def _places(verdict: BatchVerdict) -> Iterator[str]:
    """Nodes with as many pods of the gang together."""
    by_count: dict[int, list[str]] = {}
    for node, count in Counter(seat.node for seat in verdict.seats).items():
        by_count.setdefault(count, []).append(node)
    for count, nodes in sorted(by_count.items(), reverse=True):
        more = f" and {len(nodes) - _MOST_NODES} more" if len(nodes) > _MOST_NODES else ""
        yield f"  {', '.join(nodes[:_MOST_NODES])}{more}: {count}{' each' if len(nodes) > 1 else ''}"


def gang_json(verdict: BatchVerdict) -> dict[str, Any]:
    """That of one pod, with ``gang``. Stable: fields are added, never renamed. A ``fits`` is null where not certain."""
    following = verdict.following
    return verdict_json(verdict.one) | {
        "gang": {
            "object": verdict.batch.title,
            "wanted": verdict.batch.count,
            "placed": len(verdict.seats),
            "fits": verdict.fits,
            "pods": [
                {"node": seat.node, "devices": [placed_json(one) for one in seat.devices]}
                for seat in verdict.seats
            ],
            "next": None if following is None else verdict_json(following),
        }
    }
