"""VFs that a claim wants bound to vfio-pci: what a container gets, what the ledger knows, and how they come back.

The kernel's side is played by a bus in a directory (``pci_bus``), netdevs by ``FakeNetdevs``. A real kernel does the
same in the virtual node (tests/e2e/vnode/test_vfio.py).
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from claims_netdevs import HOST, World
from claims_world import (
    DRIVER,
    GPUS,
    PF,
    VFS,
    claim,
    config,
    inventory,
    ref,
    result,
    sandbox,
    uid,
    vfio_config,
    view,
)

import railmate.claims.state as verbs
from railmate.attach import functions
from railmate.attach.drivers import DriverBinding
from railmate.attach.errors import AttachError
from railmate.attach.model import NetdevSnapshot
from railmate.attach.settings import VfSettings
from railmate.claims.plan import ClaimError, NodeView
from railmate.errors import RailmateError
from railmate.node.conditions import device_status
from railmate.node.hints import environment
from railmate.publish.model import Offer, OfferedDevice
from unit.attach.pci_bus import PciBus

VFIO = vfio_config()


@dataclass
class Machine:
    world: World
    bus: PciBus
    told: list[VfSettings]  # to the physical function
    restored: list[VfSettings | None]

    def node(self, **more: Any) -> NodeView:
        def netdev_of(address: str) -> str | None:
            place = self.world.netdevs.where.get(address)
            return place[1] if place is not None and place[0] == HOST else None

        return view(sysfs_root=self.bus.sysfs, dev_root=self.bus.dev, netdev_of=netdev_of, **more)

    def restart(self, **more: Any) -> None:
        self.world.restart(node=self.node(), **more)

    def nodes(self, number: int = 1) -> list[dict[str, Any]]:
        (device,) = self.world.spec(number)["devices"]
        return list(device["containerEdits"].get("deviceNodes", []))


@pytest.fixture
def machine(
    world: World, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Machine:
    netdevs = world.netdevs

    def came(address: str) -> None:
        netdevs.where[address] = (HOST, "eth9")

    bus = PciBus(tmp_path_factory.mktemp("machine"))
    bus.setup("mlx5_core", "nvidia", "pcieport")
    bus.add("0000:0b:00.0", "pcieport", "16", "0x060400")
    for address in GPUS:
        bus.add(address, "nvidia", f"2{address[6]}")
    for number, address in enumerate(VFS):
        bus.add(address, "mlx5_core", str(17 + number))
    bus.came, bus.went = came, lambda address: netdevs.where.pop(address)
    told: list[VfSettings] = []
    restored: list[VfSettings | None] = []
    monkeypatch.setattr(DriverBinding, "_write", staticmethod(bus.write))
    monkeypatch.setattr(DriverBinding, "_start_unbind", staticmethod(bus.start_unbind))
    monkeypatch.setattr(functions, "with_host", lambda work: work(_Sides()))
    monkeypatch.setattr(functions, "return_all", netdevs.return_all)
    monkeypatch.setattr(functions.vf, "write", lambda host, port, wanted: told.append(wanted))
    monkeypatch.setattr(functions, "restore_vf", lambda known, sides: restored.append(known.vf))
    monkeypatch.setattr(functions, "_NETDEV_PATIENCE", 0.05)
    made = Machine(world, bus, told, restored)
    made.restart()
    return made


class _Sides:
    host = None


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


def test_afterwards_all_is_as_before(machine: Machine) -> None:
    before = machine.bus.state()
    machine.world.prepared(1, "vf-0", configs=[VFIO])
    machine.world.state.unprepare(ref(1))
    assert machine.bus.state() == before
    assert machine.world.clean(), "the netdev has its own name again"


def test_an_administrators_override_is_put_back(machine: Machine) -> None:
    machine.bus.write(machine.bus.sysfs / "bus/pci/devices" / VFS[0] / "driver_override", "mlx5_core")
    machine.world.prepared(1, "vf-0", configs=[VFIO])
    machine.world.state.unprepare(ref(1))
    assert machine.bus.override(VFS[0]) == "mlx5_core"


def test_a_vf_whose_pf_forbids_probing_gets_its_driver_back(machine: Machine) -> None:
    machine.bus.probing = False
    machine.world.prepared(1, "vf-0", configs=[VFIO])
    machine.world.state.unprepare(ref(1))
    assert machine.bus.driver(VFS[0]) == "mlx5_core"


def test_what_the_physical_function_keeps_is_told_while_the_vf_has_no_driver(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"vlan": 100, "trust": True, "maxTxRate": 1000, "mac": "02:00:00:00:00:AA"}
    driver_then: list[str | None] = []

    def write(host: object, port: object, wanted: VfSettings) -> None:
        machine.told.append(wanted)
        driver_then.append(machine.bus.driver(VFS[0]))

    def with_vf(name: str, address: str, port: Any, wanted: Any) -> NetdevSnapshot:
        found = machine.world.netdevs.snapshot(name, address)
        return replace(found, physical=port, vf=VfSettings(vlan=0, trust=False))

    monkeypatch.setattr(functions.vf, "write", write)
    monkeypatch.setattr(verbs, "snapshot", with_vf)
    machine.world.prepared(1, "vf-0", configs=[vfio_config(**settings)])
    (told,) = machine.told
    assert (told.vlan, told.trust, told.max_tx_rate, told.mac) == (100, True, 1000, "02:00:00:00:00:aa")
    assert driver_then == [None]
    machine.world.state.unprepare(ref(1))
    assert machine.restored == [VfSettings(vlan=0, trust=False)]


def test_the_ledger_knows_before_the_vf_is_touched(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    world, found = machine.world, []
    real = functions.make

    def make(address: str, change: Any, sysfs: Path) -> None:
        entry = world.ledger.get(uid(1))
        assert entry is not None
        found.append((entry.nics[0].change, machine.bus.driver(address), world.state.changing()))
        real(address, change, sysfs)

    monkeypatch.setattr(functions, "make", make)
    world.prepared(1, "vf-0", configs=[VFIO])
    ((change, driver, changing),) = found
    assert (change.own_driver, change.snapshot.name, change.made) == ("mlx5_core", "vf0", False)
    assert driver == "mlx5_core"
    assert changing == {VFS[0]}, "that it has no driver for a moment is no fault"
    assert world.state.changing() == set()


@pytest.mark.parametrize("write", range(1, 5))
def test_a_driver_that_ends_half_way_is_no_loss(
    machine: Machine, write: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before each write; then asked to prepare again, and without that, to give back."""
    for again in (True, False):
        before = machine.bus.state()
        count = 0

        def writing(path: Path, text: str) -> None:
            nonlocal count
            count += 1
            if count == write:
                raise Killed
            machine.bus.write(path, text)

        monkeypatch.setattr(DriverBinding, "_write", staticmethod(writing))
        machine.world.api.put(claim(1, "vf-0", configs=[VFIO]))
        if write < 4:  # binding takes three
            with pytest.raises(Killed):
                machine.world.state.prepare(ref(1), patience=0)
        else:
            machine.world.state.prepare(ref(1), patience=0)
        monkeypatch.setattr(DriverBinding, "_write", staticmethod(machine.bus.write))
        machine.restart()
        if again:
            machine.world.state.prepare(ref(1), patience=0)
            assert machine.bus.driver(VFS[0]) == "vfio-pci"
            assert [node["path"] for node in machine.nodes()] == ["/dev/vfio/vfio", "/dev/vfio/17"]
        machine.world.state.unprepare(ref(1))
        assert machine.bus.state() == before
        assert machine.world.clean()


