"""A claim's share of a NIC that stays on the node for many (KEP-5075)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from railmate.attach import macvlan
from railmate.attach.errors import UnfitError
from railmate.claims.records import PreparedNic
from railmate.errors import RailmateError
from railmate.inventory.rdmanetlink import NetnsMode, netns_mode
from railmate.publish.shared import EXCLUSIVE_MODE

_SHARE = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]{0,62}")  # a UUID; it becomes part of a CDI device's name


def share_of(result: Mapping[str, Any]) -> str:
    """The share that the scheduler has given. Raises RailmateError, a sentence without the claim's name."""
    share = str(result.get("shareID") or "")
    if not _SHARE.fullmatch(share):
        has = f"the share {share[:40]!r}, which is none" if share else "no share"
        raise RailmateError(
            f"its allocation of the shared device {result['device']} has {has}. Does the scheduler know consumable "
            "capacity (Kubernetes 1.36, feature gate DRAConsumableCapacity)? Then make the pod again."
        )
    return share


def with_port(nic: PreparedNic, netdev: str) -> PreparedNic:
    """The share with the netdev of its NIC as it is now: that is how it is found when the pod comes.

    Raises UnfitError while RDMA devices cannot be shared, AttachError when the netdev is not on the node.
    """
    assert nic.sub is not None
    if netns_mode() == NetnsMode.EXCLUSIVE:
        raise UnfitError(f"{nic.address} cannot be shared: {EXCLUSIVE_MODE}")
    port = macvlan.port(netdev, nic.address)
    return replace(nic, sub=replace(nic.sub, port=port.name, port_mac=port.mac, parent=port.parent))
