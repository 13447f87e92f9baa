"""Records of the railmate before this one are read, and what they know is enough to bring everything home."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from claims_world import PF, VFS, ref, uid

from railmate.attach.model import AttachedNetdev, NetdevSnapshot, SubInterface
from railmate.attach.settings import NO_ETHTOOL, NO_SETTINGS
from railmate.claims.records import Entry, NewerRecordError, netdev_snapshot

#: As it was before there were settings, leases, and snapshots of more than name, MAC, MTU and state.
SNAPSHOT = {
    "mac": "02:00:00:00:00:01",
    "mtu": 1500,
    "name": "vf0",
    "parent": VFS[0],
    "pci_address": VFS[0],
    "up": True,
}
ENTRY: dict[str, Any] = {
    "attachment": {
        "complete": True,
        "netdevs": [{"ifindex": 7, "mac": "02:00:00:00:00:01", "mtu": 1500, "name": "net1", "pci_address": VFS[0]}],
        "netns": "/run/netns/1", "pod": "team/pod-1", "pod_uid": "pod-1", "sandbox": "sandbox-1",
    },
    "boot_id": "boot-1",
    "claim": {"name": "claim-1", "namespace": "team", "uid": uid(1)},
    "devices": [
        {
            "admin_access": False, "attributes": {"railmate.dev/interface": {"string": "net1"}, "x": {"bool": True}},
            "device": "pair-0", "gpus": ["0000:07:00.0"],
            "nics": [{"address": VFS[0], "interface": "net1", "snapshot": SNAPSHOT}],
            "nodes": [{"host_path": "/host/dev/nvidia0", "path": "/dev/nvidia0"}],
            "pool": "node1", "request": "main", "vendor_cdi_ids": ["nvidia.com/gpu=GPU-0"],
        }
    ],
    "pod_claim_name": None,
    "pods": ["pod-1"],
    "version": 1,
}  # fmt: skip


def test_an_entry_of_the_railmate_before_is_read() -> None:
    entry = Entry.from_json(json.loads(json.dumps(ENTRY)))
    assert entry.claim == ref(1)
    (nic,) = entry.nics
    assert nic.snapshot == NetdevSnapshot(VFS[0], "vf0", "02:00:00:00:00:01", 1500, True, VFS[0])
    assert (nic.settings, nic.ipam, nic.leased) == (NO_SETTINGS, None, False)
    assert (nic.snapshot.ethtool, nic.snapshot.physical, nic.snapshot.addresses) == (NO_ETHTOOL, None, ())
    assert (nic.snapshot.link, nic.snapshot.programs) == (None, None)
    assert entry.attachment is not None
    assert entry.attachment.netdevs == (AttachedNetdev(VFS[0], "net1", 7, "02:00:00:00:00:01", 1500),)


def test_what_this_one_adds_is_ignored_by_nobody_and_read_again() -> None:
    entry = Entry.from_json(ENTRY)
    assert Entry.from_json(json.loads(json.dumps(entry.to_json()))) == entry
    newer = entry.to_json() | {"from_a_newer_version": {"a": 1}}
    newer["devices"][0]["nics"][0]["also_newer"] = 1
    assert Entry.from_json(newer) == entry


def test_what_was_seen_is_neither_told_nor_untold_where_the_record_does_not_say() -> None:
    """Else every claim of a node would be written to once after an update."""
    seen = {"sandbox": "sandbox-1", "nics": []}
    entry = Entry.from_json(ENTRY | {"seen": seen})
    assert entry.seen is not None
    assert entry.seen.told is None
    assert Entry.from_json(ENTRY | {"seen": seen | {"told": False}}).to_json()["version"] == 1


def test_a_stray_of_the_railmate_before_is_read() -> None:
    assert netdev_snapshot(SNAPSHOT) == NetdevSnapshot(VFS[0], "vf0", "02:00:00:00:00:01", 1500, True, VFS[0])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("pods",), "pod-1"),
        (("pods",), [1]),
        (("boot_id",), None),
        (("claim",), []),
        (("devices",), {}),
        (("devices", 0, "nics"), None),
        (("devices", 0, "nics", 0, "snapshot", "mtu"), "1500"),
        (("devices", 0, "nics", 0, "snapshot", "mtu"), True),
        (("devices", 0, "nics", 0, "settings"), {"addresses": "10.0.0.1/8"}),
        (("devices", 0, "nics", 0, "settings"), {"ethtool": {"features": {"rx-gro": 1}}}),
        (("devices", 0, "nics", 0, "snapshot", "physical"), {"netdev": PF}),
        (("devices", 0, "nodes"), [1]),
        (("devices", 0, "attributes"), []),
        (("attachment", "complete"), "yes"),
    ],
)
def test_a_value_of_another_type_makes_it_no_entry(path: tuple[str | int, ...], value: Any) -> None:
    record = json.loads(json.dumps(ENTRY))
    inner = record
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    with pytest.raises(ValueError, match="not a ledger entry"):
        Entry.from_json(record)


def test_an_entry_has_the_version_that_its_reader_must_know_at_least() -> None:
    """A reader of version 1 would take a sub-interface for a plain NIC: it would open the gate and attach nothing."""
    plain = Entry.from_json(ENTRY)
    assert plain.to_json()["version"] == 1
    sub = SubInterface("share", "ib0", "02:00:00:00:00:09", "02:00:00:00:00:0a", "bridge")
    shared = plain.with_nics(lambda nic: replace(nic, sub=sub))
    written = json.loads(json.dumps(shared.to_json()))
    assert written["version"] == 2
    assert Entry.from_json(written) == shared
    with pytest.raises(NewerRecordError, match="version 3"):
        Entry.from_json(written | {"version": 3})
