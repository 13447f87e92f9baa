"""The virtual functions of a physical function: how many there are, and what they are called on the wire.

Files under ``<sysfs>/bus/pci`` as kernel Documentation/ABI/testing/sysfs-bus-pci has them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from railmate.attach.errors import AttachError


class PhysicalFunction:
    """One PF's files. Every method raises AttachError that names the file and the cause."""

    def __init__(self, sysfs_root: Path, address: str) -> None:
        self.address = address
        self._bus = sysfs_root / "bus/pci"
        self._directory = self._bus / "devices" / address
        self._autoprobe = self._directory / "sriov_drivers_autoprobe"

    def vf_addresses(self) -> list[str]:
        """The VFs' PCI addresses in the order of their indices."""
        links = sorted(
            (one for one in self._directory.glob("virtfn*")),
            key=lambda one: int(one.name.removeprefix("virtfn")),
        )
        return [link.resolve().name for link in links]

    def netdevs(self) -> list[str]:
        return sorted(one.name for one in (self._directory / "net").glob("*"))

    def resize(self, count: int) -> None:
        """Make ``count`` VFs, without drivers: the kernel goes from one number to another only by way of 0.

        ``bind`` gives them their drivers, when all has been set that a driver reads but once. Until ``set_autoprobe``
        none comes by itself, not even that of a module which is loaded meanwhile.
        """
        numvfs = self._directory / "sriov_numvfs"
        self.set_autoprobe(False)
        if _read(numvfs) != "0":
            _write(numvfs, "0")
        if count:
            _write(numvfs, str(count))

    def autoprobe(self) -> bool:
        """Whether the kernel looks for drivers of new VFs; it always does before Linux 4.12."""
        return not self._autoprobe.exists() or _read(self._autoprobe) != "0"

    def set_autoprobe(self, wanted: bool) -> None:
        if self._autoprobe.exists() and self.autoprobe() != wanted:
            _write(self._autoprobe, "1" if wanted else "0")

    def has_driver(self, vf: str) -> bool:
        return (self._bus / "devices" / vf / "driver").is_symlink()

    def bind(self, vfs: Sequence[str]) -> None:
        """Let the kernel find drivers for the VFs, with autoprobe on. All are tried, also after one was refused."""
        failed = None
        for address in vfs:
            try:
                _write(self._bus / "drivers_probe", address)
            except AttachError as error:
                failed = failed or error
        if failed is not None:
            raise failed


def stable_mac(physical_mac: str, index: int) -> str:
    """The MAC of VF ``index``: the same at every boot, and different on every NIC and VF.

    Locally administered and unicast (IEEE 802, 8.2: bits 1 and 0 of the first octet); 46 bits of a hash.
    """
    digest = hashlib.sha256(f"railmate vf {index} of {physical_mac}".encode()).digest()
    first = digest[0] & 0b11111100 | 0b10
    return ":".join(f"{byte:02x}" for byte in (first, *digest[1:6]))


def stable_guid(physical_guid: str, index: int) -> str:
    """The InfiniBand node and port GUID of VF ``index``, an EUI-64 that is locally administered."""
    digest = hashlib.sha256(f"railmate vf {index} of {physical_guid}".encode()).digest()
    first = digest[0] & 0b11111100 | 0b10
    return ":".join(f"{byte:02x}" for byte in (first, *digest[1:8]))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise AttachError(f"{path} cannot be read: {error.strerror}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        hint = ""
        if isinstance(error, PermissionError) or "Read-only" in (error.strerror or ""):
            hint = "; the driver's container needs a writable sysfs (chart value provisioning)"
        raise AttachError(f"{path} does not take {text!r}: {error.strerror}{hint}") from None
