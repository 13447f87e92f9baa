"""The token of the pod's ServiceAccount, which the kubelet writes anew long before it expires."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kubernetes.client.configuration import Configuration
from kubernetes.config import incluster_config

log = logging.getLogger(__name__)

#: Seconds after which the file is read again.
_PERIOD = 60.0


class MountedToken:
    """For a configuration's ``refresh_api_key_hook``. The library's own hook goes by the time of day: set back by hours
    it would go on with an expired token for as long, and a file that cannot be read would fail the call."""

    def __init__(self, path: Path, clock: Callable[[], float] | None = None) -> None:
        self._path, self._clock = path, clock or time.monotonic
        self._lock = threading.Lock()
        self._due = self._clock() + _PERIOD  # it has just been read

    def __call__(self, configuration: Configuration) -> None:
        with self._lock:
            if self._clock() < self._due:
                return
            try:
                token = self._path.read_text()
            except (OSError, ValueError) as error:
                token = ""
                log.warning("the ServiceAccount's token %s cannot be read: %s", self._path, error)
            # what there is serves as long as the server takes it
            if token:
                configuration.api_key["BearerToken"] = f"bearer {token}"
                self._due = self._clock() + _PERIOD


def configure_in_pod(configuration: Configuration) -> None:
    """As the pod's ServiceAccount. Raises what the library raises outside a pod."""
    incluster_config.load_incluster_config(client_configuration=configuration)
    configuration.refresh_api_key_hook = MountedToken(Path(incluster_config.SERVICE_TOKEN_FILENAME))
