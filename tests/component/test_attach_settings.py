"""Every setting of a netdev has its effect in the pod, as the kernel's own tools see it, and none is left behind."""

from __future__ import annotations

import ctypes
import json
import os
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from component.netdev_lab import MakeVf, Pod, host_links, run
from railmate.attach import addressing, links, sysctl
from railmate.attach.errors import AttachError, UnfitError
from railmate.attach.model import MoveRequest, NetdevSnapshot, ReturnRequest, ReturnState
from railmate.attach.netdev import attach_all, move_back, return_all, snapshot
from railmate.attach.settings import EthtoolSettings, Neighbour, NetdevSettings, Route, RoutingRule
from railmate.netlink import Netlink
from railmate_api import fields
from railmate_api import vf as vf_config

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces: needs root")

ADDRESS = "0000:c1:00.1"
FULL = NetdevSettings(
    mtu=3000,
    mac="02:00:00:00:77:77",
    addresses=("10.77.0.2/24", "2001:db8:77::2/64"),
    routes=(Route("10.78.0.0/16", "10.77.0.1"), Route("2001:db8:78::/64", "2001:db8:77::1", metric=50)),
    rules=(RoutingRule(100, 1000, source="10.77.0.2/32"),),
    neighbours=(Neighbour("10.77.0.1", "02:00:00:00:00:01"),),
    sysctls={"ipv4/arp_ignore": "1", "ipv6/accept_ra": "0"},
    ethtool=EthtoolSettings({"rx-gro": True}, {}, {"rx": 2, "tx": 3}),
)


def give(vf: NetdevSnapshot, pod: Pod, **settings: Any) -> None:
    attach_all([MoveRequest(vf, "net1", NetdevSettings(**settings))], pod.path)


def take(vf: NetdevSnapshot, pod: Pod, settings: NetdevSettings) -> None:
    (result,) = return_all([ReturnRequest(vf, None, settings)], pod.path)
    assert (result.state, result.problems) == (ReturnState.RETURNED, ())


def fresh(vf: NetdevSnapshot) -> NetdevSnapshot:
    """The netdev as it is now."""
    return snapshot(vf.name, vf.pci_address)


def test_mtu(vf: NetdevSnapshot, pod: Pod) -> None:
    give(vf, pod, mtu=1500)
    assert pod.links()["net1"]["mtu"] == 1500


def test_mac(vf: NetdevSnapshot, pod: Pod) -> None:
    give(vf, pod, mac="02:00:00:00:77:77")
    assert pod.links()["net1"]["address"] == "02:00:00:00:77:77"


def test_addresses_are_usable_at_once(vf: NetdevSnapshot, pod: Pod) -> None:
    give(vf, pod, addresses=("10.77.0.2/24", "10.77.9.1/32", "2001:db8::2/64"))
    (link,) = pod.json("address", "show", "dev", "net1")
    found = {
        f"{one['local']}/{one['prefixlen']}": one for one in link["addr_info"] if one["scope"] == "global"
    }
    assert set(found) == {"10.77.0.2/24", "10.77.9.1/32", "2001:db8::2/64"}
    assert found["10.77.0.2/24"]["broadcast"] == "10.77.0.255"
    assert not found["2001:db8::2/64"].get("tentative")


def test_routes(vf: NetdevSnapshot, pod: Pod) -> None:
    routes = (
        Route("10.78.0.0/16", "10.77.0.1", source="10.77.0.2", metric=7),
        Route("10.79.0.0/16"),
        Route("0.0.0.0/0", "10.77.0.1", table=1000),
        Route("2001:db8:78::/64", "2001:db8::1", table=100),
        Route("::/0", "fe80::1", metric=5),
    )
    give(vf, pod, addresses=("10.77.0.2/24", "2001:db8::2/64"), routes=routes)
    via = pod.json("route", "show", "10.78.0.0/16")[0]
    assert (via["gateway"], via["prefsrc"], via["metric"], via["dev"]) == (
        "10.77.0.1",
        "10.77.0.2",
        7,
        "net1",
    )
    assert pod.json("route", "show", "10.79.0.0/16")[0]["scope"] == "link"
    assert pod.json("route", "show", "table", "1000")[0]["dst"] == "default"
    assert pod.json("-6", "route", "show", "table", "100")[0]["gateway"] == "2001:db8::1"
    assert pod.json("-6", "route", "show", "default")[0]["metric"] == 5


