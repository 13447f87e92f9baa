"""The runtime's events become the claims' verbs, in threads of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from railmate.attach.functions import FunctionChange
from railmate.attach.rdmalook import ROCE_V2
from railmate.attach.rdmamodel import Gid, RdmaDeviceRef, SeenNic
from railmate.cdi.spec import DeviceNode
from railmate.claims.records import Attachment, ClaimRef, Entry, PreparedDevice, PreparedNic, Seen
from railmate.claims.runtime_files import NCCL_TOPOLOGY
from railmate.claims.sandbox import Sandbox
from railmate.errors import RailmateError
from railmate.inventory.model import Inventory, PciFunction, RdmaDevice
from railmate.node.events import RuntimeEvents
from railmate.node.memlock import Memlock
from railmate.node.rdmacgroup import RdmaCgroup
from railmate.nri.events import UNLIMITED, ContainerAdjustment, ContainerInfo, PodSandbox, Rlimit
from railmate.publish.model import Offer, OfferedDevice

UID = "00000000-0000-4000-8000-000000000001"
OTHER = "00000000-0000-4000-8000-000000000002"
NETNS = Path("/proc/self/ns/net")


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.threads: set[str] = set()
        self.error: Exception | None = None

    def __getattr__(self, verb: str) -> Any:
        def call(*arguments: Any) -> None:
            self.threads.add(threading.current_thread().name)
            self.calls.append((verb, arguments))
            if self.error:
                raise self.error

        return call


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


class Claims:
    """What ``AttachedClaims`` knows, by claim UID."""

    def __init__(self) -> None:
        self.known: dict[str, Entry] = {}

    def entries(self, uids: Collection[str], patience: float = 0.5) -> list[Entry]:
        return [self.known[uid] for uid in uids if uid in self.known]


@pytest.fixture
def claims() -> Claims:
    return Claims()


@pytest.fixture
def rdma_cgroup(tmp_path: Path) -> RdmaCgroup:
    return RdmaCgroup("railmate.dev", tmp_path, lambda message: None)


@pytest.fixture
def events(
    recorder: Recorder, claims: Claims, rdma_cgroup: RdmaCgroup, tmp_path: Path
) -> Iterator[RuntimeEvents]:
    (tmp_path / "memlock-raised").touch()  # the gate has seen that it works
    memlock = Memlock(tmp_path, lambda message: None, proc=tmp_path)
    one = RuntimeEvents("railmate.dev", recorder, claims, memlock, rdma_cgroup)  # type: ignore[arg-type]
    yield one
    one.close()


def do(what: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(what)


def pod(netns: Path | None = NETNS, **more: Any) -> PodSandbox:
    return PodSandbox(
        **({"id": "s1", "name": "p", "namespace": "team", "uid": "pod-1", "netns_path": netns} | more)
    )


def container(*cdi: str, **more: Any) -> ContainerInfo:
    return ContainerInfo("c1", "main", "s1", cdi, **more)


def attached(uid: str, *devices: str, hints: bool = True, gid: int = 3) -> Entry:
    """A claim whose NICs (by their RDMA devices) are in sandbox s1 and were looked at."""
    nics = tuple(
        PreparedNic(f"0000:0c:00.{n}", f"net{n}", rdma=(RdmaDeviceRef(d),)) for n, d in enumerate(devices)
    )
    seen = tuple(
        SeenNic(
            nic.address, nic.interface, (), nic.rdma[0].name, "Ethernet", "ACTIVE", Gid(gid, "::1", ROCE_V2)
        )
        for nic in nics
    )
    device = PreparedDevice("main", "node1", "pair-0", ("0000:07:00.0",), nics, env_hints=hints)
    at = Attachment("s1", "pod-1", "team/p", str(NETNS), True)
    return Entry(ClaimRef(uid, "team", "c"), ("pod-1",), (device,), "boot", None, at, Seen("s1", seen))


def test_sandbox_is_attached_when_it_runs_and_detached_when_it_stops(
    events: RuntimeEvents, recorder: Recorder
) -> None:
    do(events.run_pod_sandbox(pod()))
    do(events.stop_pod_sandbox(pod()))
    do(events.remove_pod_sandbox(pod()))
    assert recorder.calls == [
        ("attach", (Sandbox("s1", "pod-1", "team/p", NETNS),)),
        ("detach", ("s1",)),
        ("detach", ("s1",)),
    ]


def test_neither_the_end_of_a_sandbox_nor_an_answer_stands_behind_those_that_begin(
    events: RuntimeEvents, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many wait: for a lock, or for an API server that does not answer."""
    go_on = threading.Event()

    def stuck(*arguments: Any) -> None:
        assert go_on.wait(20)

    def refuse(*arguments: Any) -> None:
        raise RailmateError("not yet")

    recorder.attach = stuck  # type: ignore[attr-defined]
    recorder.adopt = stuck  # type: ignore[attr-defined]
    recorder.check = refuse  # type: ignore[attr-defined]

    async def crowd() -> None:
        beginning = [
            asyncio.create_task(events.run_pod_sandbox(pod(id=f"s{n}", uid=f"pod-{n}"))) for n in range(8)
        ]
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(events.must_end(pod(id="s9", uid="pod-9")), 5)
            await asyncio.wait_for(events.stop_pod_sandbox(pod(id="old", uid="old")), 5)
            await asyncio.wait_for(events.remove_pod_sandbox(pod(id="old", uid="old")), 5)
        finally:
            go_on.set()
        await asyncio.gather(*beginning)

    do(crowd())
    question = ("renews_nodes", (Sandbox("s9", "pod-9", "team/p", NETNS),))
    assert recorder.calls == [question, *[("detach", ("old",))] * 2]


