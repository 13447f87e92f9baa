"""A VF that does not take its own MAC back at once, or not the speed that its port had."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from railmate.attach import home, links
from railmate.attach.ethtool import EthtoolState
from railmate.attach.links import Link
from railmate.attach.model import NetdevSnapshot, ReturnRequest, ReturnState
from railmate.attach.namespaces import Sides
from railmate.attach.settings import NO_ETHTOOL, EthtoolSettings

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

    def returned(
        self, monkeypatch: pytest.MonkeyPatch, ethtool: EthtoolSettings = NO_ETHTOOL
    ) -> tuple[ReturnState, tuple[str, ...]]:
        monkeypatch.setattr(links, "change", self.change)
        monkeypatch.setattr(links, "get", lambda netlink, name: self.link)
        monkeypatch.setattr(links, "get_index", lambda netlink, index: self.link)
        snapshot = NetdevSnapshot(ADDRESS, "vf0", MAC, 1500, True, ADDRESS, ethtool=ethtool)
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


@pytest.mark.parametrize(
    ("code", "problems"),
    [
        (errno.EOPNOTSUPP, ()),
        (errno.EINVAL, ("netdev vf0 does not take the link settings speed 25000: no",)),
    ],
    ids=["the port's speed", "a speed that was set"],
)
def test_a_speed_that_only_its_port_can_have_does_not_have_to_come_back(
    monkeypatch: pytest.MonkeyPatch, code: int, problems: tuple[str, ...]
) -> None:
    """The port of a VF has negotiated another one meanwhile."""
    told = []

    class Kernel:
        def state(self, index: int) -> EthtoolState:
            return EthtoolState(EthtoolSettings(link={"autoneg": 0, "speed": 10000}))

        def set(self, index: int, wanted: EthtoolSettings, what: str) -> None:
            told.append(wanted)
            with links.attempt(f"{what} does not take the link settings speed {wanted.link['speed']}"):
                raise OSError(code, "no")

        def close(self) -> None: ...

    monkeypatch.setattr(home, "Ethtool", Kernel)
    before = EthtoolSettings(link={"autoneg": 0, "speed": 25000})
    driver = Driver(refusals=0)
    assert driver.returned(monkeypatch, before) == (ReturnState.ALREADY_HOME, problems)
    assert told == [EthtoolSettings(link=before.link)]
