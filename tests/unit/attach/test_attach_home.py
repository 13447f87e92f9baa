"""A VF that does not take its own MAC back at once."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from railmate.attach import home, links
from railmate.attach.links import Link
from railmate.attach.model import NetdevSnapshot, ReturnRequest, ReturnState
from railmate.attach.namespaces import Sides

ADDRESS, MAC, OTHER = "0000:c1:00.1", "02:00:00:00:00:01", "02:00:00:00:99:99"


class Driver:
    """igbvf after its physical function has set another MAC: it refuses its own until it has reset the VF."""

    def __init__(self, refusals: int) -> None:
        self.link = Link(7, "vf0", OTHER, 1500, True, ADDRESS)
        self.refusals = refusals

    def change(self, netlink: Any, index: int, **what: Any) -> None:
        if what.get("mac") is not None:
            if self.refusals:
                self.refusals -= 1
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
            self.link = Link(7, "vf0", what["mac"], 1500, self.link.up, ADDRESS)

    def returned(self, monkeypatch: pytest.MonkeyPatch) -> tuple[ReturnState, tuple[str, ...]]:
        monkeypatch.setattr(links, "change", self.change)
        monkeypatch.setattr(links, "get", lambda netlink, name: self.link)
        monkeypatch.setattr(links, "get_index", lambda netlink, index: self.link)
        snapshot = NetdevSnapshot(ADDRESS, "vf0", MAC, 1500, True, ADDRESS)
        result = home.bring_home(ReturnRequest(snapshot), Sides(None, -1))  # type: ignore[arg-type]
        return result.state, result.problems


def test_it_is_asked_again_until_its_driver_has_reset_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Driver(refusals=2).returned(monkeypatch) == (ReturnState.ALREADY_HOME, ())


def test_one_that_never_takes_it_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "_RESET_PATIENCE", 0.05)
    state, problems = Driver(refusals=1000).returned(monkeypatch)
    assert (state, problems) == (
        ReturnState.ALREADY_HOME,
        (f"MAC {MAC} cannot be set: Cannot assign requested address",),
    )
