"""What did not come home with its claim, or not as it was: remembered, looked for, put right."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from railmate.attach.model import NetdevReturn, NetdevSnapshot, ReturnRequest, ReturnState
from railmate.attach.netdev import return_all
from railmate.claims.attempt import attempt
from railmate.claims.backoff import Backoff
from railmate.claims.ledger import Ledger
from railmate.claims.rdmastrays import RdmaStrays
from railmate.claims.records import Entry, PreparedNic, of_boot
from railmate.claims.surroundings import Surroundings

log = logging.getLogger(__name__)


class Strays:
    """Netdevs, and RDMA devices with them. Use it inside the ledger's lock."""

    def __init__(
        self, ledger: Ledger, boot_id: str, around: Surroundings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ledger, self._boot_id, self._around = ledger, boot_id, around
        self._rdma = RdmaStrays(ledger)
        # by PCI address; a netdev whose namespace has ended is back within seconds
        self._backoff = Backoff(clock)

    def remember(self, entry: Entry, returned: Sequence[NetdevReturn]) -> None:
        """A netdev that comes home after its claim is forgotten must still find its name and MAC again, and one that
        could not be put right is tried again."""
        snapshots = {nic.address: nic.snapshot for nic in entry.nics if nic.snapshot}
        for one in returned:
            if one.state is ReturnState.LOST or (one.home and one.problems):
                self._backoff.forget(one.pci_address)
                attempt(partial(self._ledger.put_stray, snapshots[one.pci_address]))
            elif one.home:
                self._ledger.drop_stray(one.pci_address)

    def remember_rdma(self, nic: PreparedNic) -> None:
        attempt(partial(self._rdma.put, nic.address, nic.rdma))

    def fetch(self) -> int:
        """Put right what has come home since it was lost; how many did. What a pod has again stays as that has set it
        up: on the host network it uses it there. It is put right when the pod has ended."""
        return self._fetch(self._ledger.strays())

    def fetch_due(self) -> int:
        """The same for those alone whose turn it is. Not of a function that is gone from the bus: its netdev comes with
        it, if ever."""
        strays = self._ledger.strays()
        self._backoff.keep({one.pci_address for one in strays})
        due = [
            one
            for one in strays
            if self._backoff.is_due(one.pci_address) and self._around.on_bus(one.pci_address)
        ]
        for one in due:
            self._backoff.tried(one.pci_address)
        return self._fetch(due)

    def pause(self) -> float | None:
        """Seconds until ``fetch_due`` is worth calling again; None where nothing is on its way."""
        strays = [one.pci_address for one in self._ledger.strays()]
        return self._backoff.pause([address for address in strays if self._around.on_bus(address)])

    def _fetch(self, strays: Sequence[NetdevSnapshot]) -> int:
        if not strays:
            return 0
        in_use = {
            nic.address
            for entry in of_boot(self._ledger.entries().values(), self._boot_id)
            if entry.attachment is not None
            for nic in entry.nics
        }
        wanted = [ReturnRequest(stray) for stray in strays if stray.pci_address not in in_use]
        return self._put_right(return_all(wanted, None)) if wanted else 0

    def fetch_from_elsewhere(self) -> tuple[int, int]:
        """Bring strays home from namespaces that no claim knows, netdevs and RDMA devices; how many of each. Takes
        some tenths of a second where there are strays."""
        strays, rdma = self._ledger.strays(), self._rdma.all()
        if not strays and not rdma:
            return 0, 0
        # what a claim has got again since is where it belongs, in that claim's pod
        held = {nic.address for entry in self._ledger.entries().values() for nic in entry.nics}
        elsewhere = self._around.elsewhere
        # before their netdevs, which soft ones end with
        found = self._rdma.fetch(held, elsewhere)
        wanted = [ReturnRequest(stray) for stray in strays if stray.pci_address not in held]
        return self._put_right(elsewhere.fetch_netdevs(wanted) if elsewhere else ()), found

    def _put_right(self, returned: Sequence[NetdevReturn]) -> int:
        right = [one for one in returned if one.home and not one.problems]
        for one in right:
            self._ledger.drop_stray(one.pci_address)
            log.info("the netdev of %s is home again, as %s", one.pci_address, one.name)
        return len(right)
