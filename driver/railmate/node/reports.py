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

from railmate.claims.records import ClaimRef, Entry
from railmate.claims.state import ClaimObserver
from railmate.kube.client import KubeClient, Object
from railmate.kube.errors import ApiError
from railmate.node.conditions import device_status

log = logging.getLogger(__name__)

#: Reports that may wait; when the API server is away for long, the newest are lost, and the log has them.
_BACKLOG = 256
_TRIES, _PAUSE = 4, 1.0  # seconds between tries, doubled each time
#: Seconds in which the same event is not sent again.
_SILENCE = 600.0


class Reports(ClaimObserver):
    def __init__(self, kube: KubeClient, driver: str, node: str) -> None:
        self._kube, self._driver, self._node = kube, driver, node
        self._waiting: queue.Queue[tuple[str, Callable[[], None]] | None] = queue.Queue(_BACKLOG)
        self._sent: dict[tuple[str, str, str], float] = {}
        self._status: dict[str, str] = {}  # claim UID -> what its status.devices was last said to be
        self._stopping = threading.Event()

    def run(self) -> None:
        """Blocking; run it in a daemon thread."""
        while (one := self._waiting.get()) is not None and not self._stopping.is_set():
            what, send = one
            pause = _PAUSE
            for left in reversed(range(_TRIES)):
                try:
                    send()
                    break
                except ApiError as error:
                    if error.not_found or error.status in {403, 422} or not left:
                        log.warning("%s could not be reported: %s", what, error)
                        break
                    self._stopping.wait(pause)
                    pause *= 2
                except Exception:
                    log.exception("%s could not be reported", what)
                    break

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
        self._put((f"event {reason}", lambda: self._kube.create_event(namespace, event)))

    # --- status.devices
    def attached(self, entry: Entry) -> None:
        """The claim's NICs are in its pod, and were looked at. A sandbox that is made again changes nothing."""
        devices = [device_status(self._driver, entry, device) for device in entry.devices if device.nics]
        digest = json.dumps(devices, sort_keys=True)
        if not devices or self._status.get(entry.claim.uid) == digest:
            return
        self._status[entry.claim.uid] = digest
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
            (
                f"status.devices of {claim}",
                lambda: self._kube.apply_claim_status(claim.namespace, claim.name, body),
            )
        )

    def released(self, claim: ClaimRef) -> None:
        """The API server removes the status with the allocation; only what we remember of it goes."""
        self._status.pop(claim.uid, None)

    def _put(self, one: tuple[str, Callable[[], None]]) -> None:
        try:
            self._waiting.put_nowait(one)
        except queue.Full:
            log.warning("%s is not reported: too many reports wait", one[0])


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
