"""RDMA devices of a claim: known when it is prepared, into the pod with it, and home before their netdevs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from claims_netdevs import World
from claims_world import VFS, inventory, ref, sandbox, state, uid, view

import railmate.claims.attachments as attachments
import railmate.claims.rdmastrays as rdmastrays
import railmate.claims.strays as netdevstrays
from railmate.attach.errors import AttachError
from railmate.attach.model import AttachedNetdev, MoveRequest, NetdevReturn, ReturnRequest
from railmate.attach.rdmamodel import RdmaDeviceRef, RdmaReturn
from railmate.claims.plan import NodeView
from railmate.claims.rdmastrays import RdmaStrays
from railmate.claims.surroundings import Surroundings
from railmate.errors import RailmateError

DEVICE = RdmaDeviceRef("mlx5_0")


@pytest.fixture
def calls(world: World, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to RDMA devices and netdevs, in order."""
    done: list[str] = []
    attach_all, return_all = attachments.attach_all, attachments.return_all

    def attach(
        requests: Sequence[MoveRequest], netns: Path, alone: Sequence[RdmaDeviceRef] = ()
    ) -> list[AttachedNetdev]:
        beside = f" beside {[d.name for d in alone]}" if alone else ""
        done.extend(
            f"{one.snapshot.name} with {[d.name for d in one.rdma_devices]}{beside}" for one in requests
        )
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
    monkeypatch.setattr(netdevstrays, "return_all", back)
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


def test_nics_with_and_without_netdev_take_one_visit_to_the_namespace(world: World, calls: list[str]) -> None:
    world.state = state(world.root, world.api, node=infiniband())
    world.prepared(1, "wide")
    world.state.attach(sandbox())
    assert calls == ["vf1 with ['mlx5_1'] beside ['mlx5_0']"]


def returning(monkeypatch: pytest.MonkeyPatch, problem: str | None) -> None:
    monkeypatch.setattr(
        attachments, "return_rdma", lambda devices, netns: [RdmaReturn(one.name, problem) for one in devices]
    )


def test_rdma_device_that_did_not_come_home_is_looked_for_until_it_is(
    world: World, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.state = state(world.root, world.api, node=infiniband())
    world.prepared(1, "vf-0")
    world.state.attach(sandbox())
    returning(monkeypatch, "RDMA device mlx5_0 is neither in the pod nor on the host")
    world.state.unprepare(ref(1))
    strays = RdmaStrays(world.ledger)
    (known,) = strays.all().items()
    assert (known[0], [one.name for one in known[1]]) == (VFS[0], ["mlx5_0"])

    where = ["lost"]
    asked: list[str] = []

    class Node:
        """Other namespaces, in one of which it is found."""

        def fetch_rdma(self, devices: Sequence[RdmaDeviceRef]) -> list[RdmaReturn]:
            asked.append(where[0])
            if where[0] == "elsewhere":
                where[0] = "home"
                return [RdmaReturn(one.name) for one in devices]
            return []

        def fetch_netdevs(self, requests: Sequence[ReturnRequest]) -> list[NetdevReturn]:
            return []

    def put_right(devices: Sequence[RdmaDeviceRef]) -> list[RdmaReturn]:
        return [RdmaReturn(one.name, None if where[0] == "home" else "it is lost") for one in devices]

    monkeypatch.setattr(rdmastrays, "put_right", put_right)
    world.restart(around=Surroundings(elsewhere=Node()))  # type: ignore[arg-type]
    moves = world.state.moves
    assert moves.strays.fetch_from_elsewhere() == (0, 0)
    assert VFS[0] in strays.all()
    where[0] = "elsewhere"
    assert moves.strays.fetch_from_elsewhere() == (0, 1)
    assert strays.all() == {}
    assert moves.strays.fetch_from_elsewhere() == (0, 0)
    assert asked == ["lost", "elsewhere"], "where nothing is missing nobody looks"


def test_rdma_device_that_another_claim_has_by_now_stays_with_it(
    world: World, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.state = state(world.root, world.api, node=infiniband())
    world.prepared(1, "vf-0")
    RdmaStrays(world.ledger).put(VFS[0], [DEVICE])
    monkeypatch.setattr(rdmastrays, "put_right", lambda devices: pytest.fail("it is the claim's"))
    assert world.state.moves.strays.fetch_from_elsewhere() == (0, 0)
    assert VFS[0] in RdmaStrays(world.ledger).all()


def test_record_of_an_rdma_stray_that_is_none_is_removed(world: World) -> None:
    strays = RdmaStrays(world.ledger)
    strays.put(VFS[1], [DEVICE])
    for name, text in (("a", "{"), ("b", "[]"), ("c", '{"devices": [{"name": 1}]}'), ("d", '{"devices": 5}')):
        (world.ledger.plugin_dir / "rdma-strays" / f"{name}.json").write_text(text)
    assert strays.all() == {VFS[1]: (DEVICE,)}
    assert [path.stem for path in (world.ledger.plugin_dir / "rdma-strays").iterdir()] == [VFS[1]]


def test_what_a_killed_writer_left_beside_the_records_is_removed(world: World) -> None:
    (world.ledger.plugin_dir / "rdma-strays" / ".tmp-half").write_text("{")
    assert world.ledger.remove_temporaries() == 1
    assert world.ledger.remove_temporaries() == 0


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
