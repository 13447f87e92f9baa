"""How a NIC steers packets, against a kernel of our own: what no NIC here has. igb's answers: test_whole_port."""

from __future__ import annotations

import errno
import json
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import pytest

from railmate.attach import ethtool, home, links, steering
from railmate.attach.ethtool import EthtoolState
from railmate.attach.links import Link
from railmate.attach.model import NetdevSnapshot, ReturnRequest
from railmate.attach.namespaces import Sides
from railmate.attach.settings import EthtoolSettings
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
    pinned: bool = False  # IFF_RXFH_CONFIGURED: somebody has set a table
    asked: list[bytes] = field(default_factory=list, compare=False)

    def ask(self, message: bytes) -> bytes:
        self.asked.append(message)
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
                self.table, self.pinned = [n % self.queues for n in range(128)], False
            elif entries != 0xFFFFFFFF:
                assert entries == 128
                table = list(struct.unpack_from(f"={entries}I", message, 24))
                if max(table) >= self.queues:
                    raise OSError(errno.EINVAL, "Invalid argument")
                self.table, self.pinned = table, True
            at = 24 + 4 * (0 if entries == 0xFFFFFFFF else entries)
            self.key = message[at : at + key_size] if key_size else self.key
            self.function = function or self.function
            return message
        head = struct.pack(HASH, command, 0, 128, len(self.key), self.function, 0, 0)
        return head + (struct.pack("=128I", *self.table) + self.key if entries else b"")

    def set_queues(self, queues: int) -> None:
        """ethnl_set_channels() of the kernel: not fewer than a table that was set, or a rule, names."""
        if self.pinned and max(self.table) >= queues:
            raise OSError(errno.EINVAL, "Invalid argument")
        if any(struct.unpack_from("=Q", spec, 152)[0] in range(queues, 1024) for spec in self.rules.values()):
            raise OSError(errno.EINVAL, "Invalid argument")
        self.queues = queues
        if not self.pinned:
            self.table = [n % queues for n in range(128)]

    def told(self) -> dict[str, object]:
        """How it is by now."""
        told = asdict(self)
        del told["asked"]
        return told


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


def look() -> Steering:
    seen = steering.read("net1")
    assert seen is not None
    return seen


def put_back(before: Steering) -> list[str]:
    steering.clear("net1", before)
    return steering.restore("net1", before)


def test_a_table_is_kept_as_far_as_it_does_not_repeat_and_is_whole_in_a_record(nic: Nic) -> None:
    nic.rules = {7: rule(7, -1)}
    seen = look()
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
    nic.rules, nic.table, nic.pinned = {7: rule(7, 2)}, table, table[0] != 0
    before, all_before = look(), nic.told()
    change(nic)
    assert look() != before
    assert put_back(before) == []
    assert nic.told() == all_before


@pytest.mark.parametrize("left", [False, True], ids=["one of the host's", "and one of the pod's"])
def test_a_rule_goes_where_the_driver_wants_it(nic: Nic, monkeypatch: pytest.MonkeyPatch, left: bool) -> None:
    """bnxt takes no rule for a place that one names."""

    def ask(message: bytes) -> bytes:
        if message[0] == 0x32:
            spec = message[16:184]
            if spec[160:164] != b"\xff" * 4:
                raise OSError(errno.EINVAL, "Invalid argument")
            nic.rules[3] = rule(3, 2)
            return message
        return Nic.ask(nic, message)

    nic.rules = {7: rule(7, 2)}
    before = look()
    nic.rules = {9: rule(9, -1)} if left else {}
    nic.refuses = {0x31} if left else set()
    monkeypatch.setattr(nic, "ask", ask)
    told = ["its flow rules cannot be set back: Operation not supported"]
    assert put_back(before) == (told if left else [])
    assert nic.rules[3] == rule(3, 2)


def test_what_is_refused_is_told_and_the_rest_is_set(nic: Nic) -> None:
    before = look()
    nic.rules, nic.table = {9: rule(9, -1)}, [0] * 128
    nic.refuses = {0x31}
    assert put_back(before) == ["its flow rules cannot be set back: Operation not supported"]
    assert nic.table == [0, 1, 2, 3] * 32


def test_a_nic_without_any_of_it_has_nothing_to_set_back(nic: Nic) -> None:
    nic.refuses = {0x46, 0x29, 0x2E}
    assert look() == Steering()
    assert put_back(Steering()) == []


def test_what_is_as_it_was_is_not_set_but_for_the_kernels_own_table(nic: Nic) -> None:
    """Some drivers restart their queues for it."""
    before = look()
    nic.asked.clear()
    assert put_back(before) == []
    (reset,) = (one for one in nic.asked if one[0] in (0x47, 0x2A, 0x31, 0x32))
    assert struct.unpack_from(HASH, reset)[2:5] == (0, 0, 0)  # no table, no key, the function stays
    nic.table = [3, 1] * 64
    before = look()
    nic.refuses = {0x47, 0x2A, 0x31, 0x32}
    assert put_back(before) == []
    assert put_back(replace(before)) == []
    assert all(one[0] != 0x47 for one in nic.asked[nic.asked.index(reset) + 1 :])


