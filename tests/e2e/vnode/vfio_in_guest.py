"""Runs inside a virtual node with an IOMMU: the driver's own verbs on VFs that a claim wants bound to vfio-pci.

Prints one JSON object of what was seen; ``test_vfio`` judges it. A program then uses the VF as DPDK does: group,
container, IOMMU, device (kernel Documentation/driver-api/vfio.rst).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from railmate.attach import drivers, ipoib, links
from railmate.attach.drivers import DriverBinding
from railmate.attach.errors import AttachError
from railmate.attach.settings import IpoibSettings
from railmate.claims.ledger import Ledger
from railmate.claims.plan import NodeView
from railmate.claims.records import ClaimRef
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.sandbox import Sandbox
from railmate.claims.state import ClaimState
from railmate.errors import RailmateError
from railmate.inventory.merge import keep_facts, keep_held
from railmate.inventory.model import Inventory
from railmate.inventory.net import netdev_of
from railmate.inventory.scan import scan
from railmate.netlink import Netlink
from railmate.publish.devices import build_offer
from railmate.publish.model import Offer, OfferedDevice
from railmate.topology.analyze import analyze

SYSFS, DEV = Path("/sys"), Path("/dev")
REF = ClaimRef("00000000-0000-4000-8000-000000000001", "team", "claim")
MAC = "52:54:00:ee:77:77"
PATIENCE = 120  # seconds; everything is emulated
#: linux/vfio.h; the type is ';', 0x3b.
_API_VERSION, _SET_IOMMU, _GROUP_STATUS, _SET_CONTAINER, _DEVICE_FD, _DEVICE_INFO = (
    0x3B64, 0x3B66, 0x3B67, 0x3B68, 0x3B6A, 0x3B6B,
)  # fmt: skip
_TYPE1 = 1


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


class Api:
    def __init__(self, **parameters: Any) -> None:
        self.device = "vf"
        self.config = {
            "source": "FromClaim",
            "requests": [],
            "opaque": {"driver": "railmate.dev", "parameters": parameters},
        }

    def get_claim(self, namespace: str, name: str) -> dict[str, Any]:
        result = {"request": "main", "driver": "railmate.dev", "pool": "vnode", "device": self.device}
        return {
            "metadata": {"namespace": namespace, "name": name, "uid": REF.uid},
            "status": {
                "allocation": {"devices": {"results": [result], "config": [self.config]}},
                "reservedFor": [{"resource": "pods", "name": "pod", "uid": "pod"}],
            },
        }


def claims(root: Path, api: Api, inventory: Inventory, address: str) -> ClaimState:
    """A driver process on ``root``."""
    view = NodeView(
        driver="railmate.dev",
        pool="vnode",
        offer=Offer((OfferedDevice("vf", "rdma-vf", {}, nics=(address,)),)),
        inventory=inventory,
        dev_root=DEV,
        node_exists=Path.exists,
        netdev_of=partial(netdev_of, SYSFS),
    )
    files = RuntimeFiles("railmate.dev", root, root / "cdi", root / "gate")
    return ClaimState(api, view, Ledger(root), files, "boot")


def state(address: str) -> dict[str, Any]:
    """Links and their VFs, RDMA devices, the function's driver and override; without what the kernel gives anew."""
    links = json.loads(run("ip", "-j", "-d", "address", "show"))
    kept = ("ifname", "address", "mtu", "flags", "vfinfo_list")
    binding = DriverBinding(SYSFS, address)
    rails = [link for link in links if link["ifname"] not in ("lo", "eth0")]
    return {
        "links": {link["ifname"]: {key: link.get(key) for key in kept} for link in rails},
        "vfs": {
            link["ifname"]: link["vfinfo_list"]
            for link in json.loads(run("ip", "-j", "link", "show"))
            if link.get("vfinfo_list")
        },
        "rdma": {
            link["ifname"]: link.get("netdev") for link in json.loads(run("rdma", "-j", "link", "show"))
        },
        "driver": [binding.driver, binding.override],
    }


def differences(before: dict[str, Any], address: str) -> list[Any]:
    """What is not as it was, when that has lasted for some time: carriers come back in the background."""
    end = time.monotonic() + PATIENCE / 4
    while True:
        now = state(address)
        found = [[part, before[part], now[part]] for part in before if before[part] != now[part]]
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.5)


def use(node: str, address: str) -> dict[str, Any]:
    """As a program in user space does, without closing anything: file descriptors are in the answer."""
    container = os.open("/dev/vfio/vfio", os.O_RDWR | os.O_CLOEXEC)
    group = os.open(node, os.O_RDWR | os.O_CLOEXEC)
    status = bytearray(struct.pack("=II", 8, 0))
    fcntl.ioctl(group, _GROUP_STATUS, status)
    fcntl.ioctl(group, _SET_CONTAINER, struct.pack("=i", container))
    fcntl.ioctl(container, _SET_IOMMU, _TYPE1)
    about = bytearray(struct.pack("=IIIII", 20, 0, 0, 0, 0))
    device = _device_fd(group, address)
    fcntl.ioctl(device, _DEVICE_INFO, about)
    _, flags, regions, interrupts, _ = struct.unpack("=IIIII", about)
    return {
        "version": fcntl.ioctl(container, _API_VERSION),
        "viable": bool(struct.unpack("=II", status)[1] & 1),
        "is_pci": bool(flags & 2),
        "regions": regions,
        "interrupts": interrupts,
        "open": [device, group, container],
    }


