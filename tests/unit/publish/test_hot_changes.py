"""Another offer and taints while the controller runs: published at once, once, and in the end as last wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from test_controller import NODE, PATIENCE, FakeApi, api, consistent, controller, offer, running

import railmate.publish.controller as module
from railmate.explain.model import Node
from railmate.explain.parse import parse_slice
from railmate.explain.pools import gather_pools
from railmate.kube.errors import ApiError
from railmate.publish.controller import SliceController
from railmate.publish.model import Offer, OfferedDevice

__all__ = ["api", "running"]  # fixtures


def names(fake: FakeApi) -> set[str]:
    return {device["name"] for spec in fake.specs() for device in spec.get("devices", [])}


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_another_offer_is_in_the_api_when_update_returns(api: FakeApi, running: SliceController) -> None:
    running.update(offer(5))
    assert names(api) == {device.name for device in offer(5).devices}
    consistent(api)
    running.update(offer(2))
    assert names(api) == {device.name for device in offer(2).devices}
    consistent(api)


def test_same_offer_writes_nothing(api: FakeApi) -> None:
    one = controller(api)
    one.sync()
    before = list(api.writes)
    one.update(offer())
    assert api.writes == before


def test_generation_never_falls(api: FakeApi) -> None:
    one, seen = controller(api), [0]
    for devices in (3, 5, 1, 3, 4):
        one.update(offer(devices))
        seen.append(max(spec["pool"]["generation"] for spec in api.specs()))
        consistent(api)
    assert seen == sorted(seen)


def test_server_that_is_away_is_asked_until_it_is_back(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE_FIRST", 0.01)
    one = controller(api)
    one.sync()
    api.fail = [ApiError("not reachable"), ApiError("busy", 500), ApiError("conflict", 409)]
    one.update(offer(4))
    assert names(api) == {device.name for device in offer(4).devices}


def test_stop_ends_an_update_that_cannot_be_made(api: FakeApi) -> None:
    one = controller(api)
    api.fail = [ApiError("not reachable")] * 100_000
    thread = in_background(lambda: one.update(offer(4)))
    one.stop()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_of_two_offers_at_a_time_the_last_one_stays(api: FakeApi, running: SliceController) -> None:
    threads = [in_background(lambda n=n: running.update(offer(n))) for n in (2, 4, 6)]  # type: ignore[misc]
    for thread in threads:
        thread.join(PATIENCE)
    running.update(offer(5))
    assert names(api) == {device.name for device in offer(5).devices}
    consistent(api)


def test_wiped_after_an_update_the_new_offer_comes_back(api: FakeApi, running: SliceController) -> None:
    running.update(offer(5))
    api.wipe()
    wanted = {device.name for device in offer(5).devices}
    api.wait_until(lambda: names(api) == wanted)
    consistent(api)


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "back"])
def test_gpu_that_is_lost_or_back_leaves_a_whole_pool_after_each_write(api: FakeApi, lost: bool) -> None:
    """No device consumes a counter that is not there, and nothing takes a new generation."""
    offers = [offer_of_gpus(3), offer_of_gpus(2)]
    first, then = offers if lost else offers[::-1]
    one, problems = controller(api, first), list[str]()
    one.sync()
    api.writes.clear()

    def look() -> None:
        consistent(api)
        (pool,) = gather_pools(list(map(parse_slice, api.slices.values())), Node(NODE))
        problems.append(pool.problem)

    api.after_write = look
    one.update(then)
    assert ([verb for verb, _ in api.writes], problems) == (["update", "update"], ["", ""])


def offer_of_gpus(count: int) -> Offer:
    counted = [(f"gpu-{number}", (("node", f"gpu-{number}", 1),)) for number in range(count)]
    devices = (
        OfferedDevice(f"{kind}-{name}", kind, {}, consumes=consumes)
        for kind in ("pair", "gpu")
        for name, consumes in counted
    )
    return Offer(tuple(devices), {"node": {name: 1 for name, _ in counted}})