def test_a_table_that_a_container_has_set_like_the_kernels_own_does_not_stay_set(nic: Nic) -> None:
    """`ethtool -X net1 equal 4` with 4 queues: what follows could have neither fewer queues nor use more."""
    before = look()
    nic.pinned = True
    assert put_back(before) == []
    assert not nic.pinned
    nic.set_queues(2)


@pytest.mark.parametrize(
    "table", [[0, 1, 2, 3] * 32, [3, 1] * 64], ids=["the kernel's table", "the host's table"]
)
@pytest.mark.parametrize("rules", [{9: rule(9, 6)}, {}], ids=["a rule", "no rule"])
def test_queues_that_a_container_has_added_go_where_its_table_and_rules_named_them(
    nic: Nic, monkeypatch: pytest.MonkeyPatch, table: list[int], rules: dict[int, bytes]
) -> None:
    class Channels:
        def state(self, index: int) -> EthtoolState:
            return EthtoolState(EthtoolSettings(channels={"combined": nic.queues}))

        def set(self, index: int, wanted: EthtoolSettings, what: str) -> None:
            with links.attempt(f"{what} does not take {ethtool.words(wanted)}"):
                nic.set_queues(wanted.channels["combined"])

        def close(self) -> None: ...

    link = Link(7, "net1", "02:00:00:00:00:01", 1500, True, "0000:c1:00.1")
    for name in ("get", "get_index"):
        monkeypatch.setattr(links, name, lambda netlink, which: link)
    monkeypatch.setattr(home, "Ethtool", Channels)
    nic.table, nic.pinned = table, table[0] != 0
    snapshot = NetdevSnapshot(
        "0000:c1:00.1", link.name, link.mac, link.mtu, link.up, link.parent,
        ethtool=Channels().state(7).now, steering=look(),
    )  # fmt: skip
    before = nic.told()
    nic.set_queues(8)
    nic.table, nic.pinned, nic.rules = list(range(8)) * 16, True, dict(rules)
    back = home.bring_home(ReturnRequest(snapshot), Sides(None, -1))  # type: ignore[arg-type]
    assert (back.problems, nic.told()) == ((), before)


def test_a_netdev_whose_driver_does_not_answer_is_not_looked_at(
    nic: Nic, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(message: bytes) -> bytes:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(nic, "ask", gone)
    assert steering.read("net1") is None


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_what_a_driver_only_says_the_size_of_is_left_out(
    nic: Nic, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """ixgbevf and ENA say how large a table is, and then not what is in it."""

    def ask(message: bytes) -> bytes:
        if message[0] in (0x46, 0x30) and any(message[4:]):
            raise OSError(code, "no")
        return Nic.ask(nic, message)

    nic.rules = {7: rule(7, 2)}
    monkeypatch.setattr(nic, "ask", ask)
    before = look()
    assert before == Steering(fields={"tcp4": 0x3C, "udp4": 0x30})
    monkeypatch.setattr(nic, "ask", partial(Nic.ask, nic))
    nic.rules.clear()
    assert put_back(before) == []  # what was not told then is not wrong now
    assert nic.table == [0, 1, 2, 3] * 32


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EINVAL])
def test_a_rule_that_ends_while_they_are_read_is_left_out(
    nic: Nic, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def ask(message: bytes) -> bytes:
        if message[0] == 0x2F and struct.unpack_from("=I", message, 176)[0] == 9:
            raise OSError(code, "no such rule")
        return Nic.ask(nic, message)

    nic.rules = {7: rule(7, 2), 9: rule(9, 2)}
    monkeypatch.setattr(nic, "ask", ask)
    assert look().rules == {"7": rule(7, 2).hex()}


@pytest.mark.parametrize("entries", [[0] * 4095 + [1], [n % 3 for n in range(4096)], list(range(4096))])
def test_how_a_large_table_repeats_is_found_at_once(entries: list[int]) -> None:
    began = time.process_time()
    short = steering._until_it_repeats(tuple(entries))
    assert time.process_time() - began < 0.05
    assert len(short) == (3 if entries[4] == 1 else 4096)
    assert [short[place % len(short)] for place in range(4096)] == entries


@pytest.mark.parametrize("table", [(), (5,), (5, 5), (0, 1, 0), (0, 0, 1, 0, 0, 1, 0, 0), (0, 0, 1, 0, 1)])
def test_a_table_is_as_short_as_what_it_repeats(table: tuple[int, ...]) -> None:
    def repeats(length: int) -> bool:
        return all(table[place] == table[place % length] for place in range(length, len(table)))

    shortest = next((length for length in range(1, len(table)) if repeats(length)), len(table))
    assert steering._until_it_repeats(table) == table[:shortest]
