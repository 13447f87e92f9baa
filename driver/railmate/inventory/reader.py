# Paths are strings here: a scan reads thousands of files, and pathlib takes several times longer.
"""Reading attribute files of sysfs and proc: nothing raises, what is odd becomes a warning."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Container

_MAX_WARNINGS = 200
# What a driver answers for an attribute that has no value right now: a link that is down has no
# speed, an empty GID slot no GID.
_NO_VALUE = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENODATA, errno.ENODEV}
_WHOLE_NUMBER = re.compile(r"[+-]?(0[xX])?[0-9a-fA-F]+")  # int() takes more: "1_0", other scripts' digits
_LONGEST_WORD = 256
_FLAGS = (
    os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
)  # non-blocking: what is a pipe in a broken tree is not waited for


class Reader:
    """Reads files and collects warnings. A file is read when asked for, so ask once."""

    def __init__(self) -> None:
        self._warnings: list[str] = []
        self._left_out = 0

    def warn(self, path: str, problem: str) -> None:
        if len(self._warnings) < _MAX_WARNINGS:
            self._warnings.append(f"{path}: {problem}")
        else:
            self._left_out += 1

    @property
    def warnings(self) -> tuple[str, ...]:
        more = (f"{self._left_out} more warnings left out",) if self._left_out else ()
        return tuple(self._warnings) + more

    def names(self, directory: str) -> list[str]:
        """The sorted entries of a directory; none, with a warning, when it cannot be listed."""
        try:
            return sorted(os.listdir(directory))
        except OSError as error:
            self.warn(directory, f"cannot be listed ({error.strerror})")
            return []

    def link(self, path: str, optional: bool = False) -> str | None:
        """The last component of a link's target: sysfs links name what they point to."""
        try:
            return os.readlink(path).rstrip("/").rpartition("/")[2] or None
        except OSError as error:
            if optional and error.errno == errno.ENOENT:
                return None
            self.warn(path, f"is not a readable link ({error.strerror})")
            return None

    def data(self, path: str, limit: int = 4096, optional: bool = False) -> bytes | None:
        """Up to ``limit`` bytes of a file; None when it has no value or cannot be read.

        ``optional``: that there is no such file is no reason for a warning.
        """
        try:
            handle = os.open(path, _FLAGS)
        except OSError as error:
            if optional and error.errno == errno.ENOENT:
                return None
            self.warn(path, f"cannot be read ({error.strerror})")
            return None
        try:
            return os.read(handle, limit)
        except OSError as error:
            if error.errno not in _NO_VALUE:
                self.warn(path, f"cannot be read ({error.strerror})")
            return None
        finally:
            os.close(handle)

    def text(self, path: str, limit: int = 4096, optional: bool = False) -> str | None:
        data = self.data(path, limit, optional)
        if data is None:
            return None
        try:
            return data.decode().strip()
        except UnicodeDecodeError:
            self.warn(path, "holds no text")
            return None

    def word(self, path: str, pattern: re.Pattern[str] | None = None, optional: bool = False) -> str | None:
        """A value of one line; None when it is empty, when it is nothing a person could read, or when all
        of it does not match ``pattern``."""
        text = self.text(path, optional=optional)
        if not text:
            return None
        if len(text) > _LONGEST_WORD or not text.isprintable() or (pattern and not pattern.fullmatch(text)):
            self.warn(path, f"holds {text[:40]!r}, which makes no sense there")
            return None
        return text

    def number(
        self, path: str, base: int = 10, among: Container[int] | None = None, optional: bool = False
    ) -> int | None:
        """A whole number; base 16 takes ``0x`` before it. ``among`` limits what makes sense."""
        text = self.text(path, optional=optional)
        if text is None:
            return None
        try:
            value = int(text, base) if _WHOLE_NUMBER.fullmatch(text) else None
        except ValueError:
            value = None
        if value is None:
            self.warn(path, f"should hold a number, holds {text[:40]!r}")
            return None
        if among is not None and value not in among:
            self.warn(path, f"holds {text[:40]!r}, which is out of range")
            return None
        return value
