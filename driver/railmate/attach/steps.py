"""A pod's devices are attached in steps, all of them or none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from railmate.attach.errors import AttachError
from railmate.attach.namespaces import Sides

log = logging.getLogger(__name__)


class Step(Protocol):
    """One change to the kernel, with its undo."""

    def apply(self, sides: Sides) -> None:
        """Make the change; a change that is there already is no error. Raises AttachError."""

    def undo(self, sides: Sides) -> None:
        """Take back what ``apply`` changed, also when it failed half-way. Raises AttachError."""


def apply_all(steps: Sequence[Step], sides: Sides) -> None:
    """Apply the steps in order; when one fails, undo it and those before it, last first, and raise its error.

    The error names what could not be undone, too.
    """
    started: list[Step] = []
    try:
        for step in steps:
            started.append(step)
            step.apply(sides)
    except BaseException as error:
        problems = []
        for step in reversed(started):
            try:
                step.undo(sides)
            except (AttachError, OSError) as problem:
                log.error("undo after a failed attach: %s", problem)
                problems.append(str(problem))
        if problems and isinstance(error, AttachError):
            raise type(error)("; then ".join([str(error), *problems])) from None
        raise
