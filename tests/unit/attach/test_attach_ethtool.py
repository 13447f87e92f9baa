"""What is restored is told in the kernel's terms, in an order that drivers take. igb's answers: test_vfio and
test_whole_port."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import pytest

from railmate.attach import ethtool
from railmate.attach.errors import AttachError
from railmate.attach.ethtool import Ethtool
from railmate.attach.settings import EthtoolSettings
from railmate.netlink import attribute, nested

FAMILY = 21


@dataclass
class Generic:
    """The kernel's ethtool, which says what it is told to and takes what is set."""

    answers: dict[int, bytes] = field(default_factory=dict)
    told: list[bytes] = field(default_factory=list)

    def request(self, kind: int, body: bytes, flags: int = 0) -> list[bytes]:
        if kind == 16:  # CTRL_CMD_GETFAMILY
            return [struct.pack("=BBH", 1, 1, 0) + attribute(1, struct.pack("=H", FAMILY))]
        assert kind == FAMILY
        if body[0] in self.answers:
            return [struct.pack("=BBH", body[0], 1, 0) + self.answers[body[0]]]
        if body[0] in (4, 9, 11, 13, 15, 17, 19, 21):  # what this driver does not have
            raise OSError(95, "Operation not supported")
        self.told.append(body)
        return []


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Generic:
    made = Generic()
    monkeypatch.setattr(ethtool, "Netlink", lambda protocol: made)
    return made


def bit(name: str, on: bool) -> bytes:
    return nested(1, attribute(2, name.encode() + b"\0"), attribute(3, b"") if on else b"")


def test_what_the_driver_tells_is_read(kernel: Generic) -> None:
    kernel.answers = {
        13: nested(2, attribute(2, struct.pack("=I", 2)), nested(3, bit("legacy-rx", True), bit("vf-ipsec", False))),
        19: attribute(2, struct.pack("=I", 50)) + attribute(11, b"\1") + nested(1),
        21: attribute(2, b"\0") + attribute(3, b"\1") + attribute(4, b"\1"),
    }  # fmt: skip
    assert Ethtool().state(7).now == EthtoolSettings(
        coalescing={"adaptive-rx": 1, "rx-usecs": 50},
        pause={"autoneg": 0, "rx": 1, "tx": 1},
        private_flags={"legacy-rx": True, "vf-ipsec": False},
    )


def link(autoneg: int, speed: int, duplex: int, *advertised: str) -> bytes:
    """ETHTOOL_MSG_LINKMODES_GET_REPLY of a port that can do two modes."""
    bits = [bit(name, name in advertised) for name in ("100baseT/Full", "1000baseT/Full")]
    numbers = (
        attribute(2, bytes([autoneg]))
        + attribute(5, struct.pack("=I", speed))
        + attribute(6, bytes([duplex]))
    )
    return numbers + nested(3, nested(3, *bits))


BOTH = {"100baseT/Full": True, "1000baseT/Full": True}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (link(1, 1000, 1, *BOTH), EthtoolSettings(link={"autoneg": 1}, advertises=BOTH)),
        (
            link(0, 100, 0, *BOTH),
            EthtoolSettings(link={"autoneg": 0, "speed": 100, "duplex": 0}, advertises=BOTH),
        ),
        (link(0, 0xFFFFFFFF, 0xFF, *BOTH), EthtoolSettings(link={"autoneg": 0}, advertises=BOTH)),
    ],
    ids=["negotiated", "fixed", "not known"],
)
def test_a_speed_counts_where_it_is_fixed_and_known(
    kernel: Generic, told: bytes, expected: EthtoolSettings
) -> None:
    kernel.answers = {4: told}
    assert Ethtool().state(7).now == expected


def test_what_a_port_negotiates_is_set_back_as_a_whole_and_what_it_advertises_bit_by_bit() -> None:
    negotiated = EthtoolSettings(link={"autoneg": 1}, advertises=BOTH)
    slow = EthtoolSettings(link={"autoneg": 1}, advertises=BOTH | {"1000baseT/Full": False})
    fixed = EthtoolSettings(
        link={"autoneg": 0, "speed": 100, "duplex": 1}, advertises=dict.fromkeys(BOTH, False)
    )
    assert ethtool.difference(negotiated, slow) == EthtoolSettings(advertises={"1000baseT/Full": True})
    assert ethtool.difference(negotiated, fixed) == negotiated
    assert ethtool.difference(fixed, negotiated) == EthtoolSettings(link=fixed.link)
    assert not ethtool.difference(fixed, fixed)


