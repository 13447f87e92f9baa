"""A PCI bus in a directory, and a kernel that acts at once on what is written to its files.

What the kernel does is what drivers/base/bus.c, drivers/base/dd.c and drivers/pci/pci-driver.c do: ``unbind`` takes a
function of that driver only, ``drivers_probe`` gives an unbound function the driver of its override or, without one,
its own, and a VF whose PF forbids probing none. The same is asked of a real kernel in the virtual node (test_vfio.py).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

VFIO = "vfio-pci"


class Ended:
    """A process that has done its work."""

    def wait(self, timeout: float) -> int:
        return 0


@dataclass
class PciBus:
    """``came`` and ``went`` hear of a function's netdev: address. ``around`` gets each thing that the kernel does."""

    root: Path
    came: Callable[[str], None] = lambda address: None
    went: Callable[[str], None] = lambda address: None
    around: Callable[[Callable[[], None]], None] = lambda act: act()
    own: dict[str, str] = field(default_factory=dict)  # address -> its own driver
    probing: bool = True  # sriov_drivers_autoprobe
    noiommu: bool = False
    refusing: set[str] = field(default_factory=set)  # drivers that take nothing
    written: list[tuple[str, str]] = field(default_factory=list)

    @property
    def sysfs(self) -> Path:
        return self.root / "sys"

    @property
    def dev(self) -> Path:
        return self.root / "dev"

    def setup(self, *drivers: str) -> None:
        for driver in (*drivers, VFIO):
            self._bus("drivers", driver).mkdir(parents=True, exist_ok=True)
            self._bus("drivers", driver, "unbind").touch()
        self._bus("drivers_probe").touch()
        self._bus("devices").mkdir(exist_ok=True)
        (self.dev / "vfio").mkdir(parents=True, exist_ok=True)
        (self.dev / "vfio/vfio").touch()

    def add(self, address: str, driver: str, group: str | None, class_code: str = "0x020000") -> None:
        device = self._bus("devices", address)
        device.mkdir()
        (device / "driver_override").write_text("(null)\n")
        (device / "class").write_text(f"{class_code}\n")
        self.own[address] = driver
        if group is not None:
            self._group(address, group)
        self._bind(address, driver)

    def driver(self, address: str) -> str | None:
        link = self._bus("devices", address, "driver")
        return link.readlink().name if link.is_symlink() else None

    def override(self, address: str) -> str:
        return self._bus("devices", address, "driver_override").read_text().strip()

    def state(self) -> dict[str, tuple[str | None, str]]:
        return {address: (self.driver(address), self.override(address)) for address in sorted(self.own)}

    def write(self, path: Path, text: str) -> None:
        """In place of ``DriverBinding._write``."""
        from railmate.attach.errors import AttachError

        try:
            with path.open("r+"):  # as opening a file below /sys: nothing is cut off
                pass
            self.written.append((path.name, text.strip()))
            self.around(lambda: self._act(path, text.strip()))
        except OSError as error:
            raise AttachError(f"{path} does not take {text.strip()!r}: {error.strerror}") from None

    @staticmethod
    def start_unbind(path: Path, address: str) -> Ended:
        """In place of ``DriverBinding._start_unbind``: in this process, so that it acts as ``_write`` does there."""
        from railmate.attach.drivers import DriverBinding

        DriverBinding._write(path, address)
        return Ended()

    def _act(self, path: Path, text: str) -> None:
        if path.name == "driver_override":
            path.write_text(f"{text or '(null)'}\n")
        elif path.name == "unbind":
            if self.driver(text) != path.parent.name:
                raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
            self._unbind(text)
        elif path.name == "drivers_probe":
            override = self.override(text)
            named = override if override != "(null)" else self.own[text] if self.probing else None
            takes = named is not None and self._bus("drivers", named).is_dir() and named not in self.refusing
            if self.driver(text) is None and takes:
                assert named is not None
                self._bind(text, named)
        else:
            raise AssertionError(f"{path} is not written to")

    def _bind(self, address: str, driver: str) -> None:
        device = self._bus("devices", address)
        (device / "driver").symlink_to(self._bus("drivers", driver))
        if driver != VFIO:
            (device / "net" / "eth9").mkdir(parents=True)
            self.came(address)
            return
        if self.noiommu:
            self._group(address, "0", "vfio-noiommu")
        group = (device / "iommu_group").readlink().name
        (self.dev / "vfio" / f"{'noiommu-' if self.noiommu else ''}{group}").touch()

    def _unbind(self, address: str) -> None:
        device = self._bus("devices", address)
        driver = self.driver(address)
        if driver != VFIO:
            (device / "net" / "eth9").rmdir()
            (device / "net").rmdir()
            self.went(address)
        else:
            group = (device / "iommu_group").readlink().name
            (self.dev / "vfio" / f"{'noiommu-' if self.noiommu else ''}{group}").unlink(missing_ok=True)
        (device / "driver").unlink()

    def _group(self, address: str, group: str, name: str = "") -> None:
        directory = self.sysfs / "kernel/iommu_groups" / group
        (directory / "devices").mkdir(parents=True, exist_ok=True)
        if name:
            (directory / "name").write_text(f"{name}\n")
        device, member = self._bus("devices", address), directory / "devices" / address
        if not member.is_symlink():
            member.symlink_to(device)
        if not (device / "iommu_group").is_symlink():
            (device / "iommu_group").symlink_to(directory)

    def _bus(self, *parts: str) -> Path:
        return self.sysfs.joinpath("bus/pci", *parts)
