"""The machine over time: looked at when the kernel says that something changed, and every minute."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Set
from dataclasses import dataclass

from railmate import files
from railmate.claims.holdings import Held
from railmate.claims.ledger import boot_id
from railmate.inventory import seen
from railmate.inventory.merge import keep_facts, keep_held
from railmate.inventory.model import Inventory
from railmate.inventory.scan import scan
from railmate.inventory.uevents import DeviceEvents
from railmate.inventory.uplinks import uplink_functions, uplink_names
from railmate.node.provisioning import Provisioner
from railmate.node.settings import Settings
from railmate.publish.devices import build_offer
from railmate.publish.model import Offer
from railmate.topology.analyze import analyze
from railmate.topology.model import Topology

log = logging.getLogger(__name__)

NOTHING_HELD = Held()
_SEEN = "seen.json"
#: How often the machine is looked at in a row when claims are prepared meanwhile.
_MOST_LOOKS = 5
#: Seconds between two looks that no event asked for; events can be lost, and a simulated tree sends none.
_EVERY = 60.0


@dataclass(frozen=True, slots=True)
class View:
    """One look at the machine."""

    inventory: Inventory
    offer: Offer
    topology: Topology
    gone: frozenset[str] = frozenset()  # held by a claim and no longer in the machine


def look(
    settings: Settings,
    before: Inventory | None = None,
    held: Held = NOTHING_HELD,
    awaiting: frozenset[str] = frozenset(),
) -> View:
    """What is in the machine and what of it is offered. Hardware that is ``held`` stays as it was ``before``, and
    devices that are stay published. ``awaiting``: physical functions that are about to get VFs."""
    inventory, gone = scan(settings.sysfs_root, settings.proc_root), frozenset[str]()
    if before is not None:
        inventory, gone = keep_held(before, keep_facts(before, inventory), held.addresses)
    topology = analyze(inventory, settings.override)
    excluded = uplink_functions(inventory, uplink_names())
    offer = build_offer(inventory, topology, settings.offer_options(excluded, held.devices, awaiting))
    return View(inventory, offer, topology, gone)


def first_look(settings: Settings, held: Callable[[], Held], provisioner: Provisioner) -> View:
    """The first look of this process, after VFs have been made. What an earlier process knew of hardware that
    pods hold is on disk. ``held`` is asked again after the look: until the kubelet knows this process the earlier one
    prepares claims."""
    before = _remembered(settings)
    view = _provisioned(settings, before, held, provisioner)
    if view is None:  # claims come too fast; the next look will see
        view = look(settings, before, held(), provisioner.awaiting)
    log_notes(view)
    log.info(
        "machine class %s: %d GPUs, %d NIC functions, %d pairs; %d devices offered",
        view.topology.machine_class, len(view.inventory.gpus), len(view.inventory.nics), len(view.topology.pairs),
        len(view.offer.devices),
    )  # fmt: skip
    remember(settings, view)
    return view


def _provisioned(
    settings: Settings, before: Inventory, held: Callable[[], Held], provisioner: Provisioner
) -> View | None:
    """A look, and a second one when VFs had to be made. None when claims came faster than looks."""
    found = _steady(settings, before, held, provisioner)
    if found is None:
        return None
    view, now = found
    uplinks = uplink_functions(view.inventory, uplink_names())
    if provisioner.provision(view.inventory, view.topology, uplinks, now.addresses | now.shared):
        found = _steady(settings, view.inventory, held, provisioner)
    return found[0] if found is not None else None


def _steady(
    settings: Settings, before: Inventory, held: Callable[[], Held], provisioner: Provisioner
) -> tuple[View, Held] | None:
    """A look and what was held from its beginning to its end: a claim that is prepared meanwhile may take a function's
    driver or netdev away while it is looked at."""
    for _ in range(_MOST_LOOKS):
        now = held()
        view = look(settings, before, now, provisioner.awaiting)
        if now.covers(held()):
            return view, now
    return None


def log_notes(view: View, before: View | None = None) -> None:
    """What is odd about the machine and what of it is not offered; after the first look only what is new."""
    said = {*before.inventory.warnings, *before.topology.notes, *before.offer.notes} if before else set()
    for sentence in view.inventory.warnings:
        if sentence not in said:
            log.warning("%s", sentence)
    for sentence in (*view.topology.notes, *view.offer.notes):
        if sentence not in said:
            log.info("%s", sentence)


def remember(settings: Settings, view: View) -> None:
    """For the next process. Without it that one would publish less of what pods hold, until they are gone."""
    record = {"boot": boot_id(), **seen.to_json(view.inventory)}
    try:
        files.write_json(settings.plugin_dir / _SEEN, record, durable=False)
    except OSError as error:
        log.warning("%s cannot be written: %s", settings.plugin_dir / _SEEN, error)


def _remembered(settings: Settings) -> Inventory:
    path = settings.plugin_dir / _SEEN
    try:
        record = json.loads(path.read_bytes())
        if isinstance(record, dict) and record.get("boot") != boot_id():
            return Inventory()  # after a reboot pods hold nothing, and devices have other numbers
        return seen.from_json(record)
    except FileNotFoundError:
        return Inventory()
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is not used: %s", path, error)
        return Inventory()


class MachineWatch:
    """Blocking; run it in a daemon thread. ``held`` gives what claims hold, ``changed`` is called with each view that
    differs from the last, ``gone`` with what is missing, ``event`` as soon as the kernel tells of a change."""

    def __init__(
        self,
        settings: Settings,
        first: View,
        held: Callable[[], Held],
        changed: Callable[[View], None],
        gone: Callable[[Set[str]], None],
        provisioner: Provisioner,
        event: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings, self._view, self._provisioner = settings, first, provisioner
        self._held, self._changed, self._gone, self._event = held, changed, gone, event
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            events: DeviceEvents | None = DeviceEvents()
        except OSError as error:
            log.warning("no device events from the kernel (%s); looking every %.0f s only", error, _EVERY)
            events = None
        while not self._stopping.is_set():
            again_in = self._provisioner.again_in
            patience = _EVERY if again_in is None else min(_EVERY, again_in)
            if events is None:
                self._stopping.wait(patience)
            else:
                events.wait(patience)
            if not self._stopping.is_set():
                self._event()
                self.look_again()

    def stop(self) -> None:
        self._stopping.set()

    def look_again(self) -> None:
        """One look; what goes wrong is logged, and what was known stays."""
        try:
            self._look_again()
        except Exception:
            log.exception("the machine cannot be looked at; what is published stays as it is")

    def _look_again(self) -> None:
        view = _provisioned(self._settings, self._view.inventory, self._held, self._provisioner)
        if view is None:
            return  # claims come too fast; the next look will see
        log_notes(view, self._view)
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
            remember(self._settings, view)
        if (view.offer, view.inventory) != (self._view.offer, self._view.inventory):
            self._changed(view)
        self._view = view