def test_rules(vf: NetdevSnapshot, pod: Pod) -> None:
    rules = (RoutingRule(100, 1000, source="10.77.0.2/32"), RoutingRule(300, 50, None, "2001:db8::/64"))
    give(vf, pod, rules=rules)
    (four,) = [one for one in pod.json("rule", "show") if one["priority"] == 1000]
    assert (four["src"], four["table"]) == ("10.77.0.2", "100")
    (six,) = [one for one in pod.json("-6", "rule", "show") if one["priority"] == 50]
    assert (six["dst"], six["dstlen"], six["table"]) == ("2001:db8::", 64, "300")


def test_neighbours(vf: NetdevSnapshot, pod: Pod) -> None:
    neighbours = (Neighbour("10.77.0.1", "02:00:00:00:00:01"), Neighbour("2001:db8::1", "02:00:00:00:00:02"))
    give(vf, pod, neighbours=neighbours)
    found = {
        one["dst"]: (one["lladdr"], one["state"]) for one in pod.json("neighbour", "show", "dev", "net1")
    }
    assert found["10.77.0.1"] == ("02:00:00:00:00:01", ["PERMANENT"])
    assert found["2001:db8::1"] == ("02:00:00:00:00:02", ["PERMANENT"])


@pytest.mark.parametrize(
    ("name", "value"),
    [("ipv4/arp_ignore", "1"), ("ipv4/arp_announce", "2"), ("ipv4/arp_filter", "1"), ("ipv4/arp_notify", "1"),
     ("ipv4/rp_filter", "2"), ("ipv4/accept_local", "1"), ("ipv6/accept_ra", "0"), ("ipv6/disable_ipv6", "1")],
)  # fmt: skip
def test_sysctls(vf: NetdevSnapshot, pod: Pod, name: str, value: str) -> None:
    family, setting = name.split("/")
    path = f"{family}/conf/net1/{setting}"
    give(vf, pod)
    assert pod.sysctl(path) != value
    take(vf, pod, NetdevSettings())
    give(vf, pod, sysctls={name: value})
    assert pod.sysctl(path) == value
    assert not Path(f"/proc/sys/net/{family}/conf/net1").exists(), "the host's are other ones"


def test_sysctls_are_set_where_proc_is_read_only_as_in_an_unprivileged_container(
    vf: NetdevSnapshot, pod: Pod
) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            private = libc.unshare(0x00020000) or libc.mount(None, b"/", None, 0x4000 | 0x40000, None)
            bound = libc.mount(b"/proc/sys", b"/proc/sys", None, 0x1000, None)
            read_only = libc.mount(None, b"/proc/sys", None, 0x1000 | 0x20 | 1, None)
            assert [private, bound, read_only] == [0, 0, 0]
            give(vf, pod, sysctls={"ipv4/arp_ignore": "1", "ipv6/disable_ipv6": "1"})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert pod.sysctl("ipv4/conf/net1/arp_ignore") == "1"
    assert pod.sysctl("ipv6/conf/net1/disable_ipv6") == "1"


def test_without_ipv6_the_interface_never_has_an_ipv6_address(vf: NetdevSnapshot, pod: Pod) -> None:
    give(vf, pod, sysctls={"ipv6/disable_ipv6": "1"})
    assert pod.json("-6", "address", "show", "dev", "net1") in ([], [{}])
    assert "UP" in pod.links()["net1"]["flags"]


def test_features(vf: NetdevSnapshot, pod: Pod) -> None:
    before = vf.ethtool.features
    give(vf, pod, ethtool=EthtoolSettings({"rx-gro": not before["rx-gro"], "tx-scatter-gather": False}))
    take_look = _seen_in(pod)
    assert take_look.features["rx-gro"] is not before["rx-gro"]
    assert take_look.features["tx-scatter-gather"] is False
    take(vf, pod, NetdevSettings())
    assert fresh(vf) == vf


