"""The kubelet's sockets: registration and both versions of the service, called as the kubelet calls them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from railmate.claims.records import ClaimRef, PreparedDevice
from railmate.claims.state import PreparedClaim
from railmate.errors import RailmateError
from railmate.kubelet.server import KubeletServer
from railmate.kubelet.sockets import Sockets, sockets
from railmate_api.proto import (
    dra_v1_pb2,
    dra_v1_pb2_grpc,
    dra_v1beta1_pb2,
    dra_v1beta1_pb2_grpc,
    pluginregistration_pb2,
    pluginregistration_pb2_grpc,
)

VERSIONS = pytest.mark.parametrize(
    ("messages", "services"), [(dra_v1_pb2, dra_v1_pb2_grpc), (dra_v1beta1_pb2, dra_v1beta1_pb2_grpc)]
)
PACKAGES = {dra_v1_pb2: "v1", dra_v1beta1_pb2: "v1beta1"}
#: The kubelet's own limits (pkg/kubelet/pluginmanager, pkg/kubelet/cm/dra/plugin).
GET_INFO_SECONDS, CALL_SECONDS = 1, 45


class Verbs:
    def __init__(self) -> None:
        self.unprepared: list[ClaimRef] = []
        self.started, self.release = threading.Event(), threading.Event()

    def prepare(self, ref: ClaimRef, *, given_up: threading.Event) -> PreparedClaim:
        if ref.name == "bad":
            raise RailmateError(f"{ref}: no")
        if ref.name == "slow":
            self.started.set()
            self.release.wait(20)
        share = "share-1" if ref.name == "shared" else None
        device = PreparedDevice("main", "node1", "pair-0", share_id=share)
        return PreparedClaim((device,), {device.key: ["railmate.dev/claim=x"]})

    def unprepare(self, ref: ClaimRef) -> None:
        self.unprepared.append(ref)


class Kubelet:
    """The kubelet's side. It dials the registration socket it finds, then the endpoint it is told."""

    def __init__(self, paths: Sockets, verbs: Verbs, heard: list[bool], server: KubeletServer) -> None:
        self.paths, self.verbs, self.heard, self.server = paths, verbs, heard, server

    async def register(self) -> Any:
        async with grpc.aio.insecure_channel(f"unix:{self.paths.registration}") as channel:
            stub = pluginregistration_pb2_grpc.RegistrationStub(channel)
            info = await stub.GetInfo(pluginregistration_pb2.InfoRequest(), timeout=GET_INFO_SECONDS)
            await stub.NotifyRegistrationStatus(
                pluginregistration_pb2.RegistrationStatus(plugin_registered=True), timeout=5
            )
            return info

    @asynccontextmanager
    async def plugin(self, services: Any) -> AsyncIterator[Any]:
        info = await self.register()
        async with grpc.aio.insecure_channel(f"unix:{info.endpoint}") as channel:
            yield services.DRAPluginStub(channel)


def with_server(tmp_path: Path, test: Callable[[Kubelet], Any]) -> None:
    async def run() -> None:
        paths, verbs, heard = sockets(tmp_path, "railmate.dev", "pod-uid"), Verbs(), list[bool]()
        server = KubeletServer("railmate.dev", paths, verbs, heard.append)
        await server.start()
        try:
            await test(Kubelet(paths, verbs, heard, server))
        finally:
            verbs.release.set()
            await server.stop(grace=1)

    asyncio.run(run())


def claims(messages: Any, *names: str) -> list[Any]:
    return [messages.Claim(uid=f"uid-{name}", namespace="team", name=name) for name in names]


def test_registration_leads_to_the_service(tmp_path: Path) -> None:
    async def test(kubelet: Kubelet) -> None:
        info = await kubelet.register()
        assert (info.type, info.name) == ("DRAPlugin", "railmate.dev")
        assert list(info.supported_versions) == ["v1.DRAPlugin", "v1beta1.DRAPlugin"]
        assert info.endpoint == str(kubelet.paths.service.absolute())
        assert kubelet.heard == [True]

    with_server(tmp_path, test)


