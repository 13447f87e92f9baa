"""What kind of machine this is: whether its PCIe tree can tell which GPU and NIC belong together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from railmate.inventory.model import PciFunction
from railmate.topology.model import MachineClass
from railmate.topology.switches import common
from railmate.topology.tree import Place

_HYPERVISOR_BRIDGES = {0x1B36, 0x15AD, 0x1414}  # vendors Red Hat (QEMU), VMware, Microsoft
_HYPERVISOR_SWITCHES = {(0x104C, 0x8232), (0x104C, 0x8233)}  # TI XIO3130, the switch QEMU imitates
_VMBUS = ("VMBUS:", "MSFT1000:")  # ACPI devices of Hyper-V's bus
_QEMU_SUBSYSTEM = (0x1AF4, 0x1100)  # QEMU's default on whatever it emulates
_DATA_DIRECT_GPUS = {(0x10DE, 0x2941), (0x10DE, 0x31C2)}  # GB200, GB300


def classify(
    gpus: Sequence[PciFunction],
    nics: Sequence[PciFunction],
    functions: Mapping[str, PciFunction],
    places: Mapping[str, Place],
    shared_switches: Iterable[str],
    has_data_direct: bool,
) -> MachineClass:
    """``nics`` are those that could be rails; ``shared_switches`` those that a GPU and one of them share."""
    if has_data_direct:
        return MachineClass.DATA_DIRECT
    shared = [functions.get(switch) for switch in shared_switches]
    if shared:
        return MachineClass.VIRTUAL if all(map(_is_made_up, shared)) else MachineClass.SWITCHED
    if any((gpu.vendor, gpu.device) in _DATA_DIRECT_GPUS for gpu in gpus):
        return MachineClass.DATA_DIRECT
    if not gpus or not nics:
        return MachineClass.FLAT
    if is_guest(gpus, functions, places):
        return MachineClass.VIRTUAL
    if any(places[one.address].bridges for one in (*gpus, *nics)):
        return MachineClass.FLAT
    # Endpoints without a root port: real ones sit on several host bridges, each with its own NIC.
    gpu_bridges = {places[gpu.address].host_bridge for gpu in gpus}
    nic_bridges = {places[nic.address].host_bridge for nic in nics}
    if gpu_bridges & nic_bridges and len(gpu_bridges | nic_bridges) > 1:
        return MachineClass.INTEGRATED
    return MachineClass.VIRTUAL


def switch_of_everything(
    gpus: Sequence[str],
    nics: Sequence[str],
    chains: Mapping[str, tuple[str, ...]],
    functions: Mapping[str, PciFunction],
) -> str | None:
    """A switch that a hypervisor made up and hung all GPUs and RDMA NICs below: it tells nothing of what is near.

    With one GPU or one NIC there is nothing to tell apart.
    """
    if min(len(gpus), len(nics)) <= 1:
        return None
    shared = common(chains[address] for address in (*gpus, *nics))
    return next((switch for switch in shared if _is_made_up(functions.get(switch))), None)


def _is_made_up(switch: PciFunction | None) -> bool:
    return switch is not None and (switch.vendor, switch.device) in _HYPERVISOR_SWITCHES


def is_guest(
    gpus: Sequence[PciFunction], functions: Mapping[str, PciFunction], places: Mapping[str, Place]
) -> bool:
    """Marks that only a hypervisor leaves. A link speed of 2.5 GT/s is one too, but not needed."""
    if any(part.startswith(_VMBUS) for gpu in gpus for part in gpu.path):
        return True
    for gpu in gpus:
        for bridge in places[gpu.address].bridges:
            function = functions.get(bridge)
            if _is_made_up(function) or (function is not None and function.vendor in _HYPERVISOR_BRIDGES):
                return True
    return any((one.subsystem_vendor, one.subsystem_device) == _QEMU_SUBSYSTEM for one in functions.values())
