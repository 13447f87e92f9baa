"""Doing what the plan says, one physical function after the other; what fails at one does not stop the next."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Set
from contextlib import AbstractContextManager
from pathlib import Path

from railmate.attach import eswitch, links, sriov, vf
from railmate.attach.errors import AttachError
from railmate.attach.links import Link, attempt
from railmate.attach.model import PhysicalPort
from railmate.attach.namespaces import Sides, with_host
from railmate.attach.settings import VfSettings
from railmate.inventory.model import Inventory
from railmate.provision.plan import PfChange, ProvisioningPlan, in_use

log = logging.getLogger(__name__)


#: Keeps a physical function and its VFs from claims; gives the addresses of what claims have already.
KeptFromClaims = Callable[[str], AbstractContextManager[Set[str]]]


def apply(
    plan: ProvisioningPlan, inventory: Inventory, kept_from_claims: KeptFromClaims, sysfs_root: Path
) -> list[str]:
    """Make the changes; a sentence for each that could not be made, and for each refusal.

    Blocking: a NIC's driver may take a second for each VF. Each change is logged before and after.
    """
    problems = [f"{one.address} is not provisioned: {one.reason}." for one in plan.refusals]
    for change in plan.changes:
        try:
            with kept_from_claims(change.address) as held:
                problems += [
                    f"{change.address}: {problem}."
                    for problem in _provision(change, inventory, held, sysfs_root)
                ]
        except AttachError as error:
            problems.append(
                f"{change.address} is not provisioned: {error}. "
                "Mend the cause, then restart railmate's pod on this node."
            )
    return problems


def _provision(change: PfChange, inventory: Inventory, held: Set[str], sysfs_root: Path) -> list[str]:
    """Raises AttachError for what stops all, returns what went wrong beside."""
    function, rule = sriov.PhysicalFunction(sysfs_root, change.address), change.rule
    problems = []
    now = len(function.vf_addresses())
    taken = sorted(held & {change.address, *function.vf_addresses()}) if change.resize else []
    if taken:
        return [
            f"a claim has got {', '.join(taken)} meanwhile, so it keeps its {now} VFs. It is looked at anew"
        ]
    if now != change.present:
        return [
            f"it had {change.present} VFs and has {now} now: somebody else changes their number. It is looked at anew"
        ]
    if rule.eswitch is not None and eswitch.mode(change.address) != rule.eswitch:
        if change.address in held:
            problems.append(
                f"its embedded switch stays as it is, not {rule.eswitch}: a claim holds it, or a share of it, and its "
                "netdev would be made anew"
            )
        elif change.present and not change.resize:
            problems.append(
                f"its embedded switch stays as it is, not {rule.eswitch}: its {change.present} VFs would go; "
                "set vfs to 0 first"
            )
        else:
            if change.present:
                function.resize(0)
            eswitch.set_mode(change.address, rule.eswitch)
    if rule.mtu is not None or (change.resize and rule.vfs):
        # igb and others give a VF no link while their PF is down
        with_host(lambda sides: _prepare_physical(function, rule.mtu, sides))
    if change.resize:
        began = time.monotonic()
        log.info("%s: from %d VFs to %d", change.address, change.present, rule.vfs)
        function.resize(rule.vfs)
        with_host(lambda sides: _name_vfs(function, inventory, sides))
        function.bind(function.vf_addresses())
        log.info("%s: has %d VFs after %.1f s", change.address, rule.vfs, time.monotonic() - began)
    if rule.mtu is not None:
        idle = [a for a in function.vf_addresses() if change.resize or not _busy(a, inventory, held)]
        problems += with_host(lambda sides: _set_mtus(sysfs_root, idle, rule.mtu or 0, sides))
    return problems


def _busy(address: str, inventory: Inventory, held: Set[str]) -> bool:
    function = inventory.functions.get(address)
    return function is not None and in_use(inventory, function, held) is not None


def _uplinks(function: sriov.PhysicalFunction, sides: Sides) -> list[Link]:
    """The PF's netdevs. In switchdev mode the VFs' representors are there as well: the PF's own has its parent
    and, alone among them, VF information; the first made is its own."""
    found = [link for name in function.netdevs() if (link := links.get(sides.host, name))]
    return sorted(found, key=lambda link: link.index)[:1]


def _prepare_physical(function: sriov.PhysicalFunction, mtu: int | None, sides: Sides) -> None:
    for link in _uplinks(function, sides):
        if mtu is not None and link.mtu != mtu:
            with attempt(f"netdev {link.name} does not take the MTU {mtu}"):
                links.change(sides.host, link.index, mtu=mtu)
        if not link.up:
            with attempt(f"netdev {link.name} cannot be brought up"):
                links.change(sides.host, link.index, up=True)


def _name_vfs(function: sriov.PhysicalFunction, inventory: Inventory, sides: Sides) -> None:
    """MACs or GUIDs that stay the same over reboots. Set before drivers bind, since those read them once."""
    known = inventory.functions[function.address]
    infiniband = next((one for one in known.rdma_devices if one.link_layer == "InfiniBand"), None)
    for link in _uplinks(function, sides):
        for index, _ in enumerate(function.vf_addresses()):
            port = PhysicalPort(link.name, index)
            if infiniband is not None:
                seed = infiniband.node_guid or function.address
                vf.write_guids(sides.host, port, sriov.stable_guid(seed, index))
            else:
                vf.write(sides.host, port, VfSettings(mac=sriov.stable_mac(link.mac, index)))


def _set_mtus(sysfs_root: Path, vfs: list[str], mtu: int, sides: Sides) -> list[str]:
    problems = []
    for address in vfs:
        for netdev in sorted((sysfs_root / "bus/pci/devices" / address / "net").glob("*")):
            try:
                link = links.get(sides.host, netdev.name)
                if link is not None and link.mtu != mtu:
                    links.change(sides.host, link.index, mtu=mtu)
            except OSError as error:
                problems.append(f"VF {address} ({netdev.name}) does not take the MTU {mtu}: {error}")
    return problems
