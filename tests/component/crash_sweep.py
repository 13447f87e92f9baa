"""Kills a driver at every step of one verb, starts it anew and compares the end with the undisturbed one.

Run by test_crash_sweep as a program of its own: it makes a network and mount namespace for itself that play the node,
so whatever happens in here ends with it. Nobody lists the steps: an audit hook sees each change to the file system and
each changing netlink message (sys.addaudithook; PEP 578), whichever code makes it.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from pyroute2 import IPRoute

from railmate.claims.attachments import Sandbox
from railmate.claims.ledger import Ledger
from railmate.claims.reconcile import Reconciler
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.state import ClaimState
from railmate.inventory.model import Inventory, Netdev
from railmate.kube.errors import ApiError
from unit.claims import claims_world as world
from unit.claims.claims_world import VFS, claim, ref, sandbox, uid

BEFORE, AFTER = "before", "after"
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x1000, 0x4000, 0x40000, 2
_SIOCGIFHWADDR = 0x8927
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# Not mode, owner and times: between the making of a file and its renaming they are no state of their own.
_CHANGING = frozenset(
    f"os.{name}" for name in ("rename", "remove", "mkdir", "rmdir", "link", "symlink", "truncate")
)
_PATIENCE = 3.0  # seconds; nothing here is ever in the way for longer
LIBC = ctypes.CDLL(None, use_errno=True)
POD_NS = "pod1"
POD_PATH = Path("/run/netns", POD_NS)
LIVE = sandbox("sandbox-1", netns=str(POD_PATH))
MACS = {address: f"02:00:00:00:03:{number:02x}" for number, address in enumerate(VFS)}
HOME = {f"vf{number}": MACS[address] for number, address in enumerate(VFS)}


# --- the steps
class Steps:
    """Counts this process's side effects and, when asked for, ends it right before or right after one of them."""

    def __init__(self) -> None:
        self.counting = False
        self.names: list[str] = []
        self._number, self._when = 0, BEFORE
        sys.addaudithook(self._audit)
        for name in ("send", "sendto", "sendmsg"):
            setattr(socket.socket, name, self._sending(getattr(socket.socket, name)))

    def arm(self, number: int = 0, when: str = BEFORE) -> None:
        self.names, self._number, self._when, self.counting = [], number, when, True

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.counting:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITING and isinstance(path, str):
                self._step(f"open {Path(path).name}")
        elif event in _CHANGING:
            path = arguments[0]
            self._step(f"{event} {path if isinstance(path, int) else Path(os.fsdecode(path)).name}")

    def _sending(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def send(sock: socket.socket, data: Any, *rest: Any, **more: Any) -> Any:
            if self.counting and sock.family == socket.AF_NETLINK:
                first = data[0] if isinstance(data, (list, tuple)) else data
                kind = struct.unpack_from("=H", bytes(first), 4)[0]
                if kind & 3 != 2:  # of each four message types the third reads (linux/rtnetlink.h)
                    self._step(f"netlink message {kind}")
            return real(sock, data, *rest, **more)

        return send

    def _step(self, name: str) -> None:
        self.names.append(name)
        if len(self.names) != self._number:
            return
        if self._when == BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        sys.setprofile(self._next_event)

    def _next_event(self, frame: FrameType, event: str, argument: Any) -> None:
        """The first thing the thread does after the change was made, whatever that is."""
        if frame.f_code.co_filename != __file__:
            os.kill(os.getpid(), signal.SIGKILL)


# --- the node
class Api:
    """The API server's claims."""

    def __init__(self) -> None:
        self.claims: dict[str, Any] = {}

    def get_claim(self, namespace: str, name: str) -> dict[str, Any]:
        if name not in self.claims:
            raise ApiError(f'resourceclaims "{name}" not found', 404, "NotFound")
        found: dict[str, Any] = self.claims[name]
        return found


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def enter_own_namespaces() -> None:
    if LIBC.unshare(_CLONE_NEWNET | _CLONE_NEWNS) or LIBC.mount(
        None, b"/", None, _MS_REC | _MS_PRIVATE, None
    ):
        raise OSError(ctypes.get_errno(), "own namespaces cannot be made")
    Path("/run/netns").mkdir(exist_ok=True)
    if LIBC.mount(b"none", b"/run/netns", b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "/run/netns cannot be mounted")


def macs_here() -> dict[str, str]:
    """MAC to interface name, in this thread's namespace."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            raw = fcntl.ioctl(sock, _SIOCGIFHWADDR, struct.pack("256s", name.encode()))
            found[":".join(f"{byte:02x}" for byte in raw[18:24])] = name
    return found


def netdev_of(address: str) -> str | None:
    """As sysfs shows it: whatever it is called, and absent while it is elsewhere."""
    return macs_here().get(MACS[address])


def inventory() -> Inventory:
    found = world.inventory()
    functions = dict(found.functions)
    for number, address in enumerate(VFS):
        netdev = Netdev(f"vf{number}", MACS[address], 4000, link_type="ether")
        functions[address] = replace(functions[address], netdevs=(netdev,))
    return replace(found, functions=functions)


class Node:
    """Four VFs, played by veth ends; a pod's namespace; what is on the disk; the API's claims."""

    def __init__(self, root: Path) -> None:
        self.root, self.api = root, Api()
        ip("netns", "add", POD_NS)
        self._route, self._pod_route = IPRoute(), IPRoute(netns=POD_NS)
        self._pod_fd = os.open(POD_PATH, os.O_RDONLY)
        self.make_links()

    def make_links(self) -> None:
        for number, address in enumerate(VFS):
            ip("link", "add", f"vf{number}", "address", MACS[address], "mtu", "4000",
               "type", "veth", "peer", "name", f"peer{number}")  # fmt: skip
            ip("link", "set", f"vf{number}", "up")

    def clear(self) -> None:
        """After a case that left something behind: the next one starts anew."""
        self.start_sandbox()
        for number in range(len(VFS)):
            subprocess.run(["ip", "link", "delete", f"peer{number}"], check=False, stderr=subprocess.DEVNULL)
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.api.claims.clear()
        self.make_links()

    def end_sandbox(self) -> None:
        """As it looks with hardware: devices come to the node under the name they have, the path leads nowhere."""
        for link in self.pod_links():
            ip("-netns", POD_NS, "link", "set", link, "netns", str(os.getpid()))
        if LIBC.umount2(os.fsencode(POD_PATH), _MNT_DETACH):
            raise OSError(ctypes.get_errno(), f"{POD_PATH} cannot be unmounted")
        POD_PATH.unlink()

    def start_sandbox(self) -> None:
        if not POD_PATH.exists():
            POD_PATH.touch()
            if LIBC.mount(
                f"/proc/self/fd/{self._pod_fd}".encode(), os.fsencode(POD_PATH), None, _MS_BIND, None
            ):
                raise OSError(ctypes.get_errno(), f"{POD_PATH} cannot be mounted")

    def links(self) -> dict[str, tuple[str, int, bool]]:
        """The node's interfaces but for lo and the other ends: name to MAC, MTU, up."""
        return _links(self._route)

    def pod_links(self) -> dict[str, tuple[str, int, bool]]:
        return _links(self._pod_route)

    def files(self) -> dict[str, str]:
        """All files below the root with their contents; interface indices are the kernel's choice."""
        found = {}
        for path in sorted(self.root.rglob("*")):
            if path.is_file() and path.name not in {"serialize.lock", "answer"}:
                text = path.read_text()
                if path.parent.name == "claims" and path.suffix == ".json":
                    entry = json.loads(text)
                    for netdev in (entry["attachment"] or {}).get("netdevs", ()):
                        netdev.pop("ifindex")
                    text = json.dumps(entry, sort_keys=True)
                found[str(path.relative_to(self.root))] = text
        return found

    def picture(self) -> dict[str, Any]:
        return {
            "node": self.links(),
            "pod": self.pod_links(),
            "files": self.files(),
        }

    def gates(self) -> set[str]:
        """Sandboxes that the gate is open for."""
        attached = self.root / "plugins" / world.DRIVER / "attached"
        return {path.name.partition(".")[2] for path in attached.glob("[!.]*")}


def _links(route: Any) -> dict[str, tuple[str, int, bool]]:
    found = {
        link.get_attr("IFLA_IFNAME"): (
            link.get_attr("IFLA_ADDRESS"), link.get_attr("IFLA_MTU"), bool(link["flags"] & 1)
        )
        for link in route.link("dump")
    }  # fmt: skip
    return {name: link for name, link in found.items() if name != "lo" and not name.startswith("peer")}


class Driver:
    """The parts of a driver process that claims go through."""

    def __init__(self, node: Node) -> None:
        view = world.view(inventory=inventory(), netdev_of=netdev_of)
        plugin = node.root / "plugins" / world.DRIVER
        ledger = Ledger(plugin)
        files = RuntimeFiles(world.DRIVER, plugin, node.root / "cdi", plugin / "gate")
        self.state = ClaimState(node.api, view, ledger, files, world.BOOT)
        self.repairs: list[str] = []
        self.reconciler = Reconciler(
            node.api, ledger, files, self.state.moves, self.state.unprepare, self.repairs.append
        )

    def start(self, live: list[Sandbox], reconcile_first: bool) -> None:
        """What a real start does, in either order: the threads do not wait for each other."""
        if reconcile_first:
            self.reconciler.run()
        self.state.synchronize(live)
        if not reconcile_first:
            self.reconciler.run()


# --- scenarios


@dataclass(frozen=True)
class Scenario:
    """What leads to the verb, the verb, and who asks for what afterwards."""

    before: Callable[[Driver], None]
    verb: Callable[[Driver], None]
    live: bool = True  # the runtime still lists the sandbox when the driver is back
    namespace_ends: bool = False  # while no driver runs
    claim_ends: bool = False  # while no driver runs; nobody asks for it any more
    again: Callable[[Driver], None] | None = None  # None: the verb


def prepare(driver: Driver) -> None:
    driver.state.prepare(ref(1), _PATIENCE)


def attach(driver: Driver) -> None:
    driver.state.attach(LIVE)


def release(driver: Driver) -> None:
    driver.state.detach(LIVE.id)


def unprepare(driver: Driver) -> None:
    driver.state.unprepare(ref(1))


def nothing(driver: Driver) -> None:
    pass


def in_order(*verbs: Callable[[Driver], None]) -> Callable[[Driver], None]:
    def run(driver: Driver) -> None:
        for verb in verbs:
            verb(driver)

    return run


def half_attached(driver: Driver) -> None:
    """A driver was killed after it had moved one netdev; the runtime's directories were emptied, too."""
    prepare(driver)
    entry = driver.state._ledger.get(uid(1))
    assert entry is not None
    from railmate.attach.model import MoveRequest
    from railmate.attach.netdev import attach_all
    from railmate.claims.records import Attachment

    driver.state._ledger.put(
        entry.with_attachment(Attachment(LIVE.id, LIVE.pod_uid, LIVE.pod, str(LIVE.netns)))
    )
    nic = entry.nics[0]
    assert nic.snapshot is not None
    assert LIVE.netns is not None
    attach_all([MoveRequest(nic.snapshot, nic.interface)], LIVE.netns)
    shutil.rmtree(driver.state._files._cdi_dir)


def start(driver: Driver) -> None:
    driver.start([LIVE], reconcile_first=True)


#: By the verb, and what happens while no driver runs.
SCENARIOS: dict[str, Scenario] = {
    "prepare": Scenario(nothing, prepare, live=False),  # it comes before the sandbox
    "prepare, then the pod is deleted": Scenario(
        nothing, prepare, live=False, claim_ends=True, again=nothing
    ),
    "attach": Scenario(prepare, attach, again=lambda driver: driver.state.check(LIVE, [uid(1)])),
    "attach, then the pod is deleted": Scenario(
        prepare, attach, live=False, namespace_ends=True, claim_ends=True, again=nothing
    ),
    "attach, then the sandbox ends": Scenario(
        prepare, attach, live=False, namespace_ends=True, again=unprepare
    ),
    "release": Scenario(in_order(prepare, attach), release, live=False),
    "release, then the sandbox ends": Scenario(
        in_order(prepare, attach), release, live=False, namespace_ends=True, again=nothing
    ),
    "unprepare": Scenario(in_order(prepare, attach, release), unprepare, live=False),
    "unprepare without release": Scenario(in_order(prepare, attach), unprepare, live=False),
    "unprepare, then the claim is gone": Scenario(
        in_order(prepare, attach), unprepare, live=False, namespace_ends=True, claim_ends=True, again=nothing
    ),
    "start": Scenario(half_attached, start, again=lambda driver: driver.state.check(LIVE, [uid(1)])),
}


class Sweep:
    def __init__(self, scenario: Scenario, nics: int, root: Path) -> None:
        self.scenario, self.device = scenario, {1: "pair-0", 2: "wide"}[nics]
        self.interfaces = {f"net{n + 1}": MACS[VFS[n]] for n in range(nics)}
        self.node = Node(root)
        self.failures: list[str] = []
        self.cases = 0

    def run(self) -> list[str]:
        """The names of the steps."""
        self._claim_exists()
        steps: list[str] = self._forked(self._count)
        self._afterwards(reconcile_first=True)
        wanted = self.node.picture()
        self._finish()
        for number, step in enumerate(steps, 1):
            # Right after a step is right before the next one, but for what is written into a file that was opened.
            both = number == len(steps) or step.startswith("open")
            for when in (BEFORE, AFTER) if both else (BEFORE,):
                self.cases += 1
                self._case(f"killed {when} step {number} ({step})", number, when, wanted)
        return steps

    def _case(self, what: str, number: int, when: str, wanted: dict[str, Any]) -> None:
        try:
            self._claim_exists()
            self._forked(lambda: self._dying(number, when), dies=True)
            self._gate_tells_the_truth("after the kill")
            # either order, by turns
            self._afterwards(reconcile_first=(number % 2 == 0) == (when == BEFORE))
            self._gate_tells_the_truth("after the start")
            if (found := self.node.picture()) != wanted:
                raise AssertionError(f"the end differs:\n{difference(wanted, found)}")
            self._finish()
        except Exception as error:
            self.failures.append(f"{what}: {error}")
            self.node.clear()

    def _claim_exists(self) -> None:
        self.node.api.claims = {"claim-1": claim(1, self.device)}

    # --- what the processes do
    def _begin(self) -> Driver:
        driver = Driver(self.node)
        self.scenario.before(driver)
        return driver

    def _count(self) -> list[str]:
        steps = Steps()
        driver = self._begin()
        steps.arm()
        self.scenario.verb(driver)
        steps.counting = False
        return steps.names

    def _dying(self, number: int, when: str) -> None:
        steps = Steps()
        driver = self._begin()
        steps.arm(number, when)
        self.scenario.verb(driver)

    def _afterwards(self, reconcile_first: bool) -> None:
        scenario = self.scenario
        if scenario.namespace_ends:
            self.node.end_sandbox()
        if scenario.claim_ends:
            self.node.api.claims.clear()

        def started() -> None:
            driver = Driver(self.node)
            driver.start([LIVE] if scenario.live else [], reconcile_first)
            (scenario.again or scenario.verb)(driver)

        self._forked(started)

    def _finish(self) -> None:
        """The pod ends in order, and nothing may be left."""

        def ending() -> None:
            driver = Driver(self.node)
            driver.state.detach(LIVE.id)
            driver.state.unprepare(ref(1))

        self._forked(ending)
        self.node.start_sandbox()
        picture = self.node.picture()
        clean = {"node": {name: (mac, 4000, True) for name, mac in HOME.items()}, "pod": {}, "files": {}}
        if picture != clean:
            raise AssertionError(f"something is left in the end:\n{difference(clean, picture)}")
        for path in self.node.root.iterdir():  # making directories are steps, too
            shutil.rmtree(path)

    def _gate_tells_the_truth(self, when: str) -> None:
        for open_for in self.node.gates():
            there = self.node.pod_links()
            if open_for != LIVE.id or any(
                name not in there or there[name][0] != mac for name, mac in self.interfaces.items()
            ):
                raise AssertionError(
                    f"{when} the gate is open for {open_for} and the devices are not in it: {there}"
                )

    def _forked(self, work: Callable[[], Any], dies: bool = False) -> Any:
        """Run ``work`` in a process of its own; its result. ``dies``: it must be killed."""
        answer = self.node.root / "answer"
        pid = os.fork()
        if pid == 0:
            try:
                result = {"result": work()}
            except BaseException:
                result = {"error": traceback.format_exc()}
            answer.write_text(json.dumps(result))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if dies:
            if not os.WIFSIGNALED(status):
                raise AssertionError(f"the process was not killed: {answer.read_text()}")
            return None
        outcome = json.loads(answer.read_text())
        answer.unlink()
        if "error" in outcome:
            raise AssertionError(outcome["error"])
        return outcome["result"]


def difference(wanted: dict[str, Any], found: dict[str, Any]) -> str:
    lines = []
    for part, values in wanted.items():
        for key in sorted(values.keys() | found[part].keys()):
            one, other = values.get(key), found[part].get(key)
            if one != other:
                lines.append(f"  {part} {key}: {other!r} instead of {one!r}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("nics", type=int, choices=(1, 2))
    parser.add_argument("root", type=Path)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    enter_own_namespaces()
    sweep = Sweep(SCENARIOS[options.scenario], options.nics, options.root)
    steps = sweep.run()
    print(json.dumps({"steps": steps, "cases": sweep.cases, "failures": sweep.failures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
