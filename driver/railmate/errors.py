"""Exception types shared by all packages.

Every message names the object, the cause and the next step; a traceback is for bugs only.
"""

from __future__ import annotations

from pathlib import Path


class RailmateError(Exception):
    """What went wrong, in a sentence for the person who runs the cluster."""


class UsageError(RailmateError):
    """Bad arguments or bad input; the command ends with exit code 2."""


def not_written(claim: str, path: Path, error: OSError) -> RailmateError:
    """What a full or broken disk looks like to people."""
    return RailmateError(
        f"{claim}: {path} cannot be written ({error.strerror or error}). "
        "Free space on the node's disk or repair it; it is tried again."
    )