def test_link_and_wake_up_are_told_in_the_kernels_terms(kernel: Generic) -> None:
    fixed = {"autoneg": 0, "speed": 100, "duplex": 1}
    wanted = EthtoolSettings(link=fixed, advertises=BOTH, wake_on={"magic": True})
    for part in ethtool.one_by_one(wanted):
        Ethtool().set(7, part, "net1")
    link_settings, advertised, wake = kernel.told
    header = nested(1, attribute(1, struct.pack("=I", 7)))
    numbers = attribute(2, b"\0") + attribute(5, struct.pack("=I", 100)) + attribute(6, b"\1")
    assert link_settings == struct.pack("=BBH", 5, 1, 0) + header + numbers
    assert advertised == struct.pack("=BBH", 5, 1, 0) + header + nested(
        3, nested(3, *(bit(one, True) for one in BOTH))
    )
    assert wake == struct.pack("=BBH", 10, 1, 0) + header + nested(2, nested(3, bit("magic", True)))


def test_what_is_set_is_told_in_the_kernels_terms(kernel: Generic) -> None:
    wanted = EthtoolSettings(
        coalescing={"rx-usecs": 3, "cqe-mode-rx": 1}, pause={"rx": 0}, private_flags={"legacy-rx": False}
    )
    Ethtool().set(7, wanted, "net1")
    coalescing, pause, flags = kernel.told
    header = nested(1, attribute(1, struct.pack("=I", 7)))
    values = attribute(2, struct.pack("=I", 3)) + attribute(25, b"\1")
    assert coalescing == struct.pack("=BBH", 20, 1, 0) + header + values
    assert pause == struct.pack("=BBH", 22, 1, 0) + header + attribute(3, b"\0")
    assert flags == struct.pack("=BBH", 14, 1, 0) + header + nested(2, nested(3, bit("legacy-rx", False)))


@pytest.mark.parametrize(
    ("adaptive", "order"), [(1, [["rx-usecs"], ["adaptive-rx"]]), (0, [["adaptive-rx"], ["rx-usecs"]])]
)
def test_fixed_values_are_set_while_the_driver_does_not_adapt_them(
    adaptive: int, order: list[list[str]]
) -> None:
    turns = ethtool._in_turn({"adaptive-rx": adaptive, "rx-usecs": 3})
    assert [list(turn) for turn in turns] == order


def test_what_one_kind_refuses_does_not_keep_the_others_from_being_set() -> None:
    wanted = EthtoolSettings(features={"a": True}, pause={"rx": 1}, private_flags={"x": True})
    assert ethtool.one_by_one(wanted) == [
        EthtoolSettings(features={"a": True}),
        EthtoolSettings(pause={"rx": 1}),
        EthtoolSettings(private_flags={"x": True}),
    ]
    assert ethtool.words(wanted) == "features a on; pause rx 1; private flags x on"


def test_a_refusal_names_what_was_refused(kernel: Generic) -> None:
    def refuse(kind: int, body: bytes, flags: int = 0) -> list[bytes]:
        raise OSError(22, "Invalid argument")

    opened = Ethtool()
    kernel.request = refuse  # type: ignore[method-assign]
    with pytest.raises(AttachError, match="net1 does not take the coalescing rx-usecs 3: Invalid argument"):
        opened.set(7, EthtoolSettings(coalescing={"rx-usecs": 3}), "net1")


def test_queues_that_serve_both_directions_are_read_and_told_in_the_kernels_terms(kernel: Generic) -> None:
    """Combined channels, which NICs have and the netdevs of the component tests have not. Numbers of
    ETHTOOL_A_CHANNELS_*: maxima of rx, tx, other and combined from 2, counts from 6."""
    four_numbers = [0, 0, 1, 63, 0, 0, 1, 8]
    kernel.answers = {
        17: b"".join(attribute(kind, struct.pack("=I", value)) for kind, value in enumerate(four_numbers, 2))
    }
    state = Ethtool().state(7)
    assert (state.now.channels["combined"], state.most.channels["combined"]) == (8, 63)
    wanted = EthtoolSettings({}, {}, {"combined": 64})
    assert ethtool.impossible(wanted, state) == "combined channels 64: at most 63"
    few = EthtoolSettings({}, {}, {"combined": 4})
    assert ethtool.impossible(few, state) == ""
    Ethtool().set(7, few, "net1")
    header = nested(1, attribute(1, struct.pack("=I", 7)))
    assert kernel.told == [struct.pack("=BBH", 18, 1, 0) + header + attribute(9, struct.pack("=I", 4))]
    back = ethtool.difference(state.now, EthtoolSettings({}, {}, {**state.now.channels, "combined": 4}))
    assert back == EthtoolSettings({}, {}, {"combined": 8}), "and only that is set back"
