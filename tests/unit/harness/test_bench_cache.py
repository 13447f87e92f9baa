"""The cache: what is slow is made once, completely or not at all."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from harness import cache


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAILMATE_CACHE", str(tmp_path / "cache"))


def make_text(text: str) -> cache.Callable[[Path], None]:
    def make(directory: Path) -> None:
        (directory / "text").write_text(text)

    return make


def test_same_key_is_made_once() -> None:
    first = cache.artefact("thing", "0" * 16, make_text("one"))
    second = cache.artefact("thing", "0" * 16, make_text("two"))
    assert first == second
    assert (second / "text").read_text() == "one"


def test_failed_making_leaves_nothing_and_is_repeated() -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise RuntimeError("broke off")

    with pytest.raises(RuntimeError):
        cache.artefact("thing", "0" * 16, fail)
    assert cache.find_artefact("thing", "0" * 16) is None
    made = cache.artefact("thing", "0" * 16, make_text("whole"))
    assert sorted(path.name for path in made.iterdir()) == ["text"]


def test_remains_of_a_killed_build_are_swept_away() -> None:
    leftover = cache.cache_dir() / "artefacts" / f".thing-{'1' * 16}.tmp"
    leftover.mkdir(parents=True)
    cache.artefact("thing", "0" * 16, make_text("x"))
    assert not leftover.exists()


def test_old_keys_go_except_the_one_used_last() -> None:
    for digit in "012":
        cache.artefact("thing", digit * 16, make_text(digit))
    cache.artefact("thing-longer", "5" * 16, make_text("another name"))
    assert cache.find_artefact("thing", "0" * 16) is None
    assert cache.find_artefact("thing", "1" * 16) is not None
    assert cache.find_artefact("thing", "2" * 16) is not None
    assert cache.find_artefact("thing-longer", "5" * 16) is not None


def test_two_callers_do_not_make_the_same_thing_twice() -> None:
    entered, made = threading.Event(), []

    def slow(directory: Path) -> None:
        made.append(directory)
        entered.set()
        second.start()
        # The second caller can only wait for the lock now; it must not get here too.
        second.join(timeout=0.3)
        assert second.is_alive()

    second = threading.Thread(
        target=lambda: cache.artefact("thing", "0" * 16, lambda path: made.append(path))
    )
    cache.artefact("thing", "0" * 16, slow)
    second.join()
    assert entered.is_set()
    assert len(made) == 1


def test_key_depends_on_contents_names_and_order(tmp_path: Path) -> None:
    file = tmp_path / "tree" / "file"
    file.parent.mkdir()
    file.write_text("a")
    before = cache.content_key("x", file.parent)
    assert before == cache.content_key("x", file.parent)
    file.write_text("b")
    changed = cache.content_key("x", file.parent)
    file.rename(file.with_name("renamed"))
    renamed = cache.content_key("x", file.parent)
    assert len({before, changed, renamed, cache.content_key(file.parent, "x")}) == 4
    assert cache.content_key("ab", "c") != cache.content_key("a", "bc")


def test_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAILMATE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_dir() == tmp_path / "xdg" / "railmate"
