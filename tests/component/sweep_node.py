"""A node in namespaces of its own: VFs, a pod's sandbox, the disk, the API's claims, and a driver on it."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute

from component.sweep_infiniband import Port, infiniband
from railmate.attach.drivers import DriverBinding
from railmate.attach.ethtool import Ethtool
from railmate.attach.namespaces import with_namespace
from railmate.claims.ledger import Ledger
from railmate.claims.reconcile import Reconciler
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.sandbox import Sandbox
from railmate.claims.state import ClaimState
from railmate.claims.surroundings import Surroundings
from railmate.inventory.model import Inventory, Netdev
from railmate.kube.errors import ApiError
from unit.attach.pci_bus import PciBus
from unit.claims import claims_world as world
from unit.claims.claims_world import VFS, sandbox

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x1000, 0x4000, 0x40000, 2
_SIOCGIFHWADDR = 0x8927
_NUD_PERMANENT = 0x80
_SKIP_STATISTICS = 1 << 3  # RTEXT_FILTER_SKIP_STATS: what takes longest to take apart
LIBC = ctypes.CDLL(None, use_errno=True)
POD_NS = "pod1"
POD_PATH = Path("/run/netns", POD_NS)
LIVE = sandbox("sandbox-1", netns=str(POD_PATH))
MACS = {address: f"02:00:00:00:03:{number:02x}" for number, address in enumerate(VFS)}
MACS[world.PF] = world.PORT_MAC
NAMES = {address: f"vf{number}" for number, address in enumerate(VFS)} | {world.PF: world.PORT}
PLACES = {address: number for number, address in enumerate(NAMES)}
HOME = {name: MACS[address] for address, name in NAMES.items()}


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


#: A CNI IPAM plugin that keeps its books beside the driver's files, gives no address twice, and notes what is given
#: back without having been lent.
_PLUGIN = """#!/bin/sh
book="{books}/$CNI_CONTAINERID.$CNI_IFNAME"
if [ "$CNI_COMMAND" = DEL ]; then
	[ -e "$book" ] || echo "$CNI_IFNAME" >> "{idle}"
	exec rm -f "$book"