def test_channels(vf: NetdevSnapshot, pod: Pod) -> None:
    assert vf.ethtool.channels != {"rx": 2, "tx": 3}
    give(vf, pod, ethtool=EthtoolSettings({}, {}, {"rx": 2, "tx": 3}))
    assert _seen_in(pod).channels == {"rx": 2, "tx": 3}
    take(vf, pod, NetdevSettings())
    assert fresh(vf) == vf


def _seen_in(pod: Pod) -> EthtoolSettings:
    """What a second look from inside the pod's namespace finds."""
    from contextlib import closing

    from railmate.attach.ethtool import Ethtool
    from railmate.attach.namespaces import open_namespace, with_namespace

    index = pod.links()["net1"]["ifindex"]

    def look(sides: Any) -> EthtoolSettings:
        with closing(Ethtool()) as kernel:
            return kernel.state(index).now

    with open_namespace(pod.path) as fd:
        return with_namespace(fd, look)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (EthtoolSettings({"rx-nonsense": True}), "the features rx-nonsense"),
        (EthtoolSettings({}, {"rx": 512}), "rx rings 512: at most 0"),
        (EthtoolSettings({}, {}, {"rx": 100}), "rx channels 100: at most 4"),
    ],
)
def test_what_the_driver_cannot_do_is_refused_before_anything_is_touched(
    vf: NetdevSnapshot, wanted: EthtoolSettings, said: str
) -> None:
    with pytest.raises(UnfitError, match=said):
        snapshot(vf.name, ADDRESS, None, NetdevSettings(ethtool=wanted))


def test_all_at_once_and_nothing_of_it_is_left(vf: NetdevSnapshot, pod: Pod) -> None:
    attach_all([MoveRequest(vf, "net1", FULL)], pod.path)
    link = pod.links()["net1"]
    assert (link["address"], link["mtu"], "UP" in link["flags"]) == (FULL.mac, 3000, True)
    take(vf, pod, FULL)
    assert fresh(vf) == vf
    assert "100" not in {str(one["table"]) for one in pod.json("rule", "show")}


def test_doing_it_again_changes_nothing(vf: NetdevSnapshot, pod: Pod) -> None:
    requests = [MoveRequest(vf, "net1", FULL)]
    first = attach_all(requests, pod.path)
    before = [pod.json(what, "show") for what in ("link", "address", "route", "rule", "neighbour")]
    assert attach_all(requests, pod.path) == first
    assert [pod.json(what, "show") for what in ("link", "address", "route", "rule", "neighbour")] == before


def test_a_move_that_broke_off_before_the_settings_is_finished(vf: NetdevSnapshot, pod: Pod) -> None:
    attach_all([MoveRequest(vf, "net1")], pod.path)
    pod.ip("link", "set", "net1", "down")
    attach_all([MoveRequest(vf, "net1", FULL)], pod.path)
    link = pod.links()["net1"]
    assert (link["address"], link["mtu"], "UP" in link["flags"]) == (FULL.mac, 3000, True)
    assert "10.77.0.2/24" in pod.ip("address", "show", "dev", "net1")


def test_addresses_that_the_host_gave_it_are_there_again_afterwards(make_vf: MakeVf, pod: Pod) -> None:
    name = make_vf(1)
    run("ip", "link", "set", name, "up")
    run("ip", "address", "add", "10.66.0.1/24", "dev", name)
    run("ip", "address", "add", "2001:db8:66::1/64", "dev", name, "nodad")
    vf = snapshot(name, ADDRESS)
    give(vf, pod, addresses=("10.77.0.2/24",))
    assert "10.66.0.1" not in pod.ip("address", "show", "dev", "net1")
    take(vf, pod, NetdevSettings())
    assert fresh(vf) == vf
    assert vf.addresses == ("10.66.0.1/24", "2001:db8:66::1/64")


