"""Names of devices: DNS labels that mean the same hardware for good."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

_MAX_NAME = 63  # a device's name is a DNS label


def device_name(prefix: str, address: str) -> str:
    """A DNS label from an address: ``gpu-0000-07-00-0``. Stable while the hardware stays in its place."""
    return f"{prefix}-{address.replace(':', '-').replace('.', '-')}"


def pair_name(gpu: str, nics: Sequence[str]) -> str:
    """``pair-0000-07-00-0-0000-0c-00-1``: both halves, so that a name means the same hardware for good, also after
    another VF had to take the place of the first. Where that is too long for a DNS label a digest names the NICs."""
    name = "-".join([device_name("pair", gpu), *(device_name("", nic)[1:] for nic in nics)])
    if len(name) <= _MAX_NAME:
        return name
    return f"{device_name('pair', gpu)}-{_digest(nics)}"


def group_name(gpus: Sequence[str], nics: Sequence[str]) -> str:
    """``group-0000-10-1c-0-…``: the first GPU, and a digest of all its hardware, for the same reason."""
    return f"{device_name('group', gpus[0])}-{_digest((*gpus, *nics))}"


def node_name(gpus: Sequence[str], nics: Sequence[str]) -> str:
    """``node-…``: a digest of all its hardware."""
    return f"node-{_digest((*gpus, *nics))}"


def _digest(addresses: Iterable[str]) -> str:
    return hashlib.sha256(",".join(addresses).encode()).hexdigest()[:10]
