"""The node as claims are planned for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from railmate.inventory.model import Inventory
from railmate.publish.model import Offer


@dataclass(frozen=True, slots=True)
class NodeView:
    """What the node has to offer, as planning sees it."""

    driver: str
    pool: str
    offer: Offer
    inventory: Inventory
    dev_root: Path
    node_exists: Callable[[Path], bool]
    netdev_of: Callable[[str], str | None]  # NIC address -> its netdev's name on the node at this moment
    vendor_cdi: Callable[[], Mapping[str, str]] = (
        dict  # GPU UUID -> CDI ID, as the vendors' specs say at this moment
    )
    cni_dir: Path | None = None  # where the node's CNI IPAM plugins are
    nccl_topology: bool = False  # whether the node has an NCCL topology file to give
    sysfs_root: Path = Path("/sys")
    #: Whether a PCI function is there at this moment. The inventory keeps those that claims hold, gone or not.
    on_bus: Callable[[str], bool] = lambda address: True
    #: The character devices of an RDMA device, given its name and, if it helps, its PCI function, at this moment; none
    #: where they cannot be known.
    char_devices: Callable[..., tuple[str, ...]] = lambda device, pci_address=None: ()
