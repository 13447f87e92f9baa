"""A VF's MAC and GUID are the same at every boot, no two are alike, and none is the manufacturer's."""

from __future__ import annotations

from railmate.attach.sriov import stable_guid, stable_mac

NICS = [f"b8:59:9f:00:{bus:02x}:{port:02x}" for bus in range(64) for port in range(2)]


def test_the_same_vf_has_the_same_mac_at_every_boot() -> None:
    assert stable_mac(NICS[0], 3) == stable_mac(NICS[0], 3) == "96:48:52:76:84:09"


def test_no_two_vfs_of_a_large_node_share_a_mac_or_guid() -> None:
    assert len({stable_mac(nic, index) for nic in NICS for index in range(128)}) == len(NICS) * 128
    assert len({stable_guid(nic, index) for nic in NICS for index in range(128)}) == len(NICS) * 128


def test_macs_are_unicast_and_locally_administered() -> None:
    for index in range(128):
        first = int(stable_mac(NICS[0], index).split(":")[0], 16)
        assert first & 0b11 == 0b10


def test_guids_are_eight_octets_and_locally_administered() -> None:
    octets = stable_guid("b8:59:9f:03:00:00:00:01", 0).split(":")
    assert len(octets) == 8
    assert int(octets[0], 16) & 0b11 == 0b10
