"""What has to be done to the physical functions of a node. Pure: facts and rules in, changes and refusals out."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from railmate.inventory.model import Inventory, PciFunction
from railmate.topology.model import Role
from railmate_api.provisioning import PfRule, PfSelector, VfProvisioning

#: What becomes of a port that cannot get its VFs: pods would wait for an administrator else.
WHOLE_MEANWHILE = ". Until then it is offered as a whole port"


@dataclass(frozen=True, slots=True)
class PfChange:
    """What one physical function gets. ``present``: how many VFs it has; ``resize``: whether they are made anew;
    ``finish``: whether their making was begun by somebody who did not end it. ``busy``: its VFs that are in use, and
    why; ``mtu_waits``: whether its MTU is another one than wanted and stays so for them."""

    address: str
    present: int
    rule: PfRule
    resize: bool
    finish: bool = False
    mtu_waits: bool = False
    busy: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A physical function that a rule selects and that stays as it is, and why: a sentence with the next step."""

    address: str
    reason: str


@dataclass(frozen=True, slots=True)
class ProvisioningPlan:
    """In PCI order. A physical function that has what its rule says is in neither."""

    changes: tuple[PfChange, ...] = ()
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class _Use:
    """Addresses of functions: behind the node's own traffic, of what claims hold, with IP addresses of the node."""

    uplinks: Set[str]
    held: Set[str]
    addressed: Set[str]


def plan(
    inventory: Inventory,
    roles: Mapping[str, Role],
    wanted: VfProvisioning,
    uplinks: Set[str],
    held: Set[str],
    addressed: Set[str] = frozenset(),
    unfinished: Set[str] = frozenset(),
) -> ProvisioningPlan:
    """``uplinks``: addresses of the functions behind the node's own traffic; ``held``: of what claims hold;
    ``addressed``: of those whose netdevs have IP addresses; ``unfinished``: of physical functions whose VFs somebody
    began to make and did not end."""
    use = _Use(uplinks, held, addressed)
    changes, refusals = [], []
    for nic in inventory.nics:
        function = nic.function
        rule = None if nic.is_vf else _rule_for(function, roles.get(nic.address), wanted)
        if rule is None:
            continue
        present = len(function.virtual_functions)
        if function.address in held and present == rule.vfs:
            continue  # it is as a pod uses it, and its number of VFs as wanted: the rest waits for the pod's end
        busy = _busy_vfs(inventory, function, use)
        reason = _refused(function, rule, use, busy)
        if reason is not None:
            refusals.append(Refusal(nic.address, reason))
            continue
        resize = present != rule.vfs
        finish = not resize and nic.address in unfinished
        waits = bool(busy) and _has_another_mtu(function, rule)
        changes.append(PfChange(nic.address, present, rule, resize, finish, waits, busy))
    return ProvisioningPlan(tuple(changes), tuple(refusals))


def _busy_vfs(inventory: Inventory, function: PciFunction, use: _Use) -> dict[str, str]:
    """By address of the VF, why it is in use."""
    known = (inventory.functions.get(address) for address in function.virtual_functions)
    why = {one.address: _in_use(one, use) for one in known if one is not None}
    return {address: reason for address, reason in why.items() if reason is not None}


def _in_use(function: PciFunction, use: _Use) -> str | None:
    """Why a VF must not be taken away, in words; None when nobody has it."""
    if function.address in use.held:
        return "a claim holds it"
    if function.address in use.uplinks:
        return "it carries the node's own traffic"
    if any(netdev.master for netdev in function.netdevs):
        return "its netdev is part of a bond, bridge or VRF"
    if function.address in use.addressed:
        return "its netdev, or one that stands on it, has an IP address"
    if function.driver == "vfio-pci":
        return "vfio-pci has it"
    if function.driver is not None and not function.netdevs:
        return f"its netdev is in another network namespace, or {function.driver} makes none"
    return None


def _has_another_mtu(function: PciFunction, rule: PfRule) -> bool:
    return rule.mtu is not None and any(
        one.mtu not in (None, rule.mtu) for one in function.netdevs if not one.is_representor
    )


def _rule_for(function: PciFunction, role: Role | None, wanted: VfProvisioning) -> PfRule | None:
    return next((rule for rule in wanted.rules if _fits(rule.select, function, role)), None)


def _fits(select: PfSelector, function: PciFunction, role: Role | None) -> bool:
    if select.address is not None and select.address.lower() != function.address:
        return False
    if select.vendor is not None and int(select.vendor, 16) != function.vendor:
        return False
    if select.model is not None and select.model.lower() != f"{function.vendor:04x}:{function.device:04x}":
        return False
    if select.role is not None and select.role != role:
        return False
    if role is Role.MANAGEMENT and select.address is None and select.role is None:
        return False  # NVSwitch management functions look like NICs, and look after NVLink
    names = [one.name for one in function.netdevs] + [one.name for one in function.rdma_devices]
    return select.name is None or any(fnmatch.fnmatchcase(name, select.name) for name in names)


def _refused(function: PciFunction, rule: PfRule, use: _Use, busy: Mapping[str, str]) -> str | None:
    if function.address in use.uplinks:
        return "it carries the node's own traffic; provision its VFs before the node joins the cluster"
    none = not function.virtual_functions
    if rule.vfs > function.max_virtual_functions:
        most = function.max_virtual_functions
        return (
            f"{rule.vfs} VFs are wanted and it can have {most} (sriov_totalvfs); ask for fewer, or raise the number "
            f"in the NIC's firmware (mlxconfig NUM_OF_VFS) and in the BIOS (SR-IOV){WHOLE_MEANWHILE if none else ''}"
        )
    if function.driver is None:
        return "it has no driver; bind one, then restart railmate's pod on this node"
    if len(function.virtual_functions) == rule.vfs:
        return None
    if function.address in use.held:
        return (
            "a claim holds the whole port, or a share of it. Free it (drain the node), then restart railmate's pod "
            "there"
        )
    for address, why in busy.items():
        return (
            f"it has {len(function.virtual_functions)} VFs, {rule.vfs} are wanted, and {address} is in use: {why}. "
            "Free it (drain the node), then restart railmate's pod there"
        )
    return None
