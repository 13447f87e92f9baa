"""Offloads, rings and queues of an interface (kernel Documentation/networking/ethtool-netlink.rst)."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from railmate.attach.links import attempt
from railmate.attach.settings import NO_ETHTOOL, EthtoolSettings
from railmate.netlink import (
    GENERIC,
    GENERIC_HEADER,
    Attributes,
    Netlink,
    attribute,
    attribute_list,
    attributes,
    generic_family,
    nested,
    number,
    text,
    u32,
)
from railmate.netlink import words as decoded

_FEATURES_GET, _FEATURES_SET = 11, 12
_HEADER, _DEV_INDEX, _FLAGS, _OMIT_REPLY = 1, 1, 3, 2
_HARDWARE, _WANTED, _NOCHANGE = 2, 3, 5
_NOMASK, _BITS, _BIT, _BIT_NAME, _BIT_VALUE = 1, 3, 1, 2, 3
#: Messages to read and to write, and where each number and its maximum is.
_RINGS = (15, 16, {"rx": (6, 2), "tx": (9, 5)})
_CHANNELS = (17, 18, {"rx": (6, 2), "tx": (7, 3), "combined": (9, 5)})
#: Messages, and for each number its attribute and how many bytes it has.
_COALESCING = (19, 20, {
    "adaptive-rx": (11, 1), "adaptive-tx": (12, 1), "rx-usecs": (2, 4), "rx-frames": (3, 4), "rx-usecs-irq": (4, 4),
    "rx-frames-irq": (5, 4), "tx-usecs": (6, 4), "tx-frames": (7, 4), "tx-usecs-irq": (8, 4), "tx-frames-irq": (9, 4),
    "stats-block-usecs": (10, 4), "pkt-rate-low": (13, 4), "rx-usecs-low": (14, 4), "rx-frames-low": (15, 4),
    "tx-usecs-low": (16, 4), "tx-frames-low": (17, 4), "pkt-rate-high": (18, 4), "rx-usecs-high": (19, 4),
    "rx-frames-high": (20, 4), "tx-usecs-high": (21, 4), "tx-frames-high": (22, 4), "sample-interval": (23, 4),
    "cqe-mode-tx": (24, 1), "cqe-mode-rx": (25, 1), "tx-aggr-max-bytes": (26, 4), "tx-aggr-max-frames": (27, 4),
    "tx-aggr-time-usecs": (28, 4),
})  # fmt: skip
_PAUSE = (21, 22, {"autoneg": (2, 1), "rx": (3, 1), "tx": (4, 1)})
_PRIVATE = (13, 14, 2)
_WAKE_ON = (9, 10, 2)
_LINK = (4, 5, {"autoneg": (2, 1), "speed": (5, 4), "duplex": (6, 1)})
_ADVERTISED = 3
_UNKNOWN = {
    "speed": 0xFFFFFFFF,
    "duplex": 0xFF,
}  # SPEED_UNKNOWN, DUPLEX_UNKNOWN of include/uapi/linux/ethtool.h
_ADAPTIVE = ("adaptive-rx", "adaptive-tx")
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
        self._netlink = Netlink(GENERIC)
        self._family = generic_family(self._netlink, "ethtool")

    def close(self) -> None:
        self._netlink.close()

    def state(self, index: int) -> EthtoolState:
        """What the driver cannot tell is left out. Raises OSError."""
        rings, most_rings = self._numbers(_RINGS, index)
        channels, most_channels = self._numbers(_CHANNELS, index)
        link, advertises = self._link(index)
        return EthtoolState(
            EthtoolSettings(
                self._features(index),
                rings,
                channels,
                self._plain(_COALESCING, index),
                self._plain(_PAUSE, index),
                self._switches(_PRIVATE, index),
                link,
                advertises,
                self._switches(_WAKE_ON, index),
            ),
            EthtoolSettings({}, most_rings, most_channels),
        )

    def set(self, index: int, wanted: EthtoolSettings, what: str) -> None:
        """Raises AttachError that says which of them ``what`` refuses."""
        if wanted.features:
            with attempt(f"{what} does not take the features {_listed(wanted.features)}"):
                self._send(_FEATURES_SET, index, nested(_WANTED, _bit_list(wanted.features)))
        for values, numbers, name in (
            (wanted.rings, _RINGS, "rings"),
            (wanted.channels, _CHANNELS, "channels"),
        ):
            if values:
                with attempt(f"{what} does not take the {name} {_listed(values)}"):
                    _, command, places = numbers
                    parts = [attribute(places[one][0], u32(value)) for one, value in values.items()]
                    self._send(command, index, b"".join(parts))
        for values in _in_turn(wanted.coalescing):
            self._set_plain(
                _COALESCING, index, values, f"{what} does not take the coalescing {_listed(values)}"
            )
        if wanted.pause:
            self._set_plain(
                _PAUSE, index, wanted.pause, f"{what} does not take the pause {_listed(wanted.pause)}"
            )
        for switches, (_, command, kind), name in (
            (wanted.private_flags, _PRIVATE, "private flags"),
            (wanted.wake_on, _WAKE_ON, "wake-up signals"),
        ):
            if switches:
                with attempt(f"{what} does not take the {name} {_listed(switches)}"):
                    self._send(command, index, nested(kind, _bit_list(switches)))
        if wanted.link:
            self._set_plain(
                _LINK, index, wanted.link, f"{what} does not take the link settings {_listed(wanted.link)}"
            )
        if wanted.advertises:
            with attempt(f"{what} does not advertise {_listed(wanted.advertises)}"):
                self._send(_LINK[1], index, nested(_ADVERTISED, _bit_list(wanted.advertises)))

    def _link(self, index: int) -> tuple[dict[str, int], dict[str, bool]]:
        """How it comes to its speed, and what it advertises; of a speed that is negotiated or not known nothing."""
        command, _, places = _LINK
        answer = self._ask(command, index)
        link = {name: number(answer[at]) for name, (at, _) in places.items() if at in answer}
        link = {name: value for name, value in link.items() if _UNKNOWN.get(name) != value}
        if link.get("autoneg"):
            link = {"autoneg": link["autoneg"]}
        return link, _values(answer.get(_ADVERTISED, b""))

    def _switches(self, bits: tuple[int, int, int], index: int) -> dict[str, bool]:
        command, _, kind = bits
        return _values(self._ask(command, index).get(kind, b""))

    def _plain(self, numbers: _Numbers, index: int) -> dict[str, int]:
        command, _, places = numbers
        answer = self._ask(command, index)
        return {name: number(answer[at]) for name, (at, _) in places.items() if at in answer}

    def _set_plain(self, numbers: _Numbers, index: int, values: Mapping[str, int], refused: str) -> None:
        _, command, places = numbers
        parts = [
            attribute(kind, u32(values[name]) if size == 4 else bytes([values[name]]))
            for name, (kind, size) in places.items()
            if name in values
        ]
        with attempt(refused):
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
        return attributes(answers[0], GENERIC_HEADER.size) if answers else {}

    def _send(self, command: int, index: int, parts: bytes = b"") -> list[bytes]:
        flags = attribute(_FLAGS, u32(_OMIT_REPLY)) if command == _FEATURES_SET else b""
        header = nested(_HEADER, attribute(_DEV_INDEX, u32(index)), flags)
        return self._netlink.request(self._family, GENERIC_HEADER.pack(command, 1, 0) + header + parts)


def difference(wanted: EthtoolSettings, now: EthtoolSettings) -> EthtoolSettings:
    """What of ``wanted`` is not so now, as far as there is such a thing now."""

    def differing(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
        return {name: value for name, value in one.items() if name in other and other[name] != value}

    advertises = wanted.advertises if wanted.link.get("autoneg") else {}
    return EthtoolSettings(
        {name: bool(on) for name, on in differing(wanted.features, now.features).items()},
        differing(wanted.rings, now.rings),
        differing(wanted.channels, now.channels),
        differing(wanted.coalescing, now.coalescing),
        differing(wanted.pause, now.pause),
        {name: bool(on) for name, on in differing(wanted.private_flags, now.private_flags).items()},
        wanted.link if differing(wanted.link, now.link) else {},
        {name: bool(on) for name, on in differing(advertises, now.advertises).items()},
        {name: bool(on) for name, on in differing(wanted.wake_on, now.wake_on).items()},
    )


def one_by_one(settings: EthtoolSettings) -> list[EthtoolSettings]:
    """The same in parts of one kind each, so that what is refused keeps nothing else from being set."""
    kinds = [one.name for one in fields(EthtoolSettings) if getattr(settings, one.name)]
    return [replace(NO_ETHTOOL, **{kind: getattr(settings, kind)}) for kind in kinds]


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


def _bits(bitset: bytes) -> frozenset[str]:
    """The names of the bits that are set: all that are listed or, in a list with a mask, those with a value."""
    parts = attributes(bitset)
    listed = [attributes(bit) for _, bit in attribute_list(parts.get(_BITS, b""))]
    return frozenset(decoded(bit[_BIT_NAME]) for bit in listed if _NOMASK in parts or _BIT_VALUE in bit)


def _values(bitset: bytes) -> dict[str, bool]:
    """Of a list with a mask: each bit's name, and whether it is set."""
    listed = [attributes(bit) for _, bit in attribute_list(attributes(bitset).get(_BITS, b""))]
    return {decoded(bit[_BIT_NAME]): _BIT_VALUE in bit for bit in listed}


