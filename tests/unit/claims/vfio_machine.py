"""A node whose VFs can be bound to vfio-pci.

The kernel's side is played by a bus in a directory (``pci_bus``), netdevs by ``FakeNetdevs``. A real kernel does the
same in the virtual node (tests/e2e/vnode/test_vfio.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from claims_netdevs import HOST, World
from claims_world import GPUS, VFS, view

from railmate.attach import functions
from railmate.attach.drivers import DriverBinding
from railmate.attach.settings import VfSettings
from railmate.claims.plan import NodeView
from unit.attach.pci_bus import PciBus


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
