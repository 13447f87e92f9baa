"""The driver is killed at every step of every verb; it comes back, and the end is as if nothing had happened.

What a step is nobody lists: crash_sweep finds them while the verb runs. So a new one is swept, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from component.crash_sweep import ANOTHER_GUID, PARTITION, SCENARIOS, SHARES, Outcome

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


class Sweeps:
    """Sweeps side by side: most of their time they wait for the kernel to take a netdev out of a namespace."""

    def __init__(self, cases: Sequence[tuple[str, str]], root: Path) -> None:
        tests = Path(__file__).resolve().parents[1]
        path = os.pathsep.join(
            [str(tests), *(str(tests.parent / part) for part in ("driver", "api", "hack"))]
        )
        command = [sys.executable, tests / "component" / "crash_sweep.py", "--at-once", "6", root]
        self._cases, self._outcomes = list(cases), dict[tuple[str, str], Outcome]()
        self._process = subprocess.Popen(
            [*command, *("/".join(case) for case in cases)],
            stdout=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip

    def outcome(self, name: str, what: str) -> Outcome:
        assert self._process.stdout is not None
        while (name, what) not in self._outcomes:
            line = self._process.stdout.readline()
            assert line, f"crash_sweep.py has ended with {self._process.wait()}"
            found = json.loads(line)
            self._outcomes[self._cases[found["number"]]] = found["outcome"]
        return self._outcomes[name, what]

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], Outcome]]:
    """Those that CI has no time for begin when they are asked for."""
    started: dict[bool, Sweeps] = {False: Sweeps(CASES, tmp_path_factory.mktemp("sweep"))}

    def outcome(name: str, what: str) -> Outcome:
        long = (name, what) in LONG
        if long not in started:
            started[long] = Sweeps(LONG, tmp_path_factory.mktemp("sweep"))
        return started[long].outcome(name, what)

    yield outcome
    for sweeps in started.values():
        sweeps.end()


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
