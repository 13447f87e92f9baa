"""A physical function that a claim has as a whole: what its kernel driver can do beyond that of its VFs is set as the
claim says, and whatever a container sets of it is undone. Likewise interfaces that a container makes over a VF, of
kinds that the machines of the other tests do not have.

In the machine without the driver's own process (see conftest): the walk is the driver's own verbs. igb (82576) has no
rules for single flows, no EEE and no FEC; see test_attach_steering for rules.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.vnode import VirtualNode

_SCRIPT = Path(__file__).with_name("port_in_guest.py")
#: None of it can be had of a VF of this NIC, or of a veth.
_ASKED = {"channels": {"combined": 1}, "rings": {"rx": 512, "tx": 1024}, "features": {"rx-all": True}}
_TOO_MUCH = {
    "combined channels 64: at most 8": {"channels": {"combined": 64}},
    "rx rings 8192: at most 4096": {"rings": {"rx": 8192}},
    "the features rx-fcs, as its driver does not let them be changed": {"features": {"rx-fcs": True}},
}
_ABUSE = (
    "ethtool -L net1 combined 2",
    "ethtool -X net1 equal 1",
    "ethtool -N net1 rx-flow-hash udp4 sdfn",
    "ethtool -G net1 rx 256 tx 256",
    "ethtool -C net1 rx-usecs 50",
    "ethtool --set-priv-flags net1 legacy-rx on",
    "ethtool -s net1 wol d",
    "ethtool -s net1 advertise 0x008",
    "ethtool -s net1 speed 100 duplex full autoneg off",
)
#: What a container makes over its VF; of which kinds nothing must be left in a pod that lives on.
_USES = {
    "bond": ("ip link add b0 type bond mode active-backup fail_over_mac active", "ip link set net1 down",
             "ip link set net1 master b0", "ip link set b0 up"),
    "vrf": ("ip link add v0 type vrf table 7", "ip link set net1 master v0", "ip link set v0 up"),
    "ipvlan": ("ip link add link net1 name over0 type ipvlan", "ip link set over0 up"),
    "macvtap": ("ip link add link net1 name over0 type macvtap mode passthru", "ip link set over0 up"),
    "queueing": ("tc qdisc replace dev net1 root handle 1: prio", "tc qdisc add dev net1 clsact",
                 "tc filter add dev net1 ingress matchall action drop",
                 "tc filter add dev net1 egress protocol ip u32 match u32 0 0 action drop"),
}  # fmt: skip


@pytest.fixture(scope="module")
def seen(iommu_node: VirtualNode) -> dict[str, Any]:
    """What one walk through the driver's verbs has shown; see the script."""
    argument = {
        "asked": _ASKED,
        "too_much": list(_TOO_MUCH.values()),
        "abuse": [one.split() for one in _ABUSE],
        "uses": {name: [one.split() for one in commands] for name, commands in _USES.items()},
    }
    path = "PYTHONPATH=/usr/lib/railmate/own:/usr/lib/railmate/packages"
    command = ("env", path, "python3", "-", json.dumps(argument))
    said = iommu_node.channel.run(*command, stdin=_SCRIPT.read_bytes(), timeout=900)
    return dict(json.loads(said))


def test_queues_rings_and_offloads_of_the_port_are_as_the_claim_says(seen: dict[str, Any]) -> None:
    pod = seen["pod"]
    (combined,) = [line for line in current(pod["-l NIC"]) if line.startswith("Combined")]
    assert combined.split() == ["Combined:", "1"]
    assert {("RX:", "512"), ("TX:", "1024")} <= {tuple(line.split()) for line in current(pod["-g NIC"])}
    assert "rx-all: on" in pod["-k NIC"]


def test_what_the_port_does_not_have_is_refused_before_anything_is_touched(seen: dict[str, Any]) -> None:
    for expected, said in zip(_TOO_MUCH, seen["refused"], strict=True):
        assert expected in said
        assert seen["address"] in said


def test_a_container_may_change_queues_steering_link_and_wake_up(seen: dict[str, Any]) -> None:
    """So that what comes next says something."""
    expected = {
        "-l NIC",
        "-g NIC",
        "-x NIC",
        "-c NIC",
        "--show-priv-flags NIC",
        "-n NIC rx-flow-hash udp4",
        "NIC",
    }
    assert expected <= seen["abused"].keys()
    told = seen["abused"]["NIC"]
    assert {"Auto-negotiation: off", "Wake-on: d"} <= set(told)


def test_afterwards_the_port_is_as_it_was_line_by_line(seen: dict[str, Any]) -> None:
    assert seen["returned"] == ["returned"]
    assert seen["after"] == []


@pytest.mark.parametrize("name", list(_USES))
def test_what_a_container_made_over_its_vf_keeps_nothing_of_it(seen: dict[str, Any], name: str) -> None:
    returned, differing, left = seen["uses"][name]
    assert returned == ["returned"]
    assert differing == []
    assert "over0" not in left


def current(lines: list[str]) -> list[str]:
    return lines[lines.index("Current hardware settings:") :]
