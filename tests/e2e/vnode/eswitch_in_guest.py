"""Runs inside a virtual node: the driver's own verbs on a real NIC's ethtool settings, and on an embedded switch as far
as the kernel's devlink goes.

Prints one JSON object of what was seen; ``test_vfio`` judges it. The switch is eswitch.c of hack/harness/vnode_guest.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from railmate.attach import eswitch, ethtool
from railmate.attach.errors import AttachError
from railmate.attach.ethtool import Ethtool
from railmate.inventory.net import netdev_of
from railmate.inventory.scan import scan
from railmate.provision.apply import apply
from railmate.provision.plan import plan
from railmate.provision.unfinished import Unfinished
from railmate_api.provisioning import PfRule, PfSelector, VfProvisioning

SYSFS = Path("/sys")


def devlink(*command: str) -> str:
    done = subprocess.run(["devlink", *command], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout or done.stderr


def told(nic: str) -> str:
    """The mode as iproute2 tells it."""
    said = json.loads(devlink("-j", "dev", "eswitch", "show", f"pci/{nic}"))
    return str(said["dev"][f"pci/{nic}"]["mode"])


def provisioned(nic: str, vfs: int, mode: str, held: frozenset[str] = frozenset()) -> list[Any]:
    """What the driver says when a rule asks for that; how many VFs there are then, and in which mode the switch is."""
    inventory = scan()
    wanted = VfProvisioning((PfRule(PfSelector(address=nic), vfs, eswitch=mode),))
    planned = plan(inventory, {}, wanted, frozenset(), held)
    problems = [one.reason for one in planned.refusals]
    with tempfile.TemporaryDirectory() as directory:
        unfinished = Unfinished(Path(directory), "this boot")
        for change in planned.changes:
            outcome = apply(change, inventory, lambda address: nullcontext(held), SYSFS, unfinished)
            problems += outcome.problems
    count = int((SYSFS / "bus/pci/devices" / nic / "sriov_numvfs").read_text())
    return [problems, count, told(nic)]


def refused(nic: str, mode: str) -> str:
    try:
        eswitch.set_mode(nic, mode)
    except AttachError as error:
        return str(error)
    return ""


def restored(netdev: str) -> list[Any]:
    """What ethtool(8) changes of igb is told as changed, and set back: differences after each of the two."""
    index = socket.if_nametoindex(netdev)
    with closing(Ethtool()) as kernel:
        before = kernel.state(index).now
        for command in (
            ("-C", netdev, "rx-usecs", "50"),
            ("-A", netdev, "autoneg", "off", "rx", "off", "tx", "off"),
            ("--set-priv-flags", netdev, "legacy-rx", "on"),
        ):
            subprocess.run(["ethtool", *command], check=False, timeout=60)
        changed = ethtool.difference(before, kernel.state(index).now)
        kernel.set(index, changed, netdev)
        return [asdict(changed), asdict(ethtool.difference(before, kernel.state(index).now))]


def main() -> dict[str, Any]:
    nic = max(one.address for one in scan().nics if not one.is_vf and one.function.virtual_functions)
    found: dict[str, Any] = {"ethtool": restored(netdev_of(SYSFS, nic) or "")}
    found |= {"nic": nic, "without": [eswitch.mode(nic), refused(nic, "switchdev")]}
    subprocess.run(["modprobe", "eswitch"], check=True)
    found["at_first"] = [eswitch.mode(nic), told(nic)]
    found["with_vfs"] = [refused(nic, "switchdev"), told(nic)]
    found["as_it_is"] = provisioned(nic, 2, "legacy")
    found["its_vfs_would_go"] = provisioned(nic, 2, "switchdev")
    found["held"] = provisioned(nic, 1, "switchdev", frozenset({nic}))
    found["with_other_vfs"] = [*provisioned(nic, 1, "switchdev"), eswitch.mode(nic)]
    found["repeated"] = provisioned(nic, 1, "switchdev")
    found["none"] = provisioned(nic, 0, "switchdev")
    eswitch.set_mode(nic, "legacy")
    found["back"] = [eswitch.mode(nic), told(nic)]
    subprocess.run(["rmmod", "eswitch"], check=True)
    return found


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
