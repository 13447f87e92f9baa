"""Runs inside the virtual node: the driver's own steps on RDMA devices of a kernel in exclusive mode.

Prints one JSON object of what was seen; ``test_rdma_exclusive`` judges it. Both ways are taken: soft RoCE, which is all
the node has, ends with its netdev's move and is made anew. The device of a PCI function (mlx5) survives and moves by
itself; that way is walked with a soft device whose netdev stays, which the kernel moves, and gives back, in the same
manner.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from railmate.attach.netdev import MoveRequest, ReturnRequest, attach_all, return_all, snapshot
from railmate.attach.rdma import attach_rdma, return_rdma
from railmate.attach.rdmalook import Wanted, char_devices, look
from railmate.attach.rdmamodel import RdmaDeviceRef, SeenNic
from railmate.attach.settings import NetdevSettings
from railmate.cdi.spec import DeviceNode
from railmate.claims.ledger import Ledger
from railmate.claims.observation import Observations
from railmate.claims.records import ClaimRef, Entry, PreparedDevice, PreparedNic
from railmate.claims.runtime_files import RuntimeFiles
from railmate.inventory.rdmanetlink import netns_mode

NETDEV, ADDRESS, POD = "rail3v3", "192.168.78.1", "rdma-test"
NETNS = Path("/run/netns") / POD
PATIENCE = 120  # seconds; everything is emulated


def run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def devices(*where: str) -> list[str]:
    return sorted(device["ifname"] for device in json.loads(run(*where, "rdma", "-j", "dev", "show")))


def in_pod() -> list[str]:
    return devices("ip", "netns", "exec", POD)


def state() -> dict[str, Any]:
    """The rails and their RDMA devices; numbers that the kernel gives anew are left out."""
    links = json.loads(run("ip", "-j", "-d", "address", "show"))
    kept = ("ifname", "address", "mtu", "operstate", "flags", "addr_info")
    rails = {
        link["ifname"]: {key: link.get(key) for key in kept}
        for link in links
        if link["ifname"].startswith("rail")
    }
    over = {link["ifname"]: link.get("netdev") for link in json.loads(run("rdma", "-j", "link", "show"))}
    lasting = {
        name: [{k: one[k] for k in ("family", "local", "prefixlen")} for one in link.pop("addr_info") or []]
        for name, link in rails.items()
    }
    return {"links": rails, "addresses": lasting, "rdma": over}


def until(what: str, condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {PATIENCE} s: {what}"
        time.sleep(0.2)
    return found


def differences(before: dict[str, Any]) -> list[Any]:
    """What is not as it was, when that has lasted for some time: addresses come back in the background."""

    def differing() -> list[Any]:
        now = state()
        return [
            [part, name, before[part].get(name), now[part].get(name)]
            for part in before
            for name in sorted(before[part].keys() | now[part].keys())
            if before[part].get(name) != now[part].get(name)
        ]

    end = time.monotonic() + PATIENCE / 4
    while (found := differing()) and time.monotonic() < end:
        time.sleep(0.5)
    return found


def settled(wanted: Wanted) -> SeenNic | None:
    (seen,) = look([wanted], NETNS)
    return seen if seen.gid and not seen.gid.gid.startswith("fe80") else None


def numbers_after_a_move(device: RdmaDeviceRef, over: dict[str, str], pci_address: str) -> dict[str, Any]:
    """Another device's character devices are free when this one moves: what it has before, what the claim's CDI spec
    says then, what sysfs shows."""
    mine = verbs_of(device.name)
    netdev, other = min(over.items(), key=lambda one: int(verbs_of(one[1])[0].removeprefix("uverbs")))
    assert other != device.name
    node = PreparedDevice(
        "main", "node", "vf", (), (PreparedNic(pci_address, "", rdma=(device,)),),
        (DeviceNode.of(f"infiniband/{mine[0]}", Path("/dev")),),
    )  # fmt: skip
    entry = Entry(ClaimRef("1-2-3", "team", "c"), ("pod",), (node,), "boot")
    run("rdma", "link", "delete", other)
    try:
        attach_rdma([device], NETNS)
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory)
            files = RuntimeFiles("railmate.dev", root, root / "cdi", root / "gate")
            now = Observations(Ledger(root), files, Path("/sys"), Path("/dev")).refreshed(entry)
            (spec,) = (root / "cdi").glob("*.json")
            told = json.loads(spec.read_text())["devices"][0]["containerEdits"]["deviceNodes"]
        found = {"before": mine, "now": verbs_of(device.name), "spec": [one["path"] for one in told]}
        found["entry"] = [one.path for one in now.devices[0].nodes]
        found["there"] = [Path(one["path"]).is_char_device() for one in told]
        return_rdma([device], NETNS)
        return found
    finally:
        run("rdma", "link", "add", other, "type", "rxe", "netdev", netdev)


def verbs_of(device: str) -> list[str]:
    return [one for one in char_devices(Path("/sys"), device) if one.startswith("uverbs")]


def main() -> dict[str, Any]:
    over = {link.get("netdev"): link["ifname"] for link in json.loads(run("rdma", "-j", "link", "show"))}
    name = over[NETDEV]
    soft, alone = (RdmaDeviceRef(name, None, "rxe"),), [RdmaDeviceRef(name)]
    pci_address = Path(f"/sys/class/net/{NETDEV}/device").resolve().name
    before = state()
    snap = replace(snapshot(NETDEV, pci_address), soft_rdma=soft)
    settings = NetdevSettings(addresses=(f"{ADDRESS}/24",))
    move, back = MoveRequest(snap, "net1", settings), ReturnRequest(snap, None, settings)
    found: dict[str, Any] = {"mode": netns_mode(), "device": name}
    run("ip", "netns", "add", POD)
    try:
        began = time.monotonic()
        attach_all([move], NETNS)
        found["attach_seconds"] = time.monotonic() - began
        attach_all([move], NETNS)  # and again: nothing changes
        found["pod"], found["host_sees_it"] = in_pod(), name in devices()
        found["char_devices"] = char_devices(Path("/sys"), name)
        wanted = Wanted(pci_address, "net1", soft[0])
        seen = until("the GID of the pod's address", lambda: settled(wanted))
        began = time.monotonic()
        look([wanted], NETNS)
        found["look_seconds"] = time.monotonic() - began
        found["seen"] = [seen.rdma_device, seen.link_layer, seen.port_state, list(seen.addresses)]
        found["gid"] = [seen.gid.gid, seen.gid.kind, seen.gid.netdev]
        table = f"/sys/class/infiniband/{name}/ports/1/gids/{seen.gid.index}"
        found["gid_in_pod"] = run("ip", "netns", "exec", POD, "cat", table).strip()
        (home,) = return_all([back], NETNS)
        found["returned"] = [home.state, *home.problems]
        found["after_return"] = differences(before)

        attach_all([move], NETNS)
        run("ip", "netns", "delete", POD)
        until("the netdev is home", lambda: (one := return_all([back], NETNS)[0]).home and not one.problems)
        found["after_the_end"] = differences(before)

        run("ip", "netns", "add", POD)
        attach_rdma(alone, NETNS)
        attach_rdma(alone, NETNS)
        found["alone_pod"], found["alone_host_sees_it"] = in_pod(), name in devices()
        found["alone_returned"] = [one.problem for one in return_rdma(alone, NETNS)]
        found["alone_after_return"] = differences(before)
        attach_rdma(alone, NETNS)
        run("ip", "netns", "delete", POD)
        until("the RDMA device is home", lambda: return_rdma(alone, NETNS)[0].problem is None)
        found["alone_after_the_end"] = differences(before)

        run("ip", "netns", "add", POD)
        found["numbers"] = numbers_after_a_move(alone[0], over, pci_address)
        found["numbers_after"] = differences(before)
    finally:
        run("ip", "netns", "delete", POD, check=False)
        return_all([back], None)
    return found


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
