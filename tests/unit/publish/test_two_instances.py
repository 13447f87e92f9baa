"""Two instances of a rolling update that offer different devices: the younger writes, the elder looks on."""

from __future__ import annotations

from typing import Any

import pytest
from test_controller import FakeApi, api, consistent, controller, offer

__all__ = ["api"]  # a fixture


class Younger:
    publishes = False


def names(fake: FakeApi) -> list[str]:
    return [device["name"] for spec in fake.specs() for device in spec.get("devices", [])]


@pytest.fixture
def younger() -> Younger:
    return Younger()


@pytest.fixture
def elder(api: FakeApi, younger: Younger) -> Any:
    published: list[bool] = []
    one = controller(
        api, offer(2), on_published=lambda: published.append(True), outdone=lambda: younger.publishes
    )
    one.sync()
    assert names(api) == ["gpu-0", "gpu-1"]
    return one


def test_the_elder_leaves_slices_that_a_younger_has_written(
    api: FakeApi, younger: Younger, elder: Any
) -> None:
    controller(api, offer(3)).sync()
    younger.publishes = True
    api.writes.clear()
    elder.sync()
    elder.update(offer(1))
    elder.set_taints({"gpu-0": "lost"})
    assert api.writes == []
    assert names(api) == ["gpu-0", "gpu-1", "gpu-2"]


def test_the_elder_writes_until_a_younger_publishes(api: FakeApi, younger: Younger, elder: Any) -> None:
    """One that cannot publish must not leave the node without slices."""
    api.wipe()
    elder.sync()
    assert names(api) == ["gpu-0", "gpu-1"]


def test_the_elder_writes_again_when_the_younger_is_no_more(
    api: FakeApi, younger: Younger, elder: Any
) -> None:
    controller(api, offer(3)).sync()
    younger.publishes = True
    elder.sync()
    younger.publishes = False
    elder.sync()
    assert names(api) == ["gpu-0", "gpu-1"]
    consistent(api)
