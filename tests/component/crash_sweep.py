"""Kills a driver at every step of one verb, starts it anew and compares the end with the undisturbed one.

Run by test_crash_sweep as a program of its own: it makes a network and mount namespace for itself that play the node,
so whatever happens in here ends with it. Nobody lists the steps: an audit hook sees each change to the file system and
each changing netlink message (sys.addaudithook; PEP 578), whichever code makes it.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from component.sweep_infiniband import GUID, GUID_CONFIG, PARTITION_CONFIG, PKEY
from component.sweep_node import (
    HOME,
    LIVE,
    MACS,
    Driver,
    Node,
    enter_own_namespaces,
    settings_config,
    shared_config,
)
from component.sweep_steps import AFTER, BEFORE, Steps, forked
from railmate.attach.macvlan import stable_mac
from railmate.attach.model import MoveRequest, SubInterfaceRequest
from railmate.attach.netdev import attach_all
from railmate.claims.records import Attachment, Entry
from unit.claims.claims_world import VFS, claim, ref, share, uid, vfio_config

SHARES, ANOTHER_GUID, PARTITION = "shares", "guid", "partition"
_PATIENCE = 3.0  # seconds; nothing here is ever in the way for longer
_SECONDS = 400  # for one sweep

Outcome = dict[str, Any]


@dataclass(frozen=True)
class Scenario:
    """What leads to the verb, the verb, and who asks for what afterwards."""

    before: Callable[[Driver], None]
    verb: Callable[[Driver], None]
    live: bool = True  # the runtime still lists the sandbox when the driver is back
    namespace_ends: bool = False  # while no driver runs
    claim_ends: bool = False  # while no driver runs; nobody asks for it any more
    again: Callable[[Driver], None] | None = None  # None: the verb
    passing: bool = False  # the claim wants its VFs bound to vfio-pci


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
    driver.state._ledger.put(
        entry.with_attachment(Attachment(LIVE.id, LIVE.pod_uid, LIVE.pod, str(LIVE.netns)))
    )
    nic = entry.nics[0]
    assert LIVE.netns is not None
    if nic.sub is not None:
        attach_all([SubInterfaceRequest(nic.address, nic.sub, nic.interface, nic.settings)], LIVE.netns)
    else:
        assert nic.snapshot is not None
        attach_all([MoveRequest(nic.snapshot, nic.interface, nic.settings)], LIVE.netns)
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
    "prepare what passes through": Scenario(nothing, prepare, live=False, passing=True),
    "prepare what passes through, then the pod is deleted": Scenario(
        nothing, prepare, live=False, claim_ends=True, again=nothing, passing=True
    ),
    "unprepare what passes through": Scenario(
        in_order(prepare, attach, release), unprepare, live=False, passing=True
    ),
    "start": Scenario(half_attached, start, again=lambda driver: driver.state.check(LIVE, [uid(1)])),
}


class Sweep:
    def __init__(self, scenario: Scenario, what: str, root: Path) -> None:
        self.scenario, self.passing = scenario, VFS[: int(what)] if scenario.passing else []
        if what in (ANOTHER_GUID, PARTITION):
            macs = [MACS[VFS[0]]]
            self.claim = claim(
                1, "pair-0", configs=[GUID_CONFIG if what == ANOTHER_GUID else PARTITION_CONFIG]
            )
        elif what == SHARES:
            shares = [share(1, "a"), share(2, "b")]
            macs = [stable_mac(one["shareID"]) for one in shares]
            self.claim = claim(1, *shares, configs=[shared_config()])
        else:
            macs = [] if scenario.passing else [MACS[vf] for vf in VFS[: int(what)]]
            device = {"1": "pair-0", "2": "wide"}[what]
            config = vfio_config() if scenario.passing else settings_config(int(what))
            self.claim = claim(1, device, configs=[config])
        self.interfaces = {f"net{n}": mac for n, mac in enumerate(macs, 1)}
        if what == PARTITION:
            self.interfaces[f"net1.{PKEY:04x}"] = "of its NIC"
        self.guid = {VFS[0]: GUID} if what == ANOTHER_GUID else {}
        self.node = Node(root, with_infiniband=what in (ANOTHER_GUID, PARTITION))
        self.bus_at_first, self.guids_at_first = self.node.bus.state(), self.node.guids()
        self.offloads_at_first = self.node.offloads()
        self.failures: list[str] = []
        self.cases = 0

    def run(self) -> list[str]:
        """The names of the steps."""
        self._claim_exists()
        steps, records = self._forked(self._count)
        for record in records:
            Entry.from_json(
                record
            )  # what its fields are is worked out once, not in each of the processes below
        self._afterwards(reconcile_first=True)
        wanted = self.node.picture()
        self._finish()
        if idle := self.node.idle_releases():
            raise AssertionError(f"without a kill, addresses of {idle} are given back twice")
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
            # the next driver cannot know whether the one call was made that the kill came upon
            if len(idle := self.node.idle_releases()) > len(set(idle)):
                raise AssertionError(
                    f"after one kill, addresses of {idle} are given back more than once too often"
                )
        except Exception as error:
            self.failures.append(f"{what}: {error}")
            self.node.clear()
            self.node.idle_releases()

    def _claim_exists(self) -> None:
        self.node.api.claims = {"claim-1": self.claim}

    # --- what the processes do
    def _begin(self) -> Driver:
        driver = Driver(self.node)
        self.scenario.before(driver)
        return driver

    def _count(self) -> tuple[list[str], list[Any]]:
        """The steps, and the claim's records before and after them."""
        steps = Steps()
        self.node.bus.around = steps.unseen
        driver = self._begin()
        records = [entry.to_json() for entry in driver.state._ledger.entries().values()]
        steps.arm()
        self.scenario.verb(driver)
        steps.counting = False
        return steps.names, records + [entry.to_json() for entry in driver.state._ledger.entries().values()]

    def _dying(self, number: int, when: str) -> None:
        steps = Steps()
        self.node.bus.around = steps.unseen
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
        picture = {name: part for name, part in self.node.picture().items() if not name.startswith("pod's")}
        clean = {
            "node": {name: (mac, 4000, True) for name, mac in HOME.items()},
            "pod": {},
            "files": {},
            "offloads and queues": self.offloads_at_first,
            "bus": self.bus_at_first,
            "guids": self.guids_at_first,
        }
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

            bound = {address: self.node.bus.driver(address) for address in self.passing}
            if set(bound.values()) - {"vfio-pci"}:
                raise AssertionError(f"{when} the gate is open and the VFs are bound to {bound}")
            if not self.guid.items() <= self.node.guids().items():
                raise AssertionError(f"{when} the gate is open and the GUIDs are {self.node.guids()}")

    def _forked(self, work: Callable[[], Any], dies: bool = False) -> Any:
        return forked(work, self.node.root / "answer", dies)


