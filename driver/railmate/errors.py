"""Exception types shared by all packages.

Every message names the object, the cause and the next step; a traceback is for bugs only.
"""

from __future__ import annotations


class RailmateError(Exception):
    """What went wrong, in a sentence for the person who runs the cluster."""


class UsageError(RailmateError):
    """Bad arguments or bad input; the command ends with exit code 2."""