@VERSIONS
def test_prepare_and_unprepare(tmp_path: Path, messages: Any, services: Any) -> None:
    async def test(kubelet: Kubelet) -> None:
        async with kubelet.plugin(services) as plugin:
            request = messages.NodePrepareResourcesRequest(claims=claims(messages, "good", "bad"))
            answer = await plugin.NodePrepareResources(request, timeout=CALL_SECONDS)
            assert answer.claims["uid-good"].devices[0].cdi_device_ids == ["railmate.dev/claim=x"]
            assert answer.claims["uid-bad"].error == "ResourceClaim team/bad: no"
            request = messages.NodeUnprepareResourcesRequest(claims=claims(messages, "good"))
            answer = await plugin.NodeUnprepareResources(request, timeout=CALL_SECONDS)
            assert set(answer.claims) == {"uid-good"}
            assert kubelet.verbs.unprepared == [ClaimRef("uid-good", "team", "good")]

    with_server(tmp_path, test)


@VERSIONS
def test_share_of_a_device_is_named_where_the_version_has_a_word_for_it(
    tmp_path: Path, messages: Any, services: Any
) -> None:
    async def test(kubelet: Kubelet) -> None:
        async with kubelet.plugin(services) as plugin:
            request = messages.NodePrepareResourcesRequest(claims=claims(messages, "shared", "good"))
            answer = await plugin.NodePrepareResources(request, timeout=CALL_SECONDS)
            shared, alone = (answer.claims[f"uid-{name}"].devices[0] for name in ("shared", "good"))
            assert shared.device_name == alone.device_name == "pair-0"
            if messages is dra_v1_pb2:
                assert shared.share_id == "share-1"
                assert not alone.HasField("share_id")

    with_server(tmp_path, test)


@VERSIONS
def test_services_have_the_kubelets_wire_names(tmp_path: Path, messages: Any, services: Any) -> None:
    """Called by their full names and raw bytes: nothing of ours is on the client's side."""

    async def test(kubelet: Kubelet) -> None:
        name = f"/k8s.io.kubelet.pkg.apis.dra.{PACKAGES[messages]}.DRAPlugin/NodePrepareResources"
        async with grpc.aio.insecure_channel(f"unix:{kubelet.paths.service}") as channel:
            # field 1 (claims): a message with namespace (1), uid (2), name (3)
            claim = b"\x0a\x04team\x12\x05uid-g\x1a\x04good"
            answer = await channel.unary_unary(name)(b"\x0a" + bytes([len(claim)]) + claim, timeout=5)
            assert b"uid-g" in answer
            assert b"pair-0" in answer

    with_server(tmp_path, test)


