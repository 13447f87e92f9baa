"""A PCI function is given to vfio-pci, for programs that drive it themselves (DPDK), and given back to its driver.

Sources: kernel Documentation/driver-api/vfio.rst (groups and what makes one viable) and
Documentation/ABI/testing/sysfs-bus-pci (driver_override, unbind, drivers_probe).
"""

from __future__ import annotations

from pathlib import Path

from railmate.attach.errors import AttachError

DRIVER = "vfio-pci"
#: Drivers whose devices do not stand in the way of a group: ports of the PCIe tree itself.
_HARMLESS = {"pcieport", "vfio-pci", "pci-stub"}


class Function:
    """One PCI function's files. Every method raises AttachError that names the function and the cause."""

    def __init__(self, sysfs_root: Path, address: str) -> None:
        self.address = address
        self._bus = sysfs_root / "bus/pci"
        self._directory = self._bus / "devices" / address

    def driver(self) -> str | None:
        """The name of the driver that has it at this moment."""
        link = self._directory / "driver"
        return link.resolve().name if link.exists() else None

    def group(self) -> int:
        """The number of its IOMMU group, which is its device node: ``/dev/vfio/<number>``.

        All functions of a group are handed out together, so a group with a function that another driver has is
        refused: the kernel would not open it (not "viable").
        """
        link = self._directory / "iommu_group"
        if not link.exists():
            raise AttachError(
                f"{self.address} is in no IOMMU group, so {DRIVER} cannot hand it out; switch the IOMMU on in the "
                "BIOS and on the kernel's command line (intel_iommu=on, amd_iommu=on)"
            )
        group = link.resolve()
        others = sorted(one.name for one in (group / "devices").iterdir() if one.name != self.address)
        for other in others:
            driver = Function(self._bus.parents[1], other).driver()
            if driver is not None and driver not in _HARMLESS:
                raise AttachError(
                    f"{self.address} shares IOMMU group {group.name} with {other}, which {driver} has, so it cannot be "
                    "handed out alone; its slot has no access control services (ACS)"
                )
        return int(group.name)

    def give(self) -> None:
        """To vfio-pci. Repeatable; when it fails the function has the driver that it had."""
        before = self.driver()
        if before == DRIVER:
            return
        self.group()  # refused before anything is touched
        try:
            self._rebind(DRIVER)
            if self.driver() != DRIVER:
                raise AttachError(
                    f"{self.address} cannot be bound to {DRIVER}; is the module loaded on the node? (modprobe {DRIVER})"
                )
        except AttachError:
            self.give_back(before)
            raise

    def give_back(self, driver: str | None) -> None:
        """To the driver it had; None: to none. Repeatable."""
        if self.driver() == driver:
            self._write(self._directory / "driver_override", "\n")
            return
        self._rebind(None, probe=driver is not None)
        if self.driver() != driver:
            raise AttachError(
                f"{self.address} has {self.driver() or 'no driver'} and not {driver} after it was given back; is the "
                f"module loaded on the node? (modprobe {driver})"
            )

    def _rebind(self, override: str | None, probe: bool = True) -> None:
        """The override makes the kernel offer the function to that driver only; empty, to all that know it."""
        self._write(self._directory / "driver_override", f"{override or ''}\n")
        if self.driver() is not None:
            self._write(self._directory / "driver/unbind", self.address)
        if probe:
            self._write(self._bus / "drivers_probe", self.address)

    def _write(self, path: Path, text: str) -> None:
        try:
            path.write_text(text)
        except OSError as error:
            raise AttachError(
                f"{path} does not take {text.strip()!r}: {error.strerror}; "
                "the driver's container needs a writable sysfs"
            ) from None
