"""Runs inside a virtual node: the driver's own verbs on a physical function that a claim has as a whole. Its kernel
driver, igb, has more to set than that of its VFs, and a container with NET_ADMIN may set all of it. Then on a VF over
which a container makes interfaces of kinds that only this kernel has.

The argument is a JSON object; see `main`. Prints one of what was seen; ``test_whole_port`` judges it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from railmate.attach.errors import UnfitError
from railmate.attach.netdev import MoveRequest, ReturnRequest, attach_all, return_all, snapshot
from railmate.attach.rdmamodel import RdmaDeviceRef
from railmate.claims.nicplan import settings_of
from railmate.inventory.scan import scan
from railmate_api.config import RdmaVfConfig, decode

POD, NAME = "port-test", "net1"
NETNS = Path("/run/netns") / POD
PATIENCE = 60  # seconds; a link that is negotiated anew takes some
#: What ethtool(8) tells of a netdev, by the option.
LOOKS = ("-l", "-g", "-k", "-x", "-n", "-c", "-a", "--show-priv-flags", "")
FLOWS = ("tcp4", "udp4", "tcp6", "udp6")


def run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def state(name: str, *where: str) -> dict[str, list[str]]:
    """What the kernel's tools say of it; its name is left out."""
    commands = [("ethtool", *([option] if option else []), name) for option in LOOKS]
    commands += [("ethtool", "-n", name, "rx-flow-hash", flow) for flow in FLOWS]
    said = {
        " ".join(command[1:]).replace(name, "NIC"): run(*where, *command, check=False) for command in commands
    }
    (link,) = json.loads(run(*where, "ip", "-j", "-d", "address", "show", name))
    said["link"] = json.dumps(
        {key: link[key] for key in ("address", "mtu", "flags", "operstate", "txqlen")}, indent=1
    )
    return {
        what: [line.strip() for line in text.replace(name, "NIC").splitlines()] for what, text in said.items()
    }


def differences(before: dict[str, list[str]], name: str) -> list[Any]:
    """What is not as it was, when that has lasted for some time."""
    end = time.monotonic() + PATIENCE
    while True:
        now = state(name)
        found = [
            [what, sorted(set(before[what]) - set(now[what])), sorted(set(now[what]) - set(before[what]))]
            for what in before
            if before[what] != now[what]
        ]
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.5)


def used(commands: list[list[str]], address: str) -> list[Any]:
    """A VF with which a container does that: what is then not as it was, and what is left of it in the pod."""
    (netdev,) = (path.name for path in Path("/sys/bus/pci/devices", address, "net").iterdir())
    before = state(netdev)
    snap = snapshot(netdev, address)
    run("ip", "netns", "add", POD)
    try:
        attach_all([MoveRequest(snap, NAME)], NETNS)
        for command in commands:
            run("ip", "netns", "exec", POD, *command)
        (home,) = return_all([ReturnRequest(snap)], NETNS)
        left = json.loads(run("ip", "-n", POD, "-j", "link", "show"))
        return [[home.state, *home.problems], differences(before, netdev), [one["ifname"] for one in left]]
    finally:
        run("ip", "netns", "delete", POD, check=False)
        return_all([ReturnRequest(snap)], None)


def main() -> dict[str, Any]:
    """Asks with ``asked`` (fields of RdmaVfConfig), each of ``too_much``, and has a container run ``abuse``, and each
    list of ``uses`` over a VF."""
    argument = json.loads(sys.argv[1])
    asked, too_much, abuse, uses = (argument[name] for name in ("asked", "too_much", "abuse", "uses"))
    vf = min(one.address for one in scan().functions.values() if one.physical_function)
    address = max(one.address for one in scan().functions.values() if one.max_virtual_functions)
    device = Path("/sys/bus/pci/devices", address)
    (device / "sriov_numvfs").write_text("0")
    inventory = scan()
    function = inventory.functions[address]
    (netdev,) = function.netdevs
    over = json.loads(run("rdma", "-j", "link", "show"))
    soft = tuple(
        RdmaDeviceRef(one["ifname"], None, "rxe") for one in over if one.get("netdev") == netdev.name
    )

    def settings(fields: dict[str, Any]) -> Any:
        config = decode({"apiVersion": "railmate.dev/v1alpha1", "kind": "RdmaVfConfig", **fields})
        assert isinstance(config, RdmaVfConfig)
        return settings_of(config, function, inventory, alone=True)

    found: dict[str, Any] = {"address": address, "refused": []}
    for fields in too_much:
        try:
            snapshot(netdev.name, address, None, settings(fields))
        except UnfitError as error:
            found["refused"].append(str(error))
    before = state(netdev.name)
    wanted = settings(asked)
    snap = replace(snapshot(netdev.name, address, None, wanted), soft_rdma=soft)
    move, back = MoveRequest(snap, NAME, wanted), ReturnRequest(snap, None, wanted)
    run("ip", "netns", "add", POD)
    inside = ("ip", "netns", "exec", POD)
    try:
        attach_all([move], NETNS)
        found["pod"] = state(NAME, *inside)
        for command in abuse:
            run(*inside, *command)
        abused = state(NAME, *inside)
        found["abused"] = {what: lines for what, lines in abused.items() if lines != found["pod"][what]}
        (home,) = return_all([back], NETNS)
        found["returned"] = [home.state, *home.problems]
        found["after"] = differences(before, netdev.name)
    finally:
        run("ip", "netns", "delete", POD, check=False)
        return_all([back], None)
    found["uses"] = {name: used(commands, vf) for name, commands in uses.items()}
    return found


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
