"""Text for a terminal: names that a machine's drivers or its users made up may hold escape codes."""

from __future__ import annotations

_KEPT = frozenset("\n\t")


def printable(text: str) -> str:
    """``text`` with a question mark for each character that is no line end and would not be seen."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in _KEPT else "?" for one in text)
