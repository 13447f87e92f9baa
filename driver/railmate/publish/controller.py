"""Keeps the node's ResourceSlices in the API as they should be.

The kubelet deletes all slices of its node when it starts, and a driver's slices 30 s after it lost
the driver (KEP-4381; kubelet pkg/kubelet/cm/dra). So the slices are watched, and what is deleted or
altered is written again. Nothing is written when nothing changed.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from railmate.kube.client import KubeClient, Object
from railmate.kube.errors import ApiError
from railmate.publish.model import Offer
from railmate.publish.slices import keep_taint_times, resource_slices

log = logging.getLogger(__name__)

#: Seconds between looks even if no event came: a watch can be lost without a word.
_WATCH_SECONDS = 240
#: Seconds between two looks that follow each other faster than _QUIET, doubled each time.
_PAUSE_FIRST, _PAUSE_MAX, _QUIET = 0.1, 30.0, 10.0
#: Fields that a server drops, and what that means.
_LOSSES = {
    "taints": "Its feature gate DRADeviceTaints is probably off (needs Kubernetes 1.36, or the gate): devices that "
    "do not work are only shown as unhealthy, and pods may get them",
}
_OTHER_LOSS = (
    "Its feature gate DRAPartitionableDevices is probably off (needs Kubernetes 1.36, or the gate): a GPU could then "
    "be given out alone and in a pair"
)


class SliceController:
    """Blocking; run it in a daemon thread. After ``stop`` it writes nothing more."""

    def __init__(
        self,
        kube: KubeClient,
        driver: str,
        node: str,
        offer: Offer,
        on_published: Callable[[], None] | None = None,
        on_refused: Callable[[str], None] = lambda message: None,
        taints: Mapping[str, str] | None = None,
    ) -> None:
        """``on_refused`` is told, in a sentence for people, when the server calls our slices invalid.
        ``taints``: see ``set_taints``."""
        self._kube, self._driver, self._node, self._offer = kube, driver, node, offer
        self._on_published = on_published or (lambda: None)
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._node_uid: str | None = None
        self._taints = dict(taints or {})
        # Fields that the server does not keep: wanting them back would loop for ever.
        self._dropped: set[str] = set()

    def run(self) -> None:
        pause = _PAUSE_FIRST
        while not self._stopping.is_set():
            started = time.monotonic()
            try:
                self._wait_for_change(self.sync())
            except ApiError as error:
                log.warning(
                    "ResourceSlices of node %s: %s. Trying again in %.1f s.", self._node, error, pause
                )
            except Exception:  # whatever it is, slices that the kubelet wiped must come back
                log.exception("ResourceSlices of node %s: trying again in %.1f s", self._node, pause)
            # The first change after a quiet while is answered at once. Changes that keep coming are not: two
            # instances of different versions (rolling update), or a proxy that cuts every watch, go on for ever.
            if time.monotonic() - started > _QUIET:
                pause = _PAUSE_FIRST
            else:
                self._stopping.wait(pause * random.uniform(0.8, 1.2))
                pause = min(pause * 2, _PAUSE_MAX)

    def stop(self) -> None:
        self._stopping.set()

    def update(self, offer: Offer) -> None:
        """Publish another offer from now on. Returns when it is in the API, or after ``stop``."""
        with self._lock:
            self._offer = offer
            self._dropped.clear()
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
                if error.status == 422:  # Invalid: no other try helps
                    self._on_refused(f"The API server refuses the devices of this node: {error}")
                raise

    def _sync(self) -> str:
        existing, version = self._kube.list_slices(self._driver, self._node)
        if self._node_uid is None or not existing:
            # a Node that was deleted and made again has another UID, and took its slices along
            self._node_uid = self._kube.get_node(self._node)["metadata"]["uid"]
        plan = plan_writes(existing, self._desired(1, existing))
        if plan.generation is not None:
            self._write(existing, self._desired(plan.generation, existing), plan)
            existing, version = self._kube.list_slices(self._driver, self._node)
        self._on_published()
        return version

    def _desired(self, generation: int, existing: Sequence[Object]) -> list[Object]:
        slices = resource_slices(
            self._offer,
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

    def _write(self, existing: list[Object], desired: list[Object], plan: WritePlan) -> None:
        by_name = {item["metadata"]["name"]: item for item in existing}
        for name in plan.delete:
            self._kube.delete_slice(by_name[name])
        for body in desired:
            name = body["metadata"]["name"]
            if name in plan.update:
                body["metadata"]["resourceVersion"] = by_name[name]["metadata"]["resourceVersion"]
                self._adopt_dropped_fields(body, self._kube.update_slice(body))
        for body in desired:
            if body["metadata"]["name"] in plan.create:
                self._adopt_dropped_fields(body, self._kube.create_slice(body))
        log.info(
            "ResourceSlices of node %s: %d created, %d updated, %d deleted (%d devices, generation %d)",
            self._node, len(plan.create), len(plan.update), len(plan.delete), len(self._offer.devices), plan.generation,
        )  # fmt: skip

    def _adopt_dropped_fields(self, sent: Object, stored: Object) -> None:
        """A server with a feature gate off drops fields without an error (resourceslice strategy)."""
        lost = dropped_fields(sent["spec"], stored["spec"]) - self._dropped
        self._dropped |= lost
        if lost:
            meaning = {_LOSSES.get(field, _OTHER_LOSS) for field in lost}
            log.warning(
                "ResourceSlice %s: the API server dropped %s. %s.",
                sent["metadata"]["name"], ", ".join(sorted(lost)), ". ".join(sorted(meaning)),
            )  # fmt: skip

    def _wait_for_change(self, version: str) -> None:
        """Return when somebody touched one of the slices, or after a while; the next sync looks closer."""
        for event in self._kube.watch_slices(self._driver, self._node, version, _WATCH_SECONDS):
            if self._stopping.is_set() or event["type"] != "BOOKMARK":
                return


class WritePlan:
    """Names of slices to delete, update and create; ``generation`` is None when nothing is to be done."""

    def __init__(self) -> None:
        self.delete: set[str] = set()
        self.update: set[str] = set()
        self.create: set[str] = set()
        self.generation: int | None = None


def plan_writes(existing: list[Object], desired: list[Object]) -> WritePlan:
    """What to write. Pure.

    A pool's generation tells the scheduler which slices belong together: it stays when exactly one
    slice changes in place, else it is raised and all slices are written (KEP-4381, ResourcePool). Taints
    need not change together, so slices that differ in nothing else do not count: while all slices are being
    written, no device of the node can be allocated.
    """
    plan = WritePlan()
    wanted = {item["metadata"]["name"]: item for item in desired}
    stored = {item["metadata"]["name"]: item for item in existing}
    highest = max((item["spec"]["pool"]["generation"] for item in existing), default=0)
    plan.delete = stored.keys() - wanted.keys()
    plan.create = wanted.keys() - stored.keys()
    kept = wanted.keys() & stored.keys()
    changed = {name for name in kept if not _same(stored[name], wanted[name])}
    mixed = len({stored[name]["spec"]["pool"]["generation"] for name in kept}) > 1
    if not (plan.delete or plan.create or changed or mixed):
        return plan
    together = {name for name in changed if not _same(_untainted(stored[name]), _untainted(wanted[name]))}
    if plan.create or plan.delete or mixed or len(together) > 1:
        plan.generation = highest + 1
        plan.update = set(kept)
    else:
        plan.generation = highest
        plan.update = changed
    return plan


def _same(stored: Object, wanted: Object) -> bool:
    """Equal but for the generation, which the plan decides. Order of devices counts: first fit walks it."""
    return _comparable(stored) == _comparable(wanted)


def _untainted(item: Object) -> Object:
    return {**item, "spec": without_fields(item["spec"], {"taints"})}


def _comparable(item: Object) -> tuple[Any, ...]:
    spec = {key: value for key, value in item["spec"].items() if value not in (None, [], {})}
    pool = dict(spec.pop("pool"))
    pool.pop("generation", None)
    owners = [(owner["name"], owner["uid"]) for owner in item["metadata"].get("ownerReferences", [])]
    return spec, pool, owners


def without_fields(value: Any, names: Collection[str]) -> Any:
    """A copy without fields of these names at any depth."""
    if isinstance(value, dict):
        return {key: without_fields(one, names) for key, one in value.items() if key not in names}
    if isinstance(value, list):
        return [without_fields(one, names) for one in value]
    return value


def dropped_fields(sent: Any, stored: Any) -> set[str]:
    """Names of fields that were sent and are not in what the server stored, at any depth."""
    lost: set[str] = set()
    if isinstance(sent, dict) and isinstance(stored, dict):
        for key, value in sent.items():
            if key not in stored and value not in (None, [], {}):
                lost.add(key)
            else:
                lost |= dropped_fields(value, stored.get(key))
    elif isinstance(sent, list) and isinstance(stored, list):
        for one, other in zip(sent, stored, strict=False):
            lost |= dropped_fields(one, other)
    return lost
