"""The driver is killed at every step of every verb; it comes back, and the end is as if nothing had happened.

What a step is nobody lists: crash_sweep finds them while the verb runs. So a new one is swept, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from component.crash_sweep import ANOTHER_GUID, PARTITION, SCENARIOS, SHARES

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces: needs root")

#: Scenario and what the claim has: VFs, each verb with one and, where it moves netdevs, with two; what may happen
#: while no driver runs with two. And two shares of a physical function, whose sub-interfaces are made and ended; a VF
#: that is bound anew with another GUID; one whose interface in a partition is made and ended.
CASES = [
    *((name, "1") for name in SCENARIOS if "then" not in name and name != "start"),
    *((name, "2") for name in SCENARIOS if name not in {"prepare", "unprepare"}),
    *(
        (name, SHARES)
        for name in (
            "prepare",
            "prepare, then the pod is deleted",
            "attach",
            "attach, then the sandbox ends",
            "release",
            "unprepare without release",
            "start",
        )
    ),
    *((name, ANOTHER_GUID) for name in ("prepare", "prepare, then the pod is deleted", "unprepare")),
    *((name, PARTITION) for name in ("attach", "release")),
]
#: What CI has no time for.
LONG = [
    *(
        (name, ANOTHER_GUID)
        for name in ("attach", "unprepare without release", "unprepare, then the claim is gone")
    ),
    *(
        (name, PARTITION)
        for name in (
            "prepare",
            "attach, then the sandbox ends",
            "release, then the sandbox ends",
            "unprepare without release",
            "start",
        )
    ),
]
#: Steps that a verb has at least; fewer would mean that they are no longer seen.
AT_LEAST = {"prepare": 6, "attach": 8, "release": 4, "unprepare": 5, "start": 8}
_SECONDS = 400

Outcome = dict[str, Any]


def sweep(name: str, what: str, root: Path) -> Outcome:
    tests = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(tests), *(str(tests.parent / part) for part in ("driver", "api", "hack"))])
    done = subprocess.run(
        [sys.executable, str(tests / "component" / "crash_sweep.py"), name, what, str(root)],
        capture_output=True, text=True, check=False, timeout=_SECONDS, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    if done.returncode:
        return {"steps": [], "cases": 0, "failures": [f"the sweep itself failed: {done.stderr}"]}
    outcome: Outcome = json.loads(done.stdout)
    return outcome


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], Outcome]]:
    """All sweeps side by side: most of their time they wait for the kernel to take a netdev out of a namespace. Those
    that CI has no time for begin when they are asked for."""
    running: dict[tuple[str, str], Future[Outcome]] = {}
    with ThreadPoolExecutor(6) as pool:

        def begin(name: str, what: str) -> None:
            running[name, what] = pool.submit(sweep, name, what, tmp_path_factory.mktemp("sweep"))

        def outcome(name: str, what: str) -> Outcome:
            if (name, what) not in running:
                for case in LONG:
                    begin(*case)
            return running[name, what].result()

        for case in CASES:
            begin(*case)
        yield outcome
        for future in running.values():
            future.cancel()


@pytest.mark.parametrize(
    ("name", "what"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_a_kill_at_any_step_changes_nothing_of_the_end(
    name: str, what: str, outcomes: Callable[[str, str], Outcome], figures: Callable[[object], None]
) -> None:
    outcome = outcomes(name, what)
    figures(f"crash sweep: {name}, {what}: {len(outcome['steps'])} steps, {outcome['cases']} kills")
    assert not outcome["failures"], "\n\n".join(outcome["failures"])
    verb = name.partition(",")[0].partition(" ")[0]
    assert len(outcome["steps"]) >= AT_LEAST[verb], outcome["steps"]
    assert outcome["cases"] > len(outcome["steps"])
