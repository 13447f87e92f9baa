"""An instance of the driver is told to end while the kubelet waits for its answer (rolling update, maxSurge 1).

The kubelet's side is played after pkg/kubelet/cm/dra/plugin: one connection an instance, closed as soon as the
instance's registration socket is gone, which fails the calls on it; new calls go to the instance registered last.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from railmate.claims.ledger import Ledger
from railmate.claims.state import ClaimState
from railmate.kubelet.server import KubeletServer
from railmate.kubelet.sockets import Sockets, sockets
from railmate.node.agent import _ENDING, Agent
from railmate.node.ending import Ending
from railmate.node.instances import Instances
from railmate_api.proto import dra_v1_pb2, dra_v1_pb2_grpc
from unit.claims.claims_world import DRIVER, FakeClaims, claim, ref, state, uid

#: The kubelet's limit of a call (pkg/kubelet/cm/dra/plugin).
CALL_SECONDS = 45


class Connection:
    """The kubelet's to one instance."""

    def __init__(self, paths: Sockets) -> None:
        self._channel = grpc.aio.insecure_channel(f"unix:{paths.service}")
        self._stub = dra_v1_pb2_grpc.DRAPluginStub(self._channel)
        self._registration = paths.registration
        self._watch = asyncio.ensure_future(self._close_when_deregistered())

    async def prepare(self, number: int, seconds: float = CALL_SECONDS) -> Any:
        request = dra_v1_pb2.NodePrepareResourcesRequest(claims=[_claim(number)])
        answer = await self._stub.NodePrepareResources(request, timeout=seconds)
        return answer.claims[uid(number)]

    async def unprepare(self, number: int) -> Any:
        request = dra_v1_pb2.NodeUnprepareResourcesRequest(claims=[_claim(number)])
        answer = await self._stub.NodeUnprepareResources(request, timeout=CALL_SECONDS)
        return answer.claims[uid(number)]

    async def _close_when_deregistered(self) -> None:
        await until(lambda: not self._registration.exists())  # the kubelet looks once a second
        await self._channel.close()

    async def close(self) -> None:
        self._watch.cancel()
        with suppress(asyncio.CancelledError):
            await self._watch
        await self._channel.close()


def _claim(number: int) -> Any:
    one = ref(number)
    return dra_v1_pb2.Claim(uid=one.uid, namespace=one.namespace, name=one.name)


class Instance:
    """The parts of one instance that the kubelet's calls go through, and their end as the agent has it."""

    def __init__(self, root: Path, api: FakeClaims, pod: str, grace_period: float) -> None:
        self.state: ClaimState = state(root, api)
        self.paths = sockets(root, DRIVER, pod)
        self.server = KubeletServer(DRIVER, self.paths, self.state, lambda registered: None)
        self._grace_period = grace_period
        self.ending, self.instances = (one(self.paths.service.parent) for one in (Ending, Instances))

    async def start(self) -> Connection:
        await self.server.start()
        return Connection(self.paths)

    async def end(self) -> None:
        """What SIGTERM leads to."""
        agent: Any = Agent.__new__(Agent)
        agent._settings = SimpleNamespace(grace_period=self._grace_period)
        agent._state, agent._kubelet, agent._health = self.state, self.server, None
        agent._ending, agent._instances = self.ending, self.instances
        agent._stopping, agent._look_soon = threading.Event(), threading.Event()
        nothing = SimpleNamespace(stop=lambda: None, close=lambda: None)
        for part in ("controller", "watch", "offers", "devices", "events", "attached", "reports"):
            setattr(agent, f"_{part}", nothing)
        await agent._end(asyncio.ensure_future(asyncio.sleep(0)))


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = tmp_path_factory.mktemp("d")  # a socket's path must be short
    yield found
    shutil.rmtree(found, ignore_errors=True)


def with_two(
    root: Path,
    test: Callable[[Instance, Instance, Connection, Connection], Awaitable[None]],
    grace_period: float = 40,
) -> None:
    """An old and a new instance on one ledger. GPU 0 is held by claim 1; claims 2 and 3 of other pods want it, too."""

    async def run() -> None:
        api = FakeClaims(*(claim(n, "gpu-0", pods=(f"pod-{n}",)) for n in (1, 2, 3)))
        old, new = (Instance(root, api, pod, grace_period) for pod in ("old", "new"))
        async with connected(old) as to_old, connected(new) as to_new:
            assert (await to_old.prepare(1)).devices
            async with asyncio.timeout(60):
                await test(old, new, to_old, to_new)

    asyncio.run(run())