def test_an_api_server_that_does_not_answer_delays_no_sandbox(
    events: RuntimeEvents, recorder: Recorder
) -> None:
    """Pods that a claim was not prepared for are asked about there; each refused container asks once."""
    go_on, asked = threading.Event(), threading.Event()

    def stuck(*arguments: Any) -> None:
        asked.set()
        assert go_on.wait(20)

    def refuse(*arguments: Any) -> None:
        raise RailmateError("not yet")

    recorder.adopt = stuck  # type: ignore[attr-defined]
    recorder.check = refuse  # type: ignore[attr-defined]

    async def crowd() -> None:
        try:
            for _ in range(6):
                with pytest.raises(RailmateError, match="not yet"):
                    await asyncio.wait_for(
                        events.create_container(pod(), container(f"railmate.dev/claim={UID}-main-pair-0")), 5
                    )
            assert asked.wait(5)
            await asyncio.wait_for(events.run_pod_sandbox(pod(id="s2", uid="pod-2")), 5)
        finally:
            go_on.set()

    do(crowd())
    assert ("attach", (Sandbox("s2", "pod-2", "team/p", NETNS),)) in recorder.calls


def test_verbs_do_not_run_on_the_event_loop(events: RuntimeEvents, recorder: Recorder) -> None:
    do(events.run_pod_sandbox(pod()))
    assert threading.current_thread().name not in recorder.threads


def synchronized(events: RuntimeEvents, recorder: Recorder, *pods: PodSandbox) -> list[str]:
    do(events.synchronize(list(pods), []))
    ((verb, (live,)),) = recorder.calls
    assert verb == "synchronize"
    return [sandbox.id for sandbox in live]


def test_only_live_sandboxes_are_synchronized(events: RuntimeEvents, recorder: Recorder) -> None:
    pods = [
        pod(id="a", uid="1"),
        pod(Path("/nonexistent"), id="ended", uid="2"),
        pod(None, id="host", uid="3", pid=1),
        pod(None, id="host-ended", uid="4"),
    ]
    assert synchronized(events, recorder, *pods) == ["a", "host"]


