"""Runs inside the virtual node: settings that its NICs do not take, each tried as the driver attaches a VF.

The argument is a JSON object, name to the fields of VfSettings. Prints one: name to the error and what then was not as
it had been. ``test_vf_settings`` judges it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from railmate.attach.errors import AttachError
from railmate.attach.model import PhysicalPort
from railmate.attach.netdev import MoveRequest, attach_all, snapshot
from railmate.attach.settings import NetdevSettings, VfSettings

PHYSICAL, NETDEV, POD = PhysicalPort("rail0", 1), "rail0v1", "refusals-test"


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def state() -> dict[str, Any]:
    """What the physical function keeps of its VFs, and the VF's netdev."""
    (physical,) = json.loads(run("ip", "-j", "-d", "link", "show", PHYSICAL.netdev))
    (netdev,) = json.loads(run("ip", "-j", "-d", "link", "show", NETDEV))
    return {"kept": physical["vfinfo_list"], **netdev}


def refusal(settings: NetdevSettings) -> str:
    address = Path(f"/sys/class/net/{NETDEV}/device").resolve().name
    request = MoveRequest(snapshot(NETDEV, address, PHYSICAL, settings), "net1", settings)
    try:
        attach_all([request], Path("/run/netns") / POD)
    except AttachError as error:
        return str(error)
    return "it was attached"


def main() -> dict[str, Any]:
    found = {}
    run("ip", "netns", "add", POD)
    try:
        for name, fields in json.loads(sys.argv[1]).items():
            before = state()
            error = refusal(NetdevSettings(vf=VfSettings(**fields)))
            after = state()
            found[name] = [error, sorted(key for key in before if before[key] != after.get(key))]
    finally:
        run("ip", "netns", "delete", POD)
    return found


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
