"""Where the sockets are. Each instance has its own, named after its pod, so that a new instance can
register before the old one has ended (rolling update, Kubernetes 1.33 and later)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from railmate.errors import UsageError

#: sun_path of a unix socket's address holds 108 bytes with the closing NUL (kernel include/uapi/linux/un.h).
_MAX_PATH = 107
#: What follows the name in an instance's socket: its pod's UID, or a digest of that.
_INSTANCE = re.compile(r"-([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{12})")
#: Seconds after which an instance that has made a socket surely listens on it.
_YOUNG = 10.0


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


def remove_dead(paths: Sockets, driver: str) -> list[Path]:
    """Remove, and return, what other instances of the driver have left that were killed for good, pod and all: the
    kubelet tries to register each of them again and again. Nothing that somebody listens on, nor another driver's."""
    places = (
        (paths.registration.parent, driver, "-reg.sock"),
        (paths.service.parent, "dra", ".sock"),
    )
    dead = []
    for directory, before, after in places:
        for path in sorted(directory.glob(f"{before}-*{after}")):
            instance = path.name.removeprefix(before).removesuffix(after)
            if (
                path not in (paths.registration, paths.service)
                and _INSTANCE.fullmatch(instance)
                and _is_dead(path)
            ):
                with contextlib.suppress(OSError):
                    path.unlink()
                    dead.append(path)
    return dead


def _is_dead(path: Path) -> bool:
    try:
        if not path.is_socket() or time.time() - path.stat().st_mtime < _YOUNG:
            return False
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1)
            connection.connect(str(path))
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False