@asynccontextmanager
async def connected(instance: Instance) -> AsyncIterator[Connection]:
    connection = await instance.start()
    try:
        yield connection
    finally:
        await connection.close()
        instance.state.stop()
        await instance.server.stop(grace=1)


async def waits(instance: Instance, number: int) -> None:
    """Return when a prepare of the claim waits there."""
    await until(lambda: any(one == uid(number) for one, _ in instance.state._preparing))
    await asyncio.sleep(0.3)  # and has looked once in vain


async def until(what: Callable[[], bool], seconds: float = 60) -> None:
    for _ in range(int(seconds / 0.01)):
        if what():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


def entries(root: Path) -> set[str]:
    return set(Ledger(root / "plugins" / DRIVER).entries())


def test_a_prepare_that_waits_is_answered_though_its_instance_was_told_to_end(root: Path) -> None:
    """The other instance frees the device that it waits for."""

    async def test(old: Instance, new: Instance, to_old: Connection, to_new: Connection) -> None:
        call = asyncio.ensure_future(to_old.prepare(2))
        await waits(old, 2)
        new.instances.registered()
        old.instances.registered()  # last, as after an update that is taken back
        end = asyncio.ensure_future(old.end())
        await asyncio.sleep(1)
        assert not call.done()
        assert not end.done()
        assert new.instances.outdone(), "while it is asked the slices are its own"
        assert not (await to_new.unprepare(1)).error
        answer = await call
        assert answer.error == ""
        assert [one.device_name for one in answer.devices] == ["gpu-0"]
        await end
        assert not new.instances.outdone()
        assert not old.paths.registration.exists()
        assert not old.paths.service.exists()
        assert entries(root) == {uid(2)}
        assert not (await to_new.unprepare(2)).error, "the successor gives back what the old one prepared"
        assert entries(root) == set()

    with_two(root, test)


def test_what_comes_to_an_instance_that_ends_is_answered_while_others_wait(root: Path) -> None:
    """Where it has no successor yet, a refusal would cost that pod a minute and more."""

    async def test(old: Instance, new: Instance, to_old: Connection, to_new: Connection) -> None:
        call = asyncio.ensure_future(to_old.prepare(2))
        await waits(old, 2)
        end = asyncio.ensure_future(old.end())
        await asyncio.sleep(0.1)
        assert not (await to_old.unprepare(1)).error
        assert (await call).devices
        await end

    with_two(root, test)


def test_when_the_grace_period_is_over_those_that_wait_are_told(root: Path) -> None:
    async def test(old: Instance, new: Instance, to_old: Connection, to_new: Connection) -> None:
        call = asyncio.ensure_future(to_old.prepare(2))
        await waits(old, 2)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await old.end()
        assert loop.time() - began < 5
        assert "the driver is being replaced" in (await call).error
        assert entries(root) == {uid(1)}

    with_two(root, test, grace_period=_ENDING + 1)


def test_an_instance_without_calls_ends_at_once(root: Path) -> None:
    async def test(old: Instance, new: Instance, to_old: Connection, to_new: Connection) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await old.end()
        assert loop.time() - began < 2

    with_two(root, test)


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
def test_a_prepare_that_the_kubelet_gives_up_on_does_not_land_after_another_instances_unprepare(
    root: Path, how: str
) -> None:
    """The kubelet has the claim given back by the instance registered last, which knows nothing of who waits."""

    async def test(old: Instance, new: Instance, to_old: Connection, to_new: Connection) -> None:
        call = asyncio.ensure_future(to_old.prepare(2, 45 if how == "cancelled" else 1))
        await waits(old, 2)
        if how == "cancelled":
            call.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await call
        assert not (await to_new.unprepare(2)).error
        assert not (await to_new.unprepare(1)).error
        await until(lambda: not old.state._preparing)
        assert entries(root) == set()
        assert (await to_new.prepare(2)).devices, "when it is asked for again it is prepared"

    with_two(root, test)