@pytest.mark.parametrize("junk", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x00" * 100, b"\x0a\x02\x12\xc3"])
def test_malformed_request_is_refused_and_the_next_is_answered(tmp_path: Path, junk: bytes) -> None:
    async def test(kubelet: Kubelet) -> None:
        async with grpc.aio.insecure_channel(f"unix:{kubelet.paths.service}") as channel:
            name = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"
            with pytest.raises(grpc.RpcError):
                await channel.unary_unary(name)(junk, timeout=5)
            assert await channel.unary_unary(name)(b"", timeout=5) == b""

    with_server(tmp_path, test)


def test_slow_claim_does_not_hold_up_other_calls(tmp_path: Path) -> None:
    async def test(kubelet: Kubelet) -> None:
        async with kubelet.plugin(dra_v1_pb2_grpc) as plugin:
            slow = plugin.NodePrepareResources(
                dra_v1_pb2.NodePrepareResourcesRequest(claims=claims(dra_v1_pb2, "slow")),
                timeout=CALL_SECONDS,
            )
            request = dra_v1_pb2.NodePrepareResourcesRequest(claims=claims(dra_v1_pb2, "good"))
            answer = await plugin.NodePrepareResources(request, timeout=5)
            assert not answer.claims["uid-good"].error
            await kubelet.register()
            kubelet.verbs.release.set()
            assert not (await slow).claims["uid-slow"].error

    with_server(tmp_path, test)


def test_call_in_flight_is_finished_when_the_server_ends(tmp_path: Path) -> None:
    async def test(kubelet: Kubelet) -> None:
        async with kubelet.plugin(dra_v1_pb2_grpc) as plugin:
            request = dra_v1_pb2.NodePrepareResourcesRequest(claims=claims(dra_v1_pb2, "slow"))
            call = asyncio.ensure_future(plugin.NodePrepareResources(request, timeout=CALL_SECONDS))
            await asyncio.to_thread(kubelet.verbs.started.wait, 5)
            stopping = asyncio.ensure_future(kubelet.server.stop(grace=10))
            await asyncio.sleep(0)  # the end has begun when the verb goes on
            kubelet.verbs.release.set()
            answer = await call
            assert answer.claims["uid-slow"].devices
            await stopping

    with_server(tmp_path, test)


def test_both_sockets_are_gone_after_the_end(tmp_path: Path) -> None:
    """A registration socket that stays is dialled by the kubelet for ever."""
    kept: list[Sockets] = []

    async def test(kubelet: Kubelet) -> None:
        kept.append(kubelet.paths)

    with_server(tmp_path, test)
    assert not kept[0].registration.exists()
    assert not kept[0].service.exists()


def test_sockets_left_by_a_killed_process_are_replaced(tmp_path: Path) -> None:
    paths = sockets(tmp_path, "railmate.dev", "pod-uid")
    for path in (paths.registration, paths.service):
        path.parent.mkdir(parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as old:
            old.bind(str(path))

    async def test(kubelet: Kubelet) -> None:
        await kubelet.register()

    with_server(tmp_path, test)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory in which a socket may be named after a pod's UID."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def test_what_instances_left_that_were_killed_for_good_is_removed_and_nothing_else(short_path: Path) -> None:
    """The kubelet would try to register it for ever. Somebody listens on one of them; one was made just now."""
    one, two, three, four = (
        f"{number}e37729-3af7-4de7-9147-0e5e46f2b82f".rjust(36, "a") for number in range(4)
    )
    own, registry = short_path / "plugins" / "railmate.dev", short_path / "plugins_registry"
    for directory in (own, registry):
        directory.mkdir(parents=True)
    dead = [own / f"dra-{one}.sock", registry / f"railmate.dev-{one}-reg.sock", own / "dra-0123456789ab.sock"]
    foreign = [registry / f"gpu.example.com-{one}-reg.sock", registry / "railmate.dev-more-reg.sock"]
    alive, young = own / f"dra-{two}.sock", own / f"dra-{three}.sock"
    plain = own / f"dra-{four}.sock"
    plain.touch()
    with contextlib.ExitStack() as sockets_of_others:
        for path in (*dead, *foreign, alive, young):
            other = sockets_of_others.enter_context(socket.socket(socket.AF_UNIX))
            other.bind(str(path))
            if path == alive:
                other.listen()
        for path in (*dead, *foreign, alive, plain):
            os.utime(path, (0, 0))

        async def test(kubelet: Kubelet) -> None:
            await kubelet.register()
            assert not any(path.exists() for path in dead)
            assert all(path.exists() for path in (*foreign, alive, young, plain))

        with_server(short_path, test)


def test_two_instances_serve_side_by_side(tmp_path: Path) -> None:
    async def run() -> None:
        servers = []
        for pod in ("old", "new"):
            paths = sockets(tmp_path, "railmate.dev", pod)
            server = KubeletServer("railmate.dev", paths, Verbs(), lambda registered: None)
            await server.start()
            servers.append((server, Kubelet(paths, Verbs(), [], server)))
        endpoints = {(await kubelet.register()).endpoint for _, kubelet in servers}
        assert len(endpoints) == 2
        await servers[0][0].stop(grace=1)
        await servers[1][1].register()
        await servers[1][0].stop(grace=1)

    asyncio.run(run())


@pytest.mark.parametrize("obstacle", ["plugins_registry", "plugins"])
def test_socket_that_cannot_be_made_is_said_in_words(tmp_path: Path, obstacle: str) -> None:
    (tmp_path / obstacle).write_text("in the way")

    async def run() -> None:
        server = KubeletServer(
            "railmate.dev", sockets(tmp_path, "railmate.dev", "p"), Verbs(), lambda _: None
        )
        try:
            await server.start()
        finally:
            await server.stop(grace=0)

    with pytest.raises(RailmateError, match="mounted into this pod"):
        asyncio.run(run())


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    paths = sockets(tmp_path, "railmate.dev", "p")
    paths.service.parent.mkdir(parents=True)
    paths.service.write_text("somebody's file")

    async def run() -> None:
        server = KubeletServer("railmate.dev", paths, Verbs(), lambda _: None)
        try:
            await server.start()
        finally:
            await server.stop(grace=0)

    with pytest.raises(RailmateError, match=str(paths.service)):
        asyncio.run(run())
    assert paths.service.read_text() == "somebody's file"
