"""What is said to a physical function about its VFs, and heard from it, on the wire.

The peer is played: messages are read, and answers made, with pyroute2's own decoder of the kernel's structures, so
that no misreading of include/uapi/linux/if_link.h can be on both sides. The kernel itself is asked in the virtual node.
"""

from __future__ import annotations

import errno
import struct
from typing import Any

import pytest
from pyroute2.netlink.generic.ethtool import ethtool_rings_msg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from railmate.attach import vf
from railmate.attach.errors import AttachError
from railmate.attach.ethtool import Ethtool
from railmate.attach.home import restore_vf
from railmate.attach.model import MoveRequest, NetdevSnapshot, PhysicalPort
from railmate.attach.move import SetVf
from railmate.attach.namespaces import Sides
from railmate.attach.settings import EthtoolSettings, NetdevSettings, VfSettings
from railmate.netlink import attribute, nested

PORT = PhysicalPort("eth7", 3)
NOW = VfSettings("02:00:00:00:00:03", 0, 0, "802.1Q", False, True, "auto", 0, 0)
SPOKEN = {
    "mac": ("02:00:00:00:77:77", "IFLA_VF_MAC", {"mac": "02:00:00:00:77:77"}),
    "trust": (True, "IFLA_VF_TRUST", {"trust": 1}),
    "spoof_check": (False, "IFLA_VF_SPOOFCHK", {"spoofchk": 0}),
    "link_state": ("disable", "IFLA_VF_LINK_STATE", {"link_state": 2}),
    "max_tx_rate": (1000, "IFLA_VF_RATE", {"min_tx_rate": 0, "max_tx_rate": 1000}),
    "min_tx_rate": (100, "IFLA_VF_RATE", {"min_tx_rate": 100, "max_tx_rate": 0}),
}


class Peer:
    """A kernel with one physical function, ``eth7``, that keeps what it is told of VF 3."""

    def __init__(self, refuses: str = "", deaf: bool = False) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.state = NOW
        self.refuses, self.deaf = refuses, deaf

    def request(self, kind: int, body: bytes, flags: int = 0) -> list[bytes]:
        message = ifinfmsg(struct.pack("=IHHII", 16 + len(body), kind, 0, 1, 0) + body)
        message.decode()
        if kind == 18:  # RTM_GETLINK
            return [self._answer()]
        assert kind == 16
        assert message["index"] == 7
        for _, info in message.get_attr("IFLA_VFINFO_LIST")["attrs"]:
            for name, value in info["attrs"]:
                self._told(name, value)
        return []

    def _told(self, name: str, value: Any) -> None:
        if name == self.refuses:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        if name == "IFLA_VF_VLAN_LIST":
            ((_, value),) = value["attrs"]
        assert value["vf"] == 3
        self.told.append((name, dict(value)))

    def _answer(self) -> bytes:
        """eth7 with the settings of VF 3, and another VF before it."""
        others = [nested(1, *self._info(2, VfSettings("02:00:00:00:00:02", 5, 1, "802.1Q")))]
        mine = nested(1, *self._info(3, self.state))
        return (
            struct.pack("=BxHiII", 0, 1, 7, 1, 0)
            + attribute(3, b"eth7\0") + attribute(4, struct.pack("=I", 1500))
            + nested(22, *others, mine)
        )  # fmt: skip

    def _info(self, number: int, now: VfSettings) -> list[bytes]:
        def of(*values: int) -> bytes:
            return struct.pack(f"={1 + len(values)}I", number, *values)

        def known(value: bool | None) -> int:
            return 0xFFFFFFFF if value is None else int(value)

        mac = bytes.fromhex((now.mac or "").replace(":", ""))
        protocol = struct.pack(">HH", 0x88A8 if now.protocol == "802.1ad" else 0x8100, 0)
        states = {"auto": 0, "enable": 1, "disable": 2}
        return [
            attribute(1, struct.pack("=I32s", number, mac)),
            attribute(2, of(now.vlan or 0, now.qos or 0)),
            attribute(6, of(now.min_tx_rate or 0, now.max_tx_rate or 0)),
            attribute(4, of(known(now.spoof_check))),
            attribute(5, of(states[now.link_state or "auto"])),
            attribute(9, of(known(now.trust))),
            nested(12, attribute(1, of(now.vlan or 0, now.qos or 0) + protocol)),
        ]


