"""Doing what the plan says, one physical function after the other; what fails at one does not stop the next."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from railmate.attach import eswitch, links, sriov
from railmate.attach.errors import AttachError, UnfitError
from railmate.attach.links import attempt
from railmate.attach.namespaces import Sides, with_host
from railmate.inventory.model import Inventory
from railmate.provision.naming import name_vfs, own_links
from railmate.provision.plan import PfChange
from railmate.provision.unfinished import Unfinished

log = logging.getLogger(__name__)


#: Keeps a physical function and its VFs from claims; gives the addresses of what claims have already.
KeptFromClaims = Callable[[str], AbstractContextManager[Set[str]]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """``problems``: sentences for people. ``made``: it has its VFs, as many as wanted, and they have drivers.
    ``again``: whether another attempt may do better."""

    problems: tuple[str, ...] = ()
    made: bool = True
    again: bool = False


class _LookAgainError(AttachError):
    """The machine is not what was planned for."""


def apply(
    change: PfChange,
    inventory: Inventory,
    kept_from_claims: KeptFromClaims,
    sysfs_root: Path,
    unfinished: Unfinished,
) -> Outcome:
    """Make the change.

    Blocking: a NIC's driver may take a second for each VF. Each change is logged before and after.
    """
    try:
        with kept_from_claims(change.address) as held:
            problems = _Provisioning(change, inventory, held, sysfs_root, unfinished).run()
    except _LookAgainError as error:
        return Outcome((f"{change.address}: {error}. It is looked at anew.",), made=False, again=True)
    except AttachError as error:
        sentence = (
            f"{change.address} is not provisioned: {error}. "
            "Mend the cause, then restart railmate's pod on this node."
        )
        return Outcome((sentence,), made=False, again=not isinstance(error, UnfitError))
    return Outcome(tuple(f"{change.address}: {problem}." for problem in problems))


class _Provisioning:
    """One change, at a time at which claims can get nothing of the physical function. ``held``: what they have."""

    def __init__(
        self,
        change: PfChange,
        inventory: Inventory,
        held: Set[str],
        sysfs_root: Path,
        unfinished: Unfinished,
    ) -> None:
        self._change, self._rule, self._inventory, self._held = change, change.rule, inventory, held
        self._sysfs_root, self._unfinished = sysfs_root, unfinished
        self._function = sriov.PhysicalFunction(sysfs_root, change.address)
        self._mtu_waits = False

    def run(self) -> list[str]:
        """What went wrong beside; raises AttachError for what stops all."""
        change, rule = self._change, self._rule
        self._check()
        problems = self._set_eswitch(rule.eswitch) if rule.eswitch is not None else []
        making = change.resize or change.finish
        if rule.mtu is not None or (making and rule.vfs):
            # igb and others give a VF no link while their PF is down
            problems += with_host(self._prepare_physical)
        if change.resize:
            problems += self._make(rule.vfs)
        elif change.finish:
            problems += self._finish(frozenset())
        if rule.mtu is not None:
            problems += with_host(self._set_vf_mtus)
        return problems

    def _check(self) -> None:
        present = self._function.vf_addresses()
        taken = sorted(self._held & {self._change.address, *present}) if self._change.resize else []
        if taken:
            raise _LookAgainError(
                f"a claim has got {', '.join(taken)} meanwhile, so it keeps its {len(present)} VFs"
            )
        if len(present) != self._change.present:
            raise _LookAgainError(
                f"it had {self._change.present} VFs and has {len(present)} now: somebody else changes their number"
            )

    def _busy(self) -> Mapping[str, str]:
        """VFs that are in use and why, as planned or as claims have got them since."""
        if self._change.resize:
            return {}
        vfs = self._function.vf_addresses()
        return {**self._change.busy, **{vf: "a claim holds it" for vf in vfs if vf in self._held}}

    # --- the embedded switch
    def _set_eswitch(self, wanted: str) -> list[str]:
        change = self._change
        mode = eswitch.mode(change.address)
        if wanted == (mode or "legacy"):  # a NIC without one does what legacy means
            return []
        if mode is None:
            raise UnfitError(
                f"its driver knows no embedded switch (devlink) that could be {wanted}; leave eswitch out of its rule"
            )
        if change.address in self._held:
            return [
                f"its embedded switch stays as it is, not {wanted}: a claim holds it, or a share of it, and its "
                "netdev would be made anew"
            ]
        if change.present and not change.resize:
            return [
                f"its embedded switch stays as it is, not {wanted}: its {change.present} VFs would go; "
                "set vfs to 0 first"
            ]
        if not change.present:
            eswitch.set_mode(change.address, wanted)
            return []
        self._make(0)
        try:
            eswitch.set_mode(change.address, wanted)
        except AttachError as error:
            raise self._with_former_vfs(error) from None
        return []

    def _with_former_vfs(self, refusal: AttachError) -> UnfitError:
        """Not to be tried again by itself: each attempt takes the VFs away for a while."""
        try:
            lost = self._make(self._change.present)
        except AttachError as error:
            lost = [str(error)]
        if len(self._function.vf_addresses()) == self._change.present:
            lost = [f"it has its {self._change.present} VFs again", *lost]
        return UnfitError("; ".join([str(refusal), *lost]))

    # --- VFs
    def _make(self, count: int) -> list[str]:
        function, address = self._function, self._change.address
        began, before = time.monotonic(), len(function.vf_addresses())
        log.info("%s: from %d VFs to %d", address, before, count)
        autoprobe = self._unfinished.begin(address, function.autoprobe())
        try:
            function.resize(count)
        except AttachError:
            function.set_autoprobe(autoprobe)
            if not function.vf_addresses():
                self._unfinished.end(address)  # nothing is left to be finished
            raise
        problems = self._finish(frozenset(function.vf_addresses()))
        log.info("%s: has %d VFs after %.1f s", address, count, time.monotonic() - began)
        return problems

    def _finish(self, new: Set[str]) -> list[str]:
        """Names and drivers for ``new`` VFs and for those that a killed driver has left without driver: they were
        named no earlier than these."""
        function, address = self._function, self._change.address
        autoprobe = self._unfinished.begin(address, function.autoprobe())
        vfs = [one for one in function.vf_addresses() if one not in self._held]
        unbound = [one for one in vfs if not function.has_driver(one)]
        unnamed = {*new, *unbound}
        problems = []
        try:
            if unnamed:
                problems = with_host(lambda sides: self._name(unnamed, sides))
        except AttachError as error:
            problems = [str(error)]
        finally:
            function.set_autoprobe(autoprobe)
            if autoprobe:
                function.bind(unbound)
        if autoprobe and (without := [one for one in unbound if not function.has_driver(one)]):
            problems.append(
                f"{', '.join(without)} found no driver: it is not loaded (iavf, mlx5_core, …), or failed as the "
                "kernel's log says"
            )
            raise AttachError("; ".join(problems))
        if unbound and not autoprobe:
            problems.append(
                "its VFs get no drivers, so they are not offered: somebody has set sriov_drivers_autoprobe to 0. Write "
                "1 to it, then the VFs' addresses to /sys/bus/pci/drivers_probe"
            )
        self._unfinished.end(address)
        return problems

    def _name(self, vfs: Set[str], sides: Sides) -> list[str]:
        return name_vfs(self._function, self._inventory.functions[self._change.address], vfs, sides)

    # --- MTU
    def _prepare_physical(self, sides: Sides) -> list[str]:
        mtu, busy, problems = self._rule.mtu, self._busy(), []
        for link in own_links(self._function, sides):
            if mtu is not None and link.mtu != mtu:
                for vf, why in busy.items():
                    problems.append(
                        f"netdev {link.name} keeps its MTU {link.mtu}, and so do its VFs, until all of them are free: "
                        f"some drivers reset the whole NIC for another one, and {vf} is in use ({why})"
                    )
                    break
                else:
                    with attempt(f"netdev {link.name} does not take the MTU {mtu}"):
                        links.change(sides.host, link.index, mtu=mtu)
            if not link.up:
                with attempt(f"netdev {link.name} cannot be brought up"):
                    links.change(sides.host, link.index, up=True)
        self._mtu_waits = bool(problems)
        return problems

    def _set_vf_mtus(self, sides: Sides) -> list[str]:
        mtu, busy, problems = self._rule.mtu or 0, self._busy(), []
        if self._mtu_waits:
            return []
        for address in self._function.vf_addresses():
            if address in busy:
                continue
            for netdev in sorted((self._sysfs_root / "bus/pci/devices" / address / "net").glob("*")):
                try:
                    link = links.get(sides.host, netdev.name)
                    if link is not None and link.mtu != mtu:
                        links.change(sides.host, link.index, mtu=mtu)
                except OSError as error:
                    problems.append(f"VF {address} ({netdev.name}) does not take the MTU {mtu}: {error}")
        return problems
