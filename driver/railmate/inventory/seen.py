"""NIC functions as JSON, for the next process: what a pod holds cannot be looked at afresh."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from railmate.inventory.model import Inventory, Netdev, Nic, PciFunction, RdmaDevice

#: Bytes and nested data that nothing published depends on.
_LEFT_OUT = frozenset({"vpd", "subfunctions"})


def to_json(inventory: Inventory) -> Any:
    """All NICs of the inventory."""
    found = []
    for nic in inventory.nics:
        function = asdict(nic.function)
        function = {name: value for name, value in function.items() if name not in _LEFT_OUT}
        found.append({"function": function, "vf_index": nic.vf_index})
    return {"version": 1, "nics": found}


def from_json(value: Any) -> Inventory:
    """The inverse, as far as it can be understood; raises ValueError when it cannot."""
    try:
        nics = tuple(Nic(_function(one["function"]), one["vf_index"]) for one in value["nics"])
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"no record of NICs: {type(error).__name__}: {error}") from error
    return Inventory(functions={nic.address: nic.function for nic in nics}, nics=nics)


def _function(value: Any) -> PciFunction:
    known = {name: value[name] for name in PciFunction.__dataclass_fields__ if name in value}
    known["netdevs"] = tuple(_build(Netdev, one) for one in value.get("netdevs", ()))
    known["rdma_devices"] = tuple(_build(RdmaDevice, one) for one in value.get("rdma_devices", ()))
    return _build(PciFunction, known)


def _build(cls: type[Any], value: Any) -> Any:
    """JSON has lists where the model has tuples."""
    known = {name: value[name] for name in cls.__dataclass_fields__ if name in value}
    return cls(**{name: tuple(one) if isinstance(one, list) else one for name, one in known.items()})
