"""Runs inside the virtual node: pods share a physical function, in both RDMA modes of a real kernel.

Prints one JSON object of what was seen; ``test_rdma_shared`` judges it. The node is in exclusive mode before and
afterwards; the kernel lets the mode be set while there is no other network namespace.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from railmate.attach.errors import UnfitError
from railmate.attach.macvlan import stable_mac
from railmate.attach.model import SubInterface, SubInterfaceRequest
from railmate.attach.netdev import attach_all, remove_all
from railmate.attach.rdmalook import Wanted, look
from railmate.attach.rdmamodel import RdmaDeviceRef, SeenNic
from railmate.attach.settings import NetdevSettings
from railmate.claims.records import PreparedNic
from railmate.claims.shares import with_port
from railmate.inventory.rdmanetlink import netns_mode
from railmate.inventory.scan import scan
from railmate.publish.devices import OfferOptions, build_offer
from railmate.publish.shared import SharedPfs
from railmate.topology.analyze import analyze

PORT, DEVICE = "rail3", "roce-rail3"
PODS = {"share-1": ("shared-1", "192.168.79.1"), "share-2": ("shared-2", "192.168.79.2")}
PATIENCE = 120  # seconds; everything is emulated


def run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def until(what: str, condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {PATIENCE} s: {what}"
        time.sleep(0.2)
    return found


def set_mode(mode: str) -> None:
    """Waits for network namespaces of pods that have just ended."""
    until(
        f"RDMA mode {mode}",
        lambda: run("rdma", "system", "set", "netns", mode, check=False) == "" and netns_mode() == mode,
    )


def state() -> Any:
    links = json.loads(run("ip", "-j", "address", "show"))
    kept = ("ifname", "address", "mtu", "operstate", "flags")
    return [{key: link.get(key) for key in kept} for link in links if link["ifname"].startswith("rail")]


def offered() -> list[str]:
    inventory = scan(Path("/sys"), Path("/proc"))
    rules = OfferOptions(shared_pfs=(SharedPfs(PORT, 2),))
    return [
        one.name for one in build_offer(inventory, analyze(inventory), rules).devices if one.sub_interfaces
    ]


def settled(wanted: Wanted, netns: Path) -> SeenNic | None:
    (seen,) = look([wanted], netns)
    return seen if seen.gid and not seen.gid.gid.startswith("fe80") else None


def prepared(share: str, pci_address: str) -> PreparedNic:
    sub = SubInterface(share, "", "", stable_mac(share))
    return PreparedNic(pci_address, "net1", sub=sub, rdma=(RdmaDeviceRef(DEVICE, None, "rxe"),))


def main() -> dict[str, Any]:
    pci_address = Path(f"/sys/class/net/{PORT}/device").resolve().name
    found: dict[str, Any] = {"mode": netns_mode(), "offered in exclusive mode": offered()}
    try:
        with_port(prepared("share-1", pci_address), PORT)
    except UnfitError as error:
        found["refused"] = str(error)
    before = state()
    set_mode("shared")
    try:
        found["offered in shared mode"] = offered()
        found["pods"] = {share: one_pod(share, pci_address) for share in PODS}
        found["again"] = {share: seen_in(share, pci_address) for share in PODS}
        for share, (name, _) in PODS.items():
            found["left"] = remove_all([request(share, pci_address)], Path("/run/netns", name))
        found["after"] = [name for name, _ in PODS.values() if "net1" in run("ip", "-netns", name, "link")]
        found["changed"] = [] if state() == before else [before, state()]
    finally:
        for name, _ in PODS.values():
            run("ip", "netns", "delete", name, check=False)
        set_mode("exclusive")
    return found


def request(share: str, pci_address: str) -> SubInterfaceRequest:
    nic = with_port(prepared(share, pci_address), PORT)
    assert nic.sub is not None
    settings = NetdevSettings(addresses=(f"{PODS[share][1]}/24",))
    return SubInterfaceRequest(pci_address, replace(nic.sub), "net1", settings)


def one_pod(share: str, pci_address: str) -> dict[str, Any]:
    name, _ = PODS[share]
    run("ip", "netns", "add", name)
    began = time.monotonic()
    attach_all([request(share, pci_address)], Path("/run/netns", name))
    print(f"attach {time.monotonic() - began:.2f} s, emulated", file=sys.stderr)
    return seen_in(share, pci_address)


def seen_in(share: str, pci_address: str) -> dict[str, Any]:
    name, _ = PODS[share]
    netns = Path("/run/netns", name)
    wanted = Wanted(pci_address, "net1", RdmaDeviceRef(DEVICE, None, "rxe"), share)
    seen = until("the GID of the pod's address", lambda: settled(wanted, netns))
    table = f"/sys/class/infiniband/{DEVICE}/ports/1"
    return {
        "seen": [seen.rdma_device, seen.link_layer, seen.port_state, list(seen.addresses)],
        "gid": [seen.gid.index, seen.gid.gid, seen.gid.kind, seen.gid.netdev],
        "in pod": run("ip", "netns", "exec", name, "cat", f"{table}/gids/{seen.gid.index}").strip(),
    }


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
