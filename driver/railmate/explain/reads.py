"""Which attributes an expression can see, so that nodes which differ in others (a GPU's UUID) need one look only."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: ``device.attributes["railmate.dev"].?kind``: a name that is written out, and no method of the map.
_NAMED = re.compile(
    r"""\bdevice\s*\.\s*attributes\s*\[\s*(?:"[^"\\]*"|'[^'\\]*'|device\s*\.\s*driver)\s*\]"""
    r"""\s*\.\s*\??\s*([A-Za-z_]\w*)\b(?!\s*\()"""
)
_OTHER_FIELDS = re.compile(r"\bdevice\s*\.\s*(?:driver|capacity|allowMultipleAllocations)\b")
_ANY = re.compile(r"\bdevice\b|\battributes\b")


def attributes_read(expressions: Iterable[str]) -> frozenset[str] | None:
    """Their names without a domain; None where an expression may see any of them (``"x" in device.attributes[…]``)."""
    names: set[str] = set()
    for expression in expressions:
        names.update(_NAMED.findall(expression))
        if _ANY.search(_OTHER_FIELDS.sub("", _NAMED.sub("", expression))):
            return None
    return frozenset(names)
