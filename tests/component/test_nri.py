"""The NRI plugin and the kernel together: events of a runtime made for the test move a netdev between namespaces, and
raise a limit.

A real containerd drives the same in the end-to-end tests.
"""

from __future__ import annotations

import asyncio
import os
import resource
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from component.conftest import wait_until
from harness import cgroups
from railmate.attach.netdev import AttachedNetdev, NetdevSnapshot, move_back, move_in, snapshot
from railmate.attach.rdmamodel import RdmaDeviceRef
from railmate.claims.ledger import Ledger
from railmate.claims.observation import Observations
from railmate.claims.records import Entry, PreparedDevice, PreparedNic
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.surroundings import ClaimObserver
from railmate.node.attached import AttachedClaims
from railmate.node.events import RuntimeEvents
from railmate.node.memlock import Memlock
from railmate.node.rdmacgroup import RdmaCgroup
from railmate.nri.events import ContainerAdjustment, ContainerInfo, NriHandler, PodSandbox
from railmate.nri.plugin import NriPlugin
from railmate_api.proto import nri_pb2, ttrpc_pb2
from unit.claims import claims_world

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces: needs root")


class Mover:
    """Gives the one VF to each pod that starts, as the driver's handler does for a claim's."""

    def __init__(self, vf: NetdevSnapshot) -> None:
        self.vf = vf
        self.attached: AttachedNetdev | None = None

    async def synchronize(self, pods: list[PodSandbox], containers: list[ContainerInfo]) -> None:
        for pod in pods:
            if pod.is_live():
                await self.run_pod_sandbox(pod)

    async def run_pod_sandbox(self, pod: PodSandbox) -> None:
        assert pod.netns_path is not None
        self.attached = await asyncio.to_thread(move_in, self.vf, pod.netns_path, name="net1")

    async def must_end(self, pod: PodSandbox) -> bool:
        return False

    async def stop_pod_sandbox(self, pod: PodSandbox) -> None:
        await asyncio.to_thread(move_back, self.vf, pod.netns_path, attached=self.attached)

    async def remove_pod_sandbox(self, pod: PodSandbox) -> None:
        pass

    async def create_container(self, pod: PodSandbox, container: ContainerInfo) -> ContainerAdjustment | None:
        return None


@pytest.fixture
def netns() -> Iterator[Path]:
    name = f"rmn{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        yield Path("/run/netns") / name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.fixture
def vf() -> Iterator[NetdevSnapshot]:
    command = "ip link add rmnvf0 type veth peer name rmnpf0"
    subprocess.run(command.split(), check=True)
    try:
        yield snapshot("rmnvf0", "0000:c1:00.1")
    finally:
        subprocess.run(["ip", "link", "delete", "rmnpf0"], check=True)


def links(netns: Path) -> str:
    return subprocess.run(
        ["ip", "-netns", netns.name, "link", "show"], check=True, capture_output=True, text=True
    ).stdout


