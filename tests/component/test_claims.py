"""Claims from prepare to unprepare with real netdevs, namespaces and ledger. A VF is one end of a veth pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from railmate.claims.state import ClaimState, Sandbox
from railmate.errors import RailmateError
from railmate.inventory.model import Inventory, Netdev
from unit.claims import claims_world as world
from unit.claims.claims_world import VFS, FakeClaims, claim, ref, uid

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces: needs root")

TAG = f"rc{os.getpid() % 100000}"


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def links(namespace: str | None = None) -> dict[str, Any]:
    where = ("-netns", namespace) if namespace else ()
    return {link["ifname"]: link for link in json.loads(ip(*where, "-json", "link", "show"))}


def vf_name(number: int) -> str:
    return f"{TAG}v{number}"


def mac(number: int) -> str:
    return f"02:00:00:00:02:{number:02x}"


@pytest.fixture
def vfs() -> Iterator[None]:
    """Four veth ends as the node's VFs: up, MTU 4000."""
    for number in range(4):
        name, peer = vf_name(number), f"{TAG}p{number}"
        ip("link", "add", name, "address", mac(number), "mtu", "4000", "type", "veth", "peer", "name", peer)
        ip("link", "set", name, "up")
    try:
        yield
    finally:
        for number in range(4):  # the other end goes with it, wherever it is
            subprocess.run(["ip", "link", "delete", f"{TAG}p{number}"], capture_output=True, check=False)


@pytest.fixture
def pods(vfs: None) -> Iterator[list[str]]:
    """Names of namespaces that the test may use, and end."""
    names = [f"{TAG}n{number}" for number in range(2)]
    for name in names:
        ip("netns", "add", name)
    try:
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def inventory(away: tuple[int, ...] = ()) -> Inventory:
    """The small node, its VFs called as the test's veth ends are."""
    found = world.inventory()
    functions = dict(found.functions)
    for number, address in enumerate(VFS):
        netdevs = () if number in away else (Netdev(vf_name(number), mac(number), 4000, link_type="ether"),)
        functions[address] = replace(functions[address], netdevs=netdevs)
    return replace(found, functions=functions)


def netdev_of(address: str) -> str | None:
    """As sysfs shows it: a netdev that is in another namespace is not there."""
    name = vf_name(VFS.index(address))
    return name if Path("/sys/class/net", name).exists() else None


def occupy(namespace: str, name: str) -> None:
    """The pod has an interface of that name already."""
    ip("-netns", namespace, "link", "add", name, "type", "veth", "peer", "name", "other")


@dataclass
class Driver:
    root: Path
    api: FakeClaims
    state: ClaimState

    @classmethod
    def on(cls, root: Path, api: FakeClaims, away: tuple[int, ...] = ()) -> Driver:
        view = world.view(inventory=inventory(away), netdev_of=netdev_of)
        return cls(root, api, world.state(root, api, node=view))

    def prepare(
        self, number: int, *devices: str, pod: str = "pod-1", patience: float = 2, **config: Any
    ) -> None:
        configs = [world.config(**config)] if config else None
        self.api.put(claim(number, *devices, pods=(pod,), configs=configs))
        self.state.prepare(ref(number), patience)

    def files(self) -> list[str]:
        return sorted(p.name for p in self.root.rglob("*") if p.is_file() and p.suffix != ".lock")

    def gates(self) -> list[str]:
        return sorted(path.name for path in self.root.rglob("attached/*"))


@pytest.fixture
def driver(tmp_path: Path, vfs: None) -> Driver:
    return Driver.on(tmp_path, FakeClaims())


def sandbox(namespace: str, pod: str = "pod-1") -> Sandbox:
    return Sandbox(f"sandbox-{namespace}", pod, f"team/{pod}", Path("/run/netns") / namespace)


def assert_home(number: int) -> None:
    link = links()[vf_name(number)]
    assert (link["address"], link["mtu"], "UP" in link["flags"]) == (mac(number), 4000, True)


def test_prepare_attach_detach_unprepare(driver: Driver, pods: list[str]) -> None:
    driver.prepare(1, "pair-0")
    assert vf_name(0) in links()
    driver.state.attach(sandbox(pods[0]))
    assert vf_name(0) not in links()
    inside = links(pods[0])["net1"]
    assert (inside["address"], "UP" in inside["flags"]) == (mac(0), True)
    driver.state.check(sandbox(pods[0]), [uid(1)])
    driver.state.detach(f"sandbox-{pods[0]}")
    assert_home(0)
    assert "net1" not in links(pods[0])
    with pytest.raises(RailmateError):
        driver.state.check(sandbox(pods[0]), [uid(1)])
    driver.state.unprepare(ref(1))
    assert driver.files() == []


