"""What a private engine and its cluster have on this machine, and whether anything of it is left."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from harness.engine import Engine, PrivateEngine

_KINDS = ("net", "mnt", "pid")


class Footprint:
    """Take it while the engine runs; its containers' namespaces are nested in the engine's own."""

    def __init__(self, engine: Engine) -> None:
        mine = _namespaces(os.getpid())
        self._own = _namespaces(engine.pid) - mine if engine.pid is not None else set()
        assert engine.pid is None or len(self._own) == len(_KINDS)

    def left(self) -> list[str]:
        """Processes, cgroups, mounts and namespaces that ``down`` should have taken away."""
        if not self._own:
            return []  # the machine's own engine, which goes on
        private = PrivateEngine()
        found = private.remains()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _namespaces(int(entry.name)) & self._own:
                found.append(f"process {entry.name} in the engine's namespaces")
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            root, point = line.split()[3:5]
            if root in self._own or Path(point).is_relative_to(private.directory):
                found.append(f"mount {point}")
        found += [f"file {path}" for path in private.directory.iterdir()]
        return found


def _namespaces(pid: int) -> set[str]:
    """Such as ``net:[4026531840]``; those of a process that has ended are none."""
    found = set[str]()
    for kind in _KINDS:
        with suppress(OSError):
            found.add(str(Path(f"/proc/{pid}/ns/{kind}").readlink()))
    return found
