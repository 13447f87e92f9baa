"""Tells people and the API what happened, from a thread of its own: no pod waits for it, and none fails by it.

Events go to the Node or to a claim; ``status.devices`` of a claim says where its netdev is (KEP-4817).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from railmate.claims.records import ClaimRef, Entry
from railmate.claims.surroundings import ClaimObserver
from railmate.kube.client import KubeClient, Object
from railmate.kube.errors import ApiError
from railmate.node.conditions import device_status

log = logging.getLogger(__name__)

#: Reports that may wait; when the API server is away for long, the newest are lost, and the log has them. Of a claim's
#: status ``on_told`` hears that.
_BACKLOG = 256
_TRIES, _PAUSE = 4, 1.0  # seconds between tries, doubled each time
#: Seconds in which the same event is not sent again.
_SILENCE = 600.0


@dataclass(frozen=True, slots=True)
class _Report:
    """``ended`` is told whether it was sent or never can be (True), or was given up for now."""

    what: str
    send: Callable[[], None]
    ended: Callable[[bool], None] = lambda final: None


@dataclass(slots=True)
class _Status:
    """What a claim's status.devices was last said to be, and for which entry; ``final`` once that was sent."""

    digest: str
    entry: Entry
    final: bool = False


class Reports(ClaimObserver):
    """``on_told`` hears of each claim whose status was sent or never can be (True), or was given up for now."""

    def __init__(self, kube: KubeClient, driver: str, node: str) -> None:
        self._kube, self._driver, self._node = kube, driver, node
        self.on_told: Callable[[Entry, bool], None] = lambda entry, final: None
        self._waiting: queue.Queue[_Report | None] = queue.Queue(_BACKLOG)
        self._lock = threading.Lock()  # of the two below: all threads of the driver report
        self._sent: dict[tuple[str, str, str], float] = {}
        self._status: dict[str, _Status] = {}  # by claim UID
        self._stopping = threading.Event()

    def run(self) -> None:
        """Blocking; run it in a daemon thread."""
        while (one := self._waiting.get()) is not None and not self._stopping.is_set():
            one.ended(self._send(one))

    def _send(self, one: _Report) -> bool:
        """Whether it was sent, or no other try helps."""
        pause = _PAUSE
        for left in reversed(range(_TRIES)):
            try:
                one.send()
                return True
            except ApiError as error:
                final = error.not_found or error.status in {403, 422}
                if final or not left:
                    log.warning("%s could not be reported: %s", one.what, error)
                    return final
                self._stopping.wait(pause)
                pause *= 2
            except Exception:
                log.exception("%s could not be reported", one.what)
                return True
        return False

    def stop(self) -> None:
        self._stopping.set()  # seen after the report that is being sent
        with contextlib.suppress(queue.Full):  # then there is one to wake up for
            self._waiting.put_nowait(None)

    # --- events
    def node_event(self, reason: str, message: str) -> None:
        """A warning on the Node object."""
        self._event("default", {"kind": "Node", "name": self._node, "uid": self._node}, reason, message)

    def claim_event(self, claim: ClaimRef, reason: str, message: str) -> None:
        """A warning on the claim."""
        about = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "namespace": claim.namespace,
            "name": claim.name,
            "uid": claim.uid,
        }
        self._event(claim.namespace, about, reason, message)

    def _event(self, namespace: str, about: Object, reason: str, message: str) -> None:
        key = (about["uid"], reason, message)
        now = time.monotonic()
        with self._lock:
            self._sent = {sent: at for sent, at in self._sent.items() if now - at < _SILENCE}
            if key in self._sent:
                return
            self._sent[key] = now
        stamp = _now()
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{about['name'][:236].rstrip('-.')}.{uuid.uuid4().hex[:16]}",
                "namespace": namespace,
            },
            "involvedObject": about,
            "reason": reason,
            "message": message[:1024],  # the API's limit
            "type": "Warning",
            "source": {"component": self._driver, "host": self._node},
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        self._put(_Report(f"event {reason}", lambda: self._kube.create_event(namespace, event)))

    # --- status.devices
    def attached(self, entry: Entry) -> None:
        """The claim's NICs are in its pod, and were looked at. A sandbox that is made again changes nothing."""
        devices = [device_status(self._driver, entry, device) for device in entry.devices if device.nics]
        if not devices:
            return
        digest, uid = json.dumps(devices, sort_keys=True), entry.claim.uid
        with self._lock:
            known = self._status.get(uid)
            if known is not None and known.digest == digest:
                known.entry = entry
            else:
                self._status[uid] = _Status(digest, entry)
        if known is not None and known.digest == digest:
            if known.final:
                self.on_told(entry, True)
            return
        stamp = _now()
        for device in devices:
            device["conditions"] = [one | {"lastTransitionTime": stamp} for one in device["conditions"]]
        body = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {
                "name": entry.claim.name,
                "namespace": entry.claim.namespace,
                "uid": entry.claim.uid,
            },
            "status": {"devices": devices},
        }
        claim = entry.claim
        self._put(
            _Report(
                f"status.devices of {claim}",
                lambda: self._kube.apply_claim_status(claim.namespace, claim.name, body),
                lambda final: self._ended(uid, digest, final),
            )
        )

    def _ended(self, uid: str, digest: str, final: bool) -> None:
        with self._lock:
            known = self._status.get(uid)
            if known is None or known.digest != digest:
                return  # released, or there is news on its way
            known.final = final
            if not final:
                del self._status[uid]
        self.on_told(known.entry, final)

    def released(self, claim: ClaimRef) -> None:
        """The API server removes the status with the allocation; only what we remember of it goes."""
        with self._lock:
            self._status.pop(claim.uid, None)

    def _put(self, one: _Report) -> None:
        try:
            self._waiting.put_nowait(one)
        except queue.Full:
            log.warning("%s is not reported: too many reports wait", one.what)
            one.ended(False)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
