"""Test modules of directories that are no packages share one name space: pytest takes one of a name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]


def test_no_two_test_modules_have_one_name() -> None:
    names = Counter(file.name for file in TESTS.rglob("*.py") if not (file.parent / "__init__.py").exists())
    assert len(names) > 100
    assert [name for name, count in names.items() if count > 1 and name != "conftest.py"] == []