def _device_fd(group: int, address: str) -> int:
    """ioctl(2) whose argument is a string and whose result is a descriptor: fcntl gives back only one of both."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.ioctl(group, _DEVICE_FD, ctypes.c_char_p(address.encode())))
    if fd < 0:
        raise OSError(ctypes.get_errno(), f"{address} cannot be opened through VFIO")
    return fd


def killed(verb: Callable[[], object], number: int, after: bool) -> int:
    """Run ``verb`` in a process that dies right before or right after its write ``number`` to sysfs. How many it had
    begun."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        real, real_start, count = DriverBinding._write, DriverBinding._start_unbind, 0

        def step(act: Callable[[], object]) -> None:
            nonlocal count
            count += 1
            os.write(writing, b".")
            if count == number and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            act()
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

        def start(path: Path, address: str) -> subprocess.Popen[bytes]:
            begun: list[subprocess.Popen[bytes]] = []

            def act() -> None:
                begun.append(real_start(path, address))
                begun[0].wait()

            step(act)
            return begun[0]

        DriverBinding._write = staticmethod(lambda path, text: step(lambda: real(path, text)))
        DriverBinding._start_unbind = staticmethod(start)
        try:
            verb()
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as pipe:
        return len(pipe.read())


def sweep(start: Callable[[], ClaimState], address: str, before: dict[str, Any]) -> dict[str, Any]:
    failures: list[Any] = []
    cases = 0
    for verb in ("prepare", "unprepare"):
        number, more = 0, True
        while more:
            number += 1
            for after in (False, True):
                if verb == "unprepare":
                    start().prepare(REF)
                begun = killed(lambda verb=verb: getattr(start(), verb)(REF), number, after)
                if begun < number:  # it has no such step: it came to its end
                    more = False
                    start().unprepare(REF)
                    break
                cases += 1
                if verb == "prepare" and after:  # the kubelet asks again
                    start().prepare(REF)
                    if DriverBinding(SYSFS, address).driver != "vfio-pci":
                        failures.append([verb, number, after, "not bound"])
                start().unprepare(REF)
                if (found := differences(before, address)) != []:
                    failures.append([verb, number, after, found])
    return {"cases": cases, "failures": failures}


def ipoib_answers(netdev: str) -> list[str]:
    """What the kernel's IPoIB says to our message and to iproute2's, over an interface that is no InfiniBand one."""
    run("modprobe", "ib_ipoib")
    wanted = IpoibSettings(0x8001, "datagram", True)
    answers = []
    with Netlink() as netlink:
        link = links.get(netlink, netdev)
        assert link is not None
        try:
            ipoib.make_child(netlink, link.index, "p.8001", wanted)
        except AttachError as error:
            answers.append(str(error))
    command = ["ip", "link", "add", "link", netdev, "name", "p.8001", "type", "ipoib", "pkey", "0x8001"]
    done = subprocess.run(
        [*command, "mode", "datagram", "umcast", "1"], capture_output=True, text=True, check=False
    )
    return [*answers, done.stderr.strip()]


def offer_of(inventory: Inventory) -> Offer:
    return build_offer(inventory, analyze(inventory))


def main() -> dict[str, Any]:
    run("modprobe", "-a", "vfio-pci", "vfio_iommu_type1")
    inventory = scan()
    pfs = sorted(f.address for f in inventory.functions.values() if f.virtual_functions)
    alone, crowded = (inventory.functions[pf].virtual_functions[0] for pf in pfs)
    api = Api(**json.loads(os.environ["EXAMPLE"]), mac=MAC)
    root = Path(tempfile.mkdtemp())
    start = partial(claims, root, api, inventory, alone)
    before = state(alone)
    found: dict[str, Any] = {"before": before["driver"]}

    began = time.monotonic()
    start().prepare(REF)
    found["prepare_seconds"] = time.monotonic() - began
    (spec,) = (root / "cdi").glob("*.json")
    nodes = [
        one["path"] for one in json.loads(spec.read_text())["devices"][0]["containerEdits"]["deviceNodes"]
    ]
    found["nodes"] = [re.sub(r"\d+$", "N", path) for path in nodes]
    found["exist"] = [Path(path).exists() for path in nodes]
    found["driver"] = DriverBinding(SYSFS, alone).driver
    found["netdev"] = netdev_of(SYSFS, alone)
    (told,) = [
        vf for link in json.loads(run("ip", "-j", "link", "show")) for vf in link.get("vfinfo_list", [])
        if vf["address"] == MAC
    ]  # fmt: skip
    found["told"] = [told["address"], told.get("vlan_list", [{}])[0].get("vlan")]
    merged, gone = keep_held(inventory, keep_facts(inventory, scan()), {alone})
    found["offer_is_the_same"] = offer_of(merged) == offer_of(inventory) and not gone
    start().attach(Sandbox("sandbox", "pod", "team/pod", None))
    start().check(Sandbox("sandbox", "pod", "team/pod", None), [REF.uid])

    used = use(nodes[-1], alone)
    descriptors = used.pop("open")
    found["used"] = used
    drivers._UNBIND_PATIENCE = 3.0
    try:
        start().unprepare(REF)
    except RailmateError as error:
        found["while_open"] = str(error)
    for descriptor in descriptors:
        os.close(descriptor)
    drivers._UNBIND_PATIENCE = 60.0
    began = time.monotonic()
    start().unprepare(REF)
    found["unprepare_seconds"] = time.monotonic() - began
    found["after"] = differences(before, alone)
    found["sweep"] = sweep(start, alone, before)

    try:
        claims(root, api, inventory, crowded).prepare(REF, patience=0)
    except RailmateError as error:
        found["crowded"] = [str(error), pfs[1], DriverBinding(SYSFS, crowded).driver]
    found["ipoib"] = ipoib_answers(netdev_of(SYSFS, pfs[0]) or "")
    found["left"] = sorted(str(path.relative_to(root)) for path in root.rglob("*.json"))
    return found


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
