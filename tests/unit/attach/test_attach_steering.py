"""How a NIC steers packets, against a kernel of our own: what no NIC here has. igb's answers: test_whole_port."""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

import pytest

from railmate.attach import steering
from railmate.attach.steering import Steering
from railmate.plain import read

HASH = "=IIIIBB2xI"  # struct ethtool_rxfh
FLOW = "=IIQ168sI"  # struct ethtool_rxnfc


@dataclass
class Nic:
    """A driver that has all of it: struct ethtool_rxfh and ethtool_rxnfc in, the same out."""

    queues: int = 4
    table: list[int] = field(default_factory=lambda: [0, 1, 2, 3] * 32)
    key: bytes = b"\1\2\3\4"
    function: int = 1
    fields: dict[int, int] = field(default_factory=lambda: {1: 0x3C, 2: 0x30})
    rules: dict[int, bytes] = field(default_factory=dict)
    refuses: set[int] = field(default_factory=set)  # commands

    def ask(self, message: bytes) -> bytes:
        (command,) = struct.unpack_from("=I", message)
        if command in self.refuses:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        if command in (0x46, 0x47):
            return self._hash(command, message)
        _, kind, data, spec, count = struct.unpack_from(FLOW, message)
        (place,) = struct.unpack_from("=I", spec, 160)
        if command == 0x29:
            if kind not in self.fields:
                raise OSError(errno.EINVAL, "Invalid argument")
            data = self.fields[kind]
        elif command == 0x2A:
            self.fields[kind] = data
        elif command in (0x2E, 0x30):
            count = len(self.rules)
        elif command == 0x2F:
            spec = self.rules[place]
        elif command == 0x31:
            del self.rules[place]
        elif command == 0x32:
            self.rules[place] = spec
        places = struct.pack(f"={len(self.rules)}I", *self.rules) if command == 0x30 else b""
        return struct.pack(FLOW, command, kind, data, spec, count) + places

    def _hash(self, command: int, message: bytes) -> bytes:
        _, _, entries, key_size, function, _, _ = struct.unpack_from(HASH, message)
        if command == 0x47:
            if entries == 0:
                self.table = [n % self.queues for n in range(128)]
            elif entries != 0xFFFFFFFF:
                assert entries == 128
                self.table = list(struct.unpack_from(f"={entries}I", message, 24))
            at = 24 + 4 * (0 if entries == 0xFFFFFFFF else entries)
            self.key = message[at : at + key_size] if key_size else self.key
            self.function = function or self.function
            return message
        head = struct.pack(HASH, command, 0, 128, len(self.key), self.function, 0, 0)
        return head + (struct.pack("=128I", *self.table) + self.key if entries else b"")


@pytest.fixture
def nic(monkeypatch: pytest.MonkeyPatch) -> Nic:
    made = Nic()

    @contextmanager
    def asking(name: str) -> Iterator[Callable[[bytes], bytes]]:
        yield made.ask

    monkeypatch.setattr(steering, "_asking", asking)
    return made


def rule(place: int, ring: int) -> bytes:
    """struct ethtool_rx_flow_spec: for the ring, or -1 to drop."""
    return struct.pack("=I148xqII", 1, ring, place, 0)


def test_a_table_is_kept_as_far_as_it_does_not_repeat_and_is_whole_in_a_record(nic: Nic) -> None:
    nic.rules = {7: rule(7, -1)}
    seen = steering.read("net1")
    assert (seen.table, seen.key, seen.fields) == ((0, 1, 2, 3), "01020304", {"tcp4": 0x3C, "udp4": 0x30})
    assert seen.rules == {"7": rule(7, -1).hex()}
    assert read(Steering, json.loads(json.dumps(asdict(seen)))) == seen


CHANGES: dict[str, Callable[[Nic], object]] = {
    "all to one queue": lambda nic: setattr(nic, "table", [0] * 128),
    "another key": lambda nic: setattr(nic, "key", b"\0" * 4),
    "another function": lambda nic: setattr(nic, "function", 2),
    "ports count": lambda nic: nic.fields.update({2: 0x3C}),
    "a flow is dropped": lambda nic: nic.rules.update({9: rule(9, -1)}),
    "a rule of the host's is gone": lambda nic: nic.rules.clear(),
    "a rule of the host's is another": lambda nic: nic.rules.update({7: rule(7, -1)}),
}


@pytest.mark.parametrize(
    "table", [[0, 1, 2, 3] * 32, [3, 1] * 64], ids=["the kernel's table", "the host's table"]
)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_a_container_has_changed_is_set_back(
    nic: Nic, change: Callable[[Nic], object], table: list[int]
) -> None:
    nic.rules, nic.table = {7: rule(7, 2)}, table
    before, all_before = steering.read("net1"), asdict(nic)
    change(nic)
    assert steering.read("net1") != before
    assert steering.restore("net1", before) == []
    assert asdict(nic) == all_before


def test_what_is_refused_is_told_and_the_rest_is_set(nic: Nic) -> None:
    before = steering.read("net1")
    nic.rules, nic.table = {9: rule(9, -1)}, [0] * 128
    nic.refuses = {0x31}
    assert steering.restore("net1", before) == ["its flow rules cannot be set back: Operation not supported"]
    assert nic.table == [0, 1, 2, 3] * 32


def test_a_nic_without_any_of_it_has_nothing_to_set_back(nic: Nic) -> None:
    nic.refuses = {0x46, 0x29, 0x2E}
    assert steering.read("net1") == Steering()
    assert steering.restore("net1", Steering()) == []


def test_what_is_as_it_was_is_not_set(nic: Nic) -> None:
    """Some drivers restart their queues for it."""
    before = steering.read("net1")
    nic.refuses = {0x47, 0x2A, 0x31, 0x32}
    assert steering.restore("net1", before) == []
    assert steering.restore("net1", replace(before)) == []