def test_node_and_port_guid_are_told_and_understood() -> None:
    """struct ifla_vf_guid: the VF and, aligned to 8 bytes, the GUID as a number. pyroute2 reads it otherwise, so it is
    compared with bytes written down by hand from include/uapi/linux/if_link.h."""
    sent: list[bytes] = []

    class Wire(Peer):
        def request(self, kind: int, body: bytes, flags: int = 0) -> list[bytes]:
            if kind == 18:
                return [self._answer()]
            sent.append(body[16:])
            return []

        def _info(self, number: int, now: VfSettings) -> list[bytes]:
            guid = struct.pack("=IIQ", number, 0, 0x0200_0000_0000_00AA)
            return [*super()._info(number, now), attribute(10, guid), attribute(11, guid)]

    peer = Wire()
    vf.write_guids(peer, PORT, "02:00:00:00:00:00:00:aa")  # type: ignore[arg-type]
    value = bytes([3, 0, 0, 0, 0, 0, 0, 0, 0xAA, 0, 0, 0, 0, 0, 0, 2])
    assert sent == [nested(22, nested(1, attribute(kind, value))) for kind in (10, 11)]
    assert vf.read(peer, PORT).guid == "02:00:00:00:00:00:00:aa"  # type: ignore[arg-type]
    assert vf.read(Peer(), PORT).guid is None, "Ethernet has none"  # type: ignore[arg-type]


def test_a_guid_that_was_never_set_is_unset_again() -> None:
    """The kernel tells and takes zeros for it."""

    class Fabric(Peer):
        guid = 0

        def request(self, kind: int, body: bytes, flags: int = 0) -> list[bytes]:
            if kind == 16:
                (self.guid,) = struct.unpack("=Q", body[-8:])
            return [self._answer()] if kind == 18 else []

        def _info(self, number: int, now: VfSettings) -> list[bytes]:
            guid = struct.pack("=IIQ", number, 0, self.guid if number == PORT.vf else 5)
            return [*super()._info(number, now), attribute(10, guid), attribute(11, guid)]

    peer = Fabric()
    sides = Sides(peer, -1)  # type: ignore[arg-type]
    before = vf.read(peer, PORT)  # type: ignore[arg-type]
    vf.write_guids(peer, PORT, "02:00:00:00:00:00:00:aa")  # type: ignore[arg-type]
    assert peer.guid == 0x0200_0000_0000_00AA
    snapshot = NetdevSnapshot("0000:0c:00.4", "ib3", "", 2044, True, physical=PORT, vf=before)
    assert restore_vf(snapshot, sides) == []
    assert peer.guid == 0


@pytest.mark.parametrize("name", SPOKEN)
def test_each_setting_is_told_in_the_kernels_terms(name: str) -> None:
    value, attribute_name, wanted = SPOKEN[name]
    peer = Peer()
    vf.write(peer, PORT, VfSettings(**{name: value}))  # type: ignore[arg-type]
    ((told, values),) = peer.told
    assert told == attribute_name
    for key, expected in wanted.items():
        found = values[key]
        assert (found if key != "mac" else found[:17]) == expected


def test_vlan_priority_and_protocol_are_told_together() -> None:
    peer = Peer()
    vf.write(peer, PORT, VfSettings(vlan=100, qos=3, protocol="802.1ad"))  # type: ignore[arg-type]
    ((name, values),) = peer.told
    assert name == "IFLA_VF_VLAN_LIST"
    assert (values["vlan"], values["qos"], values["proto"]) == (100, 3, 0x88A8)


def test_what_is_not_asked_for_is_not_told() -> None:
    peer = Peer()
    vf.write(peer, PORT, VfSettings())  # type: ignore[arg-type]
    assert peer.told == []


