"""A physical function in a directory, and a kernel that acts at once on what is written to its files.

What the kernel does is what drivers/pci/iov.c and drivers/pci/pci-driver.c do: VFs come with sriov_numvfs, from one
number to another only by way of 0; ``drivers_probe`` gives an unbound VF its driver unless sriov_drivers_autoprobe of
its PF is 0. A real NIC's driver is asked for VFs in the virtual node (e2e/vnode/test_provisioning.py).
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from railmate.attach import eswitch, links, sriov, vf
from railmate.attach.errors import AttachError
from railmate.attach.links import Link
from railmate.attach.model import PhysicalPort
from railmate.attach.settings import VfSettings
from railmate.inventory.model import Inventory, Netdev, Nic, PciFunction, RdmaDevice
from railmate.netlink import Netlink

PF = "0000:0c:00.0"
_PF_MAC, _PF_INDEX = "b8:59:9f:00:00:01", 7


def vf_address(index: int) -> str:
    return f"0000:0c:00.{index + 1}"


@contextmanager
def nobody(physical_function: str) -> Iterator[frozenset[str]]:
    yield frozenset()


@dataclass
class FakePf:
    """``around`` gets each thing that the kernel does. ``not_ready``: how often a VF's name is refused with EAGAIN;
    ``mode``: of the embedded switch, None without devlink; ``no_driver``: VFs that no driver takes."""

    root: Path
    around: Callable[[Callable[[], None]], None] = lambda act: act()
    not_ready: int = 0
    never_named: bool = False
    mode_refused: bool = False
    no_driver: set[str] = field(default_factory=set)
    netdev: str | None = "ens1"
    infiniband: bool = False

    @property
    def directory(self) -> Path:
        return self.root / "bus/pci/devices" / PF

    def setup(self, vfs: int = 0, mode: str | None = "legacy", mtu: int = 1500, autoprobe: str = "1") -> None:
        """As a machine is whose driver made VFs once, or never."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.directory.mkdir(parents=True)
        (self.root / "bus/pci/drivers/vfdriver").mkdir(parents=True)
        (self.root / "bus/pci/drivers_probe").touch()
        if self.netdev:
            (self.directory / "net" / self.netdev).mkdir(parents=True)
        for name, value in (("sriov_numvfs", "0"), ("sriov_drivers_autoprobe", "1"), ("mtu", str(mtu))):
            (self.directory / name).write_text(value)
        if mode is not None:
            (self.directory / "mode").write_text(mode)
        self._act(self.directory / "sriov_numvfs", str(vfs))
        for index in range(vfs):
            self._act(self.root / "bus/pci/drivers_probe", vf_address(index))
            self._vf(index).joinpath("name").write_text("of before")
        (self.directory / "sriov_drivers_autoprobe").write_text(autoprobe)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sriov, "_write", self._write)
        monkeypatch.setattr(links, "get", self._get)
        monkeypatch.setattr(links, "change", self._change)
        monkeypatch.setattr(vf, "write", self._name)
        monkeypatch.setattr(eswitch, "mode", self._mode)
        monkeypatch.setattr(eswitch, "set_mode", self._set_mode)

    # --- what tests see
    def vfs(self) -> int:
        return int(self.read("sriov_numvfs"))

    def read(self, name: str) -> str:
        return (self.directory / name).read_text().strip()

    def driver(self, index: int) -> str | None:
        link = self._vf(index) / "driver"
        return link.readlink().name if link.is_symlink() else None

    def name(self, index: int) -> str:
        return (self._vf(index) / "name").read_text()

    def state(self) -> dict[str, Any]:
        return {
            "VFs": {vf_address(n): (self.name(n), self.driver(n)) for n in range(self.vfs())},
            "autoprobe": self.read("sriov_drivers_autoprobe"),
            "mode": self._mode(PF),
            "mtu": self.read("mtu"),
        }

    def inventory(self) -> Inventory:
        vfs = tuple(vf_address(n) for n in range(self.vfs()))
        rdma = (RdmaDevice("mlx5_0", "InfiniBand", node_guid="b8:59:9f:03:00:00:00:01"),)
        netdevs = (Netdev(self.netdev, mtu=int(self.read("mtu"))),) if self.netdev else ()
        functions = [
            PciFunction(
                PF, ("pci0000:00", PF), 0x020000, 0x8086, 0x1572, driver="i40e", virtual_functions=vfs,
                max_virtual_functions=8, netdevs=netdevs, rdma_devices=rdma if self.infiniband else (),
            )
        ]  # fmt: skip
        functions += [
            PciFunction(
                one, ("pci0000:00", one), 0x020000, 0x8086, 0x154C, driver=self.driver(n),
                physical_function=PF, netdevs=(Netdev(f"ens1v{n}"),) if self.driver(n) else (),
            )
            for n, one in enumerate(vfs)
        ]  # fmt: skip
        nics = tuple(Nic(one, n - 1 if n else None) for n, one in enumerate(functions))
        return Inventory({one.address: one for one in functions}, nics=nics)

    # --- what the kernel does
    def _vf(self, index: int) -> Path:
        return self.root / "bus/pci/devices" / vf_address(index)

    def _write(self, path: Path, text: str) -> None:
        try:
            with path.open("r+"):  # as opening a file below /sys: nothing is cut off
                pass
            self.around(lambda: self._act(path, text))
        except OSError as error:
            raise AttachError(f"{path} does not take {text!r}: {error.strerror}") from None

    def _act(self, path: Path, text: str) -> None:
        if path.name == "sriov_numvfs":
            now = self.vfs()
            if now and int(text):
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            for index in range(now):
                (self.directory / f"virtfn{index}").unlink()
                shutil.rmtree(self._vf(index))
            for index in range(int(text)):
                self._vf(index).mkdir()
                (self._vf(index) / "name").write_text("random")
                (self.directory / f"virtfn{index}").symlink_to(self._vf(index))
            path.write_text(text)
        elif path.name == "drivers_probe":
            device = self.root / "bus/pci/devices" / text
            takes = self.read("sriov_drivers_autoprobe") == "1" and text not in self.no_driver
            if takes and not (device / "driver").is_symlink():
                (device / "driver").symlink_to(self.root / "bus/pci/drivers/vfdriver")
        else:
            path.write_text(text)

    def _get(self, netlink: Netlink, name: str) -> Link | None:
        if name != self.netdev:
            return None
        return Link(_PF_INDEX, name, _PF_MAC, int(self.read("mtu")), True, PF)

    def _change(self, netlink: Netlink, index: int, *, mtu: int) -> None:
        self._write(self.directory / "mtu", str(mtu))

    def _name(self, netlink: Netlink, port: PhysicalPort, wanted: VfSettings) -> None:
        if self.not_ready or self.never_named:
            self.not_ready = max(0, self.not_ready - 1)
            code = errno.EOPNOTSUPP if self.never_named else errno.EAGAIN
            failed = AttachError(f"{port} does not take the MAC {wanted.mac}: {os.strerror(code)}")
            failed.code = code
            raise failed
        # a driver reads it once: what comes after it has bound is too late
        if self.driver(port.vf) is None:
            self._write(self._vf(port.vf) / "name", str(wanted.mac or wanted.guid))

    def _mode(self, device: str) -> str | None:
        path = self.directory / "mode"
        return path.read_text() if path.exists() else None

    def _set_mode(self, device: str, wanted: str) -> None:
        path = self.directory / "mode"
        if self.mode_refused or not path.exists() or self.vfs():
            raise AttachError(f"the embedded switch of {device} cannot be set to {wanted}: refused")
        self._write(path, wanted)
