"""VFs that a claim wants bound to vfio-pci: their way there and back, whatever ends or refuses on it."""

from __future__ import annotations

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from claims_world import VFS, claim, ref, sandbox, uid, vfio_config
from vfio_machine import Machine, machine

import railmate.claims.preparation as preparation
from railmate.attach import functions
from railmate.attach.drivers import DriverBinding
from railmate.attach.model import NetdevSnapshot
from railmate.attach.settings import VfSettings
from railmate.claims.allocation import ClaimError
from railmate.errors import RailmateError

__all__ = ["machine"]  # a fixture

VFIO = vfio_config()


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
    monkeypatch.setattr(preparation, "snapshot", with_vf)
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