def _bit_list(wanted: Mapping[str, bool]) -> bytes:
    """Bits by their names: what is not listed is not changed."""
    bits = [
        nested(_BIT, attribute(_BIT_NAME, text(name)), attribute(_BIT_VALUE, b"") if on else b"")
        for name, on in wanted.items()
    ]
    return nested(_BITS, *bits)


def _in_turn(wanted: Mapping[str, int]) -> list[dict[str, int]]:
    """Drivers (ice) refuse fixed values while they adapt them: adapting ends first, and begins last."""
    off: dict[str, int] = {name: 0 for name, value in wanted.items() if name in _ADAPTIVE and not value}
    on = {name: value for name, value in wanted.items() if name in _ADAPTIVE and value}
    fixed = {name: value for name, value in wanted.items() if name not in _ADAPTIVE}
    parts: list[dict[str, int]] = [off, fixed, on]
    return [part for part in parts if part]


def words(settings: EthtoolSettings) -> str:
    """For people: what is set, one after the other."""
    named = [(one.name.replace("_", " "), getattr(settings, one.name)) for one in fields(EthtoolSettings)]
    return "; ".join(f"{name} {_listed(values)}" for name, values in named if values)


def _listed(values: Mapping[str, int | bool]) -> str:
    def shown(value: int | bool) -> str:
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)

    return ", ".join(f"{name} {shown(value)}" for name, value in values.items())
