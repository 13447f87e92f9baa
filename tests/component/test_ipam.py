"""Addresses from real CNI IPAM plugins: lent when a claim is prepared, and given back exactly once; a repeated DEL is
there only where it cannot be known what a killed driver has done."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

import railmate.claims.attachments as attachments
import railmate.claims.preparation as preparation
import railmate.claims.presence as presence
import railmate.claims.strays as strays
from component.netdev_lab import pods, veths
from harness.gobuild import program
from railmate.attach import ipam
from railmate.attach.errors import AttachError
from railmate.attach.ipam import IpamRequest
from railmate.attach.model import MoveRequest
from railmate.attach.netdev import attach_all, snapshot
from railmate.attach.settings import NetdevSettings, Route
from railmate.claims.allocation import ClaimError
from railmate.claims.records import Entry
from railmate.errors import RailmateError
from unit.claims.claims_netdevs import FakeNetdevs, World
from unit.claims.claims_world import FakeClaims, claim, config, ref, sandbox, state, uid, view


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    directory = tmp_path / "bin"
    directory.mkdir()
    (directory / "static").symlink_to(program("static"))
    counted = directory / "host-local"
    counted.write_text(f'#!/bin/sh\necho "$CNI_COMMAND" >> {tmp_path}/calls\nexec {program("host-local")}\n')
    counted.chmod(0o755)
    return directory


def calls(tmp_path: Path) -> list[str]:
    """What host-local was asked to do, in order."""
    return (tmp_path / "calls").read_text().split()


def section(tmp_path: Path, **more: Any) -> dict[str, Any]:
    """host-local's configuration: three addresses to give, books in a directory of the test's."""
    subnet = {
        "subnet": "10.77.0.0/24",
        "rangeStart": "10.77.0.10",
        "rangeEnd": "10.77.0.12",
        "gateway": "10.77.0.1",
    }
    routes = [{"dst": "10.78.0.0/16"}, {"dst": "10.79.0.0/16", "gw": "10.77.0.2"}]
    return {
        "type": "host-local",
        "dataDir": str(tmp_path / "leases"),
        "ranges": [[subnet]],
        "routes": routes,
        **more,
    }


def there(path: Path) -> bool:
    """Plugins are real here, the GPUs' device nodes are not."""
    return path.exists() or path.is_relative_to("/host/dev")


def lent(tmp_path: Path) -> dict[str, str]:
    """Address -> who has it, in the plugin's own books."""
    books = tmp_path / "leases" / "railmate"
    found = {path.name: path.read_text().split() for path in books.glob("10.*")} if books.exists() else {}
    return {address: " ".join(owner) for address, owner in found.items()}


