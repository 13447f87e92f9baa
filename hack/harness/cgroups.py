"""Finding and removing a cgroup tree in every hierarchy of the machine, v1 and v2."""

from __future__ import annotations

import os
import time
from pathlib import Path

from harness.shell import HarnessError

_SECONDS = 10


def mount_points(mounts: Path = Path("/proc/self/mounts")) -> list[Path]:
    """Where cgroup hierarchies are mounted."""
    lines = (line.split() for line in mounts.read_text().splitlines())
    return sorted({Path(fields[1]) for fields in lines if fields[2] in ("cgroup", "cgroup2")})


def find(name: str) -> list[Path]:
    """The cgroup /<name> in every hierarchy that has it."""
    return [point / name for point in mount_points() if (point / name).is_dir()]


def thaw(name: str) -> None:
    """Thaws all cgroups below /<name>: a frozen process cannot be killed.

    runc freezes a container for a moment when it changes its devices (v1); killed in that moment, it leaves it so.
    Kernel Documentation/admin-guide/cgroup-v1/freezer-subsystem.rst and cgroup-v2.rst, cgroup.freeze.
    """
    for tree in find(name):
        for directory, _, files in os.walk(tree):
            for file, thawed in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
                path = Path(directory) / file
                try:
                    if file in files and path.read_text().strip() != thawed:
                        path.write_text(thawed)
                except OSError:
                    continue  # it has ended meanwhile


def remove(name: str) -> None:
    """Removes the cgroup /<name>, all below it and what is empty above it, from every hierarchy.

    Its processes must have been ended; the kernel takes a moment to forget them.
    Raises HarnessError that names a cgroup which still holds a process.
    """
    deadline = time.monotonic() + _SECONDS
    while trees := find(name):
        busy = [path for tree in trees for path in _remove_tree(tree)]
        if not busy:
            break
        if time.monotonic() > deadline:
            pids = (busy[0] / "cgroup.procs").read_text().split()
            raise HarnessError(
                f"cgroup {busy[0]} cannot be removed; processes in it: {', '.join(pids) or 'none seen'}"
            )
        time.sleep(0.05)  # v1 has no event for "empty" that reaches us
    for point in mount_points():
        for parent in [Path(name), *Path(name).parents][1:-1]:
            try:
                (point / parent).rmdir()
            except OSError:
                break  # not there, or another engine's cgroup is in it


def _remove_tree(tree: Path) -> list[Path]:
    """Removes what can be removed, deepest first; returns what could not."""
    busy = []
    for directory, _, _ in os.walk(tree, topdown=False):
        try:
            Path(directory).rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            busy.append(Path(directory))
    return busy
