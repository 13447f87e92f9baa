"""Events and their answers, between a runtime made for the test and the plugin, over a real unix socket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nri_handler import Recorder, fails, with_plugin, with_session
from nri_runtime import Connection, FakeRuntime, Refused, bytewise, pod

from railmate.errors import RailmateError, UsageError
from railmate.nri.events import ContainerAdjustment, ContainerInfo, PodSandbox, Rlimit
from railmate.nri.messages import container_info
from railmate.nri.plugin import NriPlugin
from railmate.nri.ttrpc import FAILED_PRECONDITION, INTERNAL, INVALID_ARGUMENT, UNIMPLEMENTED
from railmate_api.proto import nri_pb2


def container(*cdi: str) -> Any:
    message = nri_pb2.Container(id="c1", name="main", pod_sandbox_id="ab" * 32)
    for name in cdi:
        message.CDI_devices.add(name=name)
    return message


def test_the_plugin_registers_and_asks_for_the_events_it_handles(tmp_path: Path) -> None:
    async def scenario(runtime: FakeRuntime, plugin: NriPlugin) -> None:
        connection = await runtime.plugin()
        registration = await connection.accept_registration()
        assert (registration.plugin_name, registration.plugin_idx) == ("railmate", "10")
        answer = nri_pb2.ConfigureResponse.FromString(
            await connection.call("Configure", nri_pb2.ConfigureRequest())
        )
        events = {event for event in range(1, 32) if answer.events & 1 << (event - 1)}
        assert events == {
            nri_pb2.RUN_POD_SANDBOX,
            nri_pb2.STOP_POD_SANDBOX,
            nri_pb2.REMOVE_POD_SANDBOX,
            nri_pb2.CREATE_CONTAINER,
        }
        assert not plugin.connected, "events may still be missed before Synchronize"
        await connection.call("Synchronize", nri_pb2.SynchronizeRequest())
        assert plugin.connected

    with_plugin(tmp_path, Recorder(), scenario)


@pytest.mark.parametrize(
    ("name", "index"), [("rail mate", "10"), ("", "10"), ("railmate", "1"), ("railmate", "1a")]
)
def test_a_name_or_index_that_runtimes_refuse_is_bad_usage(tmp_path: Path, name: str, index: str) -> None:
    with pytest.raises(UsageError):
        NriPlugin(name, index, tmp_path, Recorder())


def test_the_handler_gets_the_pod_as_plain_data(tmp_path: Path) -> None:
    handler = Recorder()

    async def scenario(connection: Connection) -> None:
        await connection.sandbox("RunPodSandbox", pod())
        await connection.sandbox("StopPodSandbox", pod(netns=""))

    with_session(tmp_path, handler, scenario)
    pods = dict(handler.calls)
    assert pods["run"] == PodSandbox(
        id="ab" * 32,
        name="train-0",
        namespace="ml",
        uid="uid-of-train-0",
        netns_path=Path("/proc/self/ns/net"),
        pid=4711,
        annotations={"color": "green"},
    )
    assert pods["stop"].netns_path is None


def test_frames_may_be_cut_anywhere(tmp_path: Path) -> None:
    handler = Recorder()

    async def scenario(connection: Connection) -> None:
        connection.pieces = bytewise
        await connection.sandbox("RunPodSandbox", pod())

    with_session(tmp_path, handler, scenario)
    assert "run ended" in handler.names()


def test_synchronize_in_pieces_reaches_the_handler_as_one(tmp_path: Path) -> None:
    handler = Recorder()

    async def scenario(runtime: FakeRuntime, plugin: NriPlugin) -> None:
        connection = await runtime.plugin()
        await connection.accept_registration()
        for i, more in enumerate((True, True, False)):
            request = nri_pb2.SynchronizeRequest(
                pods=[pod(f"p{i}")], containers=[container(f"v/c={i}")], more=more
            )
            answer = nri_pb2.SynchronizeResponse.FromString(await connection.call("Synchronize", request))
            assert answer.more == more
            assert plugin.connected == (not more)

    with_plugin(tmp_path, handler, scenario)
    [(_, pods)] = [call for call in handler.calls if call[0] == "synchronize"]
    assert [one.name for one in pods] == ["p0", "p1", "p2"]


def test_a_failing_synchronize_is_logged_and_kept_from_the_runtime(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handler = Recorder(synchronize=fails(RuntimeError("the ledger is on fire")))

    async def scenario(connection: Connection) -> None:
        await connection.sandbox("RunPodSandbox", pod())

    with_session(tmp_path, handler, scenario)
    assert "run ended" in handler.names()
    assert "the ledger is on fire" in caplog.text


def test_a_refused_sandbox_carries_the_handlers_own_words(tmp_path: Path) -> None:
    async def scenario(connection: Connection) -> None:
        with pytest.raises(Refused, match=r"^claim ml/nic: VF 0000:c1:00\.2 is in another pod$") as refused:
            await connection.sandbox("RunPodSandbox", pod())
        assert refused.value.code == FAILED_PRECONDITION
        await connection.sandbox("StopPodSandbox", pod())  # the connection still works

    text = "claim ml/nic: VF 0000:c1:00.2 is in another pod"
    with_session(tmp_path, Recorder(run=fails(RailmateError(text))), scenario)


def test_a_bug_in_the_handler_refuses_too_and_points_to_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(connection: Connection) -> None:
        with pytest.raises(Refused, match=r"KeyError: 'vf'.*log of the railmate pod") as refused:
            await connection.call(
                "CreateContainer", nri_pb2.CreateContainerRequest(pod=pod(), container=container())
            )
        assert refused.value.code == INTERNAL

    with_session(tmp_path, Recorder(create=fails(KeyError("vf"))), scenario)
    assert "Traceback" in caplog.text


def test_stop_and_remove_never_fail_for_the_runtime(tmp_path: Path) -> None:
    handler = Recorder(stop=fails(RailmateError("no")), remove=fails(RuntimeError("no")))

    async def scenario(connection: Connection) -> None:
        await connection.sandbox("StopPodSandbox", pod())
        await connection.sandbox("RemovePodSandbox", pod())

    with_session(tmp_path, handler, scenario)
    assert handler.names().count("stop ended") == handler.names().count("remove ended") == 1


def test_a_container_gets_its_adjustment_also_when_it_is_larger_than_a_frame(tmp_path: Path) -> None:
    adjustment = ContainerAdjustment(
        rlimits=(Rlimit("RLIMIT_MEMLOCK", 1 << 20, 2**64 - 1),),
        env={"PAD": "x" * 20_000},
        cdi_devices=("v/c=d",),
    )
    seen = []

    async def create(pod: PodSandbox, container: ContainerInfo) -> ContainerAdjustment:
        seen.append(container)
        return adjustment

    async def scenario(connection: Connection) -> None:
        request = nri_pb2.CreateContainerRequest(
            pod=pod(), container=container("railmate.dev/claim=x", "v/c=d")
        )
        answer = nri_pb2.CreateContainerResponse.FromString(await connection.call("CreateContainer", request))
        [limit] = answer.adjust.rlimits
        assert (limit.type, limit.soft, limit.hard) == ("RLIMIT_MEMLOCK", 1 << 20, 2**64 - 1)
        assert [(one.key, one.value) for one in answer.adjust.env] == [("PAD", "x" * 20_000)]
        assert [one.name for one in answer.adjust.CDI_devices] == ["v/c=d"]
        assert connection.largest_frame <= 4096

    with_session(tmp_path, Recorder(create=create), scenario)
    assert seen == [ContainerInfo("c1", "main", "ab" * 32, ("railmate.dev/claim=x", "v/c=d"))]


def test_a_container_is_told_with_what_it_has_already() -> None:
    message = nri_pb2.Container(
        id="c1", name="main", pod_sandbox_id="s1", pid=7, env=["A=1", "B=x=y", "A=2", "C"]
    )
    message.rlimits.add(type="RLIMIT_MEMLOCK", soft=1, hard=2)
    message.CDI_devices.add(name="railmate.dev/claim=x")
    message.annotations["railmate.dev/rdma-denied"] = "mlx5_0"
    message.hooks.create_runtime.add(path="/p/gate", args=["gate", "/p/attached", "x"])
    assert container_info(message) == ContainerInfo(
        "c1",
        "main",
        "s1",
        ("railmate.dev/claim=x",),
        {"A": "2", "B": "x=y", "C": ""},
        (Rlimit("RLIMIT_MEMLOCK", 1, 2),),
        {"railmate.dev/rdma-denied": "mlx5_0"},
        7,
        (("gate", "/p/attached", "x"),),
    )


def test_no_adjustment_is_an_empty_answer(tmp_path: Path) -> None:
    async def scenario(connection: Connection) -> None:
        request = nri_pb2.CreateContainerRequest(pod=pod(), container=container())
        assert await connection.call("CreateContainer", request) == b""

    with_session(tmp_path, Recorder(), scenario)


def test_older_runtimes_deliver_sandbox_events_as_state_changes(tmp_path: Path) -> None:
    handler = Recorder(run=fails(RailmateError("refused")))

    async def scenario(connection: Connection) -> None:
        with pytest.raises(Refused, match="refused"):
            await connection.call("StateChange", nri_pb2.StateChangeEvent(event=1, pod=pod()))
        for event in (2, 3, 10):
            await connection.call("StateChange", nri_pb2.StateChangeEvent(event=event, pod=pod()))

    with_session(tmp_path, handler, scenario)
    assert [name for name in handler.names() if "ended" not in name] == [
        "synchronize",
        "run",
        "stop",
        "remove",
    ]


@pytest.mark.parametrize(
    ("method", "service"),
    [("UpdateContainer", "nri.pkg.api.v1alpha1.Plugin"), ("RunPodSandbox", "other.Service")],
)
def test_unknown_methods_are_unimplemented(tmp_path: Path, method: str, service: str) -> None:
    async def scenario(connection: Connection) -> None:
        with pytest.raises(Refused, match=method) as refused:
            await connection.call(method, service=service)
        assert refused.value.code == UNIMPLEMENTED

    with_session(tmp_path, Recorder(), scenario)


def test_a_malformed_request_is_refused_and_the_next_one_served(tmp_path: Path) -> None:
    async def scenario(connection: Connection) -> None:
        with pytest.raises(Refused, match="malformed") as refused:
            await connection.call("RunPodSandbox", b"\xff\xff\xff")
        assert refused.value.code == INVALID_ARGUMENT
        await connection.sandbox("RunPodSandbox", pod())

    with_session(tmp_path, Recorder(), scenario)


def test_a_sandbox_is_live_while_its_network_namespace_exists(tmp_path: Path) -> None:
    leftover = tmp_path / "cni-0"
    leftover.touch()
    here = PodSandbox("id", "n", "ns", "uid", Path("/proc/self/ns/net"))
    assert here.is_live()
    assert not PodSandbox("id", "n", "ns", "uid", tmp_path / "gone").is_live()
    assert not PodSandbox("id", "n", "ns", "uid", leftover).is_live(), "a plain file is no namespace"
    assert PodSandbox("id", "n", "ns", "uid", None, pid=1).is_live(), "on the host network"
    assert not PodSandbox("id", "n", "ns", "uid", None, pid=0).is_live()