class Runtime:
    """A runtime that talks to one plugin, one call after the other, and reads whole messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.stream = 1

    async def receive(self) -> tuple[int, bytes]:
        """The ttrpc stream and body of a message that fits a frame."""
        _, length = struct.unpack(">II", await self.reader.readexactly(8))
        data = await self.reader.readexactly(length)
        return struct.unpack(">I", data[4:8])[0], data[10:]

    def send(self, connection: int, stream: int, kind: int, body: bytes) -> None:
        data = struct.pack(">IIBB", len(body), stream, kind, 0) + body
        self.writer.write(struct.pack(">II", connection, len(data)) + data)

    async def accept(self) -> None:
        stream, _ = await self.receive()
        self.send(2, stream, 2, ttrpc_pb2.Response().SerializeToString())

    async def call(self, method: str, payload: bytes) -> str:
        """The error message of the answer, empty for success."""
        request = ttrpc_pb2.Request(
            service="nri.pkg.api.v1alpha1.Plugin", method=method, payload=payload, timeout_nano=2 * 10**9
        )
        self.send(1, self.stream, 1, request.SerializeToString())
        self.stream += 2
        _, body = await self.receive()
        return str(ttrpc_pb2.Response.FromString(body).status.message)


def sandbox(netns: Path, id: str = "ab" * 32) -> bytes:
    return nri_pb2.PodSandboxRequest(pod=_pod(netns, id)).SerializeToString()


def container(netns: Path) -> bytes:
    one = nri_pb2.Container(id="c1", name="main", pod_sandbox_id="ab" * 32)
    return nri_pb2.CreateContainerRequest(pod=_pod(netns, "ab" * 32), container=one).SerializeToString()


def _pod(netns: Path, id: str) -> nri_pb2.PodSandbox:
    pod = nri_pb2.PodSandbox(id=id, name="train-0", namespace="ml", uid="u")
    pod.linux.namespaces.add(type="network", path=str(netns))
    return pod


def test_the_netdev_is_in_the_pod_before_its_first_container_and_home_when_stop_is_answered(
    tmp_path: Path, netns: Path, vf: NetdevSnapshot
) -> None:
    async def scenario(runtime: Runtime) -> None:
        await runtime.accept()
        dead = nri_pb2.SynchronizeRequest()
        dead.pods.add(id="de" * 32, name="train-0").linux.namespaces.add(
            type="network", path="/run/netns/gone"
        )
        assert await runtime.call("Synchronize", dead.SerializeToString()) == ""
        assert await runtime.call("RunPodSandbox", sandbox(netns)) == ""
        assert await runtime.call("CreateContainer", container(netns)) == ""
        assert "net1" in links(netns)
        assert await runtime.call("StopPodSandbox", sandbox(netns)) == ""
        assert "net1" not in links(netns)
        error = await runtime.call("RunPodSandbox", sandbox(Path("/run/netns/gone"), id="cd" * 32))
        assert error == "network namespace /run/netns/gone does not exist any more"

    serve(tmp_path / "nri.sock", Mover(vf), scenario)
    assert snapshot(vf.name, vf.pci_address) == vf


@pytest.fixture
def process() -> Iterator[tuple[int, str]]:
    """A container's process, and the container's ID: it is in a cgroup of that name and may lock 64 KiB of memory, and
    128 KiB if it asks."""
    id = f"{os.getpid():064x}"
    cgroup = cgroups.mount_points()[0] / f"railmate-test-{os.getpid()}" / id
    cgroup.mkdir(parents=True)
    limits = (64 << 10, 128 << 10)
    child = subprocess.Popen(
        ["sleep", "60"], preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)
    )
    try:
        (cgroup / "cgroup.procs").write_text(str(child.pid))
        yield child.pid, id
    finally:
        child.kill()
        child.wait()
        cgroups.remove(cgroup.parent.name)


def test_containers_that_started_while_the_driver_was_away_may_lock_memory_when_it_is_back(
    tmp_path: Path, process: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is raised without CAP_SYS_RESOURCE is the soft limit, up to the hard one; that stands for no limit here."""
    monkeypatch.setattr(resource, "RLIM_INFINITY", 128 << 10)
    pid, id = process
    claims = claims_world.state(tmp_path, claims_world.FakeClaims())
    ledger = Ledger(tmp_path / "plugins" / claims_world.DRIVER)
    nic = PreparedNic(claims_world.VFS[0], "net1", rdma=(RdmaDeviceRef("mlx5_0"),))
    device = PreparedDevice("main", claims_world.POOL, "vf-0", nics=(nic,))
    ledger.put(Entry(claims_world.ref(1), ("u",), (device,), claims_world.BOOT))
    plugin = tmp_path / "plugins" / claims_world.DRIVER
    files = RuntimeFiles(claims_world.DRIVER, plugin, tmp_path / "cdi", plugin / "gate")
    events = RuntimeEvents(
        claims_world.DRIVER,
        claims,
        AttachedClaims(ledger, Observations(ledger, files, tmp_path, tmp_path), ClaimObserver()),
        Memlock(tmp_path, print),
        RdmaCgroup(claims_world.DRIVER, tmp_path, print),
    )
    ours, other = f"railmate.dev/claim={claims_world.uid(1)}-vf-0", "nvidia.com/gpu=0"

    async def listed(runtime: Runtime, *cdi: str) -> None:
        one = nri_pb2.Container(id=id, name="main", pod_sandbox_id="ab" * 32, pid=pid)
        for name in cdi:
            one.CDI_devices.add(name=name)
        request = nri_pb2.SynchronizeRequest(containers=[one])
        assert await runtime.call("Synchronize", request.SerializeToString()) == ""

    def limits() -> tuple[int, int]:
        return resource.prlimit(pid, resource.RLIMIT_MEMLOCK)

    async def scenario(runtime: Runtime) -> None:
        await runtime.accept()
        await listed(runtime, other)
        assert limits() == (64 << 10, 128 << 10)
        await listed(runtime, other, ours)
        # on a busy machine the runtime is answered before the work has ended
        await asyncio.to_thread(wait_until, lambda: limits() == (128 << 10, 128 << 10), "the limit is raised")

    serve(tmp_path / "nri.sock", events, scenario)
    events.close()


def serve(path: Path, handler: NriHandler, scenario) -> None:  # type: ignore[no-untyped-def]
    async def run() -> None:
        connections: asyncio.Queue[Runtime] = asyncio.Queue()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.put_nowait(Runtime(reader, writer))

        server = await asyncio.start_unix_server(connected, path)
        plugin = asyncio.create_task(NriPlugin("railmate", "10", path, handler).run_forever())
        try:
            runtime = await asyncio.wait_for(connections.get(), 10)
            await asyncio.wait_for(scenario(runtime), 30)
            runtime.writer.close()
        finally:
            plugin.cancel()
            await asyncio.gather(plugin, return_exceptions=True)
            server.close()

    asyncio.run(run())
