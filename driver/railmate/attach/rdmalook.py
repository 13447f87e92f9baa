"""What a pod sees of its NIC: addresses, RDMA device, GID table. Reads only; not for the hook, see ``look``.

The GID table is in sysfs, whose RDMA devices are shown for one network namespace: the one that the mount was made
in. So a sysfs is mounted from inside the pod's namespace, attached to no directory (fsopen(2), fsmount(2); Linux 5.2)
and gone with its file descriptor: nobody else sees it, and no directory is needed for it.
"""

from __future__ import annotations

import errno
import ipaddress
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from railmate.attach import addressing, detached, links, rdmalink
from railmate.attach.namespaces import open_namespace, with_host, with_namespace
from railmate.attach.rdmamodel import Gid, RdmaDeviceRef, SeenNic
from railmate.inventory.rdmanetlink import RdmaNetlink
from railmate.netlink import Netlink

#: The kernel takes the first free slot. Behind so many empty ones nothing is looked for: soft RoCE's table has 1024.
_EMPTY_SLOTS = 32
ROCE_V2 = "RoCE v2"  # kernel Documentation/ABI/stable/sysfs-class-infiniband, gid_attrs/types


@dataclass(frozen=True, slots=True)
class Wanted:
    """A NIC to look at. ``interface`` is "" where it has no netdev. ``share`` is that of a sub-interface: the RDMA
    device is then others' too, and its GID table has their entries."""

    pci_address: str
    interface: str
    device: RdmaDeviceRef | None = None
    share: str | None = None


def look(wanted: Sequence[Wanted], netns_path: Path | None) -> list[SeenNic]:
    """Each NIC as the namespace (None: the host's) shows it. Some milliseconds; what cannot be told is None.

    Raises NamespaceGoneError when the pod has ended, AttachError when its namespace cannot be entered.
    """
    if netns_path is None:
        return with_host(lambda _: _look(wanted))
    with open_namespace(netns_path) as fd:
        return with_namespace(fd, lambda _: _look(wanted))


def _look(wanted: Sequence[Wanted]) -> list[SeenNic]:
    """From inside the namespace."""
    with Netlink() as netlink:
        try:
            rdma = RdmaNetlink()
        except OSError as error:
            supported = error.errno != errno.EPROTONOSUPPORT
            return [_seen(one, netlink, None, None, subsystem=supported) for one in wanted]
        with rdma, _sysfs() as sysfs:
            return [_seen(one, netlink, rdma, sysfs) for one in wanted]


def _seen(
    wanted: Wanted, netlink: Netlink, rdma: RdmaNetlink | None, sysfs: int | None, *, subsystem: bool = True
) -> SeenNic:
    seen = SeenNic(wanted.pci_address, wanted.interface, has_subsystem=subsystem, share=wanted.share)
    seen = _netdev(seen, netlink)
    link = rdmalink.find(rdma.links(), wanted.device) if rdma is not None and wanted.device else None
    if link is None:
        return seen
    port = f"class/infiniband/{link.name}/ports/1"
    layer = _read(sysfs, f"{port}/link_layer") or None
    gids = read_gids(sysfs, port)
    if wanted.share is not None:
        gids = own_gids(gids, seen.addresses, seen.mac)
    return replace(
        seen,
        rdma_device=link.name,
        link_layer=layer,
        port_state=_read(sysfs, f"{port}/state").rpartition(":")[2].strip() or None,
        gid=pick_gid(gids, seen.addresses, wanted.interface, layer),
        readable=sysfs is not None,
    )


def _netdev(seen: SeenNic, netlink: Netlink) -> SeenNic:
    """With its MAC and its addresses: in CIDR notation, as ``status.devices`` wants them, IPv4 first."""
    try:
        link = links.get(netlink, seen.interface) if seen.interface else None
        if link is None:
            return seen
        addresses = sorted(addressing.addresses(netlink, link.index), key=lambda one: ":" in one)
    except OSError:
        return seen
    return replace(seen, addresses=tuple(addresses), mac=link.mac)


def read_gids(sysfs: int | None, port: str) -> list[Gid]:
    """The entries of a port's GID table that are in use, by index; the type of an empty slot cannot be read."""
    found: list[Gid] = []
    empty = 0
    for index in itertools.count():
        gid = _read(sysfs, f"{port}/gids/{index}")
        if not gid or empty == _EMPTY_SLOTS:
            return found
        kind = _read(sysfs, f"{port}/gid_attrs/types/{index}") if gid.strip("0:") else ""
        if not kind:
            empty += 1
            continue
        empty = 0
        found.append(Gid(index, gid, kind, _read(sysfs, f"{port}/gid_attrs/ndevs/{index}") or None))
    return found


