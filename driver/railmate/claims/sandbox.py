"""A pod's sandbox, and why a claim's NIC is not in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from railmate.claims.records import Entry


@dataclass(frozen=True, slots=True)
class Sandbox:
    """As the runtime names it. ``netns`` is None on the host network."""

    id: str
    pod_uid: str
    pod: str  # namespace/name
    netns: Path | None


def why_not(driver: str, entry: Entry, sandbox: Sandbox) -> str:
    """A sentence for the pod's user."""
    at = entry.attachment
    if sandbox.pod_uid not in entry.pods or (at is not None and at.pod_uid != sandbox.pod_uid):
        where = f"is in pod {at.pod}" if at is not None else "was prepared for another pod"
        return (
            f"{driver}: the NIC of {entry.claim} {where}, and a NIC can be in one pod only. "
            f"Give pod {sandbox.pod} a claim of its own through a ResourceClaimTemplate."
        )
    return (
        f"{driver}: the NIC of {entry.claim} is not attached to pod {sandbox.pod} yet; "
        "the container starts by itself once it is."
    )
