"""The config of a claim and its classes: what of it is for which request. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from railmate_api.config import (
    Config,
    ConfigError,
    NetdevConfig,
    RdmaSharedConfig,
    RdmaVfConfig,
    decode,
    merge,
)


@dataclass(frozen=True, slots=True)
class ClaimConfig:
    """A decoded config and the requests it speaks of; none: all."""

    requests: frozenset[str]
    value: NetdevConfig

    def covers(self, request: str) -> bool:
        """``request`` as allocated, ``main`` or ``main/sub``."""
        return not self.requests or request in self.requests or request.split("/", 1)[0] in self.requests


def decode_all(entries: Iterable[Mapping[str, Any]], driver: str) -> list[ClaimConfig]:
    """All config for us, class before claim, also what no device of the claim uses: silence about a
    mistake would look like success. Raises ConfigError, a sentence without the claim's name."""
    found = []
    for position, entry in enumerate(entries):
        opaque = entry.get("opaque")
        if not opaque or opaque["driver"] != driver:
            continue
        try:
            value = decode(opaque.get("parameters") or {})
            found.append(ClaimConfig(frozenset(entry.get("requests") or ()), value))
        except ConfigError as error:
            where = "DeviceClass" if entry.get("source") == "FromClass" else "claim"
            raise ConfigError(
                f"config {position} (from the {where}): {error}. Correct it in the {where} and make the pod again."
            ) from error
    return found


def merged(configs: Iterable[ClaimConfig], request: str, kind: type[Config]) -> Config:
    """What is said for the request, for NICs of one kind."""
    return merge([config.value for config in configs if config.covers(request)], kind)


def refuse_wrong_kinds(configs: Sequence[ClaimConfig], shared: Sequence[tuple[str, bool]]) -> None:
    """Raise ConfigError for a config that is for sub-interfaces and covers none, or is for other NICs and covers
    sub-interfaces only: it would have no effect. Beside one of the right kind it has its reason: of a request's
    alternatives one may be a VF and one a share. ``shared``: of each allocated device its request, and whether it is a
    share."""
    for config in configs:
        covered = {request: is_share for request, is_share in shared if config.covers(request)}
        for_shares = isinstance(config.value, RdmaSharedConfig)
        if not covered or (any(covered.values()) if for_shares else not all(covered.values())):
            continue
        right, wrong = (RdmaVfConfig, RdmaSharedConfig) if for_shares else (RdmaSharedConfig, RdmaVfConfig)
        others = [one for one in configs if isinstance(one.value, right)]
        if all(any(one.covers(request) for one in others) for request in covered):
            continue
        what = "no shared NIC" if for_shares else "shared NICs only"
        raise ConfigError(
            f"a config of kind {wrong.__name__} is for {what}. Write kind: {right.__name__} there, with the fields "
            "that this kind has."
        )
