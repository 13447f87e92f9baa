"""After a claim's NICs are in their pod: what the pod sees of them is looked at, remembered and told.

Not in the runtime's hook: the kernel fills a GID table in its own time after an address has come. The container's
metadata file and hints are written from it, and so is ``status.devices``.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

from railmate.attach.rdmalook import Wanted, char_devices, look
from railmate.attach.rdmamodel import SeenNic
from railmate.claims.ledger import Ledger
from railmate.claims.rdmanodes import NoNodesError, has_rdma_nodes, names_now, with_rdma_nodes
from railmate.claims.records import Entry, PreparedDevice, Seen
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.seen import interface_of
from railmate.errors import RailmateError

log = logging.getLogger(__name__)


class Observations:
    def __init__(self, ledger: Ledger, runtime_files: RuntimeFiles, sysfs_root: Path, dev_root: Path) -> None:
        self._ledger, self._files, self._dev_root = ledger, runtime_files, dev_root
        self._char_devices = partial(char_devices, sysfs_root)

    def observe(self, uid: str) -> Entry | None:
        """Look at the claim's NICs and remember what is seen; None when they are in no pod (any more).

        Raises RailmateError when the pod's namespace cannot be entered or has ended.
        """
        entry = self._ledger.get(uid)
        if entry is None or entry.attachment is None or not entry.attachment.complete:
            return None
        at = entry.attachment
        nics = tuple(look(_wanted(entry), Path(at.netns) if at.netns else None))
        with self._ledger.locked():
            now = self._ledger.get(uid)
            if now is None or now.attachment is None or now.attachment.sandbox != at.sandbox:
                return None
            if now.seen is None or (now.seen.sandbox, now.seen.nics) != (at.sandbox, nics):
                now = replace(now, seen=Seen(at.sandbox, nics, told=False))
                self._write(now)
            return now

    def note_told(self, entry: Entry) -> None:
        """The API knows what was seen; an entry that has changed since is left alone. Raises RailmateError when that
        cannot be written; then it is told once more after a restart."""
        with self._ledger.locked():
            now = self._ledger.get(entry.claim.uid)
            if now is not None and now.seen is not None and now.seen == entry.seen and now.seen.told is False:
                self._ledger.put(replace(now, seen=replace(now.seen, told=True)), durable=False)

    def refreshed(self, entry: Entry) -> Entry:
        """The entry with the character devices that its RDMA devices have now (see `names_now`); where they are others
        the runtime's files are written anew. Call it under the ledger's lock, after the move and before the gate opens.

        Raises RailmateError when a device that had character devices has none, and when the disk refuses.
        """
        devices = tuple(self._with_nodes(device, entry) for device in entry.devices)
        if devices == entry.devices:
            return entry
        entry = replace(entry, devices=devices)
        # before the ledger knows of it: an attachment that the ledger calls complete has its files
        self._files.write(entry)
        return entry

    def _with_nodes(self, device: PreparedDevice, entry: Entry) -> PreparedDevice:
        if not has_rdma_nodes(device):
            return device  # nothing of the kernel's gives it any
        try:
            names = names_now(device, self._char_devices)
        except NoNodesError as error:
            raise RailmateError(
                f"{entry.claim}: {error}. It is tried again; if it stays so, look at the kernel's log on the node"
            ) from error
        return with_rdma_nodes(device, names, self._dev_root)

    def _write(self, entry: Entry) -> None:
        self._ledger.put(entry, durable=False)
        self._files.write(entry)


def _wanted(entry: Entry) -> list[Wanted]:
    return [
        Wanted(nic.address, interface_of(entry, nic), nic.rdma[0] if nic.rdma else None, nic.share)
        for nic in entry.nics
        if not nic.passes_through  # the kernel knows nothing of it
    ]


def is_settled(nic: SeenNic) -> bool:
    """Whether another look would tell nothing more: the GID of the NIC's address is there, or none is to come."""
    if nic.rdma_device is None or nic.link_layer != "Ethernet" or not nic.readable:
        return True
    if nic.gid is None:
        return False
    return not nic.addresses or not nic.gid.gid.startswith("fe80:")