@pytest.mark.parametrize(
    "settings",
    [NOW, VfSettings("02:00:00:00:00:09", 100, 3, "802.1ad", True, False, "enable", 10, 1000),
     VfSettings("00:00:00:00:00:00", 0, 0, "802.1Q", None, None, "disable", 0, 0)],
)  # fmt: skip
def test_what_the_kernel_tells_is_understood(settings: VfSettings) -> None:
    peer = Peer()
    peer.state = settings
    assert vf.read(peer, PORT) == settings  # type: ignore[arg-type]


def test_a_refusal_names_the_vf_and_the_setting() -> None:
    with pytest.raises(AttachError, match=r"VF 3 of eth7 does not take trust True: Operation not supported"):
        vf.write(Peer(refuses="IFLA_VF_TRUST"), PORT, VfSettings(trust=True))  # type: ignore[arg-type]


def test_one_rate_does_not_undo_the_other() -> None:
    assert vf.filled(VfSettings(min_tx_rate=5), VfSettings(min_tx_rate=1, max_tx_rate=9)) == VfSettings(
        min_tx_rate=5, max_tx_rate=9
    )


def sides(peer: Peer) -> Sides:
    return Sides(peer, -1)  # type: ignore[arg-type]


def snapshot(**more: Any) -> NetdevSnapshot:
    return NetdevSnapshot(
        "0000:c1:00.1", "vf3", "02:00:00:00:00:03", 1500, True, physical=PORT, vf=NOW, **more
    )


def test_a_setting_that_the_nics_driver_refuses_is_told_with_the_next_step() -> None:
    peer = Peer(refuses="IFLA_VF_LINK_STATE")
    step = SetVf(
        MoveRequest(snapshot(), "net1", NetdevSettings(vf=VfSettings(trust=True, link_state="enable")))
    )
    with pytest.raises(AttachError) as refused:
        step.apply(sides(peer))
    assert str(refused.value) == (
        "VF 3 of eth7 does not take link state enable: Operation not supported. "
        "Leave it out of the claim's config, or ask for another NIC"
    )


def test_only_what_differs_is_restored() -> None:
    peer = Peer()
    assert restore_vf(snapshot(), sides(peer)) == []
    assert peer.told == []
    peer.state = VfSettings("02:00:00:00:00:03", 100, 3, "802.1Q", True, True, "auto", 0, 0)
    problems = restore_vf(snapshot(), sides(peer))
    assert [name for name, _ in peer.told] == ["IFLA_VF_VLAN_LIST", "IFLA_VF_TRUST"]
    assert peer.told[0][1]["vlan"] == 0
    assert problems == ["VF 3 of eth7 does not take the VLAN 0 (802.1Q), trust False"], (
        "the peer keeps its state"
    )


def test_rings_are_told_in_the_kernels_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """veth has none; pyroute2 reads what a NIC would be told."""
    told: list[bytes] = []

    class Generic:
        def __init__(self, protocol: int) -> None:
            assert protocol == 16

        def request(self, kind: int, body: bytes, flags: int = 0) -> list[bytes]:
            if kind == 16:  # CTRL_CMD_GETFAMILY
                return [struct.pack("=BBH", 1, 1, 0) + attribute(1, struct.pack("=H", 21))]
            assert kind == 21
            told.append(body)
            return []

    monkeypatch.setattr("railmate.attach.ethtool.Netlink", Generic)
    Ethtool().set(7, EthtoolSettings({}, {"rx": 512, "tx": 1024}), "net1")
    (body,) = told
    message = ethtool_rings_msg(struct.pack("=IHHII", 16 + len(body), 21, 0, 1, 0) + body)
    message.decode()
    assert message["cmd"] == 16  # ETHTOOL_MSG_RINGS_SET
    assert (message.get_attr("ETHTOOL_A_RINGS_RX"), message.get_attr("ETHTOOL_A_RINGS_TX")) == (512, 1024)
    header = message.get_attr("ETHTOOL_A_RINGS_HEADER")
    assert header.get_attr("ETHTOOL_A_HEADER_DEV_INDEX") == 7
