"""Verdicts and fragmentation as text for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

from railmate.explain.cluster import NodeState
from railmate.explain.reasons import Reason, Shortage
from railmate.explain.verdict import (
    ERROR,
    EXCLUDED,
    FITS,
    NOT_LOOKED_AT,
    TOO_LARGE,
    NodeVerdict,
    Placed,
    Verdict,
)
from railmate_api import attributes as names

_MOST_HOLDERS = 8
_MOST_NODES = 5
_MOST_WORDS = 20
#: From here on a matchAttribute for each pair takes the scheduler long (measured: 4 pairs 0.1 s, 5 pairs 3 s, 6: 10 s).
_MANY_CONSTRAINTS = 4
_SHOWN = (names.PCIE_SWITCH, names.DISTANCE, names.RAIL, names.PAIR_RAIL, names.NUMA_NODE)


def verdict_text(verdict: Verdict) -> str:
    return "\n".join(_verdict_lines(verdict)) + "\n"


def _verdict_lines(verdict: Verdict) -> Iterator[str]:
    wish, nodes = verdict.wish, verdict.nodes
    fitting = [one for one in nodes if one.outcome == FITS]
    open_claims = [claim for claim in wish.claims if claim.allocation is None]
    for claim in wish.claims:
        if claim.allocation is not None:
            pods = ", ".join(claim.users) or "nobody"
            yield f"claim {claim.title} is allocated (used by {pods}):"
            for held in claim.allocation:
                yield f"  {held.request}: {'/'.join(held.device)}"
    if not wish.claims:
        yield f"{wish.title} asks for no device"
        return
    if not open_claims:
        return
    if verdict.stopped:
        yield f"{wish.title}: the scheduler stops with an error, on all nodes: {verdict.stopped}"
        yield "  A selector that reads what a device lacks is such an error: guard it with .?name.orValue()."
    elif fitting:
        rest = f" and {len(fitting) - 1} more" if len(fitting) > 1 else ""
        yield f"{wish.title} fits on {fitting[0].node}{rest}; of these the scheduler's scores decide"
    else:
        yield f"{wish.title} " + ("fits on no node" if verdict.fits is False else _not_certain(verdict))
        if (near := verdict.nearest()) is not None:
            yield f"  nearest: {near[1].sentence}, on {near[0].node}"
    for claim in open_claims:
        if sum(not rule.distinct for rule in claim.constraints) >= _MANY_CONSTRAINTS:
            yield (
                f"claim {claim.title} has {len(claim.constraints)} constraints: where the answer is no the scheduler "
                "tries all combinations, past its time-out, and gives the pod up on all nodes. Ask for pair devices: "
                "railmate claim --pairs N"
            )
    for one in fitting[:1]:
        yield from _devices(one)
    yield from _others(verdict)


def _not_certain(verdict: Verdict) -> str:
    """What is known, what is not, and what to do."""
    counts = Counter(one.outcome for one in verdict.uncertain)
    known = len(verdict.nodes) - sum(counts.values())
    unknown = [
        f"{count} {'node was' if count == 1 else 'nodes were'} {words}"
        for outcome, words in ((NOT_LOOKED_AT, "not looked at"), (TOO_LARGE, "too large to prove"))
        if (count := counts[outcome])
    ]
    return (
        f"may fit, that is not certain: {' and '.join(unknown)} within the time, and it fits on none of the other "
        f"{known} (next step: a larger --timeout)"
    )


def _devices(one: NodeVerdict) -> Iterator[str]:
    yield f"on {one.node} it would get:"
    for placed in one.devices:
        about = [
            f"{name.partition('/')[2]} {value[1]}"
            for name in _SHOWN
            if (value := placed.device.attribute(name)) is not None
        ]
        yield f"  {placed.request}: {placed.device.name}" + (f" ({', '.join(about)})" if about else "")


def _others(verdict: Verdict) -> Iterator[str]:
    """Nodes with the same words together."""
    same: dict[tuple[str, ...], list[str]] = {}
    for one in verdict.nodes:
        if one.outcome != FITS:
            same.setdefault(tuple(_node_lines(one)), []).append(one.node)
    for lines, nodes in list(same.items())[:_MOST_WORDS]:
        more = f" and {len(nodes) - _MOST_NODES} more" if len(nodes) > _MOST_NODES else ""
        first, *rest = lines
        yield f"{', '.join(nodes[:_MOST_NODES])}{more}: {first}"
        yield from (f"  {line}" for line in rest)
    if left := list(same.values())[_MOST_WORDS:]:
        yield f"{sum(map(len, left))} more nodes, each with words of its own: -o json has all of them"


def _node_lines(one: NodeVerdict) -> Iterator[str]:
    if one.outcome == EXCLUDED:
        yield f"out: {one.detail}"
    elif one.outcome == ERROR:
        yield f"error: {one.detail}"
    elif one.outcome == TOO_LARGE:
        yield "too large to prove within the time: neither yes nor no is certain"
    elif one.outcome == NOT_LOOKED_AT:
        yield "not looked at: the time was over (--timeout gives more)"
    elif one.reason is None:
        yield f"does not fit{f': {one.detail}' if one.detail else '; why was not found within the time'}"
    else:
        yield from _reason_lines(one.reason)
        if one.detail:
            yield one.detail
        for change in one.changes:
            yield f"would fit: {change.sentence}"


def _reason_lines(reason: Reason) -> Iterator[str]:
    if len(reason.shortages) == 1:
        only = reason.shortages[0]
        yield f"request {reason.request} of claim {reason.claim} fails: {only.sentence}"
        yield from _holder_lines(only)
        return
    yield f"request {reason.request} of claim {reason.claim} fails in all its alternatives"
    for shortage in reason.shortages:
        yield f"{shortage.request}: {shortage.sentence}"
        yield from _holder_lines(shortage)


def _holder_lines(shortage: Shortage) -> Iterator[str]:
    for holder in shortage.holders[:_MOST_HOLDERS]:
        yield f"held: {holder}"
    if (more := len(shortage.holders) - _MOST_HOLDERS) > 0:
        yield f"held: {more} more"
    if shortage.kind == "taint":
        lost = next(stage.lost for stage in shortage.stages if stage.kind == "taint")
        yield f"tainted: {', '.join(lost[:_MOST_HOLDERS])}"


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """Stable: fields are added, never renamed. ``fits`` is null where that is not certain."""
    return {
        "object": verdict.wish.title,
        "fits": verdict.fits,
        "error": verdict.stopped or None,
        "nearest": _nearest(verdict),
        "nodes": [_node_json(one) for one in verdict.nodes],
        "gang": None,  # of a workload with several pods: see rendergang
    }


def _nearest(verdict: Verdict) -> dict[str, Any] | None:
    near = verdict.nearest()
    return None if near is None else {"node": near[0].node, **asdict(near[1])}


def _node_json(one: NodeVerdict) -> dict[str, Any]:
    return {
        "node": one.node,
        "outcome": one.outcome,
        "detail": one.detail or None,
        "devices": [placed_json(placed) for placed in one.devices],
        "reason": None if one.reason is None else asdict(one.reason),
        "changes": [asdict(change) for change in one.changes],
    }


def placed_json(placed: Placed) -> dict[str, str]:
    driver, pool, device = placed.device.id
    return {
        "claim": placed.claim,
        "request": placed.request,
        "driver": driver,
        "pool": pool,
        "device": device,
    }


# --- the cluster
_COLUMNS = {
    "NODE": "node",
    "PAIRS": "pairs",
    "GPUS": "gpus",
    "STRANDED-GPUS": "stranded_gpus",
    "IDLE-NICS": "idle_nics",
    "LARGEST-ON-SWITCH": "largest_switch",
    "LARGEST-ON-NODE": "largest_node",
    "UNHEALTHY": "unhealthy",
    "NOTE": "note",
}


def cluster_text(states: Sequence[NodeState]) -> str:
    """A table, a line a node, and below it how many nodes still take how many pairs."""
    columns = dict(_COLUMNS)
    if any(one.groups for one in states):
        columns = {**dict(list(columns.items())[:2]), "GROUPS": "groups", **dict(list(columns.items())[2:])}
    if not any(one.note for one in states):
        del columns["NOTE"]
    rows = [list(columns), *([_cell(one, name) for name in columns.values()] for one in states)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    total = Counter[str]()
    for one in states:
        total.update(
            {f.name: getattr(one, f.name) for f in fields(one) if isinstance(getattr(one, f.name), int)}
        )
    said = [
        f"{total[f'free_{kind}']} of {total[kind]} {kind} are free"
        for kind in ("pairs", "groups")
        if total[kind]
    ]
    sizes = Counter(
        (one.largest_node, "pairs" if one.pairs else "groups") for one in states if one.pairs or one.groups
    )
    asks = ", ".join(
        f"{size} {what} on {count}" for (size, what), count in sorted(sizes.items(), reverse=True)
    )
    lines += ["", "; ".join([*said, f"{total['stranded_gpus']} free GPUs have no NIC left"])]
    if asks:
        lines.append(f"the largest ask that fits, by number of nodes: {asks}")
    return "\n".join(lines) + "\n"


def _cell(state: NodeState, name: str) -> str:
    if name in ("pairs", "gpus", "groups"):
        return f"{getattr(state, f'free_{name}')}/{getattr(state, name)}"
    return str(getattr(state, name))


def cluster_json(states: Sequence[NodeState]) -> dict[str, Any]:
    """Stable: fields are added, never renamed."""

    def camel(name: str) -> str:
        first, *rest = name.split("_")
        return first + "".join(word.capitalize() for word in rest)

    return {"nodes": [{camel(f.name): getattr(one, f.name) for f in fields(one)} for one in states]}
