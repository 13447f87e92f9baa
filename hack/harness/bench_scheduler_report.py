"""Results of the scheduler bench as tables with their spread, and the limits that they must keep."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

#: Eight pairs of 1 000 nodes: pods a second as pair devices, over those as constraints in the same round.
LEAST_RATIO, RATIO_NODES = 4.0, 1000
#: Seconds that infeasible pods may delay others at the 99th percentile, where pods ask for CPU in proportion to GPUs:
#: while they wait, and when they arrive at once over what as many pods that fit cost.
MOST_DELAY = 0.5
#: Of what an attempt for eight pairs takes where each node has seven, how much one for a whole node may take.
MOST_SHARE = 0.5

Results = Mapping[str, Any]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else math.nan


def ratios(results: Results, pairs: int) -> list[float]:
    """Rates of the form with pair devices over those with constraints, round by round."""
    rates = {
        name: [one["podsPerSecond"] for one in results["churn"].get(name, {}).get(str(pairs), ())]
        for name in ("pairs", "constraint")
    }
    return [ours / theirs for ours, theirs in zip(rates["pairs"], rates["constraint"], strict=False)]


def delays(one: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by which infeasible pods delay others at the 99th percentile: as they arrive, against as many pods that
    fit; and as they wait, against none."""
    pairs = {"arriving": ("besideFittingMs", "arrivingMs"), "waiting": ("beforeMs", "waitingMs")}
    return {
        name: (percentile(one[during], 0.99) - percentile(one[before], 0.99)) / 1000
        for name, (before, during) in pairs.items()
    }


def failures(results: Results) -> list[str]:
    """Sentences on limits that were not kept."""
    found = []
    for name, sizes in results["churn"].items():
        for pairs, rounds in sizes.items():
            for what in ("alignedShare", "strandedShare"):
                wanted = 1.0 if what == "alignedShare" else 0.0
                if any(one[what] != wanted for one in rounds):
                    found.append(f"{name}, {pairs} pairs: {what} is not {wanted}")
    both = ratios(results, 8)
    if both and results["nodes"] >= RATIO_NODES and statistics.median(both) < LEAST_RATIO:
        found.append(
            f"pods of 8 pairs: {statistics.median(both):.1f} times the rate of constraints, not {LEAST_RATIO}"
        )
    for name, kinds in results["waiting"].items():
        for kind, one in kinds.items():
            if one["infeasiblePlaced"]:
                found.append(f"{name}, {kind}: {one['infeasiblePlaced']} infeasible pods got a node")
            for when, seconds in delays(one).items():
                if _is_held(name) and not seconds <= MOST_DELAY:
                    found.append(
                        f"{name}, {kind}: {when} infeasible pods delay others by {seconds:.2f} s, "
                        f"not {MOST_DELAY} at most"
                    )
    asked = {name: kinds["oneShort"] for name, kinds in results["waiting"].items() if "oneShort" in kinds}
    if "pairs" in asked and "node" in asked:
        share = attempts(asked["node"])[0] / attempts(asked["pairs"])[0]
        if not share <= MOST_SHARE:
            found.append(
                f"an attempt for a whole node takes {share:.2f} of one for eight pairs, not {MOST_SHARE} at most"
            )
    return found


def _is_held(name: str) -> bool:
    """Whether the variant is the set-up that examples/scheduler recommends: without requests in proportion to GPUs the
    scheduler searches the devices of every node for pods that fit nowhere."""
    return "proportional" in name


def attempts(one: Mapping[str, Any]) -> tuple[float, int]:
    """Milliseconds of an attempt that failed, on average, and how many there were."""
    tried = [one["attempts"].get(result) for result in ("unschedulable", "error")]
    spent = [found for found in tried if found and found["count"]]
    number = sum(found["count"] for found in spent)
    return (1000 * sum(found["seconds"] for found in spent) / number if number else math.nan), number