def difference(wanted: dict[str, Any], found: dict[str, Any]) -> str:
    lines = []
    for part, values in wanted.items():
        for key in sorted(values.keys() | found[part].keys()):
            one, other = values.get(key), found[part].get(key)
            if one != other:
                lines.append(f"  {part} {key}: {other!r} instead of {one!r}")
    return "\n".join(lines)


def swept(name: str, what: str, root: Path) -> Outcome:
    """In this process, which gets namespaces of its own."""
    enter_own_namespaces()
    sweep = Sweep(SCENARIOS[name], what, root)
    steps = sweep.run()
    return {"steps": steps, "cases": sweep.cases, "failures": sweep.failures}


def begun(name: str, what: str, root: Path) -> int:
    """A process that sweeps and leaves its outcome beside ``root``; its number."""
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(_SECONDS)
    try:
        root.mkdir()
        outcome = swept(name, what, root)
    except BaseException:
        outcome = failed(traceback.format_exc())
    root.with_name(f"{root.name}.json").write_text(json.dumps(outcome))
    os._exit(0)


def failed(why: str) -> Outcome:
    return {"steps": [], "cases": 0, "failures": [f"the sweep itself failed: {why}"]}


def main() -> int:
    """Prints a line of JSON for each sweep that has ended: its number in the order of the arguments, and its outcome.

    They are forked from this process: what they import is imported once.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--at-once", type=int, default=1, help="sweeps that run side by side")
    parser.add_argument("root", type=Path, help="an empty directory")
    parser.add_argument(
        "sweeps",
        nargs="+",
        metavar="SCENARIO/WHAT",
        help="of the scenarios above / VFs of the claim: 1 or 2; or shares, guid, partition",
    )
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    gc.disable()  # a collection touches, and so copies, all that a fork shares
    waiting = list(enumerate(options.sweeps))
    running: dict[int, int] = {}
    while waiting or running:
        while waiting and len(running) < options.at_once:
            number, sweep = waiting.pop(0)
            name, _, what = sweep.partition("/")
            running[begun(name, what, options.root / str(number))] = number
        pid, status = os.wait()
        number = running.pop(pid)
        answer = options.root / f"{number}.json"
        ended = (
            json.loads(answer.read_text()) if answer.exists() else failed(f"it ended with status {status}")
        )
        print(json.dumps({"number": number, "outcome": ended}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
