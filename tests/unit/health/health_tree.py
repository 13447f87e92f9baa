"""A machine's sysfs that a test can break, with the files that only health looks at."""

from __future__ import annotations

from pathlib import Path

from harness.machines import MACHINES, Machine, load_machine, with_vfs
from harness.synthetic import synthetic
from harness.sysfs import write_tree
from railmate.inventory.model import Inventory
from railmate.inventory.scan import scan
from railmate.publish.devices import build_offer
from railmate.publish.model import Offer
from railmate.topology.analyze import analyze

_MODELS = {
    "15b3:1021": {"driver": "mlx5_core", "vfs": 64, "vf": "15b3:101e", "rdma": "Ethernet", "rate": 400},
    "10de:2330": {"driver": "nvidia"},
}
_TWO_SWITCHES = """
    pci0000:00 numa=0
      00:01.0 port
        01:00.0 gen4
          02:00.0 gen4
            03:00.0 gpu
          02:01.0 gen4
            04:00.0 nic net=rail0 rdma=mlx5_0
    pci0000:40 numa=1
      40:01.0 port
        41:00.0 gen4
          42:00.0 gen4
            43:00.0 gpu
          42:01.0 gen4
            44:00.0 nic net=rail1 rdma=mlx5_1
"""


def small_machine(vfs: int = 2) -> Machine:
    """Two GPUs, two NICs with VFs, a switch for each pair."""
    machine = synthetic(_TWO_SWITCHES, _MODELS)
    return with_vfs(machine, ["0000:04:00.0", "0000:44:00.0"], vfs, _MODELS)


def dgx_a100(vfs: int) -> Machine:
    """Eight GPUs, eight rails with as many VFs each."""
    return load_machine(MACHINES / "dgx-a100.yaml", vfs)


class Tree:
    """A machine in perfect health; ``inventory`` and ``offer`` are of that moment."""

    def __init__(self, root: Path, machine: Machine | None = None) -> None:
        write_tree(machine or small_machine(), root)
        self.sys = root / "sys"
        self.inventory: Inventory = scan(self.sys, root / "proc")
        self.offer: Offer = build_offer(self.inventory, analyze(self.inventory))
        self.gpus = [gpu.address for gpu in self.inventory.gpus]
        self.pair = self.offer.devices[0]  # of GPU and VF
        self.gpu, self.vf = self.pair.gpus[0], self.pair.nics[0]
        parent = self.inventory.functions[self.vf].physical_function
        assert parent is not None
        self.pf = parent
        for address in {*self.gpus, *(f for f in self.inventory.functions if self._is_pf(f))}:
            self._add_silicon(address)

    def function(self, address: str) -> Path:
        return self.sys / "bus/pci/devices" / address

    def netdev(self, address: str) -> Path:
        return self.function(address) / "net" / self.inventory.functions[address].netdevs[0].name

    def port(self, address: str) -> Path:
        device = self.inventory.functions[address].rdma_devices[0].name
        return self.function(address) / "infiniband" / device / "ports/1"

    def bridge(self, address: str) -> str:
        return self.inventory.functions[address].path[-2]

    def _is_pf(self, address: str) -> bool:
        function = self.inventory.functions[address]
        return bool(function.rdma_devices) and function.physical_function is None

    def _add_silicon(self, address: str) -> None:
        function = self.inventory.functions[address]
        ids = function.vendor.to_bytes(2, "little") + function.device.to_bytes(2, "little")
        (self.function(address) / "config").write_bytes(ids + bytes(60))
        for end in (address, self.bridge(address)):
            (self.function(end) / "max_link_speed").write_text("16.0 GT/s PCIe\n")
            (self.function(end) / "max_link_width").write_text("16\n")
        self.set_link(address, "16.0 GT/s PCIe", "16")
        if function.netdevs:
            self.set_netdev(address, up=True, carrier=True)
            (self.netdev(address) / "carrier_down_count").write_text("0\n")
        if function.rdma_devices:
            self.set_port(address, "4: ACTIVE", "5: LinkUp")

    def set_link(self, address: str, speed: str, width: str) -> None:
        (self.function(address) / "current_link_speed").write_text(f"{speed}\n")
        (self.function(address) / "current_link_width").write_text(f"{width}\n")

    def set_netdev(self, address: str, *, up: bool, carrier: bool) -> None:
        place = self.netdev(address)
        (place / "flags").write_text("0x1003\n" if up else "0x1002\n")
        (place / "operstate").write_text("up\n" if up and carrier else "down\n")
        if up:
            (place / "carrier").write_text(f"{int(carrier)}\n")
        else:  # the kernel answers EINVAL; a directory cannot be read either
            (place / "carrier").unlink(missing_ok=True)

    def set_port(self, address: str, state: str, physical: str) -> None:
        (self.port(address) / "state").write_text(f"{state}\n")
        (self.port(address) / "phys_state").write_text(f"{physical}\n")

    def set_carrier(self, address: str, carrier: bool) -> None:
        """As the kernel shows a cable that is pulled or plugged: netdev and, with RoCE, RDMA port."""
        self.set_netdev(address, up=True, carrier=carrier)
        if carrier:
            self.set_port(address, "4: ACTIVE", "5: LinkUp")
        else:
            self.set_port(address, "1: DOWN", "3: Disabled")
            count = self.netdev(address) / "carrier_down_count"
            count.write_text(f"{int(count.read_text()) + 1}\n")

    def lose(self, address: str) -> None:
        """The function no longer answers on the bus."""
        (self.function(address) / "config").write_bytes(b"\xff" * 64)