def report(results: Results) -> Iterator[str]:
    """Lines of text."""
    yield f"{results['nodes']} nodes, {results['fill']:.0%} of them taken as a whole; {results['rounds']} rounds"
    yield ""
    yield from _table(
        ("variant", "slices/node", "kB JSON", "kB stored", "scheduler MB"),
        [
            (name, f"{s['slices']}", *(f"{s[k] / 1000:.1f}" for k in ("jsonBytes", "storedBytes")), f"{s['rss']:.0f}")
            for name, s in results["sites"].items()
        ],
    )  # fmt: skip
    rows = [
        _churn_row(name, pairs, rounds)
        for pairs in results["sizes"]
        for name, sizes in results["churn"].items()
        if (rounds := sizes.get(str(pairs)))
    ]
    if rows:
        yield ""
        yield from _table(
            ("variant", "pairs", "pods/s (range)", "alone ms p50/p99", "busy ms p50/p99", "CPU ms/pod", "writes/pod",
             "aligned", "stranded", "nodes part taken"), rows,
        )  # fmt: skip
        yield "ms: creation to node, allocation included; alone: one pod at a time; busy: many. CPU: the scheduler's."
    yield from _ratio_lines(results)
    rows = [
        (name, kind, *_waiting_cells(one))
        for name, kinds in results["waiting"].items()
        for kind, one in kinds.items()
    ]
    if rows:
        yield ""
        yield from _table(
            ("variant", "cluster", "others alone", "as many arrive that fit", "infeasible arrive", "infeasible wait",
             "not placed", "delay p99 s", "attempt ms", "CPU s/s"), rows,
        )  # fmt: skip
        yield f"Others: ms from creation to node, p50/p99, beside {results['infeasible']} pods; infeasible: 8 pairs."
        yield "Delay: of those that arrive, over as many that fit; of those that wait, over none."
        held = [name for name in results["waiting"] if _is_held(name)]
        yield f"Held to {MOST_DELAY} s: {', '.join(held) or 'none; add a variant with +proportional'}."


def _churn_row(name: str, pairs: int, rounds: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    alone = [ms for one in rounds for ms in one["aloneMs"]]
    busy = [ms for one in rounds for ms in one["busyMs"]]
    return (
        name,
        str(pairs),
        _spread([one["podsPerSecond"] for one in rounds]),
        f"{percentile(alone, 0.5):.0f} / {percentile(alone, 0.99):.0f}",
        f"{percentile(busy, 0.5):.0f} / {percentile(busy, 0.99):.0f}",
        _spread([one["schedulerCpuMsPerPod"] for one in rounds]),
        f"{statistics.median(one['writesPerPod'] for one in rounds):.1f}",
        f"{min(one['alignedShare'] for one in rounds):.3f}",
        f"{max(one['strandedShare'] for one in rounds):.3f}",
        _spread([one["nodesPartlyTaken"] for one in rounds]),
    )


def _ratio_lines(results: Results) -> Iterator[str]:
    """Each variant against the first, in the same round."""
    first, *others = results["churn"] or [""]
    for pairs in results["sizes"]:
        for other in others:
            ours, theirs = (
                [one["podsPerSecond"] for one in results["churn"][name].get(str(pairs), ())]
                for name in (first, other)
            )
            quotients = [a / b for a, b in zip(ours, theirs, strict=False)]
            if quotients:
                yield f"{pairs} pairs: {first} places {_spread(quotients)} times as many pods a second as {other}"


def _waiting_cells(one: Mapping[str, Any]) -> tuple[str, ...]:
    mean, number = attempts(one)
    times = [one[name] for name in ("beforeMs", "besideFittingMs", "arrivingMs", "waitingMs")]
    return (
        *(f"{percentile(values, 0.5):.0f} / {percentile(values, 0.99):.0f}" for values in times),
        f"{one['notPlaced']} of {len(one['arrivingMs']) + len(one['waitingMs'])}",
        " / ".join(f"{seconds:.2f}" for seconds in delays(one).values()),
        f"{mean:.0f} x {number}",
        f"{one['schedulerCpuSeconds'] / one['seconds']:.2f}",
    )


def _spread(values: Sequence[float]) -> str:
    middle = statistics.median(values)
    digits = 0 if middle >= 100 else 1
    if len(values) == 1:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
