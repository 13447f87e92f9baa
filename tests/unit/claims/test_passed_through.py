"""VFs that a claim wants bound to vfio-pci: what a container gets and hears, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from claims_world import DRIVER, PF, VFS, config, inventory, ref, result, sandbox, uid, vfio_config
from vfio_machine import Machine, machine

from railmate.attach.drivers import DriverBinding
from railmate.attach.errors import AttachError
from railmate.claims.allocation import ClaimError
from railmate.errors import RailmateError
from railmate.node.conditions import device_status
from railmate.node.hints import environment
from railmate.publish.model import Offer, OfferedDevice
from unit.attach.pci_bus import PciBus

__all__ = ["machine"]  # a fixture

VFIO = vfio_config()


def test_a_container_gets_the_vfio_nodes_and_neither_netdev_nor_rdma(machine: Machine) -> None:
    machine.world.prepared(1, "vf-0", configs=[VFIO])
    assert machine.bus.driver(VFS[0]) == "vfio-pci"
    dev = machine.bus.dev
    assert machine.nodes() == [
        {"path": "/dev/vfio/vfio", "hostPath": f"{dev}/vfio/vfio", "permissions": "rw"},
        # the pod's user need not be root
        {"path": "/dev/vfio/17", "hostPath": f"{dev}/vfio/17", "permissions": "rw", "fileMode": 0o666},
    ]


def test_the_pair_keeps_its_gpu(machine: Machine) -> None:
    machine.world.prepared(1, "pair-0", configs=[VFIO])
    paths = [node["path"] for node in machine.nodes()]
    assert "/dev/nvidia0" in paths
    assert [path for path in paths if "nvidia" not in path] == ["/dev/vfio/vfio", "/dev/vfio/17"]


def test_the_gate_opens_when_the_sandbox_is_there_and_nothing_is_moved(machine: Machine) -> None:
    world = machine.world
    world.prepared(1, "vf-0", configs=[VFIO])
    with pytest.raises(RailmateError, match="not attached to pod"):
        world.state.check(sandbox(), [uid(1)])
    world.state.attach(sandbox())
    world.state.check(sandbox(), [uid(1)])
    assert world.gates == [f"{uid(1)}.sandbox-1"]
    assert world.netdevs.moves == []
    world.state.detach("sandbox-1")
    assert world.gates == []
    assert machine.bus.driver(VFS[0]) == "vfio-pci", "until the claim ends: a sandbox may be made again"


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda bus: _rmdir(bus.sysfs / "bus/pci/drivers/vfio-pci"), r"not loaded.*modprobe vfio-pci"),
        (lambda bus: (bus.dev / "vfio/vfio").unlink(), r"vfio/vfio is not there"),
        (lambda bus: (bus.sysfs / "bus/pci/devices" / VFS[0] / "iommu_group").unlink(), r"has no IOMMU group"),
        (lambda bus: bus.add("0000:0d:00.0", "nvidia", "17"), r"group 17 has also 0000:0d:00.0 \(driver nvidia\)"),
        (lambda bus: (bus.sysfs / "bus/pci/drivers_probe").unlink(), r"not writable.*rebindVFs"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_touched(
    machine: Machine, break_it: Callable[[PciBus], None], said: str
) -> None:
    break_it(machine.bus)
    before, written = machine.bus.state(), len(machine.bus.written)
    with pytest.raises(ClaimError, match=said):
        machine.world.prepared(1, "vf-0", configs=[VFIO])
    assert (machine.bus.state(), len(machine.bus.written)) == (before, written)
    assert machine.world.ledger.get(uid(1)) is None


def _rmdir(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def test_bridges_and_unbound_functions_of_the_group_are_no_obstacle(machine: Machine) -> None:
    machine.bus.add("0000:0d:00.0", "pcieport", "17", "0x060400")
    machine.bus.add("0000:0d:00.1", "nvidia", "17")
    machine.bus.write(machine.bus.sysfs / "bus/pci/drivers/nvidia/unbind", "0000:0d:00.1")
    machine.world.prepared(1, "vf-0", configs=[VFIO])


def test_two_claims_cannot_share_a_group_but_one_claim_may_have_all_of_it(machine: Machine) -> None:
    link = machine.bus.sysfs / "bus/pci/devices" / VFS[1] / "iommu_group"
    link.unlink()
    machine.bus._group(VFS[1], "17")
    machine.world.prepared(1, "wide", configs=[VFIO])
    assert [machine.bus.driver(address) for address in VFS[:2]] == ["vfio-pci", "vfio-pci"]
    machine.world.state.unprepare(ref(1))
    with pytest.raises(ClaimError, match=r"group 17 has also 0000:0c:00.2 \(driver mlx5_core\)"):
        machine.world.prepared(2, "vf-0", configs=[VFIO])


def test_without_an_iommu_only_where_the_kernel_was_told_to(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.bus.noiommu = True
    (machine.bus.sysfs / "bus/pci/devices" / VFS[0] / "iommu_group").unlink()
    switch = machine.bus.sysfs / "module/vfio/parameters/enable_unsafe_noiommu_mode"
    switch.parent.mkdir(parents=True)
    switch.write_text("N\n")
    with pytest.raises(ClaimError, match="has no IOMMU group"):
        machine.world.prepared(1, "vf-0", configs=[VFIO])
    switch.write_text("Y\n")
    machine.world.prepared(1, "vf-0", configs=[VFIO])
    assert [node["path"] for node in machine.nodes()] == ["/dev/vfio/vfio", "/dev/vfio/noiommu-0"]
    assert "given away without an IOMMU" in caplog.text
    machine.world.state.attach(sandbox())
    entry = machine.world.ledger.get(uid(1))
    assert entry is not None
    network = device_status(DRIVER, entry, entry.devices[0])["conditions"][1]
    assert "without an IOMMU" in network["message"]


def test_a_physical_function_is_not_given_away(machine: Machine) -> None:
    devices = Offer((OfferedDevice("pf", "rdma-vf", {}, nics=(PF,)),))
    machine.world.restart(node=machine.node(offer=devices))
    with pytest.raises(
        ClaimError, match=r"driver is for virtual functions, and 0000:0c:00\.0 is a physical one"
    ):
        machine.world.prepared(1, "pf", configs=[VFIO])


@pytest.mark.parametrize(
    "field",
    [{"interfaceName": "rail"}, {"mtu": 1500}, {"addresses": ["10.0.0.2/24"]}, {"ipam": {"type": "x"}},
     {"routes": [{"destination": "10.0.0.0/8"}]}, {"sysctls": {"arpIgnore": 1}}, {"rings": {"rx": 64}}],
)  # fmt: skip
def test_what_needs_a_netdev_contradicts_it(machine: Machine, field: dict[str, Any]) -> None:
    with pytest.raises(ClaimError, match="driver cannot be beside interfaceName, mtu"):
        machine.world.prepared(1, "vf-0", configs=[vfio_config(**field)])
    with pytest.raises(ClaimError, match="class and claim together: driver cannot be beside"):
        machine.world.prepared(1, "vf-0", configs=[config("FromClass", **field), VFIO])


def test_two_requests_of_one_claim_go_different_ways(machine: Machine) -> None:
    world = machine.world
    fast = vfio_config(requests=["fast"])
    world.prepared(1, result("vf-0", "fast"), result("vf-1", "plain"), configs=[fast])
    world.state.attach(sandbox())
    assert world.netdevs.moves == ["vf1 to /run/netns/1 as net1"]
    assert machine.bus.driver(VFS[0]) == "vfio-pci"
    world.state.unprepare(ref(1))
    assert world.clean()


def test_people_and_programs_are_told(machine: Machine) -> None:
    hinted = vfio_config(envHints=True)
    machine.world.prepared(1, result("vf-0", "fast-path"), configs=[hinted])
    machine.world.state.attach(sandbox())
    entry = machine.world.ledger.get(uid(1))
    assert entry is not None
    status = device_status(DRIVER, entry, entry.devices[0])
    assert [(one["type"], one["status"], one["reason"]) for one in status["conditions"]] == [
        ("Ready", "True", "Attached"), ("NetworkReady", "True", "PassedThrough"),
    ]  # fmt: skip
    assert status["data"]["nics"] == [
        {"pciBusID": VFS[0], "driver": "vfio-pci", "deviceNode": "/dev/vfio/17"}
    ]
    assert environment([entry], {}) == {"PCIDEVICE_RAILMATE_DEV_FAST_PATH": VFS[0]}
    assert environment([entry], {"PCIDEVICE_RAILMATE_DEV_FAST_PATH": "mine"}) == {}
    (metadata,) = machine.world.root.rglob("metadata.json")
    newest = json.loads(metadata.read_text().splitlines()[0])
    (device,) = newest["requests"][0]["devices"]
    assert device["attributes"]["railmate.dev/vfioDevice"] == {"string": "/dev/vfio/17"}
    assert "networkData" not in device


def test_without_the_hint_no_variable(machine: Machine) -> None:
    machine.world.prepared(1, "vf-0", configs=[VFIO])
    entry = machine.world.ledger.get(uid(1))
    assert entry is not None
    assert environment([entry], {}) == {}


def test_an_inventory_without_drivers_is_refused(machine: Machine) -> None:
    found = inventory()
    bare = replace(found.functions[VFS[0]], driver=None)
    machine.world.restart(
        node=machine.node(inventory=replace(found, functions={**found.functions, VFS[0]: bare}))
    )
    with pytest.raises(ClaimError, match="has no driver, so none could be given back"):
        machine.world.prepared(1, "vf-0", configs=[VFIO])


def test_the_error_of_an_impossible_bind_names_what_to_load(machine: Machine) -> None:
    with pytest.raises(AttachError, match="modprobe igbvf"):
        DriverBinding(machine.bus.sysfs, VFS[0]).rebind("igbvf")
