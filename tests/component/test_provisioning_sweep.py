"""The driver is killed at every step of making VFs; the next one comes, and the end is as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from component.provisioning_sweep import SCENARIOS

#: Steps that each has at least; fewer would mean that they are no longer seen.
_AT_LEAST = 6
_SECONDS = 200


@pytest.mark.parametrize("name", SCENARIOS, ids=lambda name: name.replace(" ", "-"))
def test_a_kill_at_any_step_changes_nothing_of_the_vfs(
    name: str, tmp_path: Path, figures: Callable[[object], None]
) -> None:
    """How many there are, their names and drivers, the switch's mode, and whether the kernel looks for drivers."""
    tests = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(tests), *(str(tests.parent / part) for part in ("driver", "api", "hack"))])
    done = subprocess.run(
        [sys.executable, str(tests / "component" / "provisioning_sweep.py"), name, str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=_SECONDS, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    figures(f"provisioning sweep: {name}: {len(outcome['steps'])} steps, {outcome['cases']} kills")
    assert not outcome["failures"], "\n\n".join(outcome["failures"])
    assert len(outcome["steps"]) >= _AT_LEAST, outcome["steps"]
    assert outcome["cases"] == 2 * len(outcome["steps"])
