"""What status.devices and the metadata file say of a NIC in its pod."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from railmate.attach.model import AttachedNetdev, NetdevSnapshot, SubInterface
from railmate.attach.rdmamodel import Gid, RdmaDeviceRef, SeenNic
from railmate.claims import metadata
from railmate.claims.records import Attachment, Entry, PreparedDevice, PreparedNic, Seen
from railmate.node.conditions import device_status
from unit.claims.claims_world import PF, PORT, PORT_MAC, VFS, ref

V4 = Gid(3, "0000:0000:0000:0000:0000:ffff:0a09:0001", "RoCE v2", "net1")
LOCAL = Gid(1, "fe80:0000:0000:0000:0000:00ff:fe00:0102", "RoCE v2", "net1")
MAC = "02:00:00:00:00:aa"
GOOD = SeenNic(VFS[0], "net1", ("10.9.0.1/24", "fd00::9/64"), "mlx5_2", "Ethernet", "ACTIVE", V4, mac=MAC)


def entry(*seen: SeenNic, netns: str | None = "/run/netns/1", nics: int = 1) -> Entry:
    prepared = tuple(
        PreparedNic(
            VFS[n],
            f"net{n + 1}",
            NetdevSnapshot(VFS[n], f"vf{n}", f"02:00:00:00:00:0{n}", 1500, True, VFS[n]),
            rdma=(RdmaDeviceRef(f"mlx5_{n + 2}"),),
        )
        for n in range(nics)
    )
    attributes = {"railmate.dev/distance": {"string": "PXB"}}
    device = PreparedDevice("main", "node1", "pair-0", ("0000:07:00.0",), prepared, attributes=attributes)
    netdevs = (AttachedNetdev(VFS[0], "net1", 7, "02:00:00:00:00:aa", 1500),)
    at = Attachment("s1", "pod-1", "team/p", netns, True, netdevs if netns else ())
    return Entry(ref(1), ("pod-1",), (device,), "boot", None, at, Seen("s1", seen) if seen else None)


def status(one: Entry) -> dict[str, Any]:
    return device_status("railmate.dev", one, one.devices[0])


def conditions(one: Entry) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in status(one)["conditions"]}


def message(one: Entry, kind: str) -> str:
    (found,) = [c["message"] for c in status(one)["conditions"] if c["type"] == kind]
    return str(found)


def test_pod_that_has_all_is_ready_and_its_facts_are_there() -> None:
    found = status(entry(GOOD))
    assert conditions(entry(GOOD)) == {
        "Ready": ("True", "Attached"),
        "NetworkReady": ("True", "Attached"),
        "RDMAReady": ("True", "GIDReady"),
    }
    assert found["networkData"] == {
        "interfaceName": "net1",
        "hardwareAddress": "02:00:00:00:00:aa",
        "ips": ["10.9.0.1/24", "fd00::9/64"],
    }
    assert found["data"] == {
        "distance": "PXB",
        "nics": [
            {
                "pciBusID": VFS[0],
                "interface": "net1",
                "rdmaDevice": "mlx5_2",
                "linkLayer": "Ethernet",
                "portState": "ACTIVE",
                "gidIndex": 3,
                "gid": V4.gid,
                "gidType": "RoCE v2",
            }
        ],
    }


@pytest.mark.parametrize(
    ("seen", "ready", "reason", "words"),
    [
        (replace(GOOD, gid=None, addresses=()), "False", "NoGID", "Give it addresses"),
        (replace(GOOD, gid=LOCAL, addresses=()), "True", "LinkLocalGID", "own subnet only"),
        (replace(GOOD, port_state="DOWN", gid=None), "False", "PortNotActive", "DOWN"),
        (replace(GOOD, rdma_device=None, gid=None), "False", "DeviceNotInPod", "mlx5_2"),
        (replace(GOOD, link_layer="InfiniBand"), "True", "PortActive", "InfiniBand"),
        (replace(GOOD, has_subsystem=False, rdma_device=None), "Unknown", "NoRDMASubsystem", "modules"),
        (replace(GOOD, readable=False, gid=None), "Unknown", "NotReadable", "cannot be read"),
    ],
)
def test_what_is_wrong_with_rdma_is_said_in_words(seen: SeenNic, ready: str, reason: str, words: str) -> None:
    one = entry(seen)
    assert conditions(one)["RDMAReady"] == (ready, reason)
    assert words in message(one, "RDMAReady")
    assert conditions(one)["Ready"][0] == ("False" if ready == "False" else "True")
    assert ready != "False" or message(one, "RDMAReady") in message(one, "Ready")


def test_nic_that_could_not_be_looked_at_is_attached_all_the_same() -> None:
    assert conditions(entry()) == {
        "Ready": ("True", "Attached"),
        "NetworkReady": ("True", "Attached"),
        "RDMAReady": ("Unknown", "NotLookedAt"),
    }


def test_one_bad_nic_of_two_decides() -> None:
    bad = replace(GOOD, pci_address=VFS[1], interface="net2", gid=None)
    found = conditions(entry(GOOD, bad, nics=2))
    assert found["RDMAReady"] == ("False", "NoGID")
    assert "networkData" not in status(entry(GOOD, bad, nics=2)), "the API has room for one"


def test_pod_on_the_host_network_sees_the_netdev_under_its_own_name() -> None:
    one = entry(replace(GOOD, interface="vf0"), netns=None)
    assert conditions(one)["NetworkReady"] == ("True", "HostNetwork")
    assert status(one)["networkData"]["interfaceName"] == "vf0"


def test_what_an_earlier_sandbox_saw_does_not_count() -> None:
    one = replace(entry(GOOD), seen=Seen("s0", (GOOD,)))
    assert conditions(one)["RDMAReady"] == ("Unknown", "NotLookedAt")


def documents(one: Entry) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metadata.render(one, "main", "railmate.dev").splitlines()]


def test_metadata_file_has_the_same_facts() -> None:
    newest, oldest = documents(entry(GOOD))
    assert newest["requests"] == oldest["requests"]
    (device,) = newest["requests"][0]["devices"]
    assert device["networkData"] == status(entry(GOOD))["networkData"]
    assert device["attributes"] == {
        "railmate.dev/distance": {"string": "PXB"},
        "railmate.dev/interface": {"string": "net1"},
        "railmate.dev/rdmaDevice": {"string": "mlx5_2"},
        "railmate.dev/gidIndex": {"int": 3},
        "railmate.dev/gid": {"string": V4.gid},
    }


def test_metadata_file_stays_as_it_is_when_the_sandbox_ends() -> None:
    """Else the reconciler would take it for altered."""
    one = entry(GOOD)
    assert documents(one.with_attachment(None)) == documents(one)


def test_metadata_names_the_netdev_as_the_pod_on_the_host_network_sees_it() -> None:
    (device,) = documents(entry(replace(GOOD, interface="vf0"), netns=None))[0]["requests"][0]["devices"]
    assert device["attributes"]["railmate.dev/interface"] == {"string": "vf0"}
    assert device["networkData"]["interfaceName"] == "vf0"


def test_metadata_that_changes_has_a_new_generation() -> None:
    assert (
        documents(entry())[0]["metadata"]["generation"] < documents(entry(GOOD))[0]["metadata"]["generation"]
    )


def test_one_gid_index_is_not_claimed_for_nics_that_differ() -> None:
    other = replace(
        GOOD, pci_address=VFS[1], interface="net2", rdma_device="mlx5_3", gid=replace(V4, index=5)
    )
    (device,) = documents(entry(GOOD, other, nics=2))[0]["requests"][0]["devices"]
    assert "railmate.dev/gidIndex" not in device["attributes"]
    assert device["attributes"]["railmate.dev/rdmaDevice"] == {"string": "mlx5_2,mlx5_3"}


def test_status_is_within_the_apis_limits() -> None:
    """At most 8 conditions, 16 addresses and 10 KiB of data a device (k8s.io/api resource/v1)."""
    many = replace(GOOD, addresses=tuple(f"10.9.{n}.1/24" for n in range(40)))
    found = status(entry(many))
    assert len(found["networkData"]["ips"]) == 16
    assert len(found["conditions"]) <= 8
    assert len(json.dumps(found["data"])) < 10240


def test_share_of_a_device_is_named_where_it_has_one() -> None:
    one = entry(GOOD)
    (device,) = one.devices
    assert "shareID" not in device_status("railmate.dev", one, device)
    assert device_status("railmate.dev", one, replace(device, share_id="share-1"))["shareID"] == "share-1"


def test_each_share_of_one_function_has_a_status_of_its_own() -> None:
    """Two requests of one claim may have shares of one function: same address, other interface, other GID."""
    shares = ("share-a", "share-b")
    devices = tuple(
        PreparedDevice(
            f"r{n}", "node1", "shared",
            nics=(
                PreparedNic(
                    PF, f"net{n}", rdma=(RdmaDeviceRef("mlx5_0"),),
                    sub=SubInterface(share, PORT, PORT_MAC, f"02:00:00:00:00:0{n}"),
                ),
            ),
            share_id=share,
        )
        for n, share in enumerate(shares, 1)
    )  # fmt: skip
    seen = tuple(
        replace(
            GOOD, pci_address=PF, interface=f"net{n}", addresses=(f"10.9.0.{n}/24",), gid=Gid(n, V4.gid, V4.kind),
            mac=f"02:00:00:00:00:0{n}", share=share,
        )
        for n, share in enumerate(shares, 1)
    )  # fmt: skip
    at = Attachment("s1", "pod-1", "team/p", "/run/netns/1", True)
    one = Entry(ref(1), ("pod-1",), devices, "boot", None, at, Seen("s1", seen))
    for n, device in enumerate(devices, 1):
        found = device_status("railmate.dev", one, device)
        assert found["shareID"] == shares[n - 1]
        assert found["networkData"] == {
            "interfaceName": f"net{n}", "hardwareAddress": f"02:00:00:00:00:0{n}", "ips": [f"10.9.0.{n}/24"]
        }  # fmt: skip
        assert found["data"]["nics"][0]["gidIndex"] == n
        assert {c["type"]: c["status"] for c in found["conditions"]} == dict.fromkeys(
            ("Ready", "NetworkReady", "RDMAReady"), "True"
        )
    on_host = replace(one, attachment=replace(at, netns=None), seen=None)
    message = device_status("railmate.dev", on_host, devices[0])["conditions"][1]["message"]
    assert PORT in message, "on the host network the function's own netdev serves"
