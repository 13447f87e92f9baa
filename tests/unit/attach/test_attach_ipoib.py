"""IPoIB interfaces on the wire: what is said to the kernel, and heard from it.

The kernel makes and changes IPoIB interfaces over InfiniBand hardware only, and there is none. So the peer is played:
messages are read, and answers made, with pyroute2's own decoder of the kernel's structures, so that no misreading of
include/uapi/linux/if_link.h can be on both sides. What a real ib_ipoib would say to them stays unproved.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from railmate.attach import home, ipoib, move
from railmate.attach.errors import AttachError
from railmate.attach.model import AttachedNetdev, MoveRequest, NetdevSnapshot, ReturnRequest
from railmate.attach.namespaces import Sides
from railmate.attach.settings import IpoibSettings, NetdevSettings
from railmate.netlink import CREATE, EXCL, attribute, nested

MAC = "00:00:10:29:fe:80:00:00:00:00:00:00:02:00:00:00:00:00:00:01"
_MODES = ("datagram", "connected")


@dataclass
class Interface:
    name: str
    index: int
    mtu: int = 2044
    up: bool = False
    mac: str = MAC
    parent: int = 0  # the interface's index below which it is
    pkey: int = 0xFFFF
    mode: str = "datagram"
    umcast: int = 0


@dataclass
class Kernel:
    """One namespace. ``peer``: where a move leads."""

    links: list[Interface] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    peer: Any = None
    refuses: str = ""

    def request(self, kind: int, body: bytes, flags: int = 0) -> list[bytes]:
        message = ifinfmsg(struct.pack("=IHHII", 16 + len(body), kind, 0, 1, 0) + body)
        message.decode()
        index, name = message["index"], message.get_attr("IFLA_IFNAME")
        if kind == 18:  # RTM_GETLINK
            found = [one for one in self.links if (one.index == index if index else one.name == name)]
            if not found:
                raise OSError(errno.ENODEV, "No such device")
            return [self._answer(found[0])]
        if kind == 17:  # RTM_DELLINK
            (gone,) = [one for one in self.links if one.index == index]
            assert gone.parent, "a NIC's own interface cannot be deleted"
            self.links.remove(gone)
            self.said.append(f"delete {gone.name}")
            return []
        assert kind == 16
        info = message.get_attr("IFLA_LINKINFO")
        if flags & CREATE:
            assert flags & EXCL
            self._make(name, message.get_attr("IFLA_LINK"), info)
        else:
            self._change(message, info)
        return []

    def dump(self, kind: int, body: bytes) -> list[bytes]:
        assert kind == 18
        return [self._answer(one) for one in self.links]

    def _make(self, name: str, parent: int, info: Any) -> None:
        if any(one.name == name for one in self.links):
            raise FileExistsError(errno.EEXIST, "File exists")
        assert info.get_attr("IFLA_INFO_KIND") == "ipoib"
        data = info.get_attr("IFLA_INFO_DATA")
        assert len(struct.pack("=H", data.get_attr("IFLA_IPOIB_PKEY"))) == 2
        made = Interface(name, 50 + len(self.links), parent=parent, pkey=data.get_attr("IFLA_IPOIB_PKEY"))
        self.links.append(made)
        self.said.append(f"make {name} over {parent} in 0x{made.pkey:04x}")
        self._set(made, data)

    def _change(self, message: Any, info: Any) -> None:
        (link,) = [one for one in self.links if one.index == message["index"]]
        if info is not None:
            assert info.get_attr("IFLA_INFO_KIND") == "ipoib"
            self._set(link, info.get_attr("IFLA_INFO_DATA"))
        if (name := message.get_attr("IFLA_IFNAME")) is not None:
            link.name = name
        if (mtu := message.get_attr("IFLA_MTU")) is not None:
            most = 65520 if link.mode == "connected" else 4092
            if mtu > most:
                raise OSError(errno.EINVAL, "Invalid argument")
            link.mtu = mtu
            self.said.append(f"{link.name} mtu {mtu}")
        if message["change"]:
            link.up = bool(message["flags"] & 1)
        if message.get_attr("IFLA_NET_NS_FD") is not None:
            assert not any(one.parent == link.index for one in self.links), "children would stay behind"
            self.links.remove(link)
            self.peer.links.append(link)
            self.said.append(f"{link.name} leaves")

    def _set(self, link: Interface, data: Any) -> None:
        mode, umcast = data.get_attr("IFLA_IPOIB_MODE"), data.get_attr("IFLA_IPOIB_UMCAST")
        if mode is not None:
            if mode == self.refuses:
                raise OSError(errno.EINVAL, "Invalid argument")
            link.mode, link.mtu = mode, min(link.mtu, 2044)
            self.said.append(f"{link.name} mode {mode}")
        if umcast is not None:
            link.umcast = umcast
            self.said.append(f"{link.name} umcast {umcast}")

    @staticmethod
    def _answer(one: Interface) -> bytes:
        data = [attribute(1, struct.pack("=H", one.pkey)), attribute(2, struct.pack("=H", _MODES.index(one.mode))),
                attribute(3, struct.pack("=H", one.umcast))]  # fmt: skip
        return (
            struct.pack("=BxHiII", 0, 32, one.index, int(one.up), 0)
            + attribute(3, one.name.encode() + b"\0") + attribute(4, struct.pack("=I", one.mtu))
            + attribute(1, bytes.fromhex(one.mac.replace(":", "")))
            + (attribute(5, struct.pack("=I", one.parent)) if one.parent else attribute(56, b"0000:c1:00.1\0"))
            + nested(18, attribute(1, b"ipoib\0"), nested(2, *data))
        )  # fmt: skip


def two() -> tuple[Kernel, Kernel, Sides]:
    host, pod = Kernel([Interface("ib3", 7)]), Kernel([Interface("lo", 1, mac="00:00:00:00:00:00")])
    host.peer, pod.peer = pod, host
    return host, pod, Sides(host, 90, pod, 91)  # type: ignore[arg-type]


def snapshot(**more: Any) -> NetdevSnapshot:
    known = {"parent": "0000:c1:00.1", "ipoib": IpoibSettings(0xFFFF, "datagram", False)}
    return NetdevSnapshot("0000:c1:00.1", "ib3", MAC, 2044, False, **(known | more))


def give(settings: NetdevSettings, sides: Sides) -> AttachedNetdev:
    steps, moved = move.steps_of(MoveRequest(snapshot(), "net1", settings))
    _apply(steps, sides)
    assert moved.attached is not None
    return moved.attached


def _apply(steps: Sequence[Any], sides: Sides) -> None:
    for step in steps:
        step.apply(sides)


def test_a_partitions_interface_is_made_in_the_pod_and_has_the_settings() -> None:
    host, pod, sides = two()
    give(NetdevSettings(mtu=4000, ipoib=IpoibSettings(0x8001, "datagram", True)), sides)
    assert host.said == ["ib3 leaves"] or host.said == ["net1 leaves"]
    assert pod.said == ["make net1.8001 over 7 in 0x8001", "net1.8001 mode datagram", "net1.8001 umcast 1",
                        "net1.8001 mtu 4000"]  # fmt: skip
    own, child = pod.links[1:]
    assert (own.name, own.mtu, own.up, own.mode) == ("net1", 2044, True, "datagram")
    assert (child.name, child.mtu, child.up, child.pkey, child.umcast) == ("net1.8001", 4000, True, 0x8001, 1)


def test_doing_it_again_changes_nothing() -> None:
    _, pod, sides = two()
    settings = NetdevSettings(ipoib=IpoibSettings(0x8001))
    first = give(settings, sides)
    said = list(pod.said)
    assert give(settings, sides) == first
    assert pod.said == said


def test_its_name_may_be_taken_in_the_pod() -> None:
    _, pod, sides = two()
    pod.links.append(Interface("net1.8001", 2, mac="02:00:00:00:00:01"))
    with pytest.raises(AttachError, match=r"the pod has an interface net1.8001 already.*choose a different"):
        give(NetdevSettings(ipoib=IpoibSettings(0x8001)), sides)


def test_it_ends_before_the_nics_interface_leaves() -> None:
    host, pod, sides = two()
    settings = NetdevSettings(ipoib=IpoibSettings(0x8001, "connected"))
    attached = give(settings, sides)
    pod.links[-1].name = "mine"  # a container may rename it
    result = home.bring_home(ReturnRequest(snapshot(), attached, settings), sides)
    assert (result.home, result.problems) == (True, ())
    assert pod.said[-2:] == ["delete mine", "ib3 leaves"] or pod.said[-2:] == ["delete mine", "net1 leaves"]
    assert [(one.name, one.mode) for one in host.links] == [("ib3", "datagram")]


def test_without_a_partition_the_nics_own_interface_gets_the_mode_before_the_mtu_and_loses_it_again() -> None:
    host, pod, sides = two()
    settings = NetdevSettings(mtu=65520, ipoib=IpoibSettings(None, "connected", True))
    attached = give(settings, sides)
    assert host.said[:3] == ["ib3 mode connected", "ib3 umcast 1", "net1 mtu 65520"]
    (own,) = pod.links[1:]
    assert (own.mode, own.umcast, own.mtu) == ("connected", 1, 65520)
    result = home.bring_home(ReturnRequest(snapshot(), attached, settings), sides)
    assert result.problems == ()
    (own,) = host.links
    assert (own.name, own.mode, own.umcast, own.mtu) == ("ib3", "datagram", 0, 2044)


def test_a_mode_that_the_nic_has_not_is_named() -> None:
    host, _, sides = two()
    host.refuses = "connected"
    with pytest.raises(
        AttachError, match="does not take the IPoIB settings mode connected: Invalid argument"
    ):
        give(NetdevSettings(ipoib=IpoibSettings(None, "connected")), sides)


def test_what_the_kernel_tells_is_understood_and_other_interfaces_have_none_of_it() -> None:
    host, _, _ = two()
    host.links[0].mode, host.links[0].umcast = "connected", 1
    assert ipoib.read(host, 7) == IpoibSettings(0xFFFF, "connected", True)  # type: ignore[arg-type]
    plain = struct.pack("=BxHiII", 0, 1, 3, 0, 0) + nested(18, attribute(1, b"vlan\0"))
    assert ipoib._settings(plain) is None
    assert ipoib._settings(struct.pack("=BxHiII", 0, 1, 3, 0, 0)) is None


def test_what_an_older_record_does_not_know_is_left_alone() -> None:
    host, _, _ = two()
    assert ipoib.restore(host, 7, None, "ib3") == []  # type: ignore[arg-type]
    assert host.said == []
