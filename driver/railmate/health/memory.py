"""What the next process of the driver has to know of the damping: a link that flaps is not calm because the driver
was restarted. Pure; times are those of a clock that goes on from one process to the next and starts with the boot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from railmate.health.damping import Damped
from railmate.health.model import Health, Reason, Verdict

_VERSION = 1


def to_json(states: Mapping[str, Damped], boot_id: str) -> dict[str, Any]:
    """States by address. Those of functions that are and were well are left out: they begin the same anew."""
    kept = {address: asdict(state) for address, state in sorted(states.items()) if _matters(state)}
    return {"version": _VERSION, "boot_id": boot_id, "states": kept}


def from_json(value: Any, boot_id: str) -> dict[str, Damped]:
    """Nothing where it is of another boot or another version. Raises ValueError when it is no such record."""
    try:
        if value["version"] != _VERSION or value["boot_id"] != boot_id:
            return {}
        return {str(address): _state(state) for address, state in value["states"].items()}
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not the health of devices: {type(error).__name__}: {error}") from error


def _matters(state: Damped) -> bool:
    return bool(state.shown.ill or state.falls or state.held_until is not None)


def _state(value: Any) -> Damped:
    return Damped(
        shown=_verdict(value["shown"]),
        raw=_verdict(value["raw"]),
        well_since=_time(value["well_since"]),
        falls=tuple(float(time) for time in value["falls"]),
        held_until=_time(value["held_until"]),
        link_downs=None if value["link_downs"] is None else int(value["link_downs"]),
    )


def _verdict(value: Any) -> Verdict:
    reason = value["reason"]
    return Verdict(Health(value["health"]), None if reason is None else Reason(reason), str(value["message"]))


def _time(value: Any) -> float | None:
    return None if value is None else float(value)
