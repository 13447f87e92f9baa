"""Which queue of a NIC a packet goes to: hash, table and rules (ethtool(8), -X and -N).

A container with NET_ADMIN can set it, a rule can drop what the next user is sent, and the kernel takes all of it along
when the netdev moves (seen with igb and Linux 7.3). By ioctl(2) SIOCETHTOOL, as netlink has most of it for reading
only; structures as in include/uapi/linux/ethtool.h. Further RSS contexts are not looked at.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from railmate.attach.links import error_of

_SIOCETHTOOL = 0x8946
_GET_HASH, _SET_HASH = 0x46, 0x47  # ETHTOOL_GRSSH, ETHTOOL_SRSSH
_GET_FIELDS, _SET_FIELDS = 0x29, 0x2A  # ETHTOOL_GRXFH, ETHTOOL_SRXFH
_COUNT_RULES, _GET_RULE, _LIST_RULES, _DELETE_RULE, _INSERT_RULE = 0x2E, 0x2F, 0x30, 0x31, 0x32
#: struct ethtool_rxfh: command, context, size of the table and of the key, function, transformation; table and key
#: follow.
_HASH = struct.Struct("=IIIIBB2xI")
_KEEP_TABLE, _DEFAULT_TABLE, _KEEP_FUNCTION = 0xFFFFFFFF, 0, 0
#: struct ethtool_rxnfc: command, flow type, data, struct ethtool_rx_flow_spec, number of rules; their places follow.
_FLOW = struct.Struct("=IIQ168sI")
_PLACE = struct.Struct("=160xI4x")  # in the specification
_PLACE_AT = slice(160, 164)
_ANY_PLACE = b"\xff" * 4  # RX_CLS_LOC_ANY
_FLOW_TYPES = {
    "tcp4": 1, "udp4": 2, "sctp4": 3, "ah4": 4, "tcp6": 5, "udp6": 6, "sctp6": 7, "ah6": 8,
}  # fmt: skip
#: Where a driver has no such thing, does not tell it (ixgbevf asks its physical function, which may refuse), or has it
#: no more.
_NOT_THERE = {errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.ENOENT}

_Ask = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Steering:
    """``table``: queues, as many as it takes until they repeat. ``key`` in hexadecimal. ``function`` and ``transform``
    of the hash, and the header ``fields`` that it takes of each kind of flow, are the kernel's numbers. ``rules``:
    place to specification, in hexadecimal."""

    table: tuple[int, ...] = ()
    key: str = ""
    function: int = 0
    transform: int = 0
    fields: Mapping[str, int] = field(default_factory=dict)
    rules: Mapping[str, str] = field(default_factory=dict)


def read(name: str) -> Steering | None:
    """Of the netdev ``name`` in this thread's namespace; what its driver does not tell is left out. None where it
    cannot be read: a claim does not fail for that."""
    try:
        with _asking(name) as ask:
            return _read(ask)
    except OSError:
        return None


def clear(name: str, before: Steering) -> None:
    """End what would keep the queues from becoming as many as they were: rules that are not ``before``'s, and a table.

    The kernel remembers that a table was set, also one that looks like its own, and then refuses to have fewer queues
    than it names, and drivers do not use more (IFF_RXFH_CONFIGURED). Only asking for its own table ends that. What is
    refused `restore` tells. Raises OSError.
    """
    with _asking(name) as ask:
        now = _now(ask, before)
        for _, verb in _deletions(ask, before, now):
            with suppress(OSError):
                verb()
        own = before.table == tuple(range(len(before.table)))  # ethtool_rxfh_indir_default() of the kernel
        if now.table and (own or now.table != before.table):
            with suppress(OSError):
                _set_hash(ask, before, _DEFAULT_TABLE)


def restore(name: str, before: Steering) -> list[str]:
    """Set what differs from ``before``, after `clear` and when the queues are as they were; a sentence for each thing
    that is still not so. Raises OSError."""
    with _asking(name) as ask:
        now = _now(ask, before)
        if now == before:
            return []
        refused = {}
        for what, verb in _changes(ask, before, now):
            try:
                verb()
            except OSError as error:
                refused[what] = f": {error_of(error)[1]}"
        still = _differing(before, _now(ask, before))
    return [f"its {what} cannot be set back{refused.get(what, '')}" for what in still]


def _deletions(ask: _Ask, before: Steering, now: Steering) -> Iterator[tuple[str, Callable[[], object]]]:
    for place in now.rules:
        if before.rules.get(place) != now.rules[place]:
            spec = bytes.fromhex(now.rules[place])
            yield "flow rules", lambda spec=spec: ask(_flow(_DELETE_RULE, spec=spec))  # type: ignore[misc]


def _changes(ask: _Ask, before: Steering, now: Steering) -> Iterator[tuple[str, Callable[[], object]]]:
    yield from _deletions(ask, before, now)
    for place, text in before.rules.items():
        if now.rules.get(place) != text:
            spec = bytes.fromhex(text)
            yield "flow rules", lambda spec=spec: _insert(ask, spec)  # type: ignore[misc]
    if now.table and now.table != before.table:
        # the table that the kernel makes itself: it follows the number of queues from then on
        yield "RSS table", lambda: _set_hash(ask, before, _DEFAULT_TABLE)
        if _read(ask).table != before.table:
            yield "RSS table", lambda: _set_hash(ask, before, table=before.table)
    if (now.key, now.function, now.transform) != (before.key, before.function, before.transform):
        key = bytes.fromhex(before.key)
        yield "RSS hash", lambda: _set_hash(ask, before, key=key, function=before.function)
    for kind, fields in before.fields.items():
        if now.fields.get(kind, fields) != fields:
            message = _flow(_SET_FIELDS, _FLOW_TYPES[kind], fields)
            yield "RSS fields", lambda message=message: ask(message)  # type: ignore[misc]


def _insert(ask: _Ask, spec: bytes) -> None:
    """Where it was; where the driver chooses the places itself (bnxt), anywhere. Raises OSError."""
    try:
        ask(_flow(_INSERT_RULE, spec=spec))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        ask(_flow(_INSERT_RULE, spec=_placed(spec, _ANY_PLACE)))


def _placed(spec: bytes, place: bytes) -> bytes:
    return spec[: _PLACE_AT.start] + place + spec[_PLACE_AT.stop :]


def _wherever(rules: Mapping[str, str]) -> list[bytes]:
    """The rules without their places."""
    return sorted(_placed(bytes.fromhex(spec), _ANY_PLACE) for spec in rules.values())


def _differing(before: Steering, now: Steering) -> list[str]:
    fields = {kind: now.fields.get(kind, value) for kind, value in before.fields.items()}
    pairs: dict[str, tuple[object, object]] = {
        "flow rules": (_wherever(before.rules), _wherever(now.rules)),
        "RSS table": (before.table, now.table),
        "RSS hash": (
            (before.key, before.function, before.transform),
            (now.key, now.function, now.transform),
        ),
        "RSS fields": (before.fields, fields),
    }
    return [what for what, (one, other) in pairs.items() if one != other]


def _now(ask: _Ask, before: Steering) -> Steering:
    """As it is by now; without the hash where its driver did not tell it ``before``."""
    now = _read(ask)
    if (before.table, before.key, before.function) == ((), "", 0):
        return replace(now, table=(), key="", function=0, transform=before.transform)
    return now


def _read(ask: _Ask) -> Steering:
    table, key, function, transform = _hash(ask)
    fields = {}
    for kind, number in _FLOW_TYPES.items():
        answer = _if_there(ask, _flow(_GET_FIELDS, number))
        if answer:
            fields[kind] = _FLOW.unpack_from(answer)[2]
    return Steering(_until_it_repeats(table), key.hex(), function, transform, fields, _rules(ask))


def _hash(ask: _Ask) -> tuple[tuple[int, ...], bytes, int, int]:
    sizes = _if_there(ask, _HASH.pack(_GET_HASH, 0, 0, 0, 0, 0, 0))
    if not sizes:
        return (), b"", 0, 0
    _, _, entries, key_size, _, _, _ = _HASH.unpack_from(sizes)
    question = _HASH.pack(_GET_HASH, 0, entries, key_size, 0, 0, 0) + bytes(4 * entries + key_size)
    answer = _if_there(ask, question)
    if not answer:
        return (), b"", 0, 0
    _, _, entries, key_size, function, transform, _ = _HASH.unpack_from(answer)
    table = struct.unpack_from(f"={entries}I", answer, _HASH.size)
    key = answer[_HASH.size + 4 * entries :][:key_size]
    return table, key, function, transform


def _set_hash(
    ask: _Ask,
    before: Steering,
    entries: int = _KEEP_TABLE,
    table: tuple[int, ...] = (),
    key: bytes = b"",
    function: int = _KEEP_FUNCTION,
) -> None:
    """``transform`` is always set with it. Raises OSError."""
    if table:
        sizes = ask(_HASH.pack(_GET_HASH, 0, 0, 0, 0, 0, 0))
        entries = _HASH.unpack_from(sizes)[2]
        table = tuple(table[place % len(table)] for place in range(entries))
    head = _HASH.pack(_SET_HASH, 0, entries, len(key), function, before.transform, 0)
    ask(head + struct.pack(f"={len(table)}I", *table) + key)


def _rules(ask: _Ask) -> dict[str, str]:
    counted = _if_there(ask, _flow(_COUNT_RULES))
    count = _FLOW.unpack_from(counted)[4] if counted else 0
    if not count:
        return {}
    listed = _if_there(ask, _flow(_LIST_RULES, count=count) + bytes(4 * count))
    if not listed:
        return {}
    places = struct.unpack_from(f"={count}I", listed, _FLOW.size)
    rules = {}
    for place in places[: _FLOW.unpack_from(listed)[4]]:
        answer = _if_there(ask, _flow(_GET_RULE, spec=_PLACE.pack(place)))
        if answer:
            rules[str(place)] = _FLOW.unpack_from(answer)[3].hex()
    return rules


def _flow(command: int, kind: int = 0, data: int = 0, spec: bytes = b"", count: int = 0) -> bytes:
    return _FLOW.pack(command, kind, data, spec, count)


def _until_it_repeats(table: tuple[int, ...]) -> tuple[int, ...]:
    """By the prefix function of Knuth, Morris and Pratt, as tables can have thousands of entries: for each beginning of
    the table, how much of its own beginning it ends with."""
    ends = [0] * len(table)
    same = 0
    for place in range(1, len(table)):
        while same and table[place] != table[same]:
            same = ends[same - 1]
        same += table[place] == table[same]
        ends[place] = same
    return table[: len(table) - same]


def _if_there(ask: _Ask, message: bytes) -> bytes:
    """The answer; empty where the driver has no such thing."""
    try:
        return ask(message)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return b""
        raise


@contextmanager
def _asking(name: str) -> Iterator[_Ask]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as any_socket:

        def ask(message: bytes) -> bytes:
            """The message as the kernel leaves it."""
            buffer = ctypes.create_string_buffer(
                message, max(len(message), 192)
            )  # sizeof(struct ethtool_rxnfc)
            request = struct.pack("16sP16x", name.encode(), ctypes.addressof(buffer))
            fcntl.ioctl(any_socket, _SIOCETHTOOL, request)
            return buffer.raw

        yield ask
