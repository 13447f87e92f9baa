"""Which words of the kernel about links are worth a look."""

from __future__ import annotations

import random
import struct

import pytest

from railmate.health.links import Links

UP, RUNNING, LOWER_UP, PROMISCUOUS = 0x1, 0x40, 0x10000, 0x100
WELL = UP | RUNNING | LOWER_UP


def message(index: int, flags: int, kind: int = 16, attributes: bytes = b"") -> bytes:
    body = struct.pack("=BxHiII", 0, 1, index, flags, 0xFFFFFFFF) + attributes
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body + b"\0" * (-len(body) % 4)


def test_fall_and_rise_are_worth_a_look_and_repeated_words_are_not() -> None:
    links = Links()
    assert links.heard(message(2, WELL))  # nothing was known of it
    assert not links.heard(message(2, WELL))
    assert links.heard(message(2, UP))
    assert not links.heard(message(2, UP))
    assert links.heard(message(2, WELL))


def test_what_says_nothing_of_the_carrier_is_not_worth_a_look() -> None:
    links = Links()
    links.heard(message(2, WELL))
    assert not links.heard(message(2, WELL | PROMISCUOUS))
    assert not links.heard(message(3, UP, kind=17))
    assert not links.heard(message(2, UP, kind=20)), "RTM_NEWADDR"


def test_link_made_anew_under_the_same_number_is_another_link() -> None:
    links = Links()
    links.heard(message(2, WELL))
    links.heard(message(2, WELL, kind=17))
    assert links.heard(message(2, WELL))


def test_all_messages_of_a_read_are_heard() -> None:
    links = Links()
    links.heard(message(2, WELL) + message(3, WELL))
    assert links.heard(message(2, WELL, attributes=b"\5\0\1\0\1") + message(3, UP))


@pytest.mark.parametrize("seed", range(200))
def test_no_bytes_stop_the_watch(seed: int) -> None:
    chance, links = random.Random(seed), Links()
    data = bytearray(message(2, WELL) + message(3, UP))
    for _ in range(chance.randint(1, 6)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    links.heard(bytes(data[: chance.randrange(len(data) + 1)]))
