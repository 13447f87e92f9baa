"""Where the sockets are. Each instance has its own, named after its pod, so that a new instance can
register before the old one has ended (rolling update, Kubernetes 1.33 and later)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

#: sun_path of a unix socket's address holds 108 bytes with the closing NUL (kernel include/uapi/linux/un.h).
_MAX_PATH = 107


@dataclass(frozen=True, slots=True)
class Sockets:
    registration: Path
    service: Path


def sockets(kubelet_dir: Path, driver: str, pod_uid: str) -> Sockets:
    """The kubelet looks into ``plugins_registry`` once a second; a service socket must not lie there.

    A name too long for a socket's address has the UID replaced by a digest of it.
    """
    registry, plugin = kubelet_dir / "plugins_registry", kubelet_dir / "plugins" / driver
    instance = f"-{pod_uid}" if pod_uid else ""
    found = Sockets(registry / f"{driver}{instance}-reg.sock", plugin / f"dra{instance}.sock")
    if max(len(str(found.registration)), len(str(found.service))) <= _MAX_PATH:
        return found
    short = "-" + hashlib.sha256(pod_uid.encode()).hexdigest()[:12]
    return Sockets(registry / f"{driver}{short}-reg.sock", plugin / f"dra{short}.sock")