fi
mkdir -p "{books}"
set -C
: > "$book" || exit 1
number="${{CNI_IFNAME#net}}"
echo '{{"ips": [{{"address": "10.77.0.'"${{number%%.*}}"'/24"}}]}}'
"""


def settings_config(nics: int) -> Any:
    """Something of each kind of setting."""
    rules = [{"table": 100, "source": "10.77.0.0/24"}]
    # once is enough of what takes messages of its own
    more: dict[str, Any] = (
        {}
        if nics > 1
        else {
            "routes": [{"destination": "10.78.0.0/16", "metric": 5}],
            "neighbours": [{"address": "10.77.0.9", "mac": "02:00:00:00:09:09"}],
            "features": {"tx-scatter-gather": False},
            "channels": {"rx": 2, "tx": 3},
        }
    )
    return world.config(mtu=3000, ipam={"type": "books"}, sysctls={"arpIgnore": 1}, rules=rules, **more)


def shared_config() -> Any:
    """The same for shares of a physical function."""
    rules = [{"table": 100, "source": "10.77.0.0/24"}]
    return world.config(
        kind="RdmaSharedConfig", mtu=3000, ipam={"type": "books"}, sysctls={"arpIgnore": 1}, rules=rules
    )


def netdev_of(address: str) -> str | None:
    """As sysfs shows it: whatever it is called, and absent while it is elsewhere."""
    return macs_here().get(MACS[address])


def inventory() -> Inventory:
    found = world.inventory()
    functions = dict(found.functions)
    for address, name in NAMES.items():
        netdev = Netdev(name, MACS[address], 4000, link_type="ether")
        functions[address] = replace(functions[address], netdevs=(netdev,))
    return replace(found, functions=functions)


def make_link(name: str, address: str, *more: str) -> None:
    peer = f"peer{PLACES[address]}"
    queues = ["numrxqueues", "4", "numtxqueues", "4"]
    ip("link", "add", name, "address", MACS[address], *queues, *more, "type", "veth", "peer", "name", peer)


class Node:
    """Four VFs and their physical function, played by veth ends; a pod's namespace; the disk; the API's claims.
    ``with_infiniband``: the links are InfiniBand."""

    def __init__(self, root: Path, with_infiniband: bool = False) -> None:
        self.root, self.api = root, Api()
        self.cni_dir = root.with_name(f"{root.name}-plugins")
        self.cni_dir.mkdir()
        plugin = self.cni_dir / "books"
        self._idle = self.cni_dir / "idle"
        plugin.write_text(_PLUGIN.format(books=root / "leases", idle=self._idle))
        plugin.chmod(0o755)
        ip("netns", "add", POD_NS)
        self._route, self._pod_route = IPRoute(), IPRoute(netns=POD_NS)
        self._pod_fd = os.open(POD_PATH, os.O_RDONLY)
        self.bus = PciBus(root.with_name(f"{root.name}-pci"))
        self.infiniband = Port(self.bus) if with_infiniband else None
        self.make_links()
        DriverBinding._write = staticmethod(self.bus.write)  # type: ignore[method-assign, assignment]
        DriverBinding._start_unbind = staticmethod(self.bus.start_unbind)  # type: ignore[method-assign, assignment]

    def make_links(self) -> None:
        shutil.rmtree(self.bus.root, ignore_errors=True)
        self.bus.came = self.bus.went = lambda address: None
        self.bus.setup("mlx5_core")
        for address, name in NAMES.items():
            make_link(name, address, "mtu", "4000")
            ip("link", "set", name, "up")
        for number, address in enumerate(VFS):
            self.bus.add(address, "mlx5_core", str(10 + number))
        if self.infiniband:
            self.infiniband.setup()
        # a driver's netdev is the kernel's own way of naming and setting up one
        self.bus.came = lambda address: make_link(f"eth{VFS.index(address)}", address)
        self.bus.went = lambda address: ip("link", "delete", f"peer{PLACES[address]}")

    def clear(self) -> None:
        """After a case that left something behind: the next one starts anew."""
        self.start_sandbox()
        for number in range(len(NAMES)):
            subprocess.run(["ip", "link", "delete", f"peer{number}"], check=False, stderr=subprocess.DEVNULL)
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.api.claims.clear()
        self.make_links()

    def idle_releases(self) -> list[str]:
        """Interfaces whose addresses were given back while none was lent, once each time, since the last look."""
        found = self._idle.read_text().split() if self._idle.exists() else []
        self._idle.unlink(missing_ok=True)
        return found

    def end_sandbox(self) -> None:
        """As it looks with hardware: devices come to the node under the name they have, what software made ends, and
        the path leads nowhere."""
        for link, (mac, _, _) in self.pod_links().items():
            if mac in MACS.values():
                ip("-netns", POD_NS, "link", "set", link, "netns", str(os.getpid()))
            else:
                ip("-netns", POD_NS, "link", "delete", link)
        # what belongs to the namespace goes with it
        subprocess.run(
            ["ip", "-netns", POD_NS, "rule", "delete", "priority", "1000"],
            check=False,
            stderr=subprocess.DEVNULL,
        )
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
            if path.is_file() and path.name not in {"serialize.lock", "leases.lock", "answer"}:
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
            "pod's addresses": {
                a.get_attr("IFA_ADDRESS"): a["prefixlen"] for a in self._ipv4(self._pod_route)
            },
            "pod's rules": {
                rule.get_attr("FRA_PRIORITY") or 0: rule["table"] for rule in self._pod_route.get_rules()
            },
            "pod's neighbours": {
                n.get_attr("NDA_DST"): n.get_attr("NDA_LLADDR")
                for n in self._pod_route.get_neighbours(family=socket.AF_INET)
                if n["state"] & _NUD_PERMANENT
            },
            "pod's offloads and queues": self._pod_offloads(),
            "offloads and queues": self.offloads(),
            "files": self.files(),
            "bus": self.bus.state(),
            "guids": self.guids(),
        }

    def offloads(self) -> dict[str, tuple[str, ...]]:
        """On the node."""
        return offloads(_indices(self._route))

    def _pod_offloads(self) -> dict[str, tuple[str, ...]]:
        # not in the thread: there pyroute2 opens its socket anew, and a namespace that has no name any more, too
        indices = _indices(self._pod_route)
        return with_namespace(self._pod_fd, lambda _: offloads(indices))

    def guids(self) -> dict[str, str]:
        return self.infiniband.guids() if self.infiniband else {}

    def _ipv4(self, route: IPRoute) -> list[Any]:
        return [one for one in route.get_addr(family=socket.AF_INET) if one["index"] != 1]

    def gates(self) -> set[str]:
        """Sandboxes that the gate is open for."""
        attached = self.root / "plugins" / world.DRIVER / "attached"
        return {path.name.partition(".")[2] for path in attached.glob("[!.]*")}


def _indices(route: Any) -> dict[str, int]:
    """The first VF's name and index, where it is in the route's namespace. No other has offloads or queues set."""
    return {
        link.get_attr("IFLA_IFNAME"): link["index"]
        for link in route.link("dump", ext_mask=_SKIP_STATISTICS)
        if link.get_attr("IFLA_ADDRESS") == MACS[VFS[0]]
    }


def offloads(indices: dict[str, int]) -> dict[str, tuple[str, ...]]:
    """The features that are on, and the numbers of queues, of interfaces of this thread's namespace."""
    with closing(Ethtool()) as kernel:
        states = {name: kernel.state(index).now for name, index in indices.items()}
    return {
        name: (*sorted(feature for feature, on in state.features.items() if on), str(dict(state.channels)))
        for name, state in states.items()
    }


def _links(route: Any) -> dict[str, tuple[str, int, bool]]:
    found = {
        link.get_attr("IFLA_IFNAME"): (
            link.get_attr("IFLA_ADDRESS"), link.get_attr("IFLA_MTU"), bool(link["flags"] & 1)
        )
        for link in route.link("dump", ext_mask=_SKIP_STATISTICS)
    }  # fmt: skip
    return {
        # an interface in a partition has its NIC's address, and the one that plays it another each time
        name: ("of its NIC", *link[1:]) if "." in name else link
        for name, link in found.items()
        if name != "lo" and not name.startswith("peer")
    }


class Driver:
    """The parts of a driver process that claims go through."""

    def __init__(self, node: Node) -> None:
        view = world.view(
            inventory=infiniband(inventory()) if node.infiniband else inventory(),
            netdev_of=netdev_of,
            cni_dir=node.cni_dir,
            sysfs_root=node.bus.sysfs,
            dev_root=node.bus.dev,
        )
        plugin = node.root / "plugins" / world.DRIVER
        ledger = Ledger(plugin)
        files = RuntimeFiles(world.DRIVER, plugin, node.root / "cdi", plugin / "gate")
        self.repairs: list[str] = []
        around = Surroundings(repaired=self.repairs.append)
        self.state = ClaimState(node.api, view, ledger, files, world.BOOT, around)
        self.reconciler = Reconciler(node.api, ledger, files, self.state.moves, self.state.unprepare)

    def start(self, live: list[Sandbox], reconcile_first: bool) -> None:
        """What a real start does, in either order: the threads do not wait for each other."""
        if reconcile_first:
            self.reconciler.run()
        self.state.synchronize(live)
        if not reconcile_first:
            self.reconciler.run()
