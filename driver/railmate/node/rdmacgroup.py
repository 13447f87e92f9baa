"""The rdma cgroup: a container with RDMA devices of claims gets no resource of those that other claims may have.

In exclusive mode namespaces keep RDMA devices apart, in shared mode only the device nodes do; where the node has the
rdma controller (kernel Documentation/admin-guide/cgroup-v2.rst, section RDMA) the kernel does it in both, and in
privileged containers too. The runtime could be asked for it, but runc fails a container where the controller is
missing. So the gate writes the limits; it learns the devices from an annotation of the container, and leaves word of
how it went.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from railmate.claims.records import Entry, PreparedDevice
from railmate.inventory.model import Inventory
from railmate.node.gateword import GateWord
from railmate.publish.model import Offer

log = logging.getLogger(__name__)

#: Characters that the gate reads of the annotation.
_MAX_LENGTH = 64 << 10
_WORDS = (
    "RDMA devices of other claims are kept from containers by their device nodes and network namespaces alone: the "
    "node has no rdma cgroup controller for them. Privileged containers may reach those devices. To change that, use "
    "a kernel with CONFIG_CGROUP_RDMA and see that /sys/fs/cgroup/kubepods*/cgroup.controllers names rdma."
)


def claimable(inventory: Inventory, offer: Offer) -> frozenset[str]:
    """Names of the RDMA devices that claims can have, and of the physical functions above them."""
    offered = {address for device in offer.devices for address in device.nics}
    functions = [inventory.functions[one] for one in offered if one in inventory.functions]
    above = [inventory.functions.get(one.physical_function or "") for one in functions]
    return frozenset(
        device.name for one in (*functions, *above) if one is not None for device in one.rdma_devices
    )


class RdmaCgroup:
    """``report`` is called once with words for people where the kernel does not keep the devices apart."""

    def __init__(self, driver: str, plugin_dir: Path, report: Callable[[str], None]) -> None:
        self._key = f"{driver}/rdma-denied"
        self._unlimited = GateWord(plugin_dir / "rdma-unlimited", _WORDS, report)
        self._inventory, self._offer = Inventory(), Offer(())
        self._claimable: frozenset[str] = frozenset()

    def update(self, inventory: Inventory, offer: Offer) -> None:
        """The machine as it is now; what claims hold is in it as it was before."""
        self._inventory, self._offer = inventory, offer
        self._claimable = claimable(inventory, offer)

    def annotations(self, mine: Iterable[Entry], present: Mapping[str, str]) -> dict[str, str]:
        """What tells the gate of a container which devices to deny; ``mine``: all claims that it references.

        Nothing where ``present``, what the container has already, says it: the driver that is replacing this one, or
        that this one replaces, was asked before.
        """
        mine = list(mine)
        own = {device.name for entry in mine for nic in entry.nics for device in nic.rdma}
        own |= {name for entry in mine for device in entry.devices for name in self._looked_at(device)}
        if not own:
            return {}
        denied = sorted(self._claimable - own)
        text = " ".join(denied)
        if len(text) > _MAX_LENGTH:
            log.warning("the node has too many RDMA devices (%d) to limit containers to theirs", len(denied))
            return {}
        if self._key in present:
            if present[self._key] != text:
                log.warning("a container has annotation %s already, with other devices: %s", self._key, text)
            return {}
        return {self._key: text} if text else {}

    def _looked_at(self, device: PreparedDevice) -> frozenset[str]:
        """RDMA devices of one that an administrator's claim looks at (KEP-5018); it holds no NIC that names them."""
        offered = self._offer.by_name.get(device.device) if device.admin_access else None
        functions = [self._inventory.functions.get(address) for address in (offered.nics if offered else ())]
        return frozenset(one.name for function in functions if function for one in function.rdma_devices)

    def look(self) -> None:
        """Tell, once, what the gate had to find out."""
        self._unlimited.look()
