"""The machine over time: looked at when the kernel says that something changed, and every minute."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Set
from dataclasses import dataclass

from railmate.inventory.merge import keep_held
from railmate.inventory.model import Inventory
from railmate.inventory.scan import scan
from railmate.inventory.uevents import DeviceEvents
from railmate.inventory.uplinks import uplink_functions, uplink_names
from railmate.node.settings import Settings
from railmate.publish.devices import OfferOptions, build_offer
from railmate.publish.model import Offer
from railmate.topology.analyze import analyze

log = logging.getLogger(__name__)

#: Seconds between two looks that no event asked for; events can be lost, and a simulated tree sends none.
_EVERY = 60.0


@dataclass(frozen=True, slots=True)
class View:
    """One look at the machine."""

    inventory: Inventory
    offer: Offer
    gone: frozenset[str] = frozenset()  # held by a claim and no longer in the machine


def look(settings: Settings, before: Inventory | None = None, held: Set[str] = frozenset()) -> View:
    """What is in the machine and what of it is offered. ``held`` hardware stays as it was ``before``."""
    inventory, gone = scan(settings.sysfs_root, settings.proc_root), frozenset[str]()
    if before is not None:
        inventory, gone = keep_held(before, inventory, held)
    topology = analyze(inventory)
    excluded = uplink_functions(inventory, uplink_names())
    offer = build_offer(inventory, topology, OfferOptions(settings.share_pair_vfs, excluded))
    if before is None:
        for sentence in inventory.warnings:
            log.warning("%s", sentence)
        for sentence in topology.notes:
            log.info("%s", sentence)
        log.info(
            "machine class %s: %d GPUs, %d NIC functions, %d pairs; %d devices offered",
            topology.machine_class, len(inventory.gpus), len(inventory.nics), len(topology.pairs), len(offer.devices),
        )  # fmt: skip
    return View(inventory, offer, gone)


class MachineWatch:
    """Blocking; run it in a daemon thread. ``held`` gives the addresses of all hardware that claims hold,
    ``changed`` is called with each view whose offer differs from the last, ``gone`` with what is missing."""

    def __init__(
        self,
        settings: Settings,
        first: View,
        held: Callable[[], Set[str]],
        changed: Callable[[View], None],
        gone: Callable[[Set[str]], None],
    ) -> None:
        self._settings, self._view = settings, first
        self._held, self._changed, self._gone = held, changed, gone
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            events: DeviceEvents | None = DeviceEvents()
        except OSError as error:
            log.warning("no device events from the kernel (%s); looking every %.0f s only", error, _EVERY)
            events = None
        while not self._stopping.is_set():
            if events is None:
                self._stopping.wait(_EVERY)
            else:
                events.wait(_EVERY)
            if not self._stopping.is_set():
                self.look_again()

    def stop(self) -> None:
        self._stopping.set()

    def look_again(self) -> None:
        """One look; what goes wrong is logged, and what was known stays."""
        try:
            view = look(self._settings, self._view.inventory, self._held())
        except Exception:
            log.exception("the machine cannot be looked at; what is published stays as it is")
            return
        if view.gone - self._view.gone:
            self._gone(view.gone - self._view.gone)
        if view.offer != self._view.offer:
            before, after = self._view.offer.by_name.keys(), view.offer.by_name.keys()
            log.info(
                "the machine has changed: %s",
                "; ".join(
                    f"{what} {', '.join(sorted(names))}"
                    for what, names in (("new", after - before), ("no longer offered", before - after))
                    if names
                )
                or "attributes of devices",
            )
            self._changed(view)
        self._view = view