@pytest.mark.parametrize("newest_first", [True, False])
def test_of_two_sandboxes_of_a_pod_the_one_with_a_process_counts(
    events: RuntimeEvents, recorder: Recorder, newest_first: bool
) -> None:
    """A killed pause process leaves its namespace behind, and the runtime lists both sandboxes."""
    pods = [pod(id="new", pid=7), pod(id="old", pid=0)]
    assert synchronized(events, recorder, *(pods if newest_first else reversed(pods))) == ["new"]


def test_container_with_our_devices_is_checked_once_a_claim(
    events: RuntimeEvents, recorder: Recorder
) -> None:
    ids = [f"railmate.dev/claim={OTHER}-b", f"railmate.dev/claim={UID}-a", f"railmate.dev/claim={UID}-b"]
    do(events.create_container(pod(), container(*ids, "nvidia.com/gpu=0")))
    ((verb, (_, claims)),) = recorder.calls
    assert (verb, list(claims)) == ("check", [UID, OTHER])


def test_other_containers_are_none_of_our_business(events: RuntimeEvents, recorder: Recorder) -> None:
    do(events.create_container(pod(), container("nvidia.com/gpu=0", "other.dev/claim=x")))
    do(events.create_container(pod(), container()))
    assert recorder.calls == []


def test_refusal_reaches_the_runtime(events: RuntimeEvents, recorder: Recorder) -> None:
    recorder.error = RailmateError("not attached")
    with pytest.raises(RailmateError, match="not attached"):
        do(events.create_container(pod(), container(f"railmate.dev/claim={UID}-a")))


