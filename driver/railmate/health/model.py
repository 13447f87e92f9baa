"""The words in which health is spoken of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Health(StrEnum):
    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"
    UNKNOWN = "Unknown"  # it could not be found out; never taken for healthy, and never a taint


class Reason(StrEnum):
    """Why a function is unhealthy, the lightest first. The words are the end of a taint's value."""

    PCIE_LINK_DEGRADED = "pcie-link-degraded"
    LINK_DOWN = "link-down"
    FLAPPING = "flapping"
    DRIVER_UNBOUND = "driver-unbound"
    LOST = "lost"  # on the bus for the kernel, but it no longer answers
    GONE = "gone"  # no longer on the bus

    @property
    def severity(self) -> int:
        return _SEVERITY[self]


_SEVERITY = {reason: place for place, reason in enumerate(Reason)}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is thought of one PCI function. ``reason`` is set when, and only when, it is unhealthy.

    ``message`` is a sentence for people without the function's name; empty when all is well.
    """

    health: Health
    reason: Reason | None = None
    message: str = ""

    @property
    def ill(self) -> bool:
        return self.health is Health.UNHEALTHY


HEALTHY = Verdict(Health.HEALTHY)


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """What is told about one published device.

    ``taint``: the taint's value (``nic-link-down``) while the device is unhealthy, else None.
    ``checked``: when this was found out, seconds since 1970.
    """

    name: str
    health: Health
    message: str = ""
    taint: str | None = None
    checked: float = 0.0
