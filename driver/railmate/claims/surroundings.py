"""What the claims' verbs need of the driver around them: one object, given to them when they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from railmate.attach.elsewhere import Elsewhere
from railmate.claims.records import ClaimRef, Entry


class ClaimObserver:
    """Hears what became of claims. Called under the ledger's lock, so it must not block. This one ignores it."""

    def attached(self, entry: Entry) -> None:
        """The claim's netdevs are in its pod."""

    def released(self, claim: ClaimRef) -> None:
        """Nothing of the claim is left on the node."""

    def claim_event(self, claim: ClaimRef, reason: str, message: str) -> None:
        """Something that the claim's user should know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The defaults are for a driver that has nobody to tell and nothing to ask."""

    observer: ClaimObserver = field(default_factory=ClaimObserver)
    #: Counts a repair, by kind.
    repaired: Callable[[str], None] = lambda kind: None
    #: Where on the node that may be which did not come home.
    elsewhere: Elsewhere | None = None
    #: Whether the PCI function of this address is in the machine at this moment.
    on_bus: Callable[[str], bool] = lambda address: True
    #: An entry whose devices have just been moved, as it is now: `railmate.claims.observation.Observations.refreshed`.
    refreshed: Callable[[Entry], Entry] = lambda entry: entry
