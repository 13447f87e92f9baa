"""Inventory and topology to devices: GPUs, their partitions, NICs, pairs, groups and nodes. A pure function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from railmate.inventory.address import order
from railmate.inventory.model import Gpu, GpuVendor, Inventory, Nic
from railmate.publish import notes
from railmate.publish.attributes import (
    MAX_STRING,
    PUBLISHED,
    Attributes,
    Describer,
    fits,
    gpu_attributes,
    memory,
    partition_attributes,
    split,
)
from railmate.publish.counters import assign_counters
from railmate.publish.devicenames import device_name, group_name, node_name, pair_name
from railmate.publish.held import SECTION as SECTION_HELD
from railmate.publish.held import shared_in_use, still_held
from railmate.publish.model import Offer, OfferedDevice
from railmate.publish.pairrails import pair_rails
from railmate.publish.shared import SharedPfs, shared_ports
from railmate.publish.units import Unit, Units, joined, whole_switches
from railmate.topology.model import Role, Topology
from railmate.topology.nickinds import PASS_THROUGH
from railmate_api import attributes as names

#: A GPU in this mode runs nothing as a whole (NVIDIA MIG User Guide).
_MIG = "MIG"
_NOT_WHOLE = "in MIG mode: its instances are offered, and no pair with a NIC"
#: Devices of one NIC that are published in one place; a slice takes no more (railmate.publish.slices).
_SECTION = 64
Item = TypeVar("Item")
_GPUS = "gpus"  # the section of everything with a GPU
_SHARED = "shared"


@dataclass(frozen=True, slots=True)
class OfferOptions:
    """What an administrator may set, and what is found on the node beside the machine.

    ``nics_only``: offer NICs alone, and no GPU or pair: those are another driver's on this node.
    ``share_pair_vfs``: offer the VF of a pair alone as well. It is off by default: where a physical
    function has several VFs, one of them is kept for each of its pairs, so that a claim for a lone VF
    never costs a GPU its NIC. A physical function with a single VF, or without any, is offered both ways.
    ``excluded``: PCI addresses that are never offered (the node's uplink).
    ``lone_vfs``: how many VFs of a physical function are offered alone at most; None: all.
    ``switch_groups``: where a switch has several pairs, offer all of it as one device as well.
    ``all_attributes``: publish everything that is known of a device, not only what most people select on.
    ``held``: what pods have; see ``railmate.publish.held``.
    ``shared_pfs``: physical functions that pods share through sub-interfaces; the first that fits counts.
    ``awaiting_vfs``: physical functions that are to have VFs; those that have none yet are not offered whole.
    ``handed_out``: vendors whose GPUs a device plugin hands out on this node, and under which name.
    """

    nics_only: bool = False
    share_pair_vfs: bool = False
    excluded: frozenset[str] = frozenset()
    lone_vfs: int | None = None
    switch_groups: bool = False
    all_attributes: bool = False
    held: Sequence[OfferedDevice] = ()
    shared_pfs: tuple[SharedPfs, ...] = ()
    awaiting_vfs: frozenset[str] = frozenset()
    handed_out: Mapping[GpuVendor, str] = field(default_factory=dict)


def build_offer(inventory: Inventory, topology: Topology, options: OfferOptions | None = None) -> Offer:
    """Devices in the order the scheduler should take them: pairs, groups, the whole node, GPUs, their partitions, then
    NICs, each switch by switch, then shared ports.

    First fit walks this order, so small claims fill one switch before they open the next.
    """
    mapping = _Mapping(inventory, topology, options or OfferOptions())
    devices = [
        *mapping.together(),
        *mapping.gpus(),
        *mapping.partitions(),
        *mapping.lone_nics(),
        *mapping.shared(),
    ]
    if mapping.options.all_attributes:
        devices = [_with_all_attributes(one) for one in devices]
    devices += still_held(mapping.options.held, {one.name for one in devices})
    offer = assign_counters(devices, topology.switches)
    return replace(
        offer, sections=mapping.sections(), notes=(*mapping.notes(), *_too_long(devices), *offer.notes)
    )


def _with_all_attributes(device: OfferedDevice) -> OfferedDevice:
    published = {name: value for name, value in device.told.items() if fits(value)}
    facts = {name: value for name, value in device.told.items() if name not in published}
    return replace(device, attributes=published, facts=facts)


def _too_long(devices: Iterable[OfferedDevice]) -> Iterator[str]:
    lost = Counter(
        name for device in devices for name in PUBLISHED[device.kind] if not fits(device.facts.get(name, ""))
    )
    return notes.too_long(lost, MAX_STRING)


class _Mapping:
    def __init__(self, inventory: Inventory, topology: Topology, options: OfferOptions) -> None:
        self._topology, self.options, self._inventory = topology, options, inventory
        self._functions = inventory.functions
        # a running machine has drivers; a tree without any is a copy that left them out
        self._drivers_known = any(one.driver for one in inventory.functions.values())
        self._describe = Describer(inventory, topology)
        self._shared = shared_ports(options.shared_pfs, inventory, topology.roles, options.excluded)
        self._in_use = shared_in_use(options.held)
        # a port without VFs that is shared, or that pods have shares of, is not offered whole
        kept_here = self._in_use | self._shared.offered.keys()
        rails = [
            nic
            for nic in inventory.nics
            if topology.roles.get(nic.address) == Role.RAIL
            and (nic.address not in kept_here or nic.function.virtual_functions)
        ]
        offered_gpus = () if self.options.nics_only else inventory.gpus
        candidates: list[Gpu | Nic] = [*offered_gpus, *rails]
        reasons = {device.address: self._obstacle(device) for device in candidates}
        self._refused = [(one, reason) for one in candidates if (reason := reasons[one.address]) is not None]
        self._partitioned = [
            gpu for gpu in offered_gpus if reasons[gpu.address] in (None, _NOT_WHOLE) and gpu.partitions
        ]
        self._gpus = {gpu.address: gpu for gpu in offered_gpus if reasons[gpu.address] is None}
        self._nics = {nic.address: nic for nic in rails if reasons[nic.address] is None}
        # VFs by the address of their physical function, in VF order
        self._vfs: dict[str, list[Nic]] = {}
        for nic in self._nics.values():
            if nic.function.physical_function:
                self._vfs.setdefault(nic.function.physical_function, []).append(nic)
        for vfs in self._vfs.values():
            vfs.sort(key=lambda vf: vf.vf_index or 0)
        self._pair_rails = pair_rails(topology)
        self._units = Units(topology, self._functions, self._gpus, self._nics, self._vfs)

    # --- GPUs with NICs
    def together(self) -> list[OfferedDevice]:
        """Pairs, then groups, then the whole node."""
        pairs, groups = self._units.pairs, self._units.groups
        if self.options.switch_groups:
            # of what shares a NIC the group, which has the switch's NICs once
            in_groups = {gpu for unit in groups for gpu in unit.pair.gpus}
            alone = [unit for unit in pairs if in_groups.isdisjoint(unit.pair.gpus)]
            groups = [*groups, *whole_switches([*alone, *groups])]
        devices = [
            device
            for units in (pairs, groups)
            for device in _in_switch_order([self._joined(unit) for unit in units])
        ]
        return [*devices, self._node(pairs)] if self._is_whole(pairs) else devices

    def _is_whole(self, pairs: Sequence[Unit]) -> bool:
        """Whether they are all GPUs of the machine, several, and each with its NIC on its switch."""
        in_pairs = {gpu.address for unit in pairs for gpu in unit.gpus if unit.pair.pcie_switch}
        return len(in_pairs) > 1 and in_pairs == {gpu.address for gpu in self._inventory.gpus}

    def _node(self, pairs: Sequence[Unit]) -> OfferedDevice:
        """The n-th NIC is the n-th GPU's, in PCI order, where each has one."""
        return self._joined(
            joined(sorted(pairs, key=lambda unit: order(unit.gpus[0].address)), None), names.KIND_NODE
        )

    def _joined(self, unit: Unit, kind: str = "") -> OfferedDevice:
        gpus, nics = [gpu.address for gpu in unit.gpus], [nic.address for nic in unit.nics]
        attributes = self._describe.together(unit.pair, unit.gpus, unit.nics)
        kind = kind or (names.KIND_PAIR if len(gpus) == 1 else names.KIND_GROUP)
        if kind == names.KIND_PAIR:
            name = pair_name(gpus[0], nics)
            rail = attributes.get(names.RAIL)
            if rail is not None and self._pair_rails[rail] != rail:
                attributes[names.PAIR_RAIL] = self._pair_rails[rail]
        else:
            name = (node_name if kind == names.KIND_NODE else group_name)(gpus, nics)
            attributes |= {names.GPU_COUNT: len(gpus), names.NIC_COUNT: len(nics)}
        sizes = [gpu.memory_bytes for gpu in unit.gpus]
        size = sum(one or 0 for one in sizes) if all(sizes) else None
        return _device(name, kind, attributes, memory(size), gpus=tuple(gpus), nics=tuple(nics))

    # --- GPUs alone
    def gpus(self) -> list[OfferedDevice]:
        return _in_switch_order(
            [
                _device(
                    device_name("gpu", gpu.address),
                    names.KIND_GPU,
                    self._describe.place(gpu.address) | gpu_attributes(gpu),
                    memory(gpu.memory_bytes),
                    gpus=(gpu.address,),
                )
                for gpu in self._gpus.values()
            ]
        )

    def partitions(self) -> list[OfferedDevice]:
        """The parts into which GPUs are cut, as the machine's owner cut them."""
        return _in_switch_order(
            [
                _device(
                    f"{device_name('gpu', gpu.address)}-{part.name}",
                    names.KIND_GPU_PARTITION,
                    self._describe.place(gpu.address) | partition_attributes(gpu, part),
                    memory(part.memory_bytes),
                    gpus=(gpu.address,),
                    partition=part.name,
                )
                for gpu in self._partitioned
                for part in gpu.partitions
            ]
        )

    # --- NICs alone
    def lone_nics(self) -> list[OfferedDevice]:
        """VFs of rails, and rails without VFs as they are, less those kept for pairs."""
        devices = []
        for port in self._ports():
            if port in self._vfs or self._functions[port].virtual_functions:
                vfs = self._vfs.get(port, [])
                kept = self._units.kept if len(vfs) > 1 and not self.options.share_pair_vfs else set()
                alone = [vf for vf in vfs if vf.address not in kept]
            else:
                alone = [self._nics[port]] if port in self._nics else []
            devices += [self._lone_nic(port, nic) for nic in alone[: self.options.lone_vfs]]
        return devices

    def _lone_nic(self, port: str, nic: Nic) -> OfferedDevice:
        return _device(
            device_name("vf" if nic.is_vf else "pf", nic.address),
            names.KIND_RDMA_VF,
            self._describe.place(nic.address) | self._describe.nics([nic]),
            {},
            nics=(nic.address,),
            section=f"{port}/{(nic.vf_index or 0) // _SECTION}",
        )

    def shared(self) -> list[OfferedDevice]:
        """Ports whose sub-interfaces pods get, each one device for many claims."""
        nics = {nic.address: nic for nic in self._inventory.nics}
        return _in_switch_order(
            [
                replace(
                    _device(
                        device_name("shared", address),
                        names.KIND_RDMA_SHARED,
                        self._describe.place(address) | self._describe.nics([nics[address]]),
                        {},
                        nics=(address,),
                        section=_SHARED,
                    ),
                    sub_interfaces=number,
                )
                for address, number in self._shared.offered.items()
            ]
        )

    def _ports(self) -> list[str]:
        """Rails that are no VF of another, offered or not, and the parents of VFs; switch by switch."""
        roles, switches = self._topology.roles, self._topology.switches
        rails = [
            nic.address
            for nic in self._inventory.nics
            if not nic.is_vf and roles.get(nic.address) == Role.RAIL
        ]
        ports = list(dict.fromkeys([*rails, *self._vfs]))
        return _grouped(ports, switches.get)

    def sections(self) -> dict[str, int]:
        gpus, groups = self._inventory.gpus, sum(len(pair.gpus) > 1 for pair in self._topology.pairs)
        if self.options.switch_groups:
            groups += len(set(self._topology.switches.values()))
        found = {_GPUS: 1 + groups + sum(2 + len(gpu.partitions) for gpu in gpus)}
        if self.options.nics_only:
            found = {}
        for port in self._ports():
            parent = self._functions.get(port)
            count = max(1, len(parent.virtual_functions) if parent else len(self._vfs[port]))
            for start in range(0, count, _SECTION):
                found[f"{port}/{start // _SECTION}"] = min(_SECTION, count - start)
        wanted = len(self._shared.offered) + len(self._shared.refused)
        return found | ({_SHARED: wanted} if wanted else {}) | {SECTION_HELD: 0}

    # --- what is not offered
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
        if not self._drivers_known and (self._gpus or self._nics):
            yield notes.NO_DRIVERS
        yield from notes.left_out("GPU", gpus)
        yield from notes.left_out("rail NIC", ports)
        for parent, reasons in vfs.items():
            yield from notes.vfs_left_out(parent, reasons)
        yield from self._shared.notes(self._inventory)
        yield from notes.still_shared(sorted(self._in_use - self._shared.offered.keys(), key=order))
        yield from notes.halves(self._units.without_half)
        for unit in self._units.few_vfs:
            yield notes.few_vfs([gpu.address for gpu in unit.gpus], unit.pair.nics)

    def _obstacle(self, device: Gpu | Nic) -> str | None:
        """Why a pod could not use a GPU or NIC, or must not; None where nothing is in the way."""
        function = device.function
        if device.address in self.options.excluded:
            return "the node's uplink"
        if device.address in self.options.awaiting_vfs and not function.virtual_functions:
            return "its VFs, which --vf-provisioning asks for, are not made yet"
        if function.driver is None:
            return "no driver" if self._drivers_known else None
        if function.driver in PASS_THROUGH:
            return f"held by driver {function.driver} for a virtual machine or a program in user space"
        if isinstance(device, Gpu):
            resource = self.options.handed_out.get(device.vendor)
            if resource is not None:
                return notes.handed_out(resource)
            if device.partition_mode == _MIG:
                return _NOT_WHOLE if device.partitions else "in MIG mode, and no instance is made"
            return None
        if not function.rdma_devices:
            return "RDMA device in another network namespace" if function.has_rdma else "no RDMA device"
        return None


def _in_switch_order(devices: list[OfferedDevice]) -> list[OfferedDevice]:
    return _grouped(devices, lambda device: device.attributes.get(names.PCIE_SWITCH))


def _grouped(items: list[Item], key: Callable[[Item], object]) -> list[Item]:
    """Stable: what has one key together, keys in the order of their first items."""
    order: dict[object, int] = {}
    for item in items:
        order.setdefault(key(item), len(order))
    return sorted(items, key=lambda item: order[key(item)])


def _device(
    name: str,
    kind: str,
    attributes: Attributes,
    capacity: dict[str, int],
    *,
    gpus: tuple[str, ...] = (),
    nics: tuple[str, ...] = (),
    partition: str | None = None,
    section: str = _GPUS,
) -> OfferedDevice:
    published, facts = split(attributes | {names.KIND: kind})
    return OfferedDevice(
        name,
        kind,
        published,
        capacity,
        gpus=gpus,
        nics=nics,
        partition=partition,
        facts=facts,
        section=section,
    )
