"""Two instances of a rolling update that offer different devices: one writes, the other looks on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_controller import FakeApi, api, consistent, controller, offer

from railmate.kube.errors import ApiError
from railmate.node.instances import Instances

__all__ = ["api"]  # a fixture


class Other:
    keeps = False


def names(fake: FakeApi) -> list[str]:
    return [device["name"] for spec in fake.specs() for device in spec.get("devices", [])]


@pytest.fixture
def other() -> Other:
    return Other()


@pytest.fixture
def published() -> list[bool]:
    return []


@pytest.fixture
def one(api: FakeApi, other: Other, published: list[bool]) -> Any:
    found = controller(
        api, offer(2), on_published=lambda: published.append(True), outdone=lambda: other.keeps
    )
    found.sync()
    assert names(api) == ["gpu-0", "gpu-1"]
    return found


def test_slices_that_are_anothers_are_left_as_they_are(
    api: FakeApi, other: Other, one: Any, published: list[bool]
) -> None:
    controller(api, offer(3)).sync()
    other.keeps = True
    api.writes.clear()
    published.clear()
    one.sync()
    one.update(offer(1))
    one.set_taints({"gpu-0": "lost"})
    assert api.writes == []
    assert names(api) == ["gpu-0", "gpu-1", "gpu-2"]
    assert published == [], "what it offers is not published"
    assert one.left_to_another


def test_slices_are_written_again_when_the_other_is_no_more(api: FakeApi, other: Other, one: Any) -> None:
    controller(api, offer(3)).sync()
    other.keeps = True
    one.sync()
    other.keeps = False
    one.sync()
    assert names(api) == ["gpu-0", "gpu-1"]
    consistent(api)
    assert not one.left_to_another


def test_slices_that_are_as_it_wants_them_are_published_whoever_keeps_them(
    api: FakeApi, other: Other, one: Any, published: list[bool]
) -> None:
    """As in an update that changes nothing of them."""
    other.keeps = True
    published.clear()
    one.sync()
    assert published == [True]


def test_slices_that_are_refused_in_the_middle_are_put_right_by_the_other_and_not_broken_again(
    api: FakeApi, tmp_path: Path
) -> None:
    """A release with a fault: the server takes some of the pool's slices and not the rest."""
    elder, younger = Instances(tmp_path), Instances(tmp_path)
    elder.registered()
    good = controller(api, offer(200), outdone=elder.outdone)
    good.sync()
    younger.registered()
    bad = controller(api, offer(300), outdone=younger.outdone, on_refused=lambda message: younger.withdraw())

    def refuse() -> None:
        api.after_write = lambda: None
        raise ApiError("a device has too many attributes", 422)

    api.after_write = refuse
    with pytest.raises(ApiError):
        bad.sync()
    assert not elder.outdone()
    good.sync()
    consistent(api)
    assert len(names(api)) == 200
    api.writes.clear()
    bad.sync()
    assert api.writes == []
    assert bad.left_to_another
