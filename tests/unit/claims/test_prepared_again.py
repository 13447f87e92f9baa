"""Claims that are prepared again, after a restart of the kubelet, when the machine is not what it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from claims_netdevs import HOST, World
from claims_world import GPUS, VFS, claim, ref, result, sandbox, uid, view

from railmate.claims.allocation import ClaimError

UVM = Path("/host/dev/nvidia-uvm")


def numbers(**now: str) -> Callable[..., tuple[str, ...]]:
    """What the kernel says of RDMA devices: each has its old number, but for those that are named."""

    def of(device: str, pci_address: str | None = None) -> tuple[str, ...]:
        return (now[device],) if device in now else (f"uverbs{device.removeprefix('mlx5_')}",)

    return of


def paths(world: World) -> list[str]:
    """Device nodes that a container gets, as the CDI spec on disk says."""
    devices = world.spec()["devices"]
    return [node["path"] for device in devices for node in device["containerEdits"].get("deviceNodes", [])]


def nodes(answer: Any) -> list[str]:
    return [node.path for device in answer.devices for node in device.nodes]


def test_rdma_devices_with_new_numbers_are_answered_with_those(world: World) -> None:
    world.restart(node=view(char_devices=numbers()))
    world.prepared(1, "pair-0")
    assert "/dev/infiniband/uverbs0" in paths(world)
    before = paths(world)
    world.restart(node=view(char_devices=numbers(mlx5_0="uverbs7", mlx5_1="uverbs0")))
    answer = world.state.prepare(ref(), patience=0)
    assert nodes(answer) == paths(world)
    assert [path.replace("uverbs7", "uverbs0") for path in paths(world)] == before
    entry = world.ledger.get(uid(1))
    assert entry is not None
    assert entry.devices == tuple(answer.devices)


@pytest.mark.parametrize("netns", ["/run/netns/1", None], ids=["in a pod", "on the host network"])
def test_the_gate_opens_for_containers_with_the_nodes_of_now(world: World, netns: str | None) -> None:
    """Else no container of the pod would ever start again: the gate refuses those that were made with other nodes."""
    world.prepared(1, "pair-0")
    world.state.attach(sandbox(netns=netns))
    before = gate_word(world)
    world.restart(node=view(vendor_cdi=lambda: {"GPU-0": "nvidia.com/gpu=GPU-0"}))
    world.state.prepare(ref(), patience=0)
    entry = world.ledger.get(uid(1))
    assert entry is not None
    assert before != entry.nodes_word == gate_word(world)


def test_a_gate_that_names_former_nodes_is_put_right_by_the_round(world: World) -> None:
    """A railmate before this one has left it so."""
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    right = gate_word(world)
    world.ledger.open_gate(uid(1), "sandbox-1", nodes="former")
    world.state.synchronize([sandbox()])
    assert gate_word(world) == right


def test_it_is_not_while_the_nic_is_not_in_the_pod(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    before = gate_word(world)
    world.netdevs.where[VFS[0]] = (HOST, "eth7")
    world.restart(node=view(vendor_cdi=lambda: {"GPU-0": "nvidia.com/gpu=GPU-0"}))
    world.state.prepare(ref(), patience=0)
    assert gate_word(world) == before


def gate_word(world: World) -> str:
    return (world.ledger.attached_dir / f"{uid(1)}.sandbox-1").read_text().split()[-1]


def test_an_unchanged_machine_changes_no_record(world: World) -> None:
    world.restart(node=view(char_devices=numbers()))
    world.prepared(1, "wide")
    world.prepared(2, result("vf-2", adminAccess=True))
    before = {path: path.stat().st_mtime_ns for path in (world.root / "plugins").rglob("*.json")}
    for number in (1, 2):
        world.state.prepare(ref(number), patience=0)
    records = [path for path in before if path.parent.name == "claims"]
    assert len(records) == 2
    assert all(path.stat().st_mtime_ns == before[path] for path in records)


def test_a_number_that_is_anothers_by_now_is_not_handed_out(world: World) -> None:
    world.restart(node=view(char_devices=numbers()))
    world.prepared(1, "vf-0")

    def now(device: str, *_: object) -> tuple[str, ...]:
        return {"mlx5_0": (), "mlx5_1": ("uverbs0",)}.get(device, ("uverbs5",))

    world.restart(node=view(char_devices=now))
    with pytest.raises(ClaimError, match=r"mlx5_0 of device vf-0 has no device nodes.*driver loaded"):
        world.state.prepare(ref(), patience=0)


@pytest.mark.parametrize("address", [GPUS[0], VFS[0]])
def test_hardware_that_has_left_is_refused_by_name(world: World, address: str) -> None:
    world.prepared(1, "pair-0")
    world.restart(node=view(on_bus=lambda one: one != address))
    with pytest.raises(
        ClaimError, match=f"{address} of device pair-0 is not on node node1 any more.*Delete the pod"
    ):
        world.state.prepare(ref(), patience=0)
    world.state.unprepare(ref())
    assert world.clean()


def test_what_an_administrator_looks_at_is_renewed_too(world: World) -> None:
    world.restart(node=view(char_devices=numbers()))
    world.prepared(1, result("vf-0", adminAccess=True))
    world.restart(node=view(char_devices=numbers(mlx5_0="uverbs7")))
    assert "/dev/infiniband/uverbs7" in nodes(world.state.prepare(ref(), patience=0))
    world.restart(node=view(on_bus=lambda one: one != VFS[0]))
    with pytest.raises(ClaimError, match="not on node"):
        world.state.prepare(ref(), patience=0)


# --- nodes that are made by themselves, but late
def test_a_node_that_cuda_needs_is_waited_for(world: World) -> None:
    there: list[bool] = []

    def exists(path: Path) -> bool:
        there.append(True)
        return path != UVM or len(there) > 20

    world.restart(node=view(node_exists=exists))
    world.api.put(claim(1, "gpu-0"))
    assert "/dev/nvidia-uvm" in nodes(world.state.prepare(ref(), patience=20))


@pytest.mark.parametrize("name", ["nvidiactl", "nvidia-uvm"])
def test_without_it_the_claim_is_refused_with_what_makes_it(world: World, name: str) -> None:
    world.restart(node=view(node_exists=lambda path: path.name != name))
    world.api.put(claim(1, "gpu-0"))
    with pytest.raises(ClaimError, match=f"no /dev/{name}.*nvidia-modprobe.*nvidia-persistenced"):
        world.state.prepare(ref(), patience=0)
    assert world.clean()


def test_a_gpu_of_a_vendors_spec_needs_no_node_of_ours(world: World) -> None:
    lacking = view(node_exists=lambda path: path != UVM, vendor_cdi=lambda: {"GPU-0": "nvidia.com/gpu=0"})
    world.restart(node=lacking)
    world.prepared(1, "gpu-0")
    assert json.dumps(world.spec()).count("/dev/nvidia") == 0


def test_a_claim_that_was_prepared_without_it_gets_it_when_it_is_prepared_again(world: World) -> None:
    """Written by a railmate that left the node out."""
    world.prepared(1, "gpu-0")
    record = world.root / "plugins" / "railmate.dev" / "claims" / f"{uid(1)}.json"
    entry = json.loads(record.read_text())
    (device,) = entry["devices"]
    device["nodes"] = [node for node in device["nodes"] if node["path"] != "/dev/nvidia-uvm"]
    record.write_text(json.dumps(entry))
    assert "/dev/nvidia-uvm" in nodes(world.state.prepare(ref(), patience=0))
    assert "/dev/nvidia-uvm" in paths(world)