def own_gids(gids: Iterable[Gid], addresses: Sequence[str], mac: str | None) -> list[Gid]:
    """Of a shared port's table only a sub-interface's own entries: each pod's may be called net1, and the table has the
    names of all namespaces' interfaces alike."""
    own = {gid_of(address) for address in (*addresses, *([link_local(mac)] if mac else ()))}
    return [gid for gid in gids if gid.gid in own]


def link_local(mac: str) -> str:
    """The IPv6 address that the kernel makes from a MAC (RFC 4291, appendix A), in CIDR notation."""
    first, *rest = links.mac_bytes(mac)
    end = bytes((first ^ 0x02, *rest[:2], 0xFF, 0xFE, *rest[2:]))
    return f"{ipaddress.IPv6Address(bytes((0xFE, 0x80, *bytes(6))) + end)}/64"


def pick_gid(
    gids: Iterable[Gid], addresses: Sequence[str], interface: str, link_layer: str | None
) -> Gid | None:
    """The entry an application should use: RoCE v2 for the interface's first address, IPv4 before IPv6, and a
    link-local one only where there is no other. On InfiniBand the first entry, the port's own."""
    usable = [gid for gid in gids if link_layer == "InfiniBand" or gid.kind == ROCE_V2]
    usable = [gid for gid in usable if not interface or gid.netdev in (interface, None)]
    if link_layer == "InfiniBand":
        return usable[0] if usable else None
    by_gid = {gid.gid: gid for gid in reversed(usable)}
    routable = [one for one in addresses if not ipaddress.ip_interface(one).is_link_local]
    for address in (*routable, *addresses):
        if (found := by_gid.get(gid_of(address))) is not None:
            return found
    return usable[0] if usable else None


def gid_of(address: str) -> str:
    """The GID of an address, as sysfs writes it (RoCE v2, InfiniBand annex A17.4.5: IPv4 addresses are mapped)."""
    packed = ipaddress.ip_interface(address).ip.packed
    digits = packed.hex() if len(packed) == 16 else f"{'0' * 20}ffff{packed.hex()}"
    return ":".join(digits[start : start + 4] for start in range(0, 32, 4))


def _read(sysfs: int | None, path: str) -> str:
    """Empty where there is nothing, or nothing to be read."""
    if sysfs is None:
        return ""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=sysfs)
    except OSError:
        return ""
    try:
        return os.read(fd, 256).decode(errors="replace").strip()
    except OSError:
        return ""
    finally:
        os.close(fd)


@contextmanager
def _sysfs() -> Iterator[int | None]:
    """A sysfs of this thread's network namespace; None where the kernel or its security module refuses."""
    try:
        mount = mount_sysfs()
    except OSError:
        yield None
        return
    try:
        yield mount
    finally:
        os.close(mount)


def mount_sysfs() -> int:
    """A file descriptor of the root of a sysfs of this thread's network namespace. Raises OSError."""
    return detached.mount("sysfs")


def char_devices(sysfs_root: Path, device: str, pci_address: str | None = None) -> tuple[str, ...]:
    """The names below ``/dev/infiniband`` of an RDMA device, in whatever namespace it is: these classes are not
    split by namespace. With the address of its PCI function those of the function, whatever the device is called by
    now; that takes a look at few files only, which the hook has the time for."""
    if pci_address and (found := _char_devices(sysfs_root / "bus/pci/devices" / pci_address)):
        return found
    # Below its PCI function are its own alone; the classes have one for each VF of the machine.
    function = sysfs_root / "class/infiniband" / device / "device"
    return _char_devices(function, device) or _char_devices(sysfs_root / "class", device)


def _char_devices(directory: Path, device: str | None = None) -> tuple[str, ...]:
    """Of ``device``, or all."""
    found = []
    for group in ("infiniband_verbs", "infiniband_mad"):
        for ibdev in sorted((directory / group).glob("*/ibdev")):
            try:
                if ibdev.read_text().strip() == device or device is None:
                    found.append(ibdev.parent.name)
            except OSError:
                continue  # it ends while we look
    return tuple(found)
