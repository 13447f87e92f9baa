"""What the API server says of a claim: whether it is the one that is meant, what it was allocated, and for whom.

Source of the claim's shape: k8s.io/api resource/v1 (ResourceClaimStatus, AllocationResult).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from railmate.claims.records import ClaimRef
from railmate.errors import RailmateError

_POD_CLAIM_NAME = "resource.kubernetes.io/pod-claim-name"


class ClaimError(RailmateError):
    """This claim cannot be prepared; trying again changes nothing unless somebody changes something."""


class GivenUpError(ClaimError):
    """Nobody waits for the answer any more, so nothing is prepared."""

    def __init__(self, ref: ClaimRef) -> None:
        super().__init__(f"{ref}: the kubelet has given up on this call; it asks anew.")


class Holder(NamedTuple):
    """The claim that has what another wants, and `Ledger.mark` of its record as it was looked at."""

    uid: str
    mark: tuple[int, int] | None


class NotYetError(RailmateError):
    """Cannot be done now; will pass by itself, as a rule. ``next_step`` is a sentence for when it does not; ``holder``
    the claim that is in the way, where one is."""

    def __init__(self, message: str, next_step: str | None = None, *, holder: Holder | None = None) -> None:
        super().__init__(message)
        self.next_step, self.holder = next_step, holder


def check_claim(claim: Mapping[str, Any], ref: ClaimRef) -> None:
    """Raise ClaimError unless this is the claim the kubelet means, allocated and in use."""
    uid = claim["metadata"]["uid"]
    if uid != ref.uid:
        raise ClaimError(
            f"{ref}: it was replaced (UID {ref.uid} was asked for, the API server has {uid}). "
            "Delete the pod; its successor gets the new claim."
        )
    if not claim.get("status", {}).get("allocation"):
        raise ClaimError(f"{ref}: it is not allocated. The scheduler allocates it when its pod is scheduled.")


def allocated(claim: Mapping[str, Any], driver: str) -> list[Mapping[str, Any]]:
    """The allocation's results that are ours."""
    results = claim["status"]["allocation"]["devices"].get("results") or []
    return [result for result in results if result["driver"] == driver]


def reserved_pods(claim: Mapping[str, Any]) -> tuple[str, ...]:
    """UIDs of the pods that the claim is reserved for."""
    return tuple(user["uid"] for user in _pods(claim))


def pod_name(claim: Mapping[str, Any]) -> str:
    """The name of the first pod that the claim is reserved for, for IPAM plugins that note it; "" without one."""
    return next((str(user.get("name", "")) for user in _pods(claim)), "")


def pod_claim_name(claim: Mapping[str, Any]) -> str | None:
    """What the pod calls the claim, where it was made from a template."""
    return (claim["metadata"].get("annotations") or {}).get(_POD_CLAIM_NAME)


def _pods(claim: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    users = claim["status"].get("reservedFor") or []
    return [user for user in users if user.get("resource") == "pods"]
