"""Where the sockets are. Each instance has its own, named after its pod, so that a new instance can
register before the old one has ended (rolling update, Kubernetes 1.33 and later)."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from railmate.errors import UsageError

#: sun_path of a unix socket's address holds 108 bytes with the closing NUL (kernel include/uapi/linux/un.h).
_MAX_PATH = 107


@dataclass(frozen=True, slots=True)
class Sockets:
    registration: Path
    service: Path


def sockets(kubelet_dir: Path, driver: str, pod_uid: str) -> Sockets:
    """The kubelet looks into ``plugins_registry`` once a second; a service socket must not lie there.

    A name too long for a socket's address has the UID, and then the driver's name too, replaced by a digest.
    Raises UsageError when even that does not fit.
    """
    registry, plugin = kubelet_dir / "plugins_registry", kubelet_dir / "plugins" / driver
    instance = f"-{pod_uid}" if pod_uid else ""
    short = "-" + hashlib.sha256(pod_uid.encode()).hexdigest()[:12]
    digest = hashlib.sha256(f"{driver}\0{pod_uid}".encode()).hexdigest()[:16]
    for found in (
        Sockets(registry / f"{driver}{instance}-reg.sock", plugin / f"dra{instance}.sock"),
        Sockets(registry / f"{driver}{short}-reg.sock", plugin / f"dra{short}.sock"),
        Sockets(registry / f"{digest}-reg.sock", plugin / f"{digest[:8]}.sock"),
    ):
        if max(len(os.fsencode(found.registration)), len(os.fsencode(found.service))) <= _MAX_PATH:
            return found
    raise UsageError(
        f"--kubelet-dir {kubelet_dir} leaves no room for a socket's path of at most {_MAX_PATH} bytes. "
        "Give the kubelet a shorter --root-dir."
    )