def test_a_netdev_that_its_driver_has_made_anew_is_in_the_pod_before_the_next_container(
    driver: Driver, pods: list[str]
) -> None:
    """A reload ends the pod's netdev, and makes one on the node, under another name."""
    driver.prepare(1, "vf-0", "vf-1")
    driver.state.attach(sandbox(pods[0]))
    kept = links(pods[0])["net2"]
    ip("-netns", pods[0], "link", "set", "net1", "netns", str(os.getpid()), "name", f"{TAG}new")
    with pytest.raises(RailmateError, match=rf"{VFS[0]} .*is not in pod"):
        driver.state.check(sandbox(pods[0]), [uid(1)])
    driver.state.attach(sandbox(pods[0]))
    driver.state.check(sandbox(pods[0]), [uid(1)])
    assert links(pods[0])["net1"]["address"] == mac(0)
    assert links(pods[0])["net2"] == kept
    assert len(driver.gates()) == 1
    driver.state.unprepare(ref(1))
    assert_home(0)
    assert_home(1)
    assert driver.files() == []


def test_several_vfs_and_claims_of_a_pod(driver: Driver, pods: list[str]) -> None:
    driver.prepare(1, "wide")
    driver.prepare(2, "vf-2")
    driver.state.attach(sandbox(pods[0]))
    assert {links(pods[0])[f"net{n + 1}"]["address"] for n in range(3)} == {mac(n) for n in range(3)}
    driver.state.unprepare(ref(2))
    assert_home(2)
    assert {"net1", "net2"} <= links(pods[0]).keys(), "unprepare is for its own claim only"
    driver.state.unprepare(ref(1))
    for number in range(3):
        assert_home(number)


def test_devices_come_home_whatever_the_pod_did_to_them(driver: Driver, pods: list[str]) -> None:
    driver.prepare(1, "pair-0")
    driver.state.attach(sandbox(pods[0]))
    ip("-netns", pods[0], "link", "set", "net1", "down")
    ip("-netns", pods[0], "link", "set", "net1", "name", "mine", "mtu", "1400")
    driver.state.detach(f"sandbox-{pods[0]}")
    assert_home(0)


def test_config_has_its_effect_in_the_pod_and_leaves_nothing_behind(driver: Driver, pods: list[str]) -> None:
    """Here for the NIC half of a pair; each setting by itself: test_attach_settings.py."""
    before = links()[vf_name(0)]
    driver.prepare(
        1,
        "pair-0",
        interfaceName="rail",
        mtu=2000,
        mac="02:00:00:00:77:77",
        addresses=["10.66.0.2/24"],
        routes=[{"destination": "10.67.0.0/16", "gateway": "10.66.0.1", "table": 100}],
        rules=[{"table": 100, "source": "10.66.0.2/32"}],
        sysctls={"arpIgnore": 1},
    )
    driver.state.attach(sandbox(pods[0]))
    inside = links(pods[0])["rail"]
    assert (inside["address"], inside["mtu"], "UP" in inside["flags"]) == ("02:00:00:00:77:77", 2000, True)
    assert "10.66.0.2/24" in ip("-netns", pods[0], "address", "show", "dev", "rail")
    assert "10.67.0.0/16 via 10.66.0.1" in ip("-netns", pods[0], "route", "show", "table", "100")
    assert "from 10.66.0.2 lookup 100" in ip("-netns", pods[0], "rule", "show")
    driver.state.detach(f"sandbox-{pods[0]}")
    assert_home(0)
    assert "lookup 100" not in ip("-netns", pods[0], "rule", "show")
    driver.state.unprepare(ref(1))
    assert driver.files() == []
    assert {key: links()[vf_name(0)][key] for key in ("address", "mtu", "flags")} == {
        key: before[key] for key in ("address", "mtu", "flags")
    }


def test_config_that_the_device_cannot_have_is_refused_at_once(driver: Driver) -> None:
    with pytest.raises(RailmateError, match=r"team/claim-1: netdev .* cannot have rx rings 512: at most 0"):
        driver.prepare(1, "pair-0", patience=60, rings={"rx": 512})
    assert driver.files() == []


def test_namespace_deleted_under_the_driver(driver: Driver, pods: list[str]) -> None:
    """A veth end dies with its namespace; it is made again to play the VF that the kernel gives back."""
    driver.prepare(1, "pair-0", mac="02:00:00:00:77:77")
    driver.state.attach(sandbox(pods[0]))
    ip("netns", "delete", pods[0])
    driver.state.detach(f"sandbox-{pods[0]}")
    driver.state.unprepare(ref(1))
    assert driver.gates() == []
    assert driver.files() == [f"{VFS[0]}.json"], "it is looked for"
    # the kernel ends a namespace, and the veth with it, in its own time
    subprocess.run(["ip", "link", "delete", f"{TAG}p0"], capture_output=True, check=False)
    ip("link", "add", f"{TAG}back", "address", mac(0), "type", "veth", "peer", "name", f"{TAG}p0")
    assert driver.state.moves.strays.fetch() == 1
    assert_home(0)
    assert driver.files() == []


def test_new_sandbox_of_the_pod_gets_the_netdev(driver: Driver, pods: list[str]) -> None:
    driver.prepare(1, "pair-0")
    driver.state.attach(sandbox(pods[0]))
    driver.state.attach(sandbox(pods[1]))
    assert "net1" not in links(pods[0])
    assert "net1" in links(pods[1])
    assert driver.gates() == [f"{uid(1)}.sandbox-{pods[1]}"]


