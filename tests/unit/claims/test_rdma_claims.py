"""RDMA devices of a claim: known when it is prepared, into the pod with it, and home before their netdevs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from claims_netdevs import World
from claims_world import VFS, inventory, ref, sandbox, state, uid, view

import railmate.claims.attachments as attachments
from railmate.attach.errors import AttachError
from railmate.attach.model import AttachedNetdev, MoveRequest, NetdevReturn, ReturnRequest
from railmate.attach.rdmamodel import RdmaDeviceRef, RdmaReturn
from railmate.claims.plan import NodeView
from railmate.errors import RailmateError

DEVICE = RdmaDeviceRef("mlx5_0")


@pytest.fixture
def calls(world: World, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to RDMA devices and netdevs, in order."""
    done: list[str] = []
    attach_all, return_all = attachments.attach_all, attachments.return_all

    def attach(requests: Sequence[MoveRequest], netns: Path) -> list[AttachedNetdev]:
        done.extend(f"{one.snapshot.name} with {[d.name for d in one.rdma_devices]}" for one in requests)
        return attach_all(requests, netns)

    def back(requests: Sequence[ReturnRequest], netns: Path | None) -> list[NetdevReturn]:
        done.extend(f"{one.snapshot.name} home" for one in requests)
        return return_all(requests, netns)

    def attach_rdma(devices: Sequence[RdmaDeviceRef], netns: Path) -> None:
        done.extend(f"{one.name} to {netns}" for one in devices)

    def return_rdma(devices: Sequence[RdmaDeviceRef], netns: Path) -> list[RdmaReturn]:
        done.extend(f"{one.name} home" for one in devices)
        return [RdmaReturn(one.name) for one in devices]

    for name, verb in {
        "attach_all": attach, "return_all": back, "attach_rdma": attach_rdma, "return_rdma": return_rdma,
    }.items():  # fmt: skip
        monkeypatch.setattr(attachments, name, verb)
    return done


def infiniband() -> NodeView:
    """The first VF is an InfiniBand one without IPoIB: it has no netdev."""
    known = inventory()
    (device,) = known.functions[VFS[0]].rdma_devices
    bare = replace(
        known.functions[VFS[0]], netdevs=(), rdma_devices=(replace(device, link_layer="InfiniBand"),)
    )
    return view(inventory=replace(known, functions={**known.functions, VFS[0]: bare}))


def test_rdma_device_goes_with_its_netdev_and_comes_home_before_it(world: World, calls: list[str]) -> None:
    world.prepared(1, "vf-0")
    world.state.attach(sandbox())
    world.state.detach("sandbox-1")
    assert calls == ["vf0 with ['mlx5_0']", "mlx5_0 home", "vf0 home"]


def test_nic_without_netdev_gives_its_rdma_device_alone(world: World, calls: list[str]) -> None:
    world.state = state(world.root, world.api, node=infiniband())
    world.prepared(1, "vf-0")
    world.state.attach(sandbox())
    assert calls == ["mlx5_0 to /run/netns/1"]
    assert world.gates == [f"{uid(1)}.sandbox-1"]
    world.state.unprepare(ref(1))
    assert calls[1:] == ["mlx5_0 home"]
    assert world.clean()


def test_rdma_device_that_cannot_be_moved_keeps_the_gate_closed(
    world: World, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(devices: Sequence[RdmaDeviceRef], netns: Path) -> None:
        raise AttachError("RDMA device mlx5_0 cannot be moved into the pod: Operation not permitted")

    monkeypatch.setattr(attachments, "attach_rdma", refuse)
    world.state = state(world.root, world.api, node=infiniband())
    world.prepared(1, "vf-0")
    with pytest.raises(RailmateError, match="mlx5_0 cannot be moved into the pod"):
        world.state.attach(sandbox())
    assert world.gates == []


def test_pod_on_the_host_network_gets_nothing_moved(world: World, calls: list[str]) -> None:
    world.prepared(1, "vf-0")
    world.state.attach(sandbox(netns=None))
    assert calls == []


def test_soft_device_is_remembered_with_the_netdev_it_is_made_over(world: World) -> None:
    """It is made anew whenever the netdev is put right, also when that is found as a stray much later."""
    known = inventory()
    (device,) = known.functions[VFS[0]].rdma_devices
    soft = replace(known.functions[VFS[0]], rdma_devices=(replace(device, name="rxe0", soft="rxe"),))
    node = view(inventory=replace(known, functions={**known.functions, VFS[0]: soft}))
    world.state = state(world.root, world.api, node=node)
    world.prepared(1, "vf-0")
    entry = world.ledger.get(uid(1))
    assert entry is not None
    (nic,) = entry.nics
    assert nic.snapshot is not None
    assert nic.snapshot.soft_rdma == nic.rdma == (RdmaDeviceRef("rxe0", None, "rxe"),)
    world.ledger.put_stray(nic.snapshot)
    assert world.ledger.strays() == [nic.snapshot]