def test_sysctls_that_the_host_gave_it_are_there_again_afterwards(make_vf: MakeVf, pod: Pod) -> None:
    """As on nodes with several rails in one network, where each answers ARP for its own address only."""
    name = make_vf(1)
    for path, value in (("ipv4", "arp_ignore=2"), ("ipv4", "rp_filter=2"), ("ipv6", "accept_ra=0")):
        setting, _, value = value.partition("=")
        Path(f"/proc/sys/net/{path}/conf/{name}/{setting}").write_text(value)
    vf = snapshot(name, ADDRESS)
    give(vf, pod, sysctls={"ipv4/arp_ignore": "1"})
    assert pod.sysctl("ipv4/conf/net1/arp_ignore") == "1"
    take(vf, pod, NetdevSettings())
    assert fresh(vf) == vf
    assert Path(f"/proc/sys/net/ipv4/conf/{name}/arp_ignore").read_text().strip() == "2"


def test_all_that_a_claim_can_set_below_proc_sys_net_is_kept_of_the_host() -> None:
    assert {vf_config.kernel_name(one) for one in fields.settings(vf_config.Sysctls).values()} == set(
        sysctl.KEPT
    )


def test_what_the_pod_changed_is_put_right(vf: NetdevSnapshot, pod: Pod) -> None:
    attach_all([MoveRequest(vf, "net1", FULL)], pod.path)
    pod.ip("link", "set", "net1", "down")
    pod.ip("link", "set", "net1", "name", "mine0", "address", "02:00:00:00:99:99", "mtu", "1400")
    pod.ip("link", "set", "mine0", "up")
    pod.ip("address", "add", "10.55.0.1/24", "dev", "mine0")
    (result,) = return_all([ReturnRequest(vf, None, FULL)], pod.path)
    # without hardware behind it, only what attach returned tells which device this is
    assert result.state == ReturnState.LOST
    pod.ip("link", "set", "mine0", "down")
    pod.ip("link", "set", "mine0", "address", FULL.mac or "")
    take(vf, pod, FULL)
    assert fresh(vf) == vf


