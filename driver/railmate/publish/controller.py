"""Keeps the node's ResourceSlices in the API as they should be.

The kubelet deletes all slices of its node when it starts, and a driver's slices 30 s after it lost
the driver (KEP-4381; kubelet pkg/kubelet/cm/dra). So the slices are watched, and what is deleted or
altered is written again. Nothing is written when nothing changed.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from railmate.kube.client import KubeClient, Object
from railmate.kube.errors import ApiError
from railmate.publish.exclusive import Preference, lost, without_counters
from railmate.publish.model import Offer
from railmate.publish.shared import without_shared
from railmate.publish.slices import gate_probe, keep_taint_times, resource_slices
from railmate.publish.writes import WritePlan, dropped_fields, is_kept, plan_writes, without_fields

log = logging.getLogger(__name__)

#: Seconds between looks even if no event came: a watch can be lost without a word.
_WATCH_SECONDS = 240
#: The same while the slices are another instance's: nobody tells when that ends.
_WATCH_OUTDONE = 10
#: Seconds between two looks that follow each other faster than _QUIET, doubled each time; at most the second where
#: nothing had to be put right: the driver's own writes are heard, too.
_PAUSE_FIRST, _PAUSE_CALM, _PAUSE_MAX, _QUIET = 0.1, 1.0, 10.0, 10.0
#: Seconds after which a server that drops fields is asked whether it still does.
_ASK_AGAIN = 300.0
#: What is refused with this status is refused at every try.
_INVALID = 422
#: Fields that a server drops while this feature gate is off.
_COUNTERS = frozenset({"consumesCounters", "sharedCounters"})
_SHARES = frozenset({"allowMultipleAllocations", "requestPolicy"})
_TAINTS_LOST = (
    "The API server dropped the taints of this node's devices: its feature gate DRADeviceTaints is off (needs "
    "Kubernetes 1.36, or the gate). Devices that do not work are only shown as unhealthy, and pods may get them."
)


class SliceController:
    """Blocking; run it in a daemon thread. After ``stop`` it writes nothing more but what it is writing.
    ``left_to_another``: the slices are not as offered, and another instance's to write."""

    def __init__(
        self,
        kube: KubeClient,
        driver: str,
        node: str,
        offer: Offer,
        on_published: Callable[[], None] | None = None,
        on_refused: Callable[[str], None] = lambda message: None,
        taints: Mapping[str, str] | None = None,
        on_lost: Callable[[str], None] = lambda message: None,
        preference: Preference = Preference.PAIRS,
        outdone: Callable[[], bool] = lambda: False,
    ) -> None:
        """``on_refused`` is told, in a sentence for people, when the server calls our slices invalid, ``on_lost``
        when it keeps less than it was sent because a feature gate is off. ``preference`` says what is then
        published of hardware with several names. ``taints``: see ``set_taints``. ``outdone``: whether the slices are
        another instance's to keep."""
        self._kube, self._driver, self._node, self._offer = kube, driver, node, offer
        self._on_published = on_published or (lambda: None)
        self._on_refused, self._on_lost, self._preference = on_refused, on_lost, preference
        self._outdone, self.left_to_another = outdone, False
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._node_uid: str | None = None
        self._taints = dict(taints or {})
        # Fields that the server does not keep: wanting them back would loop for ever.
        self._dropped: set[str] = set()
        self._ask_again_at = 0.0
        # Slices that the server made more of than it was sent, with its answer: writing them again changes nothing.
        self._answers: dict[str, tuple[Object, Object]] = {}
        self._written = 0  # how often something was written

    def run(self) -> None:
        pause = _PAUSE_FIRST
        while not self._stopping.is_set():
            started, written, calm = time.monotonic(), self._written, False
            try:
                version = self.sync()
                calm = self._written == written
                calm &= self._wait_for_change(version)
            except ApiError as error:
                log.warning(
                    "ResourceSlices of node %s: %s. Trying again in %.1f s.", self._node, error, pause
                )
            except Exception:  # whatever it is, slices that the kubelet wiped must come back
                log.exception("ResourceSlices of node %s: trying again in %.1f s", self._node, pause)
            # The first change after a quiet while is answered at once. Changes that keep coming are not: somebody
            # who writes the slices, too, or a proxy that cuts every watch, goes on for ever.
            if time.monotonic() - started > _QUIET:
                pause = _PAUSE_FIRST
            else:
                self._stopping.wait(pause * random.uniform(0.8, 1.2))
                pause = min(pause * 2, _PAUSE_CALM if calm else _PAUSE_MAX)

    def stop(self) -> None:
        self._stopping.set()

    def update(self, offer: Offer) -> None:
        """Publish another offer from now on. Returns when it is in the API, after ``stop``, when the slices are left to
        another instance, or when the API server refuses it as invalid: no other try helps then, but the next offer
        may."""
        with self._lock:
            self._offer = offer
        self._publish()

    def set_taints(self, taints: Mapping[str, str]) -> None:
        """Publish these taints, device name to reason, from now on. Returns as ``update`` does."""
        with self._lock:
            self._taints = dict(taints)
        self._publish()

    def _publish(self) -> None:
        pause = _PAUSE_FIRST
        while not self._stopping.is_set():
            try:
                self.sync()
                return
            except ApiError as error:
                if error.status == _INVALID:
                    log.error("ResourceSlices of node %s: %s", self._node, error)
                    return
                log.warning(
                    "ResourceSlices of node %s: %s. Trying again in %.1f s.", self._node, error, pause
                )
                self._stopping.wait(pause * random.uniform(0.8, 1.2))
                pause = min(pause * 2, _PAUSE_MAX)

    def sync(self) -> str:
        """Bring the API to what is offered; return the resource version to watch from."""
        with self._lock:
            try:
                return self._sync()
            except ApiError as error:
                if error.status == _INVALID:
                    self._on_refused(f"The API server refuses the devices of this node: {error}")
                raise

    def _sync(self) -> str:
        existing, version = self._kube.list_slices(self._driver, self._node)
        asked = self._node_uid is None
        if asked:
            self._ask_for_node()
        if time.monotonic() >= self._ask_again_at:
            self._ask_for_gates()
        while True:
            plan = plan_writes(existing, self._desired(1, existing), self._answers)
            if plan.generation is None:
                self.left_to_another = False
                break
            if self._leaves():
                return version
            if plan.create and not asked:
                # A Node that was deleted and made again has another UID, and takes the slices along that name the old
                # one, one by one: what is restored must not go the same way.
                asked = True
                if self._ask_for_node():
                    continue
            finished = self._write(existing, self._desired(plan.generation, existing), plan)
            existing, version = self._kube.list_slices(self._driver, self._node)
            if finished:
                break
        self._on_published()
        return version

    def _leaves(self) -> bool:
        before, self.left_to_another = self.left_to_another, self._outdone()
        if self.left_to_another and not before:
            log.info("ResourceSlices of node %s: left to another instance of the driver", self._node)
        return self.left_to_another

    def _ask_for_node(self) -> bool:
        """Whether the Node's UID is another than was known."""
        known, self._node_uid = self._node_uid, self._kube.get_node(self._node)["metadata"]["uid"]
        return self._node_uid != known

    @property
    def _published(self) -> Offer:
        offer = without_shared(self._offer) if self._dropped & _SHARES else self._offer
        return without_counters(offer, self._preference) if self._dropped & _COUNTERS else offer

    def _desired(self, generation: int, existing: Sequence[Object]) -> list[Object]:
        slices = resource_slices(
            self._published,
            self._driver,
            self._node,
            node_uid=self._node_uid,
            generation=generation,
            taints=self._taints,
        )
        for item in slices:
            item["spec"] = without_fields(item["spec"], self._dropped)
        keep_taint_times(slices, existing)
        return slices

    def _write(self, existing: list[Object], desired: list[Object], plan: WritePlan) -> bool:
        """Write what is planned. False when the server turned out to know no counters, or no shares: the rest is left
        out then, so that hardware is not published under several names. Counters are in the first slices, and while
        slices of a pool are missing none of its devices is given out."""
        by_name = {item["metadata"]["name"]: item for item in existing}
        self._written += 1
        for name in plan.delete:
            self._kube.delete_slice(by_name[name])
        for body in sorted(desired, key=lambda item: item["metadata"]["name"] == plan.last):
            name = body["metadata"]["name"]
            if name in plan.update:
                body["metadata"]["resourceVersion"] = by_name[name]["metadata"]["resourceVersion"]
                stored = self._kube.update_slice(body)
            elif name in plan.create:
                stored = self._kube.create_slice(body)
            else:
                continue
            dropped = dropped_fields(body["spec"], stored["spec"])
            self._answers.pop(name, None)
            if not dropped and not is_kept(stored, body):
                self._answers[name] = body, stored
            if self._note_dropped(dropped) & (_COUNTERS | _SHARES):
                return False
        log.info(
            "ResourceSlices of node %s: %d created, %d updated, %d deleted (%d devices, generation %d)",
            self._node, len(plan.create), len(plan.update), len(plan.delete), len(self._published.devices),
            plan.generation,
        )  # fmt: skip
        return True

    # --- servers that keep less
    def _ask_for_gates(self) -> None:
        """Which fields the server keeps: at the start, and then while it drops some, since it may have been updated.
        Writes nothing."""
        probe = gate_probe(self._driver, self._node)
        found = dropped_fields(probe["spec"], self._kube.try_slice(probe)["spec"])
        dropped = found & {"taints"}
        for together in (_COUNTERS, _SHARES):
            dropped |= together if found & together else set()
        kept = (self._dropped & (_COUNTERS | _SHARES | {"taints"})) - dropped
        if kept:
            log.info("node %s: the API server keeps %s now", self._node, ", ".join(sorted(kept)))
            self._dropped -= kept
        self._note_dropped(dropped)
        self._ask_again_at = time.monotonic() + _ASK_AGAIN if self._dropped else math.inf

    def _note_dropped(self, dropped: set[str]) -> set[str]:
        """A server with a feature gate off drops fields without an error (resourceslice strategy). Returns those
        that were not known to be dropped."""
        new = dropped - self._dropped
        if new:
            self._dropped |= new
            self._ask_again_at = time.monotonic() + _ASK_AGAIN
            for message in self._losses(new):
                log.warning("node %s: %s", self._node, message)
                self._on_lost(message)
        return new

    def _losses(self, gone: set[str]) -> list[str]:
        losses = []
        if gone & _COUNTERS and self._offer.counter_sets:
            offer = without_shared(self._offer)
            less = lost(offer, without_counters(offer, self._preference)) or "nothing"
            other = next(one for one in Preference if one is not self._preference)
            losses.append(
                "The API server dropped the counters of this node's devices: its feature gate DRAPartitionableDevices "
                "is off (needs Kubernetes 1.36, or the gate). So each GPU and NIC is published under one name; left "
                f"out: {less}. --without-counters={other} leaves out others."
            )
        shared = [device for device in self._offer.devices if device.sub_interfaces]
        if gone & _SHARES and shared:
            losses.append(
                "The API server lets no two claims have one device: its feature gate DRAConsumableCapacity is off "
                f"(needs Kubernetes 1.36, or the gate). So no shared NIC is published; left out: {len(shared)}."
            )
        if "taints" in gone:
            losses.append(_TAINTS_LOST)
        rest = sorted(gone - _COUNTERS - _SHARES - {"taints"})
        if rest:
            losses.append(f"The API server dropped {', '.join(rest)} of this node's ResourceSlices.")
        return losses

    def _wait_for_change(self, version: str) -> bool:
        """Return when somebody touched one of the slices, whether that was told, or after a while; the next sync looks
        closer."""
        seconds = _WATCH_OUTDONE if self.left_to_another else _WATCH_SECONDS
        for event in self._kube.watch_slices(self._driver, self._node, version, seconds):
            if self._stopping.is_set() or event["type"] != "BOOKMARK":
                return True
        return False
