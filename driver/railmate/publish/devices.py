"""Inventory and topology to devices: GPUs, VFs and pairs. A pure function."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from railmate.inventory.model import Gpu, Inventory, Nic
from railmate.publish import notes
from railmate.publish.counters import assign_counters
from railmate.publish.model import AttributeValue, Offer, OfferedDevice
from railmate.topology.model import Pair, Role, Source, Topology
from railmate_api import attributes as names

#: A GPU in this mode runs nothing as a whole (NVIDIA MIG user guide); its instances are not offered yet.
_MIG = "MIG"
#: Drivers that hold a function for a virtual machine or a user-space driver.
_PASS_THROUGH = frozenset({"vfio-pci", "pci-stub", "uio_pci_generic", "igb_uio", "xen-pciback"})
#: API limit of an attribute's string in bytes (k8s.io/api resource/v1, DeviceAttributeMaxValueLength).
_MAX_STRING = 64
_MAX_NAME = 63  # a device's name is a DNS label


@dataclass(frozen=True, slots=True)
class OfferOptions:
    """What an administrator may set.

    ``share_pair_vfs``: offer the VF of a pair alone as well. It is off by default: where a physical
    function has several VFs, one of them is kept for its pair, so that a claim for a lone VF never
    costs a GPU its NIC. A physical function with a single VF is always offered both ways.
    ``excluded``: PCI addresses that are never offered (the node's uplink).
    """

    share_pair_vfs: bool = False
    excluded: frozenset[str] = frozenset()


def build_offer(inventory: Inventory, topology: Topology, options: OfferOptions | None = None) -> Offer:
    """Devices in the order the scheduler should take them: pairs, GPUs, then VFs, each switch by switch.

    First fit walks this order, so small claims fill one switch before they open the next.
    """
    mapping = _Mapping(inventory, topology, options or OfferOptions())
    offer = assign_counters(mapping.pairs() + mapping.gpus() + mapping.lone_nics(), topology.switches)
    return replace(offer, notes=(*mapping.notes(), *offer.notes))


class _Mapping:
    def __init__(self, inventory: Inventory, topology: Topology, options: OfferOptions) -> None:
        self._topology = topology
        self._options = options
        self._functions = inventory.functions
        self._gpus = {gpu.address: gpu for gpu in inventory.gpus if self._obstacle(gpu) is None}
        rails = [nic for nic in inventory.nics if topology.roles.get(nic.address) == Role.RAIL]
        self._nics = {nic.address: nic for nic in rails if self._obstacle(nic) is None}
        candidates: list[Gpu | Nic] = [*inventory.gpus, *rails]
        self._refused = [
            (device, reason) for device in candidates if (reason := self._obstacle(device)) is not None
        ]
        # VFs by the address of their physical function, in VF order
        self._vfs: dict[str, list[Nic]] = {}
        for nic in self._nics.values():
            if nic.function.physical_function:
                self._vfs.setdefault(nic.function.physical_function, []).append(nic)
        for vfs in self._vfs.values():
            vfs.sort(key=lambda vf: vf.vf_index or 0)
        # an n-th pair of the same physical function takes its n-th VF
        self._taken: Counter[str] = Counter()
        self._kept_for_pairs: set[str] = set()
        self._without_half: list[str] = []  # GPUs whose pair could not be made for want of a NIC
        self._too_long: Counter[str] = Counter()  # attribute to the devices that had to leave it out

    def pairs(self) -> list[OfferedDevice]:
        devices = []
        for pair in self._topology.pairs:
            device = self._pair(pair)
            if device is not None:
                devices.append(device)
        return self._in_switch_order(devices)

    def gpus(self) -> list[OfferedDevice]:
        return self._in_switch_order(
            [
                OfferedDevice(
                    name=device_name("gpu", gpu.address),
                    kind=names.KIND_GPU,
                    attributes=self._place(gpu.address) | gpu_attributes(gpu) | {names.KIND: names.KIND_GPU},
                    capacity=gpu_capacity(gpu),
                    gpus=(gpu.address,),
                )
                for gpu in self._gpus.values()
            ]
        )

    def lone_nics(self) -> list[OfferedDevice]:
        """VFs of rails, less those kept for pairs. Call after ``pairs``."""
        devices = []
        for vfs in self._vfs.values():
            for vf in vfs:
                if len(vfs) > 1 and vf.address in self._kept_for_pairs and not self._options.share_pair_vfs:
                    continue
                devices.append(
                    OfferedDevice(
                        name=device_name("vf", vf.address),
                        kind=names.KIND_RDMA_VF,
                        attributes=self._place(vf.address)
                        | self._nic_attributes([vf])
                        | {names.KIND: names.KIND_RDMA_VF},
                        nics=(vf.address,),
                    )
                )
        return self._in_switch_order(devices)

    def notes(self) -> Iterator[str]:
        """What is not offered, and why. Call when all devices are made."""
        gpus, ports, vfs = dict[str, str](), dict[str, str](), dict[str, dict[str, str]]()
        for device, reason in self._refused:
            parent = device.function.physical_function
            if isinstance(device, Gpu):
                gpus[device.address] = reason
            elif parent is not None:
                vfs.setdefault(parent, {})[device.address] = reason
            elif not device.function.virtual_functions:  # else its VFs are what would be offered
                ports[device.address] = reason
        yield from notes.left_out("GPU", gpus)
        yield from notes.left_out("rail NIC", ports)
        for parent, reasons in vfs.items():
            yield from notes.vfs_left_out(parent, reasons)
        for pair in self._topology.pairs:
            if len(pair.gpus) > 1:
                yield notes.group(pair, with_vfs=any(nic in self._vfs for nic in pair.nics))
        yield from notes.halves(self._without_half)
        yield from notes.too_long(self._too_long, _MAX_STRING)

    # --- one pair
    def _pair(self, pair: Pair) -> OfferedDevice | None:
        """One GPU with its NICs. None where a half is not offered, or where the matching gives one
        NIC to several GPUs (a group, which is no pair)."""
        if len(pair.gpus) != 1 or pair.gpus[0] not in self._gpus:
            return None
        halves = [self._nic_of_pair(nic) for nic in pair.nics]
        nics = [nic for nic in halves if nic is not None]
        if not nics or len(nics) != len(halves):
            self._without_half.append(pair.gpus[0])
            return None
        for nic in nics:
            self._taken[nic.function.physical_function or nic.address] += 1
            self._kept_for_pairs.add(nic.address)
        gpu = self._gpus[pair.gpus[0]]
        attributes: dict[str, AttributeValue] = {
            **self._place(gpu.address),
            **gpu_attributes(gpu),
            **self._nic_attributes(nics),
            names.KIND: names.KIND_PAIR,
            names.DISTANCE: str(pair.distance),
            names.TOPOLOGY_SOURCE: str(pair.source),
            names.GPU_PCI_BUS_ID: gpu.address,
        }
        attributes.pop(names.PCIE_SWITCH, None)
        if pair.pcie_switch:
            attributes[names.PCIE_SWITCH] = pair.pcie_switch
        self._put_joined(attributes, names.NIC_PCI_BUS_ID, (nic.address for nic in nics))
        return OfferedDevice(
            name=pair_name(gpu.address, [nic.address for nic in nics]),
            kind=names.KIND_PAIR,
            attributes=attributes,
            capacity=gpu_capacity(gpu),
            gpus=(gpu.address,),
            nics=tuple(nic.address for nic in nics),
        )

    def _nic_of_pair(self, physical_function: str) -> Nic | None:
        """The next VF of the physical function, or the function itself where it has none at all: it would
        go into the pod from under VFs that are only not offered."""
        used = self._taken[physical_function]
        if self._functions[physical_function].virtual_functions:
            vfs = self._vfs.get(physical_function, [])
            return vfs[used] if used < len(vfs) else None
        nic = self._nics.get(physical_function)
        return nic if nic is not None and used == 0 else None

    # --- what may be offered
    def _obstacle(self, device: Gpu | Nic) -> str | None:
        """Why a pod could not use a GPU or NIC, or must not; None where nothing is in the way."""
        function = device.function
        if device.address in self._options.excluded:
            return "the node's uplink"
        if function.driver is None:
            return "no driver"
        if function.driver in _PASS_THROUGH:
            return f"held by driver {function.driver} for a virtual machine or a program in user space"
        if isinstance(device, Gpu):
            return "in MIG mode" if device.partition_mode == _MIG else None
        if not function.rdma_devices:
            return "RDMA device in another network namespace" if function.has_rdma else "no RDMA device"
        return None

    # --- attributes
    def _place(self, address: str) -> dict[str, AttributeValue]:
        """Where a function sits; what is not known is left out, never guessed."""
        function = self._functions[address]
        place: dict[str, AttributeValue] = {names.PCI_BUS_ID: address}
        if function.pcie_root:
            place[names.PCIE_ROOT] = function.pcie_root
        numa_node = self._topology.numa_nodes.get(address)
        if numa_node is not None:
            place[names.NUMA_NODE] = numa_node
        switch = self._topology.switches.get(address)
        if switch:
            place[names.PCIE_SWITCH] = switch
        rail = self._topology.rails.get(address)
        if rail is not None:
            place[names.RAIL] = rail
        place[names.MACHINE_CLASS] = str(self._topology.machine_class)
        place[names.TOPOLOGY_SOURCE] = str(self._topology.sources.get(address, Source.NUMA))
        return place

    def _nic_attributes(self, nics: Sequence[Nic]) -> dict[str, AttributeValue]:
        first = nics[0]
        parent = self._functions.get(first.function.physical_function or first.address, first.function)
        found: dict[str, AttributeValue] = {names.MODE: "vf" if first.is_vf else "pf"}
        if first.vf_index is not None:
            found[names.VF_INDEX] = first.vf_index
            found[names.PF_PCI_BUS_ID] = parent.address
        if parent.netdevs:
            found[names.PF_NAME] = parent.netdevs[0].name
            # a VF's own link speed is unknown while it is down or away; its physical function's is the port's
            if parent.netdevs[0].speed:
                found[names.LINK_SPEED] = parent.netdevs[0].speed
        rdma = [device for nic in nics for device in nic.function.rdma_devices]
        if rdma and rdma[0].link_layer:
            found[names.LINK_LAYER] = rdma[0].link_layer
        if rdma and names.LINK_SPEED not in found and rdma[0].rate:
            found[names.LINK_SPEED] = rdma[0].rate * 1000
        self._put_joined(found, names.RDMA_DEVICE, (device.name for device in rdma))
        return found

    def _put_joined(self, attributes: dict[str, AttributeValue], name: str, values: Iterable[str]) -> None:
        """Several values in one string, as long as the API's limit allows; else the attribute is left out."""
        joined = ",".join(values)
        if len(joined.encode()) > _MAX_STRING:
            self._too_long[name] += 1
        elif joined:
            attributes[name] = joined

    def _in_switch_order(self, devices: list[OfferedDevice]) -> list[OfferedDevice]:
        """Stable: switches in the order of their first device, unknown switches last in PCI order."""
        order: dict[object, int] = {}
        for device in devices:
            order.setdefault(device.attributes.get(names.PCIE_SWITCH), len(order))
        return sorted(devices, key=lambda d: order[d.attributes.get(names.PCIE_SWITCH)])


def device_name(prefix: str, address: str) -> str:
    """A DNS label from an address: ``gpu-0000-07-00-0``. Stable while the hardware stays in its place."""
    return f"{prefix}-{address.replace(':', '-').replace('.', '-')}"


def pair_name(gpu: str, nics: Sequence[str]) -> str:
    """``pair-0000-07-00-0-0000-0c-00-1``: both halves, so that a name means the same hardware for good, also after
    another VF had to take the place of the first. Where that is too long for a DNS label a digest names the NICs."""
    name = "-".join([device_name("pair", gpu), *(device_name("", nic)[1:] for nic in nics)])
    if len(name) <= _MAX_NAME:
        return name
    return f"{device_name('pair', gpu)}-{hashlib.sha256(','.join(nics).encode()).hexdigest()[:10]}"


def gpu_attributes(gpu: Gpu) -> dict[str, AttributeValue]:
    known = {
        names.VENDOR: str(gpu.vendor),
        names.PRODUCT: gpu.product,
        names.UUID: gpu.uuid,
        names.ARCHITECTURE: gpu.architecture,
        # a plain string: "535.104.05" is no semantic version, and the API refuses it as one
        names.DRIVER_VERSION: gpu.driver_version,
    }
    return {name: _cut(value) for name, value in known.items() if value}


def gpu_capacity(gpu: Gpu) -> dict[str, int]:
    return {names.MEMORY: gpu.memory_bytes} if gpu.memory_bytes else {}


def _cut(value: str) -> str:
    """One attribute that is too long would keep all of the node's devices from being published."""
    return value.encode()[:_MAX_STRING].decode(errors="ignore")
