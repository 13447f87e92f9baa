"""What a physical function keeps of its VFs: read and set through its netdev (rtnetlink(7), IFLA_VFINFO_LIST).

Structures of kernel include/uapi/linux/if_link.h. Each setting is a message of its own, so that an error tells which
one the NIC's driver refuses.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from railmate.attach import linkmessages, links
from railmate.attach.errors import AttachError
from railmate.attach.linkmessages import GETLINK, NEWLINK, VFINFO_LIST
from railmate.attach.links import attempt, mac_bytes, mac_text
from railmate.attach.model import PhysicalPort
from railmate.attach.settings import VfSettings
from railmate.netlink import Netlink, attribute, attribute_list, attributes, nested

_VF_INFO = 1
_MAC, _VLAN, _SPOOFCHK, _LINK_STATE, _RATE, _TRUST, _VLAN_LIST, _VLAN_INFO = 1, 2, 4, 5, 6, 9, 12, 1
_NODE_GUID, _PORT_GUID = 10, 11
_UNKNOWN = 0xFFFFFFFF  # what a driver that has no such thing says
_LINK_STATES = ("auto", "enable", "disable")  # IFLA_VF_LINK_STATE_*
_PROTOCOLS = {"802.1Q": 0x8100, "802.1ad": 0x88A8}
_GUID = struct.Struct("=IxxxxQ")  # struct ifla_vf_guid


def read(netlink: Netlink, port: PhysicalPort) -> VfSettings:
    """Raises AttachError."""
    with attempt(f"the settings of {port} cannot be read"):
        body = linkmessages.question(_index(netlink, port), vfs=True)
        (answer,) = netlink.request(GETLINK, body)
    for _, information in attribute_list(linkmessages.answer(answer)[2].get(VFINFO_LIST, b"")):
        parts = attributes(information)
        if _MAC in parts and struct.unpack_from("=I", parts[_MAC])[0] == port.vf:
            return _settings(parts)
    raise AttachError(
        f"{port.netdev} tells nothing of its VF {port.vf}; is it the physical function's netdev?"
    )


def _index(netlink: Netlink, port: PhysicalPort) -> int:
    link = links.get(netlink, port.netdev)
    if link is None:
        raise AttachError(f"there is no netdev {port.netdev} on the host, through which {port} is set")
    return link.index


def _settings(parts: dict[int, bytes]) -> VfSettings:
    vlan, qos, protocol = _vlan(parts)
    low, high = struct.unpack_from("=II", parts[_RATE], 4) if _RATE in parts else (None, None)
    state = _value(parts, _LINK_STATE)
    return VfSettings(
        mac=mac_text(parts[_MAC][4:10]),
        vlan=vlan,
        qos=qos,
        protocol=protocol,
        trust=_flag(parts, _TRUST),
        spoof_check=_flag(parts, _SPOOFCHK),
        link_state=_LINK_STATES[state] if state is not None and state < len(_LINK_STATES) else None,
        min_tx_rate=low,
        max_tx_rate=high,
        guid=_guid(parts),
    )


def _vlan(parts: dict[int, bytes]) -> tuple[int | None, int | None, str | None]:
    for _, entry in attribute_list(parts.get(_VLAN_LIST, b"")):
        _, vlan, qos = struct.unpack_from("=III", entry)
        (protocol,) = struct.unpack_from(">H", entry, 12)
        return vlan, qos, {number: name for name, number in _PROTOCOLS.items()}.get(protocol)
    if _VLAN in parts:
        _, vlan, qos = struct.unpack_from("=III", parts[_VLAN])
        return vlan, qos, None
    return None, None, None


def write(netlink: Netlink, port: PhysicalPort, wanted: VfSettings) -> None:
    """Set what is not None. Raises AttachError that names the setting."""
    parts = list(_parts(port.vf, wanted))
    physical = _index(netlink, port) if parts else 0
    for what, part in parts:
        with attempt(f"{port} does not take {what}"):
            body = linkmessages.about(physical, nested(VFINFO_LIST, nested(_VF_INFO, part)))
            netlink.request(NEWLINK, body)


def write_guids(netlink: Netlink, port: PhysicalPort, guid: str) -> None:
    """Set the InfiniBand node and port GUID of the VF. Raises AttachError."""
    write(netlink, port, VfSettings(guid=guid))


def _parts(index: int, wanted: VfSettings) -> Iterator[tuple[str, bytes]]:
    def numbers(kind: int, *values: int) -> bytes:
        return attribute(kind, struct.pack(f"={1 + len(values)}I", index, *values))

    if wanted.mac is not None:
        yield f"the MAC {wanted.mac}", attribute(_MAC, struct.pack("=I32s", index, mac_bytes(wanted.mac)))
    if wanted.vlan is not None:
        protocol = wanted.protocol or "802.1Q"
        entry = struct.pack("=III", index, wanted.vlan, wanted.qos or 0) + struct.pack(
            ">HH", _PROTOCOLS[protocol], 0
        )
        yield f"the VLAN {wanted.vlan} ({protocol})", nested(_VLAN_LIST, attribute(_VLAN_INFO, entry))
    if wanted.min_tx_rate is not None or wanted.max_tx_rate is not None:
        rates = (wanted.min_tx_rate or 0, wanted.max_tx_rate or 0)
        yield f"the rates {rates[0]} to {rates[1]} Mbit/s", numbers(_RATE, *rates)
    if wanted.spoof_check is not None:
        yield f"spoof check {wanted.spoof_check}", numbers(_SPOOFCHK, wanted.spoof_check)
    if wanted.link_state is not None:
        yield f"link state {wanted.link_state}", numbers(_LINK_STATE, _LINK_STATES.index(wanted.link_state))
    if wanted.trust is not None:
        yield f"trust {wanted.trust}", numbers(_TRUST, wanted.trust)
    if wanted.guid is not None:
        guid = _GUID.pack(index, int(wanted.guid.replace(":", ""), 16))
        yield f"the node GUID {wanted.guid}", attribute(_NODE_GUID, guid)
        yield f"the port GUID {wanted.guid}", attribute(_PORT_GUID, guid)


NOTHING = VfSettings()


def words(settings: VfSettings) -> str:
    """For people: what is set, one after the other."""
    return ", ".join(what for what, _ in _parts(0, settings))


#: What goes into one message together: who sets one of them sets all.
_TOGETHER = (("vlan", "qos", "protocol"), ("min_tx_rate", "max_tx_rate"))


def difference(wanted: VfSettings, now: VfSettings) -> VfSettings:
    """What of ``wanted`` is not so now. What the NIC does not tell now it would not take either."""
    names = [one.name for one in fields(VfSettings)]
    differing = {
        name
        for name in names
        if getattr(wanted, name) is not None and getattr(now, name) not in (None, getattr(wanted, name))
    }
    for group in _TOGETHER:
        if differing & set(group):
            differing |= {name for name in group if getattr(wanted, name) is not None}
    return VfSettings(**{name: getattr(wanted, name) for name in names if name in differing})


def filled(wanted: VfSettings, now: VfSettings) -> VfSettings:
    """``wanted``, and beside it what one message must repeat of ``now``."""
    more: dict[str, Any] = {}
    for group in _TOGETHER:
        if any(getattr(wanted, name) is not None for name in group):
            more |= {name: getattr(now, name) for name in group if getattr(wanted, name) is None}
    return replace(wanted, **more)


def _value(parts: dict[int, bytes], kind: int) -> int | None:
    if kind not in parts:
        return None
    value: int = struct.unpack_from("=I", parts[kind], 4)[0]
    return None if value == _UNKNOWN else value


def _guid(parts: dict[int, bytes]) -> str | None:
    """The port's GUID, which is what a subnet manager knows it by. Zeros where it was never set, which is set again
    like any other; None where the NIC has none."""
    if _PORT_GUID not in parts:
        return None
    value = _GUID.unpack_from(parts[_PORT_GUID])[1]
    return ":".join(f"{byte:02x}" for byte in value.to_bytes(8, "big"))


def _flag(parts: dict[int, bytes], kind: int) -> bool | None:
    value = _value(parts, kind)
    return None if value is None else bool(value)
