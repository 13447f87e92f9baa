"""From a NIC's config to its settings, and what is refused on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from claims_world import PF, VFS, claim, config, inventory, offer, ref, result, view

from railmate.attach.model import PhysicalPort
from railmate.attach.settings import (
    NO_SETTINGS,
    EthtoolSettings,
    Neighbour,
    NetdevSettings,
    Route,
    RoutingRule,
    VfSettings,
)
from railmate.claims.allocation import ClaimError
from railmate.claims.nicplan import physical_port
from railmate.claims.plan import NodeView, make_plan
from railmate.inventory.model import Inventory, Netdev, RdmaDevice
from railmate_api import fields
from railmate_api.config import RdmaVfConfig


def with_pf(**netdev: Any) -> Inventory:
    """The small node, with the PF's netdev as given."""
    found = inventory()
    physical = replace(found.functions[PF], netdevs=(Netdev("enp12s0np0", link_type="ether", **netdev),))
    return replace(found, functions={**found.functions, PF: physical})


def node(**more: Any) -> NodeView:
    return view(inventory=with_pf(mtu=9000), **more)


def planned(*configs: Any, where: NodeView | None = None, device: str = "vf-0") -> NetdevSettings:
    plan = make_plan(claim(1, device, configs=list(configs)), ref(1), where or node(), ())
    return plan.devices[0].nics[0].settings


def refusal(*configs: Any, where: NodeView | None = None, device: str = "vf-0") -> str:
    with pytest.raises(ClaimError) as caught:
        planned(*configs, where=where, device=device)
    assert "ResourceClaim team/claim-1" in str(caught.value)
    return str(caught.value)


#: Every field of the config but the name, and what it becomes.
EFFECTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mtu": ({"mtu": 1500}, {"mtu": 1500}),
    "mac": ({"mac": "02:00:00:00:00:AA"}, {"mac": "02:00:00:00:00:aa", "vf": VfSettings("02:00:00:00:00:aa")}),
    "addresses": ({"addresses": ["10.0.0.2/24"]}, {"addresses": ("10.0.0.2/24",)}),
    "routes": (
        {"addresses": ["10.0.0.2/24"],
         "routes": [{"destination": "10.1.0.0/16", "metric": 5, "table": 100},
                    {"destination": "0.0.0.0/0", "gateway": "10.0.0.1", "source": "10.0.0.2"}]},
        {"addresses": ("10.0.0.2/24",),
         "routes": (Route("10.1.0.0/16", None, None, 5, 100), Route("0.0.0.0/0", "10.0.0.1", "10.0.0.2"))},
    ),
    "rules": (
        {"rules": [{"table": 100, "source": "10.0.0.2/32", "priority": 7}, {"table": 9, "destination": "::/0"}]},
        {"rules": (RoutingRule(100, 7, "10.0.0.2/32"), RoutingRule(9, 1000, None, "::/0"))},
    ),
    "neighbours": (
        {"neighbours": [{"address": "10.0.0.1", "mac": "02:00:00:00:00:0B"}]},
        {"neighbours": (Neighbour("10.0.0.1", "02:00:00:00:00:0b"),)},
    ),
    "sysctls": (
        {"sysctls": {"arpIgnore": 1, "arpAnnounce": 2, "arpFilter": True, "arpNotify": False, "rpFilter": 2,
                     "acceptLocal": True, "acceptRA": 0, "disableIPv6": True}},
        {"sysctls": {"ipv4/arp_ignore": "1", "ipv4/arp_announce": "2", "ipv4/arp_filter": "1",
                     "ipv4/arp_notify": "0", "ipv4/rp_filter": "2", "ipv4/accept_local": "1", "ipv6/accept_ra": "0",
                     "ipv6/disable_ipv6": "1"}},
    ),
    "features": ({"features": {"rx-gro": False}}, {"ethtool": EthtoolSettings({"rx-gro": False})}),
    "rings": ({"rings": {"rx": 512, "tx": 256}}, {"ethtool": EthtoolSettings({}, {"rx": 512, "tx": 256})}),
    "channels": (
        {"channels": {"rx": 1, "tx": 2, "combined": 4}},
        {"ethtool": EthtoolSettings({}, {}, {"rx": 1, "tx": 2, "combined": 4})},
    ),
    "vlan": ({"vlan": 100}, {"vf": VfSettings(vlan=100, qos=0, protocol="802.1Q")}),
    "vlanQoS": ({"vlan": 100, "vlanQoS": 3}, {"vf": VfSettings(vlan=100, qos=3, protocol="802.1Q")}),
    "vlanProtocol": (
        {"vlan": 100, "vlanProtocol": "802.1ad"}, {"vf": VfSettings(vlan=100, qos=0, protocol="802.1ad")}
    ),
    "trust": ({"trust": True}, {"vf": VfSettings(trust=True)}),
    "spoofCheck": ({"spoofCheck": False}, {"vf": VfSettings(spoof_check=False)}),
    "linkState": ({"linkState": "disable"}, {"vf": VfSettings(link_state="disable")}),
    "minTxRate": ({"minTxRate": 10}, {"vf": VfSettings(min_tx_rate=10)}),
    "maxTxRate": ({"maxTxRate": 1000}, {"vf": VfSettings(max_tx_rate=1000)}),
}  # fmt: skip


