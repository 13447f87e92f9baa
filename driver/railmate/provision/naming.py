"""MACs or GUIDs of VFs that stay the same over reboots."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Set

from railmate.attach import links, sriov, vf
from railmate.attach.errors import AttachError
from railmate.attach.links import Link, attempt
from railmate.attach.model import PhysicalPort
from railmate.attach.namespaces import Sides
from railmate.attach.settings import VfSettings
from railmate.inventory.model import PciFunction

#: What a NIC says that has not got its new VFs ready yet (i40e, ice).
_NOT_YET = frozenset({errno.EAGAIN, errno.EBUSY})
#: Seconds that all VFs of a physical function get to be ready, and between two attempts.
_PATIENCE, _PAUSE = 10.0, 0.2


def own_links(function: sriov.PhysicalFunction, sides: Sides) -> list[Link]:
    """The PF's netdev, or nothing. In switchdev mode the VFs' representors are there as well: the PF's own has its
    parent and, alone among them, VF information; the first made is its own."""
    with attempt(f"the netdevs of {function.address} cannot be read"):
        found = [link for name in function.netdevs() if (link := links.get(sides.host, name))]
    return sorted(found, key=lambda link: link.index)[:1]


def name_vfs(
    function: sriov.PhysicalFunction, known: PciFunction, wanted: Set[str], sides: Sides
) -> list[str]:
    """Name the VFs that are in ``wanted`` (addresses). To be done before drivers bind, since those read names once.

    Returns what went wrong; a VF without such a name works, and has another one after each boot.
    """
    infiniband = next((one for one in known.rdma_devices if one.link_layer == "InfiniBand"), None)
    physical = own_links(function, sides)
    if not physical:
        # kernel: GUIDs and MACs of VFs are set by rtnetlink only, which wants a netdev (IFLA_VF_*)
        what, module = ("GUIDs", "load the module ib_ipoib") if infiniband else ("MACs", "look why")
        return [
            f"its VFs get no {what} that stay the same over reboots, since those are set through the physical "
            f"function's netdev and it has none; {module}, then have the VFs made anew (vfs: 0 and back)"
        ]
    failed, deadline = [], time.monotonic() + _PATIENCE
    for index, address in enumerate(function.vf_addresses()):
        if address not in wanted:
            continue
        port = PhysicalPort(physical[0].name, index)
        if infiniband is not None:
            name = VfSettings(guid=sriov.stable_guid(infiniband.node_guid or function.address, index))
        else:
            name = VfSettings(mac=sriov.stable_mac(physical[0].mac, index))
        try:
            _when_ready(lambda port=port, name=name: vf.write(sides.host, port, name), deadline)  # type: ignore[misc]
        except AttachError as error:
            failed.append(str(error))
    if not failed:
        return []
    more = f" (and {len(failed) - 1} more of its VFs take none either)" if failed[1:] else ""
    return [
        f"{failed[0]}{more}; what the NIC gave instead changes at each boot. Look at the kernel's log, then have the "
        "VFs made anew (vfs: 0 and back)"
    ]


def _when_ready(work: Callable[[], None], deadline: float) -> None:
    while True:
        try:
            return work()
        except AttachError as error:
            if error.code not in _NOT_YET or time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE)  # no event tells when a VF has been reset
