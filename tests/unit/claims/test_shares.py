"""A device that several claims share: each share is a claim's own, is told by its id, and ends by itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from claims_netdevs import World
from claims_world import (
    DRIVER,
    PF,
    PORT,
    claim,
    config,
    inventory,
    ref,
    result,
    sandbox,
    share,
    uid,
    view,
)

import railmate.claims.shares as shares
from railmate.attach.errors import UnfitError
from railmate.attach.macvlan import Port
from railmate.attach.settings import Neighbour, Route, RoutingRule
from railmate.claims.allocation import ClaimError
from railmate.claims.plan import make_plan
from railmate.claims.reconcile import Reconciler
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.surroundings import Surroundings
from railmate.errors import RailmateError
from railmate_api import fields
from railmate_api.config import RdmaSharedConfig


def shared_config(**fields: Any) -> Any:
    return config(kind="RdmaSharedConfig", **fields)


def two_pods(world: World) -> None:
    for number in (1, 2):
        world.prepared(number, share(number), pods=(f"pod-{number}",))
        world.state.attach(sandbox(f"sandbox-{number}", f"pod-{number}", f"/run/netns/{number}"))


def test_share_is_answered_and_remembered(world: World) -> None:
    world.api.put(claim(1, share(1), result("gpu-1", request="other")))
    first = world.state.prepare(ref(1))
    assert [device.share_id for device in first.devices] == [share(1)["shareID"], None]
    world.restart()
    entry = world.ledger.get(uid(1))
    assert entry is not None
    assert [device.share_id for device in entry.devices] == [share(1)["shareID"], None]
    assert world.state.prepare(ref(1)).devices == first.devices


# --- what is planned
def test_a_share_is_a_sub_interface_over_the_function_with_a_mac_of_its_own() -> None:
    plan = make_plan(claim(1, share(1, "a"), share(2, "b")), ref(1), view(), ())
    one, other = (device.nics[0] for device in plan.devices)
    assert one.address == other.address == PF
    assert [nic.sub.port if nic.sub else None for nic in (one, other)] == [PORT, PORT]
    assert one.sub is not None
    assert other.sub is not None
    assert one.sub.mac != other.sub.mac
    assert int(one.sub.mac[:2], 16) & 0b11 == 0b10, "locally administered, unicast"
    assert (one.interface, other.interface) == ("net1", "net2")
    assert one.sub.mode == "bridge"
    again = make_plan(claim(1, share(1, "a")), ref(1), view(), ()).devices[0].nics[0]
    assert again.sub == one.sub, "the same share has the same MAC, in every sandbox"


def test_the_container_gets_the_functions_verbs_and_not_what_changes_the_port() -> None:
    (device,) = make_plan(claim(1, share(1)), ref(1), view(), ()).devices
    assert [node.path for node in device.nodes] == ["/dev/infiniband/uverbs9", "/dev/infiniband/rdma_cm"]


def test_config_is_applied_to_the_sub_interface() -> None:
    said = shared_config(
        interfaceName="rail0", mac="02:00:00:00:00:0A", macvlanMode="private", addresses=["10.1.0.5/24"],
        routes=[{"destination": "10.2.0.0/16", "gateway": "10.1.0.1"}], sysctls={"arpIgnore": 1}, envHints=True,
    )  # fmt: skip
    (device,) = make_plan(claim(1, share(1), configs=[said]), ref(1), view(), ()).devices
    (nic,) = device.nics
    assert nic.sub is not None
    assert (nic.interface, nic.sub.mac, nic.sub.mode) == ("rail0", "02:00:00:00:00:0a", "private")
    assert nic.settings.addresses == ("10.1.0.5/24",)
    assert nic.settings.routes == (Route("10.2.0.0/16", "10.1.0.1"),)
    assert nic.settings.sysctls == {"ipv4/arp_ignore": "1"}
    assert nic.settings.vf is None
    assert device.env_hints


#: Every field of the config and what it becomes, by the attribute's path from the device.
EFFECTS: dict[str, tuple[Any, str, Any]] = {
    "interfaceName": ("rail0", "nic.interface", "rail0"),
    "mtu": (1400, "nic.settings.mtu", 1400),
    "mac": ("02:00:00:00:00:0A", "nic.sub.mac", "02:00:00:00:00:0a"),
    "macvlanMode": ("private", "nic.sub.mode", "private"),
    "addresses": (["10.1.0.5/24"], "nic.settings.addresses", ("10.1.0.5/24",)),
    "ipam": ({"type": "books"}, "nic.ipam.config", {"type": "books"}),
    "routes": ([{"destination": "10.2.0.0/16"}], "nic.settings.routes", (Route("10.2.0.0/16"),)),
    "rules": (
        [{"table": 9, "destination": "::/0"}],
        "nic.settings.rules",
        (RoutingRule(9, 1000, None, "::/0"),),
    ),
    "neighbours": (
        [{"address": "10.1.0.1", "mac": "02:00:00:00:00:0B"}],
        "nic.settings.neighbours",
        (Neighbour("10.1.0.1", "02:00:00:00:00:0b"),),
    ),
    "sysctls": ({"arpIgnore": 1}, "nic.settings.sysctls", {"ipv4/arp_ignore": "1"}),
    "envHints": (True, "device.env_hints", True),
}


@pytest.mark.parametrize("field", EFFECTS)
def test_every_field_has_its_effect(field: str, tmp_path: Path) -> None:
    (tmp_path / "books").touch()
    given, path, wanted = EFFECTS[field]
    node = view(cni_dir=tmp_path, node_exists=Path.exists)

    def effect(*said: Any) -> Any:
        (device,) = make_plan(claim(1, share(1), configs=list(said)), ref(1), node, ()).devices
        first, *rest = path.split(".")
        found: Any = {"device": device, "nic": device.nics[0]}[first]
        for name in rest:
            found = getattr(found, name, None)
        return found

    assert effect(shared_config(**{field: given})) == wanted
    assert effect() != wanted


def test_no_field_is_forgotten() -> None:
    assert {one.name for one in fields.settings(RdmaSharedConfig).values()} == EFFECTS.keys()


@pytest.mark.parametrize(
    ("field", "value"),
    [("vlan", 5), ("trust", True), ("maxTxRate", 100), ("rings", {"rx": 64}), ("spoofCheck", False),
     ("channels", {"rx": 1}), ("features", {"rx-gro": True}), ("linkState", "auto"), ("macvlanMode", "passthru")],
)  # fmt: skip
def test_what_is_the_functions_own_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ClaimError, match=field):
        make_plan(claim(1, share(1), configs=[shared_config(**{field: value})]), ref(1), view(), ())


@pytest.mark.parametrize(
    ("devices", "said", "words"),
    [
        ([share(1)], config(mtu=1400), "RdmaVfConfig is for shared NICs only. Write kind: RdmaSharedConfig"),
        ([result("vf-0")], shared_config(mtu=1400), "RdmaSharedConfig is for no shared NIC. Write kind: RdmaVfConfig"),
        ([share(1, "a"), result("vf-0", "b")], config(requests=["a"], mtu=1400), "Write kind: RdmaSharedConfig"),
        ([share(1, "a"), result("vf-0", "b")], shared_config(requests=["b"]), "Write kind: RdmaVfConfig"),
    ],
)  # fmt: skip
def test_config_of_the_wrong_kind_is_refused_with_the_right_one(devices: Any, said: Any, words: str) -> None:
    with pytest.raises(ClaimError, match="config of kind") as caught:
        make_plan(claim(1, *devices, configs=[said]), ref(1), view(), ())
    assert words in str(caught.value)


def test_of_alternatives_each_may_have_its_config() -> None:
    """firstAvailable: a VF, or else a share; which one it is the scheduler decides."""
    said = [config(requests=["main"], mtu=1400), shared_config(requests=["main"], interfaceName="sub0")]
    (vf,) = make_plan(claim(1, result("vf-0", "main/vf"), configs=said), ref(1), view(), ()).devices
    (sub,) = make_plan(claim(1, share(1, "main/sub"), configs=said), ref(1), view(), ()).devices
    assert (vf.nics[0].settings.mtu, sub.nics[0].interface) == (1400, "sub0")


def test_a_claim_of_both_kinds_has_a_config_of_each() -> None:
    both = [config(mtu=1400, interfaceName="vf0"), shared_config(interfaceName="sub0")]
    plan = make_plan(claim(1, share(1, "a"), result("vf-0", "b"), configs=both), ref(1), view(), ())
    assert [device.nics[0].interface for device in plan.devices] == ["sub0", "vf0"]


def test_a_share_of_a_port_that_is_gone_from_the_machine_is_refused_in_words() -> None:
    """It stays published while others have shares of it."""
    found = inventory()
    functions = {address: one for address, one in found.functions.items() if address != PF}
    with pytest.raises(ClaimError, match="device node1/shared is not on node node1"):
        make_plan(claim(1, share(1)), ref(1), view(inventory=replace(found, functions=functions)), ())


@pytest.mark.parametrize("wrong", [None, "", "../../x", "a" * 64])
def test_an_allocation_without_a_share_is_refused(wrong: str | None) -> None:
    """A scheduler that knows no shares would give the whole function to one claim."""
    with pytest.raises(ClaimError, match=r"share.*DRAConsumableCapacity"):
        make_plan(claim(1, result("shared", shareID=wrong)), ref(1), view(), ())


def test_a_config_that_wants_more_than_the_functions_mtu_is_refused() -> None:
    found = inventory()
    netdev = replace(found.functions[PF].netdevs[0], mtu=1500)
    functions = {**found.functions, PF: replace(found.functions[PF], netdevs=(netdev,))}
    node = view(inventory=replace(found, functions=functions))
    with pytest.raises(ClaimError, match=f"mtu 9000 is above the 1500 of its physical function {PF}"):
        make_plan(claim(1, share(1), configs=[shared_config(mtu=9000)]), ref(1), node, ())


# --- several claims
def test_many_claims_hold_shares_of_one_function(world: World) -> None:
    for number in range(1, 7):
        world.prepared(number, share(number), pods=(f"pod-{number}",))
    assert len(world.ledger.entries()) == 6
    assert world.state.holdings.now().addresses == set()
    assert [len(claims) for claims in world.state.holdings.sharers().values()] == [6]
    (device,) = world.state.holdings.now().devices
    assert (device.name, device.nics, device.sub_interfaces) == ("shared", (PF,), 6)
    for entry in world.ledger.entries().values():
        world.ledger.put(replace(entry, boot_id="another boot"))
    assert world.state.holdings.sharers() == {}, "after a reboot"


def test_the_same_share_is_with_one_claim_only(world: World) -> None:
    world.prepared(1, share(1))
    world.api.put(claim(2, share(1), pods=("pod-2",)))
    with pytest.raises(ClaimError, match=r"still held by ResourceClaim team/claim-1"):
        world.state.prepare(ref(2), patience=0)


@pytest.mark.parametrize(("first", "second"), [(share(1), "port"), ("port", share(1))])
def test_a_function_is_shared_or_whole(world: World, first: Any, second: Any) -> None:
    world.netdevs.where[PF] = ("host", PORT)
    world.prepared(1, first)
    world.api.put(claim(2, second, pods=("pod-2",)))
    with pytest.raises(ClaimError, match="still held by"):
        world.state.prepare(ref(2), patience=0)


def test_vfs_of_a_shared_function_are_given_out_beside_it(world: World) -> None:
    world.prepared(1, share(1))
    world.prepared(2, "vf-0", pods=("pod-2",))
    world.prepared(3, "pair-1", pods=("pod-3",))


def test_a_claim_with_another_share_is_prepared_anew(world: World) -> None:
    world.prepared(1, share(1))
    world.api.put(claim(1, share(2)))
    (device,) = world.state.prepare(ref(1), patience=0).devices
    assert device.share_id == share(2)["shareID"]


def test_cdi_devices_of_two_shares_in_one_claim_have_names_of_their_own(world: World) -> None:
    world.api.put(claim(1, share(1, "a"), share(2, "b")))
    answer = world.state.prepare(ref(1), patience=0)
    ids = [answer.cdi_ids[device.key] for device in answer.devices]
    assert all(len(one) == 1 for one in ids)
    assert len({one[0] for one in ids}) == 2
    assert {one["name"] for one in world.spec()["devices"]} == {one[0].partition("=")[2] for one in ids}
    assert all("hooks" in one["containerEdits"] for one in world.spec()["devices"]), (
        "the gate, for each request"
    )


def test_metadata_tells_the_share_and_the_interface(world: World) -> None:
    world.prepared(1, share(1))
    entry = world.ledger.get(uid(1))
    assert entry is not None
    path = world.root / "plugins/railmate.dev/dra-device-metadata" / uid(1) / "main/metadata.json"
    (told,) = json.loads(path.read_text().splitlines()[0])["requests"][0]["devices"]
    assert told["attributes"]["railmate.dev/shareID"] == {"string": share(1)["shareID"]}
    assert told["attributes"]["railmate.dev/interface"] == {"string": "net1"}
    sub = entry.nics[0].sub
    assert sub is not None
    assert told["networkData"] == {"interfaceName": "net1", "hardwareAddress": sub.mac}


# --- in pods
def test_each_pod_gets_its_own_and_gives_back_its_own(world: World) -> None:
    two_pods(world)
    assert set(world.netdevs.subs) == {("/run/netns/1", "net1"), ("/run/netns/2", "net1")}
    assert len(set(world.netdevs.subs.values())) == 2
    assert world.gates == [f"{uid(1)}.sandbox-1", f"{uid(2)}.sandbox-2"]
    world.state.detach("sandbox-1")
    assert set(world.netdevs.subs) == {("/run/netns/2", "net1")}
    assert world.gates == [f"{uid(2)}.sandbox-2"]
    world.state.unprepare(ref(1))
    world.state.unprepare(ref(2))
    assert world.clean()


def test_of_two_claims_in_one_pod_one_is_released_and_the_other_stays(world: World) -> None:
    for number in (1, 2):
        world.prepared(number, share(number))
    world.state.attach(sandbox())
    assert set(world.netdevs.subs) == {("/run/netns/1", "net1"), ("/run/netns/1", "net2")}
    world.state.unprepare(ref(1))
    assert set(world.netdevs.subs) == {("/run/netns/1", "net2")}
    world.state.check(sandbox(), [uid(2)])


def test_the_gate_is_shut_until_the_sub_interface_is_there(world: World) -> None:
    world.prepared(1, share(1))
    with pytest.raises(RailmateError, match="not attached to pod"):
        world.state.check(sandbox(), [uid(1)])
    world.state.attach(sandbox())
    world.state.check(sandbox(), [uid(1)])


def test_a_sub_interface_that_cannot_be_ended_is_not_forgotten(world: World) -> None:
    world.prepared(1, share(1))
    world.state.attach(sandbox())
    world.netdevs.sub_errors = [
        "a sub-interface of it cannot be removed from the pod: Device or resource busy"
    ]
    with pytest.raises(RailmateError, match=r"busy.*tried again"):
        world.state.unprepare(ref(1))
    assert world.gates == []
    world.netdevs.sub_errors = []
    world.state.unprepare(ref(1))
    assert world.clean()


def test_on_the_host_network_nothing_is_made(world: World) -> None:
    world.prepared(1, share(1))
    world.state.attach(sandbox(netns=None))
    assert world.netdevs.subs == {}
    world.state.check(sandbox(netns=None), [uid(1)])


# --- RDMA in exclusive mode
def test_in_exclusive_mode_prepare_refuses_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "netns_mode", lambda: "exclusive")
    (device,) = make_plan(claim(1, share(1)), ref(1), view(), ()).devices
    with pytest.raises(UnfitError, match=f"{PF} cannot be shared.*rdma system set netns shared"):
        shares.with_port(device.nics[0], PORT)


def test_what_is_found_in_prepare_is_what_the_function_is_called_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shares, "netns_mode", lambda: "shared")
    monkeypatch.setattr(
        shares.macvlan, "port", lambda name, address: Port(name, "02:00:00:00:09:09", 9000, PF)
    )
    (device,) = make_plan(claim(1, share(1)), ref(1), view(), ()).devices
    sub = shares.with_port(device.nics[0], "renamed0").sub
    assert sub is not None
    assert (sub.port, sub.port_mac, sub.parent) == ("renamed0", "02:00:00:00:09:09", PF)


def test_after_a_restart_a_share_that_is_another_claims_now_is_released(world: World) -> None:
    """The claim was given another share while no driver ran; the pool and the device's name are the same."""
    world.prepared(1, share(1))
    repaired: list[str] = []
    world.restart(around=Surroundings(repaired=repaired.append))
    world.api.put(claim(1, share(2), pods=("pod-9",)))
    plugin = world.root / "plugins" / DRIVER
    files = RuntimeFiles(DRIVER, plugin, world.root / "cdi", plugin / "gate")
    Reconciler(world.api, world.ledger, files, world.state.moves, world.state.unprepare).run()
    assert repaired == ["deleted claim"]
    assert world.clean()


def test_after_a_restart_a_share_in_its_pod_stays_as_it_is(world: World) -> None:
    two_pods(world)
    before, moves = dict(world.netdevs.subs), len(world.netdevs.moves)
    world.restart()
    world.state.synchronize([sandbox(f"sandbox-{n}", f"pod-{n}", f"/run/netns/{n}") for n in (1, 2)])
    world.state.prepare(ref(1), patience=0)  # the kubelet asks again after a restart of its own
    assert world.netdevs.subs == before
    assert len(world.netdevs.moves) == moves


def test_a_new_sandbox_gets_the_same_sub_interface(world: World) -> None:
    world.prepared(1, share(1))
    world.state.attach(sandbox("sandbox-1", netns="/run/netns/1"))
    mac = world.netdevs.subs["/run/netns/1", "net1"]
    world.state.attach(sandbox("sandbox-2", netns="/run/netns/2"))
    assert world.netdevs.subs == {("/run/netns/2", "net1"): mac}
    assert world.gates == [f"{uid(1)}.sandbox-2"]
