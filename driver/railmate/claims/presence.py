"""Whether what was attached is still in its pod: the ledger cannot tell, the kernel is asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from railmate.attach.model import ReturnRequest, SubInterfaceRequest
from railmate.attach.presence import Expected, absent
from railmate.claims.records import Entry, PreparedNic


def gone(entries: Sequence[Entry], netns: Path) -> list[tuple[Entry, PreparedNic]]:
    """Of claims that are attached to the sandbox with that namespace, the NICs that have something there no more. One
    look for all; of a NIC that passes through the kernel knows nothing.

    Raises AttachError when the namespace cannot be entered.
    """
    nics = [(entry, nic) for entry in entries for nic in entry.nics if not nic.passes_through]
    away = absent([_expected(entry, nic) for entry, nic in nics], netns) if nics else []
    return [one for one, is_away in zip(nics, away, strict=True) if is_away]


def _expected(entry: Entry, nic: PreparedNic) -> Expected:
    netdevs = entry.attachment.netdevs if entry.attachment else ()
    attached = next((one for one in netdevs if (one.pci_address, one.share) == nic.key), None)
    netdev: ReturnRequest | SubInterfaceRequest | None = None
    if nic.snapshot:
        netdev = ReturnRequest(nic.snapshot, attached, nic.settings)
    elif nic.sub:
        netdev = SubInterfaceRequest(nic.address, nic.sub, nic.interface, nic.settings, attached)
    return Expected(nic.address, netdev, () if nic.sub else nic.rdma)
