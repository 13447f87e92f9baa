"""Vital product data: the keywords of its read-only part (PCI Local Bus 3.0, appendix I)."""

from __future__ import annotations

_LARGE_RESOURCE = 0x80
_READ_ONLY = 0x90


def keyword(vpd: bytes, name: str) -> str | None:
    """The value of a two-letter keyword, such as ``SN``; None when absent or the data make no sense."""
    position = 0
    while position + 3 <= len(vpd) and vpd[position] & _LARGE_RESOURCE:
        size = int.from_bytes(vpd[position + 1 : position + 3], "little")
        body = vpd[position + 3 : position + 3 + size]
        if vpd[position] == _READ_ONLY:
            return _in_read_only(body, name.encode())
        position += 3 + size
    return None


def _in_read_only(body: bytes, name: bytes) -> str | None:
    position = 0
    while position + 3 <= len(body):
        size = body[position + 2]
        if body[position : position + 2] == name:
            value = body[position + 3 : position + 3 + size]
            return value.decode("ascii", "replace").rstrip("\0 ") or None
        position += 3 + size
    return None
