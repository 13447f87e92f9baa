"""What the gate finds out on a node when it starts a container, and people should hear of."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)


class GateWord:
    """The gate leaves the empty file ``left_as`` when it could not do something; ``words`` say what that means and go
    to the log and to ``report``, once."""

    def __init__(self, left_as: Path, words: str, report: Callable[[str], None]) -> None:
        self._left_as, self._words, self._report = left_as, words, report
        self._told = False

    def look(self) -> None:
        """Tell if the gate has left word."""
        if not self._told and self._left_as.exists():
            self.tell()

    def tell(self) -> None:
        """For who knows it without the gate."""
        if not self._told:
            self._told = True
            log.warning("%s", self._words)
            self._report(self._words)