def test_what_failed_when_the_sandbox_came_is_tried_once_more_for_its_container(
    events: RuntimeEvents, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RunPodSandbox is answered before a slow attach has ended: the runtime has not heard of the failure."""
    there: list[str] = []

    def check(sandbox: Sandbox, claims: Collection[str]) -> None:
        recorder.calls.append(("check", sandbox.id))
        if sandbox.id not in there:
            raise RailmateError("not attached")

    def attach(sandbox: Sandbox) -> None:
        recorder.calls.append(("attach", sandbox.id))
        there.append(sandbox.id)

    monkeypatch.setattr(recorder, "check", check, raising=False)
    monkeypatch.setattr(recorder, "attach", attach, raising=False)
    do(events.synchronize([pod()], []))
    recorder.calls.clear()
    do(events.create_container(pod(), container(f"railmate.dev/claim={UID}-a")))
    assert recorder.calls == [("check", "s1"), ("attach", "s1"), ("check", "s1")]

    # a container of an older sandbox, whose end was never told, must not take the NIC from the new one
    do(events.run_pod_sandbox(pod(id="s2")))
    recorder.calls.clear()
    there.clear()
    with pytest.raises(RailmateError, match="not attached"):
        do(events.create_container(pod(), container(f"railmate.dev/claim={UID}-a")))
    assert ("attach", "s1") not in recorder.calls


def test_container_with_device_nodes_of_before_the_move_is_refused_before_it_could_fail_to_start(
    events: RuntimeEvents, claims: Claims
) -> None:
    """The runtime reads the CDI spec before it asks, and RunPodSandbox was answered before the attach had ended."""
    (device,) = attached(UID, "mlx5_2").devices
    nodes = (DeviceNode("/dev/infiniband/uverbs0", "/host/dev/infiniband/uverbs0"),)
    entry = replace(attached(UID, "mlx5_2"), devices=(replace(device, nodes=nodes),))
    claims.known[UID] = entry

    def created(word: str, driver: str = "railmate.dev") -> None:
        hooks = (("other",), ("gate", "/p/attached", UID, driver, word))
        do(events.create_container(pod(), container(f"railmate.dev/claim={UID}-a", hooks=hooks)))

    created(entry.nodes_word)
    created("before", driver="other.dev")
    with pytest.raises(RailmateError, match=r"the device nodes of ResourceClaim .* have changed"):
        created("before")


# --- what a container gets beside its devices
MEMLOCK = Rlimit("RLIMIT_MEMLOCK", UNLIMITED, UNLIMITED)
OURS = f"railmate.dev/claim={UID}-pair-0"


def adjusted(events: RuntimeEvents, *cdi: str, **more: Any) -> ContainerAdjustment:
    found = do(events.create_container(pod(), container(*cdi, **more)))
    assert isinstance(found, ContainerAdjustment)
    return found


def test_container_with_rdma_may_lock_memory_and_is_told_its_devices(
    events: RuntimeEvents, claims: Claims
) -> None:
    claims.known[UID] = attached(UID, "mlx5_2", "mlx5_3")
    assert adjusted(events, OURS) == ContainerAdjustment(
        rlimits=(MEMLOCK,),
        env={
            "NCCL_IB_HCA": "=mlx5_2:1,mlx5_3:1",
            "UCX_NET_DEVICES": "mlx5_2:1,mlx5_3:1",
            "NCCL_IB_GID_INDEX": "3",
        },
    )


def test_nothing_of_a_claim_reaches_a_container_that_does_not_reference_it(
    events: RuntimeEvents, claims: Claims
) -> None:
    """Two claims in one pod: each container hears of its own, and one without claims of none."""
    claims.known = {UID: attached(UID, "mlx5_2"), OTHER: attached(OTHER, "mlx5_9", gid=5)}
    first = adjusted(events, OURS)
    assert "mlx5_9" not in str(first)
    second = adjusted(events, f"railmate.dev/claim={OTHER}-pair-0")
    assert "mlx5_2" not in str(second)
    assert do(events.create_container(pod(), container("nvidia.com/gpu=0"))) is None


def test_the_gate_hears_which_rdma_devices_the_container_does_not_have(
    events: RuntimeEvents, claims: Claims, rdma_cgroup: RdmaCgroup
) -> None:
    functions = {
        f"0000:0c:00.{n}": PciFunction(
            f"0000:0c:00.{n}", (), 0x020000, 0x15B3, 0x101E, rdma_devices=(RdmaDevice(f"mlx5_{n}"),)
        )
        for n in range(3)
    }
    offer = Offer(tuple(OfferedDevice(f"vf-{one[-1]}", "rdmaVF", {}, nics=(one,)) for one in functions))
    rdma_cgroup.update(Inventory(functions), offer)
    claims.known = {UID: attached(UID, "mlx5_2"), OTHER: attached(OTHER, "mlx5_0")}
    assert adjusted(events, OURS).annotations == {"railmate.dev/rdma-denied": "mlx5_0 mlx5_1"}
    both = adjusted(events, OURS, f"railmate.dev/claim={OTHER}-pair-0")
    assert both.annotations == {"railmate.dev/rdma-denied": "mlx5_1"}


def test_two_drivers_of_an_update_do_not_set_the_same_twice(
    events: RuntimeEvents, claims: Claims, rdma_cgroup: RdmaCgroup
) -> None:
    """The runtime asks one after the other, and shows the second what the first has set (CreateContainer in
    pkg/adaptation of github.com/containerd/nri); what both set fails the container."""
    functions = {
        address: PciFunction(address, (), 0x020000, 0x15B3, 0x101E, rdma_devices=(RdmaDevice(name),))
        for address, name in (("0000:0c:00.0", "mlx5_2"), ("0000:0c:00.1", "mlx5_3"))
    }
    offer = Offer(tuple(OfferedDevice(f"vf-{one[-1]}", "rdmaVF", {}, nics=(one,)) for one in functions))
    rdma_cgroup.update(Inventory(functions), offer)
    claims.known[UID] = attached(UID, "mlx5_2")
    first = adjusted(events, OURS)
    assert first.rlimits
    assert first.env
    assert first.annotations
    second = adjusted(events, OURS, env=first.env, rlimits=first.rlimits, annotations=first.annotations)
    assert second == ContainerAdjustment()


def test_claim_of_a_gpu_alone_changes_no_limit(events: RuntimeEvents, claims: Claims) -> None:
    claims.known[UID] = attached(UID)
    assert adjusted(events, OURS) == ContainerAdjustment()


def test_hints_are_for_those_who_ask(events: RuntimeEvents, claims: Claims) -> None:
    claims.known[UID] = attached(UID, "mlx5_2", hints=False)
    assert adjusted(events, OURS).env == {}


def test_topology_file_is_named_where_the_node_has_one(events: RuntimeEvents, claims: Claims) -> None:
    entry = attached(UID, "mlx5_2")
    (device,) = entry.devices
    claims.known[UID] = replace(entry, devices=(replace(device, nccl_topology=True),))
    assert adjusted(events, OURS).env["NCCL_TOPO_FILE"] == NCCL_TOPOLOGY
    assert "NCCL_TOPO_FILE" not in adjusted(events, OURS, env={"NCCL_TOPO_FILE": "/mine.xml"}).env


def test_what_the_user_has_set_stays(events: RuntimeEvents, claims: Claims) -> None:
    claims.known[UID] = attached(UID, "mlx5_2")
    found = adjusted(events, OURS, env={"NCCL_IB_HCA": "mlx5", "UCX_NET_DEVICES": ""})
    assert found.env == {"NCCL_IB_GID_INDEX": "3"}


def test_no_single_gid_index_is_claimed_for_nics_that_differ(events: RuntimeEvents, claims: Claims) -> None:
    claims.known = {UID: attached(UID, "mlx5_2"), OTHER: attached(OTHER, "mlx5_9", hints=False, gid=5)}
    found = adjusted(events, OURS, f"railmate.dev/claim={OTHER}-pair-0")
    assert found.env == {"NCCL_IB_HCA": "=mlx5_2:1,mlx5_9:1", "UCX_NET_DEVICES": "mlx5_2:1,mlx5_9:1"}


def test_what_an_earlier_sandbox_saw_is_no_hint(events: RuntimeEvents, claims: Claims) -> None:
    entry = attached(UID, "mlx5_2")
    claims.known[UID] = replace(entry, seen=Seen("s0", entry.seen.nics if entry.seen else ()))
    assert adjusted(events, OURS).env == {}


def test_limit_that_is_none_already_is_not_set_twice(events: RuntimeEvents, claims: Claims) -> None:
    """The runtime refuses a container for which two plugins set one limit."""
    claims.known[UID] = attached(UID, "mlx5_2")
    assert adjusted(events, OURS, rlimits=(MEMLOCK,)).rlimits == ()


def test_memory_is_not_limited_for_what_drives_a_vf_by_itself(events: RuntimeEvents, claims: Claims) -> None:
    change = FunctionChange("vfio-pci", "igbvf", made=True, node="vfio/17")
    device = PreparedDevice("main", "node1", "vf-0", (), (PreparedNic("0000:0c:00.1", "", change=change),))
    claims.known[UID] = replace(attached(UID), devices=(device,))
    found = do(events.create_container(pod(), container(f"railmate.dev/claim={UID}-vf-0")))
    assert found.rlimits == (Rlimit("RLIMIT_MEMLOCK", UNLIMITED, UNLIMITED),)


# --- containers that started while nobody heard of it
def test_running_containers_with_rdma_get_their_limit_when_the_runtime_is_back(
    events: RuntimeEvents, claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a driver that was away: the runtime lists what runs, once, and only some of it is ours to mend."""
    repaired: list[str] = []

    def repair(self: Memlock, containers: list[ContainerInfo]) -> int:
        repaired.extend(container.id for container in containers)
        return len(repaired)

    monkeypatch.setattr(Memlock, "repair", repair)
    claims.known = {UID: attached(UID, "mlx5_2"), OTHER: attached(OTHER)}
    listed = [
        ContainerInfo("with-rdma", "main", "s1", (OURS,), pid=70),
        ContainerInfo("not-running", "main", "s1", (OURS,)),
        ContainerInfo("gpu-alone", "main", "s1", (f"railmate.dev/claim={OTHER}-gpu-0",), pid=71),
        ContainerInfo("of-another-driver", "main", "s1", ("nvidia.com/gpu=0",), pid=72),
        ContainerInfo("without-claims", "main", "s1", pid=73),
    ]
    do(events.synchronize([pod()], listed))
    assert repaired == ["with-rdma"]