@pytest.fixture
def world(tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    fake = FakeNetdevs()
    monkeypatch.setattr(preparation, "snapshot", fake.snapshot)
    for name in ("attach_all", "return_all"):
        monkeypatch.setattr(attachments, name, getattr(fake, name))
    monkeypatch.setattr(strays, "return_all", fake.return_all)
    monkeypatch.setattr(attachments, "return_rdma", lambda devices, netns: [])
    monkeypatch.setattr(presence, "absent", fake.absent)
    root = tmp_path / "node"
    node = view(cni_dir=plugins, node_exists=there)
    api = FakeClaims()
    return World(root, api, fake, state(root, api, node=node))


def prepared(world: World, tmp_path: Path, number: int = 1, *devices: str) -> Entry:
    world.prepared(number, *(devices or (f"vf-{number}",)), configs=[config(ipam=section(tmp_path))])
    entry = world.ledger.get(uid(number))
    assert entry is not None
    return entry


def restarted(world: World, plugins: Path) -> None:
    world.restart(node=view(cni_dir=plugins, node_exists=there))


def test_addresses_and_routes_of_the_plugin_are_among_the_settings(world: World, tmp_path: Path) -> None:
    (nic,) = prepared(world, tmp_path).nics
    assert nic.settings.addresses == ("10.77.0.10/24",)
    assert nic.settings.routes == (Route("10.78.0.0/16", "10.77.0.1"), Route("10.79.0.0/16", "10.77.0.2"))
    assert lent(tmp_path) == {"10.77.0.10": f"{uid(1)} net1"}


def test_they_are_usable_in_the_pod(plugins: Path, tmp_path: Path) -> None:
    lease = ipam.obtain(IpamRequest(section(tmp_path), uid(1), "net1"), plugins, asked_before=False)
    with pods("i") as (pod,), veths("ri") as make:
        settings = NetdevSettings(addresses=lease.addresses, routes=lease.routes)
        vf = snapshot(make(1), "0000:c1:00.1")
        attach_all([MoveRequest(vf, "net1", settings)], pod.path)
        assert "10.77.0.10/24" in pod.ip("address", "show", "dev", "net1")
        assert pod.json("route", "show", "10.78.0.0/16")[0]["gateway"] == "10.77.0.1"


def test_each_nic_of_a_claim_has_a_lease_of_its_own(world: World, tmp_path: Path) -> None:
    nics = prepared(world, tmp_path, 1, "wide").nics
    assert [nic.settings.addresses for nic in nics] == [("10.77.0.10/24",), ("10.77.0.11/24",)]
    assert [len(nic.settings.routes) for nic in nics] == [2, 0], (
        "two routes to one place cannot be in one pod"
    )
    world.state.unprepare(ref(1))
    assert lent(tmp_path) == {}


def test_a_claim_gives_back_its_own_only(world: World, tmp_path: Path) -> None:
    prepared(world, tmp_path, 1)
    prepared(world, tmp_path, 2)
    world.state.attach(sandbox())
    world.state.unprepare(ref(1))
    assert list(lent(tmp_path).values()) == [f"{uid(2)} net2"]
    assert world.ledger.get(uid(1)) is None
    world.state.unprepare(ref(2))
    assert lent(tmp_path) == {}
    assert sorted(path.name for path in world.root.rglob("*") if path.is_file()) == [
        "leases.lock",
        "serialize.lock",
    ]


def test_preparing_again_asks_no_plugin(world: World, tmp_path: Path, plugins: Path) -> None:
    first = prepared(world, tmp_path)
    (plugins / "host-local").unlink()
    world.state.prepare(ref(1), patience=0)
    assert world.ledger.get(uid(1)) == first


def test_an_address_is_lent_once_and_given_back_once(world: World, tmp_path: Path, plugins: Path) -> None:
    prepared(world, tmp_path)
    world.state.prepare(ref(1), patience=0)
    world.state.attach(sandbox())
    world.state.detach(sandbox().id)
    restarted(world, plugins)
    world.state.prepare(ref(1), patience=0)
    assert calls(tmp_path) == ["ADD"]
    world.state.unprepare(ref(1))
    world.state.unprepare(ref(1))
    assert calls(tmp_path) == ["ADD", "DEL"]


def test_a_driver_killed_before_the_plugin_was_asked_leaves_doubt_and_one_call_for_it(
    world: World, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(request: IpamRequest, directory: Path, **more: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(ipam, "obtain", killed)
        with pytest.raises(Killed):
            prepared(world, tmp_path)
    restarted(world, plugins)
    world.state.prepare(ref(1), patience=0)
    assert calls(tmp_path) == ["DEL", "ADD"]


def test_a_driver_killed_before_it_noted_a_release_releases_once_more(
    world: World, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(world, tmp_path)
    real = ipam.release

    def killed(request: IpamRequest, directory: Path) -> None:
        real(request, directory)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(ipam, "release", killed)
        with pytest.raises(Killed):
            world.state.unprepare(ref(1))
    restarted(world, plugins)
    world.state.unprepare(ref(1))
    assert calls(tmp_path) == ["ADD", "DEL", "DEL"]


def test_a_claim_that_failed_before_a_plugin_was_asked_gives_nothing_back(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unwilling(*arguments: Any) -> None:
        raise RailmateError("not now")

    monkeypatch.setattr(world.state._leases, "obtain", unwilling)
    with pytest.raises(RailmateError, match="not now"):
        prepared(world, tmp_path)
    world.state.unprepare(ref(1))
    assert not (tmp_path / "calls").exists()


def killed_after_asking(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prepare whose process ends when the plugin has answered."""
    real = ipam.obtain

    def killed(request: IpamRequest, directory: Path, **more: Any) -> None:
        real(request, directory, **more)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(ipam, "obtain", killed)
        with pytest.raises(Killed):
            prepared(world, tmp_path)


def test_a_driver_killed_after_the_plugin_was_asked_gives_back_what_it_got(
    world: World, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_after_asking(world, tmp_path, monkeypatch)
    assert len(lent(tmp_path)) == 1
    restarted(world, plugins)
    world.state.unprepare(ref(1))
    assert lent(tmp_path) == {}
    assert calls(tmp_path) == ["ADD", "DEL"]


def test_a_driver_killed_after_the_plugin_was_asked_asks_once_more_for_the_same_claim(
    world: World, tmp_path: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_after_asking(world, tmp_path, monkeypatch)
    restarted(world, plugins)
    world.state.prepare(ref(1), patience=0)
    entry = world.ledger.get(uid(1))
    assert entry is not None
    assert list(lent(tmp_path)) == [entry.nics[0].settings.addresses[0].split("/")[0]]
    world.state.unprepare(ref(1))
    assert calls(tmp_path) == ["ADD", "DEL", "ADD", "DEL"]


def test_a_pod_is_not_started_without_its_addresses(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(request: IpamRequest, directory: Path, **more: Any) -> None:
        raise AttachError("it is broken")

    with monkeypatch.context() as patch:
        patch.setattr(ipam, "obtain", broken)
        with pytest.raises(ClaimError, match="team/claim-1: it is broken"):
            prepared(world, tmp_path)
    with pytest.raises(RailmateError, match="are not there yet"):
        world.state.attach(sandbox())
    assert world.netdevs.moves == []
    assert world.gates == []


def test_no_address_left_is_told_in_the_plugins_words(world: World, tmp_path: Path, plugins: Path) -> None:
    for number in range(3):
        ipam.obtain(IpamRequest(section(tmp_path), f"other-{number}", "net1"), plugins, asked_before=False)
    with pytest.raises(ClaimError, match=r"IPAM plugin host-local refused ADD: .*no IP addresses available"):
        prepared(world, tmp_path)
    assert calls(tmp_path) == [*["ADD"] * 3, "ADD", "DEL"], "what fails is undone"
    world.state.unprepare(ref(1))
    assert len(lent(tmp_path)) == 3


def test_another_allocation_of_the_claim_gives_the_old_addresses_back_first(
    world: World, tmp_path: Path
) -> None:
    prepared(world, tmp_path)
    world.api.put(claim(1, "vf-3"))
    world.state.prepare(ref(1), patience=0)
    assert lent(tmp_path) == {}
    entry = world.ledger.get(uid(1))
    assert entry is not None
    assert entry.nics[0].ipam is None


def test_after_a_reboot_the_old_addresses_are_given_back_and_new_ones_asked(
    world: World, tmp_path: Path, plugins: Path
) -> None:
    prepared(world, tmp_path)
    world.restart(node=view(cni_dir=plugins, node_exists=there), boot="boot-2")
    world.state.prepare(ref(1), patience=0)
    assert len(lent(tmp_path)) == 1


def test_a_plugin_that_does_not_take_its_address_back_is_asked_again(
    world: World, tmp_path: Path, plugins: Path
) -> None:
    prepared(world, tmp_path)
    (plugins / "host-local").rename(plugins / "away")
    with pytest.raises(RailmateError, match=r"its addresses cannot be given back: .*No such file"):
        world.state.unprepare(ref(1))
    assert world.specs == []
    (plugins / "away").rename(plugins / "host-local")
    world.state.unprepare(ref(1))
    assert lent(tmp_path) == {}
    assert world.ledger.get(uid(1)) is None


def test_pods_start_while_a_plugin_is_slow(world: World, tmp_path: Path, plugins: Path) -> None:
    """Nothing that a pod's start waits for may be held while a plugin is asked."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    slow = plugins / "slow"
    slow.write_text(f'#!/bin/sh\n[ "$CNI_COMMAND" = DEL ] || cat {gate}\n')
    slow.chmod(slow.stat().st_mode | stat.S_IXUSR)
    world.prepared(2, "vf-2", pods=("pod-2",))

    world.api.put(claim(1, "vf-1", configs=[config(ipam={"type": "slow"})]))
    asking = threading.Thread(target=lambda: world.state.prepare(ref(1), patience=0))
    asking.start()
    answer = {"cniVersion": "1.0.0", "ips": [{"address": "10.9.9.9/24"}]}
    with gate.open("w") as plugin:  # opens when the plugin waits at the other end
        world.state.attach(sandbox("sandbox-2", "pod-2"))
        assert world.gates == [f"{uid(2)}.sandbox-2"]
        json.dump(answer, plugin)
    asking.join()
    entry = world.ledger.get(uid(1))
    assert entry is not None
    assert entry.nics[0].settings.addresses == ("10.9.9.9/24",)


@pytest.mark.parametrize("said", ["", "[]", '{"ips": []}', '{"ips": [{"address": "x"}]}', "{", '{"ips": 1}'])
def test_an_answer_that_is_no_result_is_refused(tmp_path: Path, said: str) -> None:
    plugin = tmp_path / "odd"
    plugin.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
    plugin.chmod(0o755)
    with pytest.raises(AttachError, match="IPAM plugin odd answered what is no CNI result"):
        ipam.obtain(IpamRequest({"type": "odd"}, uid(1), "net1"), tmp_path, asked_before=False)


def test_the_static_plugin_works_as_well(plugins: Path) -> None:
    section = {"type": "static", "addresses": [{"address": "10.5.0.2/24", "gateway": "10.5.0.1"}],
               "routes": [{"dst": "0.0.0.0/0"}]}  # fmt: skip
    lease = ipam.obtain(IpamRequest(section, uid(1), "net1"), plugins, asked_before=False)
    assert (lease.addresses, lease.routes) == (("10.5.0.2/24",), (Route("0.0.0.0/0", "10.5.0.1"),))


def test_plugins_are_run_in_no_other_way_than_the_specification_has(tmp_path: Path) -> None:
    plugin = tmp_path / "spy"
    plugin.write_text(
        f"#!/bin/sh\nenv | grep ^CNI_ | sort > {tmp_path}/$CNI_COMMAND.env\ncat > {tmp_path}/$CNI_COMMAND.in\n"
        'echo \'{"cniVersion": "1.0.0", "ips": [{"address": "10.1.1.1/24"}]}\'\n'
    )
    plugin.chmod(0o755)
    ipam.obtain(
        IpamRequest({"type": "spy", "x": 1}, uid(1), "net1", "team", "pod-1"), tmp_path, asked_before=True
    )
    spoken = dict(line.split("=", 1) for line in (tmp_path / "ADD.env").read_text().splitlines())
    assert (spoken["CNI_CONTAINERID"], spoken["CNI_IFNAME"], spoken["CNI_PATH"]) == (
        uid(1),
        "net1",
        str(tmp_path),
    )
    assert "K8S_POD_NAMESPACE=team;K8S_POD_NAME=pod-1" in spoken["CNI_ARGS"]
    assert json.loads((tmp_path / "ADD.in").read_text()) == {
        "cniVersion": "1.0.0", "name": "railmate", "type": "railmate", "ipam": {"type": "spy", "x": 1},
    }  # fmt: skip
    assert (tmp_path / "DEL.in").read_text() == (tmp_path / "ADD.in").read_text()
