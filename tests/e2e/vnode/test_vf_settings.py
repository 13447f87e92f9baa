"""What a claim's config sets on a real VF, read back from the pod, from its NIC and from its physical function.

The NICs are igb (82576): its driver has no link state of VFs, no guaranteed rate and no 802.1ad.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e.lab import eventually
from e2e.vnode.lab import PATIENCE, VnodeLab, VnodeWorkspace, pod, vf_template
from harness.vnode import VirtualNode

_MAC = "02:00:00:00:5e:70"
_SETTINGS: dict[str, Any] = {
    "interfaceName": "set",
    "mtu": 1400,
    "mac": _MAC,
    "vlan": 77,
    "vlanQoS": 3,
    "trust": True,
    "spoofCheck": False,
    "maxTxRate": 100,
    "rings": {"rx": 512, "tx": 1024},
    "features": {"rx-checksum": False, "tx-tcp-segmentation": False},
}
#: What igb refuses (fields of VfSettings), and what is said of it. The MAC that goes with one igb takes: it is undone.
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "link state": ({"link_state": "disable"}, "link state disable: Operation not supported"),
    "guaranteed rate": (
        {"min_tx_rate": 10, "max_tx_rate": 100},
        "the rates 10 to 100 Mbit/s: Invalid argument",
    ),
    "802.1ad": (
        {"vlan": 5, "protocol": "802.1ad", "mac": "02:00:00:00:5e:71", "trust": True},
        "the VLAN 5 (802.1ad): Protocol not supported",
    ),
}
_NEXT = "Leave it out of the claim's config, or ask for another NIC"
_SCRIPT = Path(__file__).with_name("refusals_in_guest.py")


@dataclass(frozen=True)
class Pods:
    """A pod with the settings, what iproute2 and ethtool say there, and the node's state before there was any."""

    workspace: VnodeWorkspace
    before: dict[str, Any]
    link: dict[str, Any]
    rings: list[str]
    features: list[str]


@pytest.fixture(scope="module")
def pods(vlab: VnodeLab) -> Iterator[Pods]:
    before = vlab.state()
    with vlab.workspace() as workspace:
        workspace.apply(vf_template("set", vlab.switches[1], **_SETTINGS), pod("set", "set"))
        workspace.await_ready("set")
        commands = ("/usr/bin/ip -j link show set", "ethtool -g set", "ethtool -k set")
        (_, link), *listings = workspace.tries("set", *commands)
        rings, features = ([" ".join(line.split()) for line in said.splitlines()] for _, said in listings)
        yield Pods(workspace, before, json.loads(link)[0], rings, features)


def test_the_pods_interface_has_mtu_and_mac(pods: Pods) -> None:
    link = pods.link
    assert (link["mtu"], link["address"], "UP" in link["flags"]) == (1400, _MAC, True)


def test_the_pods_nic_has_rings_and_features(pods: Pods) -> None:
    current = pods.rings[pods.rings.index("Current hardware settings:") :]
    assert {"RX: 512", "TX: 1024"} <= set(current)
    assert {"rx-checksumming: off", "tx-tcp-segmentation: off"} <= set(pods.features)


def test_the_physical_function_has_vlan_priority_trust_spoof_check_rate_and_mac(
    pods: Pods, vlab: VnodeLab
) -> None:
    (mine,) = (one for one in vlab.kept_of_vfs("rail1") if one["address"] == _MAC)
    assert mine["vlan_list"] == [{"vlan": 77, "qos": 3}]
    assert (mine["trust"], mine["spoofchk"]) == (True, False)
    assert mine["rate"] == {"max_tx": 100, "min_tx": 0}


def test_afterwards_every_vf_is_as_it_was_field_by_field(pods: Pods, vlab: VnodeLab) -> None:
    """The last test with this pod: it deletes it."""
    assert any(key.startswith("link.rail1.vfinfo_list.") for key in pods.before)
    assert vlab.state() != pods.before
    pods.workspace.delete_pods()
    vlab.await_state(pods.before)


def test_what_the_nic_does_not_do_is_named_and_its_vf_stays_as_it_was(virtual_node: VirtualNode) -> None:
    path = "PYTHONPATH=/usr/lib/railmate/own:/usr/lib/railmate/packages"
    asked = json.dumps({name: fields for name, (fields, _) in _REFUSED.items()})
    said = virtual_node.channel.run(
        "env", path, "python3", "-", asked, stdin=_SCRIPT.read_bytes(), timeout=PATIENCE
    )
    assert json.loads(said) == {
        name: [f"VF 1 of rail0 does not take {words}. {_NEXT}", []] for name, (_, words) in _REFUSED.items()
    }


def test_a_pod_whose_nic_does_not_do_it_waits_and_is_told_why(vlab: VnodeLab) -> None:
    before = vlab.state()
    with vlab.workspace() as workspace:
        workspace.apply(
            vf_template("refused", vlab.switches[0], linkState="disable"), pod("refused", "refused")
        )
        (told, *_) = eventually(lambda: refusals(workspace, "refused"), "an Event of the pod", PATIENCE)
        assert f"the NIC of ResourceClaim {workspace.namespace}/refused-" in told
        assert f"cannot be attached to pod {workspace.namespace}/refused" in told
        assert f"{_REFUSED['link state'][1]}. {_NEXT}" in told
        assert workspace.get("pod", "refused")["status"]["phase"] == "Pending"
    vlab.await_state(before)


def refusals(workspace: VnodeWorkspace, name: str) -> list[str]:
    """Messages of the pod's events about what was refused: the sandbox, or its container where that came first."""
    selector = f"involvedObject.name={name},type=Warning"
    listed = json.loads(workspace.kubectl("get", "events", "--field-selector", selector, "-o", "json"))
    return [event["message"] for event in listed["items"] if "cannot be attached" in event["message"]]
