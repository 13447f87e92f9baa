"""Small files that must be whole or absent: written beside their place and renamed into it."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

_TEMPORARY = ".tmp-"


def write_json(path: Path, value: Any, *, mode: int = 0o600, durable: bool = True) -> None:
    """Replace ``path`` by ``value`` as JSON, atomically.

    ``durable`` also forces file and directory to disk: for what must survive a power cut. Without it
    the file still survives the end of this process. Raises OSError (a full disk leaves the old file).
    """
    write_bytes(path, json_bytes(value), mode=mode, durable=durable)


def json_bytes(value: Any) -> bytes:
    """The value as ``write_json`` writes it."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def write_bytes(path: Path, data: bytes, *, mode: int = 0o600, durable: bool = True) -> None:
    # A name that starts with "." and has no suffix: neither CDI nor the ledger reads it if it is left behind.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{_TEMPORARY}{path.stem}-")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            if durable:
                os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    if durable:
        sync_directory(path.parent)


def remove_temporaries(directory: Path, stem: str = "", older_than: float = 0.0) -> int:
    """Remove what killed writers left of files whose name starts with ``stem``; return how many.

    Call it where no other writer can be at work, or with an age in seconds that no write takes.
    """
    removed = 0
    for path in directory.glob(f"{_TEMPORARY}{stem}*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime >= older_than and remove(path):
                removed += 1
    return removed


def remove(path: Path) -> bool:
    """Remove the file; False when it was not there."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