class Killed(BaseException):
    pass


def test_giving_back_is_finished_by_the_next_process(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = machine.bus.state()
    machine.world.prepared(1, "vf-0", configs=[VFIO])

    def writing(path: Path, text: str) -> None:
        if path.name == "drivers_probe":
            raise Killed
        machine.bus.write(path, text)

    monkeypatch.setattr(DriverBinding, "_write", staticmethod(writing))
    with pytest.raises(Killed):
        machine.world.state.unprepare(ref(1))
    assert machine.bus.driver(VFS[0]) is None
    assert machine.world.state.changing() == {VFS[0]}
    monkeypatch.setattr(DriverBinding, "_write", staticmethod(machine.bus.write))
    machine.restart()
    machine.world.state.unprepare(ref(1))
    assert machine.bus.state() == before
    assert machine.world.clean()


def test_a_driver_that_refuses_leaves_the_vf_as_it_was(machine: Machine) -> None:
    before = machine.bus.state()
    machine.bus.refusing = {"vfio-pci"}
    with pytest.raises(ClaimError, match=r"0000:0c:00.1 is bound to no driver, not to vfio-pci"):
        machine.world.prepared(1, "vf-0", configs=[VFIO])
    assert machine.bus.state() == before


def test_its_own_driver_that_refuses_keeps_the_claim_until_it_does_not(machine: Machine) -> None:
    machine.world.prepared(1, "vf-0", configs=[VFIO])
    machine.bus.refusing = {"mlx5_core"}
    with pytest.raises(RailmateError, match=r"not to mlx5_core.*It is tried again"):
        machine.world.state.unprepare(ref(1))
    assert VFS[0] in machine.world.state.holdings.owners()
    machine.bus.refusing = set()
    machine.world.state.unprepare(ref(1))
    assert machine.world.clean()


def test_a_netdev_that_comes_late_is_a_stray_with_its_name(machine: Machine) -> None:
    machine.world.prepared(1, "vf-0", configs=[VFIO])
    machine.bus.came = lambda address: None
    machine.world.state.unprepare(ref(1))
    (stray,) = machine.world.ledger.strays()
    assert (stray.pci_address, stray.name) == (VFS[0], "vf0")


def test_after_a_reboot_nothing_is_bound_back(machine: Machine) -> None:
    machine.world.prepared(1, "vf-0", configs=[VFIO])
    machine.bus.write(machine.bus.sysfs / "bus/pci/drivers/vfio-pci/unbind", VFS[0])
    written = len(machine.bus.written)
    machine.restart(boot="boot-2")
    machine.world.state.unprepare(ref(1))
    assert len(machine.bus.written) == written
    assert machine.world.ledger.get(uid(1)) is None


def test_another_device_for_the_claim_brings_the_first_one_back(machine: Machine) -> None:
    machine.world.prepared(1, "vf-0", configs=[VFIO])
    machine.world.prepared(1, "vf-1", configs=[VFIO])
    assert [machine.bus.driver(address) for address in VFS[:2]] == ["mlx5_core", "vfio-pci"]


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


def test_a_function_that_is_gone_is_no_obstacle(machine: Machine) -> None:
    """Its physical function made its VFs anew, or it was taken out."""
    machine.world.prepared(1, "vf-0", configs=[VFIO])
    device = machine.bus.sysfs / "bus/pci/devices" / VFS[0]
    device.rename(machine.bus.root / "gone")
    machine.world.state.unprepare(ref(1))
    assert machine.world.ledger.get(uid(1)) is None


def test_what_a_process_holds_open_is_not_waited_for_without_end(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.world.prepared(1, "vf-0", configs=[VFIO])
    open_for = 2

    class Waiting:
        """The kernel has taken the link to the driver away, and waits."""

        def wait(self, timeout: float) -> int:
            nonlocal open_for
            if open_for:
                open_for -= 1
                raise subprocess.TimeoutExpired("unbind", timeout)
            return 0

    def start(path: Path, address: str) -> Waiting:
        machine.bus.write(path, address)
        return Waiting()

    monkeypatch.setattr(DriverBinding, "_start_unbind", staticmethod(start))
    for _ in range(2):
        with pytest.raises(RailmateError, match="a process still has it open"):
            machine.world.state.unprepare(ref(1))
        assert machine.bus.driver(VFS[0]) is None, "it is not given to another while it may be in use"
    machine.world.state.unprepare(ref(1))
    assert machine.world.clean()


@pytest.mark.parametrize("file", ["unbind", "drivers_probe"])
def test_a_slow_rebind_delays_no_other_claim_and_no_sandbox(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Drivers take seconds, and one whose function a program has open takes ten."""
    world, bus = machine.world, machine.bus
    world.prepared(3, "vf-2", pods=("pod-3",))
    world.state.attach(sandbox("sandbox-3", "pod-3", "/run/netns/3"))
    world.api.put(claim(1, "vf-0", configs=[VFIO]))
    slow, go_on = threading.Event(), threading.Event()

    def writing(path: Path, text: str) -> None:
        if path.name == file and text == VFS[0]:
            slow.set()
            assert go_on.wait(20)
        bus.write(path, text)

    monkeypatch.setattr(DriverBinding, "_write", staticmethod(writing))
    with ThreadPoolExecutor(1) as kubelet, ThreadPoolExecutor(1) as others:
        waiting = kubelet.submit(world.state.prepare, ref(1), 0)
        try:
            assert slow.wait(20)

            def meanwhile() -> None:
                world.state.detach("sandbox-3")
                world.state.unprepare(ref(3))
                world.prepared(2, "vf-1", pods=("pod-2",), configs=[VFIO])
                world.state.attach(sandbox("sandbox-2", "pod-2", "/run/netns/2"))
                world.state.unprepare(ref(2))

            others.submit(meanwhile).result(5)
            assert not waiting.done()
        finally:
            go_on.set()
        waiting.result(20)
    world.state.unprepare(ref(1))
    assert world.clean()


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