class Deaf:
    """The real kernel, but for one thing that it says it has done and has not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def to(self, what: str) -> None:
        real = links.change
        if what == "address":
            self._patch.setattr(addressing, "add_address", lambda *_: None)
            return

        def change(netlink: Netlink, index: int, **more: Any) -> None:
            real(netlink, index, **{key: value for key, value in more.items() if key != what})

        self._patch.setattr(links, "change", change)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("name", "its name is rsnet1, not {name}"),
        ("mac", "its MAC is 02:00:00:00:77:77, not {mac}"),
        ("mtu", "its MTU is 1400, not 4000"),
        ("up", "its state is down, not up"),
        ("address", "its address 10.66.0.1/24 is missing"),
    ],
)
def test_what_is_not_as_it_was_although_the_kernel_said_so_is_told(
    make_vf: MakeVf, monkeypatch: pytest.MonkeyPatch, what: str, said: str
) -> None:
    name = make_vf(1)
    run("ip", "link", "set", name, "up")
    run("ip", "address", "add", "10.66.0.1/24", "dev", name)
    vf = snapshot(name, ADDRESS)
    run("ip", "link", "set", name, "down")
    run("ip", "link", "set", name, "name", "rsnet1", "address", "02:00:00:00:77:77", "mtu", "1400")
    run("ip", "address", "flush", "dev", "rsnet1")
    back = ReturnRequest(vf, None, NetdevSettings(mac="02:00:00:00:77:77"))
    with monkeypatch.context() as patch:
        Deaf(patch).to(what)
        (result,) = return_all([back], None)
    assert (result.state, result.problems) == (
        ReturnState.ALREADY_HOME,
        (said.format(name=vf.name, mac=vf.mac),),
    )
    (result,) = return_all([back], None)
    assert result.problems == ()
    assert fresh(vf) == vf


def test_one_that_the_kernel_gave_back_is_put_right_as_well(vf: NetdevSnapshot, pod: Pod) -> None:
    """As after the end of its namespace: it is on the host under the pod's name, with all the pod's settings."""
    attach_all([MoveRequest(vf, "net1", FULL)], pod.path)
    pod.ip("link", "set", "net1", "netns", str(os.getpid()), "name", "rsnet1")
    (result,) = return_all([ReturnRequest(vf, None, FULL)], None)
    assert (result.state, result.name, result.problems) == (ReturnState.ALREADY_HOME, vf.name, ())
    assert fresh(vf) == vf


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mtu": 100_000, "mac": "02:00:00:00:77:77"}, "cannot be given to the pod as net1"),
        ({"routes": (Route("10.1.0.0/16", "10.99.0.1"),)}, "cannot get the route to 10.1.0.0/16"),
        (
            {"sysctls": {"ipv6/disable_ipv6": "1"}, "addresses": ("2001:db8::2/64",)},
            "cannot get the address 2001",
        ),
    ],
)
def test_a_setting_that_fails_leaves_the_netdev_at_home_as_it_was(
    vf: NetdevSnapshot, pod: Pod, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(AttachError, match=said):
        give(vf, pod, rules=(RoutingRule(100, 1000, "10.77.0.2/32"),), **settings)
    assert set(pod.links()) == {"lo"}
    assert fresh(vf) == vf
    assert not [one for one in pod.json("rule", "show") if one["priority"] == 1000]


def test_a_route_never_takes_the_place_of_the_pods_own(vf: NetdevSnapshot, pod: Pod) -> None:
    pod.ip("link", "add", "eth0", "type", "veth", "peer", "name", "other0")
    pod.ip("link", "set", "eth0", "up")
    pod.ip("address", "add", "10.1.0.2/24", "dev", "eth0")
    pod.ip("route", "add", "default", "via", "10.1.0.1")
    with pytest.raises(AttachError, match=r"the pod has another route there; give this one a metric"):
        give(vf, pod, addresses=("10.77.0.2/24",), routes=(Route("0.0.0.0/0", "10.77.0.1"),))
    assert pod.json("route", "show", "default")[0]["gateway"] == "10.1.0.1"
    give(vf, pod, addresses=("10.77.0.2/24",), routes=(Route("0.0.0.0/0", "10.77.0.1", metric=100),))
    assert len(pod.json("route", "show", "default")) == 2


def test_the_kernels_own_words_are_passed_on(vf: NetdevSnapshot, pod: Pod) -> None:
    with pytest.raises(AttachError, match=r"\(.*[Nn]exthop.*\)"):
        give(vf, pod, routes=(Route("10.1.0.0/16", "10.99.0.1"),))


def test_four_vfs_of_one_nic_in_one_pod(make_vf: MakeVf, pod: Pod) -> None:
    vfs = [snapshot(make_vf(n), f"0000:c1:00.{n}") for n in (1, 2, 3, 4)]
    settings = [NetdevSettings(addresses=(f"10.77.{n}.2/24",), mtu=1500 + n) for n in range(4)]
    requests = [MoveRequest(vf, f"net{n}", settings[n]) for n, vf in enumerate(vfs)]
    attach_all(requests, pod.path)
    assert {name: link["mtu"] for name, link in pod.links().items() if name != "lo"} == {
        f"net{n}": 1500 + n for n in range(4)
    }
    for n, vf in enumerate(vfs):
        (result,) = return_all([ReturnRequest(vf, None, settings[n])], pod.path)
        assert (result.state, result.problems) == (ReturnState.RETURNED, ())
        assert fresh(vf) == vf
        assert len(pod.links()) == 4 - n, "the others stay"


def test_a_name_that_the_host_uses_too_is_no_obstacle(vf: NetdevSnapshot, pod: Pod) -> None:
    run("ip", "link", "add", "net1", "type", "veth", "peer", "name", "rsother1")
    try:
        give(vf, pod)
        assert pod.links()["net1"]["address"] == vf.mac
        assert "net1" in host_links()
        take(vf, pod, NetdevSettings())
        assert fresh(vf) == vf
    finally:
        run("ip", "link", "delete", "net1")


def test_an_old_snapshot_restores_what_it_knows(vf: NetdevSnapshot, pod: Pod) -> None:
    """One of an earlier railmate: no ethtool, no addresses, nothing of the link."""
    from railmate.claims.records import netdev_snapshot

    old = {"pci_address": ADDRESS, "name": vf.name, "mac": vf.mac, "mtu": 4000, "up": False, "parent": None}
    give(vf, pod, mtu=1500)
    result = move_back(netdev_snapshot(json.loads(json.dumps(old))), pod.path)
    assert (result.state, result.problems) == (ReturnState.RETURNED, ())
    assert replace(fresh(vf), ethtool=vf.ethtool) == vf
