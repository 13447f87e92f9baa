"""The one place outside the tree where the bench keeps what is slow to make.

Layout of RAILMATE_CACHE (default ~/.cache/railmate):
    artefacts/<name>-<key>/   finished things, keyed by the content of what they were made from
    log/                      output of builds
    go-build/, go-mod/        Go's own caches
    run/                      state of what runs now (engine, cluster, control plane)
An artefact appears under its name only when it is complete, so an interrupted build is simply repeated.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.shell import progress

_KEY_DIGITS = 16
_KEPT_PER_NAME = 2


def cache_dir() -> Path:
    """RAILMATE_CACHE, made if it does not exist."""
    configured = os.environ.get("RAILMATE_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(configured) if configured else base / "railmate"
    path = path.absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path


def run_dir(name: str) -> Path:
    """Directory for the state of something that runs."""
    path = cache_dir() / "run" / name
    path.mkdir(parents=True, exist_ok=True)
    return path


def log_file(name: str) -> Path:
    """Where the output of building `name` goes."""
    path = cache_dir() / "log"
    path.mkdir(parents=True, exist_ok=True)
    return path / f"{name}.log"


def content_key(*parts: str | bytes | Path) -> str:
    """Key of 16 hex digits over the parts in order; a Path stands for its content, a directory for its tree.

    Names, contents and the executable bit of a tree count; times and owners do not.
    """
    digest = hashlib.sha256()

    def add(kind: str, data: bytes) -> None:
        digest.update(f"{kind}{len(data)}:".encode())
        digest.update(data)

    for part in parts:
        if isinstance(part, bytes):
            add("b", part)
        elif isinstance(part, str):
            add("s", part.encode())
        elif part.is_dir():
            for child in sorted(p for p in part.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
                add("n", f"{child.relative_to(part)} {child.stat().st_mode & 0o111 != 0}".encode())
                add("f", child.read_bytes())
        else:
            add("f", part.read_bytes())
    return digest.hexdigest()[:_KEY_DIGITS]


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Holds the machine-wide lock `name`; says so when it has to wait for another process."""
    directory = cache_dir() / "artefacts" / ".locks"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / name).open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(name, "waiting for another process that is working on it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def find_artefact(name: str, key: str) -> Path | None:
    """The finished artefact, or None when it has not been made."""
    path = cache_dir() / "artefacts" / f"{name}-{key}"
    if not path.is_dir():
        return None
    os.utime(path)  # the time of last use decides what is pruned
    return path


def artefact(name: str, key: str, make: Callable[[Path], None], doing: str = "building") -> Path:
    """Directory of the artefact `name` with content key `key`; `make` fills it when it is not there yet.

    `make` gets an empty directory that becomes the artefact when it returns. Two callers never make the
    same one at once. Older keys of the name are removed, except the one used last.
    """
    if found := find_artefact(name, key):
        return found
    with locked(name):
        if found := find_artefact(name, key):
            return found
        directory = cache_dir() / "artefacts"
        unfinished = directory / f".{name}-{key}.tmp"
        _remove(*directory.glob(f".{name}-*.tmp"))
        unfinished.mkdir()
        started = time.monotonic()
        progress(name, doing)
        try:
            make(unfinished)
            final = directory / f"{name}-{key}"
            unfinished.rename(final)
        except BaseException:
            _remove(unfinished)
            raise
        progress(name, f"done in {time.monotonic() - started:.0f} s")
        _prune(directory, name, final)
        return final


def _prune(directory: Path, name: str, newest: Path) -> None:
    pattern = re.compile(rf"{re.escape(name)}-[0-9a-f]{{{_KEY_DIGITS}}}")
    old = [p for p in directory.iterdir() if pattern.fullmatch(p.name) and p != newest]
    old.sort(key=lambda p: p.stat().st_mtime, reverse=True)
    _remove(*old[_KEPT_PER_NAME - 1 :])


def _remove(*paths: Path) -> None:
    for path in paths:
        shutil.rmtree(path)