@pytest.mark.parametrize("field", EFFECTS)
def test_every_field_becomes_a_setting(field: str) -> None:
    given, wanted = EFFECTS[field]
    assert planned(config(**given)) == replace(NO_SETTINGS, **({"mtu": 9000} | wanted))
    assert planned(config(**given), device="pair-0") == replace(NO_SETTINGS, **({"mtu": 9000} | wanted))


def test_no_field_is_forgotten() -> None:
    declared = {one.name for one in fields.settings(RdmaVfConfig).values()}
    elsewhere = {
        "driver": "test_passed_through",
        "guid": "test_infiniband",
        "pkey": "test_infiniband",
        "ipoib": "test_infiniband",
    }
    assert declared == EFFECTS.keys() | {"interfaceName", "ipam", "envHints"} | elsewhere.keys()
    for field, module in elsewhere.items():
        assert field in Path(__file__).with_name(f"{module}.py").read_text(), f"{field} in {module}"


def nested(kind: fields.Type) -> set[str]:
    """Names of the settings in objects of ours, and in lists of them."""
    if isinstance(kind, fields.Items):
        return nested(kind.item)
    return (
        {one.name for one in fields.settings(kind.of).values()}
        if isinstance(kind, fields.Group) and not kind.open
        else set()
    )


def written(value: Any) -> set[str]:
    entries = value if isinstance(value, list) else [value]
    return {name for one in entries if isinstance(one, dict) for name in one}


def test_no_nested_field_is_forgotten() -> None:
    declared = {one.name: nested(one.type) for one in fields.settings(RdmaVfConfig).values()}
    assert {name for name, inner in declared.items() if inner} == {
        "routes", "rules", "neighbours", "sysctls", "rings", "channels", "ipoib"
    }  # fmt: skip
    for name in declared.keys() & EFFECTS.keys():
        if declared[name]:
            assert written(EFFECTS[name][0][name]) == declared[name], name
    elsewhere = Path(__file__).with_name("test_infiniband.py").read_text()
    assert all(f'"{field}": ' in elsewhere for field in declared["ipoib"])


def test_without_config_a_vf_gets_its_physical_functions_mtu() -> None:
    assert planned() == NetdevSettings(mtu=9000)
    assert planned(where=view(inventory=with_pf())) == NO_SETTINGS


def test_a_physical_function_keeps_its_own_mtu() -> None:
    devices = offer().devices
    whole = replace(next(one for one in devices if one.name == "vf-0"), name="pf", nics=(PF,))
    assert planned(where=node(offer=replace(offer(), devices=(*devices, whole))), device="pf") == NO_SETTINGS


def test_the_physical_port_of_a_vf() -> None:
    found = with_pf()
    assert physical_port(found.functions[VFS[2]], found) == PhysicalPort("enp12s0np0", 2)
    assert physical_port(found.functions[PF], found) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mtu": 9001}, "mtu 9001 is above the 9000 of its physical function 0000:0c:00.0"),
        ({"mtu": 1000, "addresses": ["2001:db8::2/64"]}, "IPv6 needs an mtu of 1280"),
        ({"addresses": ["2001:db8::2/64"], "sysctls": {"disableIPv6": True}}, "disableIPv6 is true"),
        (
            {"routes": [{"destination": "10.1.0.0/16", "gateway": "10.0.0.1"}]},
            "the gateway 10.0.0.1 of the route to 10.1.0.0/16 is on none of the interface's networks",
        ),
        (
            {"addresses": ["10.0.0.2/24"], "routes": [{"destination": "10.1.0.0/16", "gateway": "10.0.1.1"}]},
            "the gateway 10.0.1.1",
        ),
        ({"routes": [{"destination": "10.1.0.0/16", "gateway": "fe80::1"}]}, "mixes IPv4 and IPv6"),
        ({"routes": [{"destination": "10.1.0.0/16", "source": "10.0.0.9"}]}, "the source 10.0.0.9"),
        ({"rules": [{"table": 5, "source": "10.0.0.0/8", "destination": "::/0"}]}, "mixes IPv4 and IPv6"),
        ({"ipam": {"type": "host-local"}}, "no IPAM plugin 'host-local' for want of a CNI directory"),
    ],
)
def test_what_would_fail_in_the_pod_is_refused(given: dict[str, Any], said: str) -> None:
    assert said in refusal(config(**given))
    assert "request main" in refusal(config(**given)) or "ipam" in given


