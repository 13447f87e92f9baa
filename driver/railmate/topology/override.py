"""An override made to fit one machine: its addresses matched to devices, what fits nothing named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

from railmate.inventory.address import card
from railmate.inventory.model import Inventory, PciFunction
from railmate.topology.model import Role
from railmate.topology.nickinds import is_management, may_be_management
from railmate_api.override import RoleRule, TopologyOverride

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Fitted:
    """An override's statements about the GPUs and physical NIC functions of one machine."""

    chains: Mapping[str, tuple[str, ...]]  # switches above, from the top down
    numa_nodes: Mapping[str, int | None]
    roles: Mapping[str, Role]
    rails: Mapping[str, int]
    pairs: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]  # GPUs, NICs
    notes: tuple[str, ...]


def fit(override: TopologyOverride, inventory: Inventory) -> Fitted:
    """Pure. An address that the machine has not is left out with a note: cards get taken out."""
    return _Fitting(override, inventory).fitted()


class _Fitting:
    def __init__(self, override: TopologyOverride, inventory: Inventory) -> None:
        self._override = override
        self._functions = inventory.functions
        self._gpus = {gpu.address for gpu in inventory.gpus}
        self._nics = {nic.address: nic.function for nic in inventory.nics if not nic.is_vf}
        self._cards: dict[str, list[str]] = {}
        for address in (*self._gpus, *self._nics):
            self._cards.setdefault(card(address), []).append(address)
        self._unknown: list[str] = []
        self._notes: list[str] = []

    def fitted(self) -> Fitted:
        chains = self._spread({a: chain for chain, devices in self._switches() for a in devices})
        numa = self._spread(self._override.numa_nodes)
        roles = self._roles()
        rails = self._spread(self._override.rails)
        pairs = self._pairs(roles)
        if self._unknown:
            named = ", ".join(dict.fromkeys(self._unknown))
            self._notes.append(f"The override names what is no GPU and no NIC of this machine: {named}.")
        return Fitted(
            chains=chains,
            numa_nodes={address: None if node < 0 else node for address, node in numa.items()},
            roles=roles,
            rails=rails,
            pairs=pairs,
            notes=tuple(self._notes),
        )

    def _switches(self) -> Iterable[tuple[tuple[str, ...], tuple[str, ...]]]:
        parents = {switch.id: switch.parent for switch in self._override.switches}
        for switch in self._override.switches:
            chain, above = [switch.id], switch.parent
            while above is not None:
                chain.append(above)
                above = parents[above]
            yield tuple(reversed(chain)), switch.devices

    def _spread(self, stated: Mapping[str, Value]) -> dict[str, Value]:
        """By device: functions of one card share its place, so function 0 speaks for those not named."""
        result: dict[str, Value] = {}
        for address, value in stated.items():
            function = self._functions.get(address)
            if function is not None and function.physical_function is not None:
                self._notes.append(
                    f"The override names the VF {address}, which is where its physical function "
                    f"{function.physical_function} is. Name that."
                )
                continue
            fitting = self._cards.get(card(address), []) if address.endswith(".0") else []
            if address in self._gpus or address in self._nics:
                fitting = [address, *fitting]
            elif not fitting and function is None:
                self._unknown.append(address)
            for one in fitting:
                if one == address or one not in stated:
                    result[one] = value
        return result

    def _roles(self) -> dict[str, Role]:
        for rule in self._override.roles:
            if not any(_fits(rule, function) for function in self._nics.values()):
                what = rule.address or rule.model or rule.name
                self._notes.append(f"The role rule {what}={rule.role} fits no NIC of this machine.")
        roles = {}
        for address, function in self._nics.items():
            rules = [rule for rule in self._override.roles if _fits(rule, function)]
            if not rules:
                continue
            rule = rules[0]
            if rule.role == Role.RAIL and (is_management(function) or may_be_management(function)):
                if rule.address is None:
                    self._notes.append(
                        f"NIC {address} stays management: it is the NVSwitches', and only a rule by its address "
                        "makes a rail of it."
                    )
                    continue
                self._notes.append(f"NIC {address} is the NVSwitches' own; the override makes it a rail.")
            roles[address] = Role(rule.role)
        return roles

    def _pairs(self, roles: dict[str, Role]) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
        """Pairs whose devices are all there; their NICs are rails by that, but for management functions."""
        fitting = []
        for pair in self._override.pairs:
            missing = [a for a in pair.gpus if a not in self._gpus] + [
                a for a in pair.nics if a not in self._nics
            ]
            refused = [
                a
                for a in pair.nics
                if a in self._nics and is_management(self._nics[a]) and roles.get(a) is not Role.RAIL
            ]
            name = " + ".join((*pair.gpus, *pair.nics))
            if missing:
                self._notes.append(f"The override's pair {name} is left out: {missing[0]} is not there.")
            elif refused:
                self._notes.append(
                    f"The override's pair {name} is left out: {refused[0]} is the NVSwitches' own."
                )
            else:
                fitting.append((pair.gpus, pair.nics))
                roles.update((nic, Role.RAIL) for nic in pair.nics)
        return tuple(fitting)


def _fits(rule: RoleRule, function: PciFunction) -> bool:
    if rule.address is not None:
        return rule.address == function.address
    if rule.model is not None:
        return rule.model == f"{function.vendor:04x}:{function.device:04x}"
    names = [netdev.name for netdev in function.netdevs] + [device.name for device in function.rdma_devices]
    return any(fnmatchcase(name, rule.name or "") for name in names)


NOTHING = Fitted(chains={}, numa_nodes={}, roles={}, rails={}, pairs=(), notes=())
