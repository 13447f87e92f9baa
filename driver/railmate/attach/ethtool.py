"""Offloads, rings and queues of an interface (kernel Documentation/networking/ethtool-netlink.rst)."""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from railmate.attach.links import attempt
from railmate.attach.settings import NO_ETHTOOL, EthtoolSettings
from railmate.netlink import (
    Attributes,
    Netlink,
    attribute,
    attribute_list,
    attributes,
    nested,
    number,
    text,
    u32,
)
from railmate.netlink import words as decoded

_NETLINK_GENERIC = 16
_GET_FAMILY, _FAMILY_ID, _FAMILY_NAME, _CONTROLLER = 3, 1, 2, 16
_FEATURES_GET, _FEATURES_SET = 11, 12
_HEADER, _DEV_INDEX, _FLAGS, _OMIT_REPLY = 1, 1, 3, 2
_HARDWARE, _WANTED, _NOCHANGE = 2, 3, 5
_NOMASK, _BITS, _BIT, _BIT_NAME, _BIT_VALUE = 1, 3, 1, 2, 3
_GENERIC = struct.Struct("=BBH")  # struct genlmsghdr: command, version
#: Messages to read and to write, and where each number and its maximum is.
_RINGS = (15, 16, {"rx": (6, 2), "tx": (9, 5)})
_CHANNELS = (17, 18, {"rx": (6, 2), "tx": (7, 3), "combined": (9, 5)})
_Numbers = tuple[int, int, Mapping[str, tuple[int, int]]]
_NOT_THERE = {errno.EOPNOTSUPP, errno.ENODEV}


@dataclass(frozen=True, slots=True)
class EthtoolState:
    """How it is, and what it can be: features that can be changed, and the largest rings and channels there are."""

    now: EthtoolSettings = NO_ETHTOOL
    most: EthtoolSettings = NO_ETHTOOL


class Ethtool:
    """The kernel's ethtool in the network namespace of the thread that makes it."""

    def __init__(self) -> None:
        self._netlink = Netlink(_NETLINK_GENERIC)
        self._family = _family(self._netlink)

    def close(self) -> None:
        self._netlink.close()

    def state(self, index: int) -> EthtoolState:
        """What the driver cannot tell is left out. Raises OSError."""
        rings, most_rings = self._numbers(_RINGS, index)
        channels, most_channels = self._numbers(_CHANNELS, index)
        return EthtoolState(
            EthtoolSettings(self._features(index), rings, channels),
            EthtoolSettings({}, most_rings, most_channels),
        )

    def set(self, index: int, wanted: EthtoolSettings, what: str) -> None:
        """Raises AttachError that says which of them ``what`` refuses."""
        if wanted.features:
            with attempt(f"{what} does not take the features {_listed(wanted.features)}"):
                bits = [
                    nested(_BIT, attribute(_BIT_NAME, text(name)), attribute(_BIT_VALUE, b"") if on else b"")
                    for name, on in wanted.features.items()
                ]
                self._send(_FEATURES_SET, index, nested(_WANTED, nested(_BITS, *bits)))
        for values, numbers, name in (
            (wanted.rings, _RINGS, "rings"),
            (wanted.channels, _CHANNELS, "channels"),
        ):
            if values:
                with attempt(f"{what} does not take the {name} {_listed(values)}"):
                    _, command, places = numbers
                    parts = [attribute(places[one][0], u32(value)) for one, value in values.items()]
                    self._send(command, index, b"".join(parts))

    def _features(self, index: int) -> dict[str, bool]:
        answer = self._ask(_FEATURES_GET, index)
        fixed = _bits(answer.get(_NOCHANGE, b""))
        wanted = _bits(answer.get(_WANTED, b""))
        changeable = _bits(answer.get(_HARDWARE, b"")) - fixed
        return {name: name in wanted for name in sorted(changeable)}

    def _numbers(self, numbers: _Numbers, index: int) -> tuple[dict[str, int], dict[str, int]]:
        """As they are, and their maxima."""
        command, _, places = numbers
        answer = self._ask(command, index)
        now = {name: number(answer[at]) for name, (at, _) in places.items() if at in answer}
        most = {name: number(answer[at]) for name, (_, at) in places.items() if at in answer}
        return now, most

    def _ask(self, command: int, index: int) -> Attributes:
        try:
            answers = self._send(command, index)
        except OSError as error:
            if error.errno in _NOT_THERE:
                return {}
            raise
        return attributes(answers[0], _GENERIC.size) if answers else {}

    def _send(self, command: int, index: int, parts: bytes = b"") -> list[bytes]:
        flags = attribute(_FLAGS, u32(_OMIT_REPLY)) if command == _FEATURES_SET else b""
        header = nested(_HEADER, attribute(_DEV_INDEX, u32(index)), flags)
        return self._netlink.request(self._family, _GENERIC.pack(command, 1, 0) + header + parts)


def difference(wanted: EthtoolSettings, now: EthtoolSettings) -> EthtoolSettings:
    """What of ``wanted`` is not so now, as far as there is such a thing now."""

    def differing(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
        return {name: value for name, value in one.items() if name in other and other[name] != value}

    return EthtoolSettings(
        {name: bool(on) for name, on in differing(wanted.features, now.features).items()},
        differing(wanted.rings, now.rings),
        differing(wanted.channels, now.channels),
    )


def impossible(wanted: EthtoolSettings, state: EthtoolState) -> str:
    """What of ``wanted`` the driver cannot do, for people; "" when it can do all."""
    found = []
    unknown = sorted(wanted.features.keys() - state.now.features.keys())
    if unknown:
        can = ", ".join(state.now.features) or "none"
        found.append(
            f"the features {', '.join(unknown)}, as its driver does not let them be changed (it does: {can})"
        )
    pairs = (
        ("rings", wanted.rings, state.most.rings),
        ("channels", wanted.channels, state.most.channels),
    )
    for what, values, most in pairs:
        found += [
            f"{name} {what} {value}: at most {most.get(name, 0)}"
            for name, value in values.items()
            if value > most.get(name, 0)
        ]
    return "; ".join(found)


def _family(netlink: Netlink) -> int:
    body = _GENERIC.pack(_GET_FAMILY, 1, 0) + attribute(_FAMILY_NAME, text("ethtool"))
    (answer,) = netlink.request(_CONTROLLER, body)
    return number(attributes(answer, _GENERIC.size)[_FAMILY_ID])


def _bits(bitset: bytes) -> frozenset[str]:
    """The names of the bits that are set: all that are listed or, in a list with a mask, those with a value."""
    parts = attributes(bitset)
    listed = [attributes(bit) for _, bit in attribute_list(parts.get(_BITS, b""))]
    return frozenset(decoded(bit[_BIT_NAME]) for bit in listed if _NOMASK in parts or _BIT_VALUE in bit)


def words(settings: EthtoolSettings) -> str:
    """For people: what is set, one after the other."""
    named = (("features", settings.features), ("rings", settings.rings), ("channels", settings.channels))
    return "; ".join(f"{name} {_listed(values)}" for name, values in named if values)


def _listed(values: Mapping[str, int | bool]) -> str:
    def shown(value: int | bool) -> str:
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)

    return ", ".join(f"{name} {shown(value)}" for name, value in values.items())
