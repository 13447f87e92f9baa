"""An InfiniBand NIC for the crash sweep. There is none to ask, and the kernel makes IPoIB interfaces over nothing else:
the physical function's book of GUIDs is a directory, an interface in a partition is played by a macvlan one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from railmate.attach import ipoib, vf
from railmate.attach.links import Link
from railmate.attach.model import PhysicalPort
from railmate.attach.settings import IpoibSettings, VfSettings
from railmate.inventory.model import Inventory
from unit.attach.pci_bus import PciBus
from unit.claims import claims_world as world
from unit.claims.claims_world import PF, VFS

GUID = "02:00:00:00:00:00:00:aa"
PKEY = 0x8001
#: What the claim asks for.
GUID_CONFIG: Any = world.config(guid=GUID)
PARTITION_CONFIG: Any = world.config(
    pkey=PKEY, mtu=3000, ipam={"type": "books"}, sysctls={"arpIgnore": 1},
    rules=[{"table": 100, "source": "10.77.0.0/24"}],
)  # fmt: skip
_OF_THE_PORT = IpoibSettings(0xFFFF, "datagram", False)


def infiniband(found: Inventory) -> Inventory:
    """The node's NIC with InfiniBand links."""
    functions = dict(found.functions)
    for address in (PF, *VFS):
        one = functions[address]
        functions[address] = replace(
            one,
            netdevs=tuple(replace(netdev, link_type="infiniband") for netdev in one.netdevs),
            rdma_devices=tuple(replace(device, link_layer="InfiniBand") for device in one.rdma_devices),
        )
    return replace(found, functions=functions)


class Port:
    """The physical function and the subnet manager."""

    def __init__(self, bus: PciBus) -> None:
        self._bus, self._book = bus, bus.root / "guids"
        vf.read, vf.write = self._read, self._write
        ipoib.is_ipoib = _is_ipoib
        ipoib.read = lambda netlink, index: _OF_THE_PORT
        ipoib._NAME, ipoib._data = "macvlan", lambda wanted: b""

    def setup(self) -> None:
        self._book.mkdir(exist_ok=True)
        for number, address in enumerate(VFS):
            (self._book / str(number)).write_text(f"02:00:00:00:00:00:00:{number:02x}")
            place = self._bus.sysfs / "bus/pci/devices" / address / "infiniband" / f"mlx5_{number}"
            (place / "ports/1/pkeys").mkdir(parents=True, exist_ok=True)
            (place / "ports/1/pkeys/0").write_text(f"0x{PKEY:04x}\n")

    def guids(self) -> dict[str, str]:
        return {VFS[int(path.name)]: path.read_text() for path in sorted(self._book.glob("*"))}

    def _read(self, netlink: object, port: PhysicalPort) -> VfSettings:
        return VfSettings(guid=(self._book / str(port.vf)).read_text())

    def _write(self, netlink: object, port: PhysicalPort, wanted: VfSettings) -> None:
        path, guid = self._book / str(port.vf), wanted.guid
        if guid is None:
            return
        if self._bus.driver(VFS[port.vf]) is not None:
            raise AssertionError("a driver reads its GUID once, when it takes the function over")
        with path.open("r+"):  # the message is a step of the process, what the kernel does is none
            pass
        self._bus.around(lambda: _written(path, guid))


def _written(path: Any, text: str) -> None:
    path.write_text(text)


def _is_ipoib(link: Link) -> bool:
    return True
