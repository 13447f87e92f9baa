"""Threads that get nowhere are noticed, and threads that only have much to do are not taken for such."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from grpc import aio

from railmate.claims.records import ClaimRef
from railmate.claims.state import PreparedClaim
from railmate.kubelet.server import KubeletServer, probe
from railmate.kubelet.sockets import Sockets
from railmate.kubelet.workers import WorkerPools
from railmate_api.proto import dra_v1_pb2, dra_v1_pb2_grpc


class Stuck:
    """Verbs that end when they are let go."""

    def __init__(self) -> None:
        self.let_go, self.running, self.news = threading.Event(), 0, threading.Condition()

    def unprepare(self, ref: ClaimRef) -> None:
        with self.news:
            self.running += 1
            self.news.notify_all()
        assert self.let_go.wait(30)

    def prepare(self, ref: ClaimRef, *, given_up: threading.Event) -> PreparedClaim:
        return PreparedClaim((), {})

    def wait(self, count: int) -> None:
        with self.news:
            assert self.news.wait_for(lambda: self.running >= count, 10)


@pytest.fixture
def pools() -> Iterator[WorkerPools]:
    found = WorkerPools()
    yield found
    found.shutdown()


def until(what: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(1000):
        if what():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come to that")


def waiting(pools: WorkerPools | KubeletServer) -> set[str]:
    """Pools whose threads did not come to their task at once."""
    return {name for name, seconds in pools.stuck_for().items() if seconds > 0.1}


def stays_well(pools: WorkerPools) -> bool:
    """Each look hands in another task."""
    pause = threading.Event()
    looks = []
    for _ in range(20):
        looks.append(waiting(pools))
        pause.wait(0.02)
    return looks[10:] == [set()] * 10


def test_idle_threads_come_to_their_task(pools: WorkerPools) -> None:
    assert stays_well(pools)


def test_task_waits_as_long_as_all_threads_are_stuck_and_its_time_counts(pools: WorkerPools) -> None:
    stuck = Stuck()
    for number in range(8):
        pools.workers.unprepare.submit(stuck.unprepare, ClaimRef(str(number), "team", "c"))
    stuck.wait(8)
    until(lambda: waiting(pools) == {"unprepare"})
    first = pools.stuck_for()["unprepare"]
    until(lambda: pools.stuck_for()["unprepare"] > first + 0.05)
    stuck.let_go.set()
    until(lambda: stays_well(pools))


def test_one_thread_that_is_left_is_enough(pools: WorkerPools) -> None:
    stuck = Stuck()
    for number in range(7):
        pools.workers.unprepare.submit(stuck.unprepare, ClaimRef(str(number), "team", "c"))
    stuck.wait(7)
    assert stays_well(pools)
    stuck.let_go.set()


def test_a_prepare_does_not_stand_behind_those_of_all_pods_of_a_node(pools: WorkerPools) -> None:
    """Each of them may wait for a device half a minute, and the kubelet gives a call 45 s."""
    let_go = threading.Event()
    try:
        for _ in range(110):
            pools.workers.prepare.submit(let_go.wait, 30)
        assert pools.workers.prepare.submit(lambda: "done").result(10) == "done"
    finally:
        let_go.set()


def test_pools_that_have_ended_are_not_stuck(pools: WorkerPools) -> None:
    pools.shutdown()
    assert pools.stuck_for() == {}


def test_eight_unprepares_that_never_end_are_noticed_though_the_service_answers(tmp_path: Path) -> None:
    stuck = Stuck()
    paths = Sockets(tmp_path / "reg.sock", tmp_path / "dra.sock")

    async def scenario() -> None:
        server = KubeletServer("railmate.dev", paths, stuck, lambda registered: None)
        await server.start()
        try:
            async with aio.insecure_channel(f"unix:{paths.service}") as channel:
                stub = dra_v1_pb2_grpc.DRAPluginStub(channel)
                claims = [dra_v1_pb2.Claim(uid=str(n), namespace="team", name=f"c{n}") for n in range(8)]
                call = asyncio.ensure_future(
                    stub.NodeUnprepareResources(dra_v1_pb2.NodeUnprepareResourcesRequest(claims=claims))
                )
                await asyncio.to_thread(stuck.wait, 8)
                await probe(paths.service)
                await asyncio.to_thread(until, lambda: waiting(server) == {"unprepare"})
                stuck.let_go.set()
                await call
                await asyncio.to_thread(until, lambda: waiting(server) == set())
        finally:
            stuck.let_go.set()
            await server.stop(1.0)

    asyncio.run(scenario())