def test_name_that_the_pod_has_is_refused_and_the_netdev_stays_home(driver: Driver, pods: list[str]) -> None:
    occupy(pods[0], "net1")
    driver.prepare(1, "pair-0")
    with pytest.raises(RailmateError, match="net1"):
        driver.state.attach(sandbox(pods[0]))
    assert_home(0)
    assert driver.gates() == []
    ip("-netns", pods[0], "link", "delete", "net1")
    driver.state.attach(sandbox(pods[0]))
    driver.state.check(sandbox(pods[0]), [uid(1)])


def test_half_of_a_claim_is_never_left_in_a_pod(driver: Driver, pods: list[str]) -> None:
    """The second netdev cannot move: the first one is home again."""
    occupy(pods[0], "net2")
    driver.prepare(1, "wide")
    with pytest.raises(RailmateError, match="net2"):
        driver.state.attach(sandbox(pods[0]))
    for number in (0, 1):
        assert_home(number)


def test_sandbox_that_is_gone_already_is_refused_and_nothing_moves(driver: Driver, pods: list[str]) -> None:
    driver.prepare(1, "pair-0")
    ip("netns", "delete", pods[0])
    with pytest.raises(RailmateError, match="does not exist any more"):
        driver.state.attach(sandbox(pods[0]))
    assert_home(0)
    driver.state.attach(sandbox(pods[1]))
    driver.state.check(sandbox(pods[1]), [uid(1)])


def test_pod_on_the_host_network_keeps_everything_in_place(driver: Driver) -> None:
    driver.prepare(1, "pair-0")
    host = Sandbox("host", "pod-1", "team/pod-1", None)
    driver.state.attach(host)
    driver.state.check(host, [uid(1)])
    assert_home(0)
    driver.state.unprepare(ref(1))
    assert_home(0)


def test_driver_that_started_while_the_vf_was_away_attaches_it_to_the_next_pod(
    driver: Driver, pods: list[str], tmp_path: Path
) -> None:
    driver.prepare(1, "vf-0")
    driver.state.attach(sandbox(pods[0]))
    later = Driver.on(tmp_path, driver.api, away=(0,))  # what a scan finds at this moment
    later.state.detach(f"sandbox-{pods[0]}")
    later.state.unprepare(ref(1))
    assert_home(0)
    try:
        later.prepare(2, "vf-0", pod="pod-2", patience=0.5)
        later.state.attach(sandbox(pods[1], "pod-2"))
        later.state.check(sandbox(pods[1], "pod-2"), [uid(2)])
    except RailmateError:
        return  # refused: the pod does not run without its NIC
    assert "net1" in links(pods[1]), "the gate is open and the NIC is not there"


_CHILD = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import component.test_claims as tests
import railmate.claims.attachments as attachments
tests.TAG = sys.argv[4]
api = tests.FakeClaims()
driver = tests.Driver.on(Path(sys.argv[3]), api)
driver.prepare(1, "wide")
move = attachments.attach_all
def move_and_die(requests, netns, *alone):
    if sys.argv[6] == "first":
        requests = requests[:1]
    move(requests, netns, *alone)
    os.kill(os.getpid(), signal.SIGKILL)
attachments.attach_all = move_and_die
driver.state.attach(tests.sandbox(sys.argv[5]))
"""


@pytest.fixture(params=["first", "all"])
def killed(request: pytest.FixtureRequest, tmp_path: Path, pods: list[str]) -> Driver:
    """A driver process was killed after it had moved the first or all netdevs, before it could note that."""
    tests = Path(__file__).resolve().parents[1]
    hack = tests.parent / "hack"
    code = [sys.executable, "-c", _CHILD, tests, hack, tmp_path, TAG, pods[0], request.param]
    done = subprocess.run([str(part) for part in code], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    inside = links(pods[0])
    assert "net1" in inside
    assert ("net2" in inside) == (request.param == "all")
    return Driver.on(tmp_path, FakeClaims(claim(1, "wide")))


def test_kill_between_move_and_completion_then_synchronize(killed: Driver, pods: list[str]) -> None:
    assert killed.gates() == [], "closed until all is there"
    with pytest.raises(RailmateError):
        killed.state.check(sandbox(pods[0]), [uid(1)])
    killed.state.synchronize([sandbox(pods[0])])
    killed.state.check(sandbox(pods[0]), [uid(1)])
    assert {"net1", "net2"} <= links(pods[0]).keys()
    killed.state.unprepare(ref(1))
    for number in (0, 1):
        assert_home(number)
    assert killed.files() == []


def test_kill_between_move_and_completion_then_the_pod_ends(killed: Driver, pods: list[str]) -> None:
    killed.state.detach(f"sandbox-{pods[0]}")
    killed.state.unprepare(ref(1))
    for number in (0, 1):
        assert_home(number)
    assert killed.files() == []


def test_kill_between_move_and_completion_then_unprepare_alone(killed: Driver, pods: list[str]) -> None:
    """The pod was deleted while no driver ran: no event of its sandbox will come."""
    killed.state.unprepare(ref(1))
    for number in (0, 1):
        assert_home(number)
    assert killed.files() == []