@pytest.mark.parametrize(
    "given",
    [
        {"addresses": ["10.0.0.2/24"], "routes": [{"destination": "0.0.0.0/0", "gateway": "10.0.0.1"}]},
        {"routes": [{"destination": "10.0.0.1/32"}, {"destination": "0.0.0.0/0", "gateway": "10.0.0.1"}]},
        {"routes": [{"destination": "::/0", "gateway": "fe80::1"}]},
    ],
)
def test_gateways_that_can_be_reached_are_taken(given: dict[str, Any]) -> None:
    assert len(planned(config(**given)).routes) == len(given["routes"])


@pytest.mark.parametrize(
    "given",
    [
        {"mac": "02:00:00:00:00:0a"},
        {"addresses": ["10.0.0.2/24"]},
        {"routes": [{"destination": "10.1.0.0/16"}]},
    ],
)
def test_what_only_one_nic_can_have_is_refused_for_several(given: dict[str, Any]) -> None:
    assert "Give each NIC a request of its own" in refusal(config(**given), device="wide")
    two = claim(1, result("vf-0"), result("vf-1"), configs=[config(**given)])
    with pytest.raises(ClaimError, match="a request of its own"):
        make_plan(two, ref(1), node(), ())
    apart = claim(1, result("vf-0", "a"), result("vf-1", "b"), configs=[config(requests=["a"], **given)])
    assert make_plan(apart, ref(1), node(), ()).devices[0].nics[0].settings != NetdevSettings(mtu=9000)


def test_rules_between_fields_hold_for_class_and_claim_together() -> None:
    of_class, of_claim = config("FromClass", maxTxRate=100), config(minTxRate=200)
    assert "class and claim together: minTxRate must not be above maxTxRate" in refusal(of_class, of_claim)


def test_settings_of_a_vf_are_refused_where_its_physical_function_cannot_be_asked() -> None:
    found = inventory()
    hidden = {**found.functions, PF: replace(found.functions[PF], netdevs=())}
    where = view(inventory=replace(found, functions=hidden))
    assert "0000:0c:00.1 has none on this node" in refusal(config(vlan=5), where=where)
    assert planned(config(mac="02:00:00:00:00:0a"), where=where).vf is None


def test_settings_of_a_netdev_are_refused_where_there_is_none() -> None:
    found = inventory()
    bare = replace(found.functions[VFS[0]], netdevs=(), rdma_devices=(RdmaDevice("mlx5_0", "InfiniBand"),))
    where = view(inventory=replace(found, functions={**found.functions, VFS[0]: bare}))
    assert "mtu, vlan: 0000:0c:00.1 has an RDMA device only" in refusal(config(mtu=1500, vlan=5), where=where)
    assert planned(config(interfaceName="rail"), where=where) == NO_SETTINGS


def test_infiniband_has_no_mac_and_no_vlan_to_give() -> None:
    found = inventory()
    infiniband = replace(found.functions[VFS[0]], netdevs=(Netdev("ib0", link_type="infiniband"),))
    where = view(inventory=replace(found, functions={**found.functions, VFS[0]: infiniband}))
    assert "InfiniBand" in refusal(config(vlan=5), where=where)


def test_an_ipam_plugin_is_asked_for_the_claim_and_its_interface(tmp_path: Path) -> None:
    section = {"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/24"}]]}
    (tmp_path / "host-local").touch()
    where = node(cni_dir=tmp_path, node_exists=Path.exists)
    one = claim(
        1, "vf-0", configs=[config(ipam=section, routes=[{"destination": "::/0", "gateway": "fe80::1"}])]
    )
    nic = make_plan(one, ref(1), where, ()).devices[0].nics[0]
    assert nic.ipam is not None
    assert (nic.ipam.config, nic.ipam.owner, nic.ipam.interface) == (section, ref(1).uid, "net1")
    assert (nic.ipam.pod_namespace, nic.ipam.pod_name, nic.leased) == ("team", "pod-1", False)
    assert f"no IPAM plugin 'whereabouts' in {tmp_path}" in refusal(
        config(ipam={"type": "whereabouts"}), where=where
    )
