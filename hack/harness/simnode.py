"""hack/simnode: makes a worker of the cluster look like a machine with GPUs and RDMA NICs, as far as software can tell.

What silicon would show is a tree of files (sys, proc) and device nodes that are clones of /dev/null. The netdevs of
the NICs, physical and virtual functions, are real links: veth ends whose peers meet on a bridge. simnode_agent.sh runs
in the node and makes a link anew that died with its pod's namespace.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from harness.machines import (
    DEMO_MACHINE,
    DEMO_VFS_PER_RAIL,
    FactsError,
    Machine,
    list_char_devices,
    list_netdevs,
    load_machine,
)
from harness.shell import main_guard, progress
from harness.sysfs import write_tree

#: Where a simulated node keeps everything: sys, proc and dev are what the driver is pointed at.
STATE = "/var/lib/railmate-sim"
#: Network namespace in the node that holds the links' other ends.
FABRIC = "railmate-fabric"
#: Label of a simulated node, and the chart's nodeSelector for it.
LABEL = "railmate.dev/simulated"
_UNIT = "railmate-simnode"
_AGENT = Path(__file__).with_name("simnode_agent.sh")
_NULL_DEVICE = (1, 3)  # Documentation/admin-guide/devices.txt: /dev/null

# The directories sys, proc and dev stay the same ones: a driver that runs has them mounted.
_INSTALL = f"""\
set -euo pipefail
systemctl stop {_UNIT} 2> /dev/null || true
systemctl reset-failed {_UNIT} 2> /dev/null || true
[ ! -e /run/netns/{FABRIC} ] || ip netns del {FABRIC}
mkdir -p {STATE}/sys {STATE}/proc {STATE}/dev
find {STATE} -mindepth 1 ! -path {STATE}/sys ! -path {STATE}/proc ! -path {STATE}/dev -delete
tar -C {STATE} -xpf -
"""
# Links first, so that an error is seen here and not in the unit's log.
_START = f"""\
set -euo pipefail
bash {STATE}/agent.sh {STATE} {FABRIC} once
systemctl is-active -q {_UNIT} || {{
  systemctl reset-failed {_UNIT} 2> /dev/null || true
  systemd-run -q --unit={_UNIT} --description="Links of a simulated GPU node" -p Restart=always -p RestartSec=1 \\
    bash {STATE}/agent.sh {STATE} {FABRIC} watch
}}
"""
_REMOVE = f"""\
set -euo pipefail
systemctl stop {_UNIT} 2> /dev/null || true
systemctl reset-failed {_UNIT} 2> /dev/null || true
[ ! -e /run/netns/{FABRIC} ] || ip netns del {FABRIC}
[ ! -d {STATE} ] || {{
  find {STATE}/sys {STATE}/proc {STATE}/dev -mindepth 1 -delete
  rm -rf {STATE}
}}
"""


class Nodes(Protocol):
    """What of harness.cluster.Cluster is used here."""

    def node_exec(
        self, node: str, *command: str, input: str | bytes | None = None, timeout: float | None = None
    ) -> str: ...

    def kubectl(self, *arguments: str, input: str | None = None, timeout: float | None = None) -> str: ...


class SimNode:
    """One worker as a simulated machine. Making the object touches nothing."""

    def __init__(self, cluster: Nodes, node: str, machine: Machine) -> None:
        self.cluster, self.node, self.machine = cluster, node, machine

    def up(self) -> None:
        """Makes the node the machine, or repairs what is missing; a node that is another machine is changed,
        and pods on it lose the links they hold.

        Raises HarnessError when the node is not there or refuses.
        """
        content = archive(self.machine)
        digest = hashlib.sha256(content).hexdigest()
        present = self.cluster.node_exec(
            self.node, "sh", "-c", f"cat {STATE}/digest 2> /dev/null || true"
        ).strip()
        if present != digest:
            self.cluster.node_exec(self.node, "bash", "-c", _INSTALL, input=content)
        self.cluster.node_exec(self.node, "bash", "-c", _START)
        if present != digest:  # only now: an interrupted `up` is done over
            self.cluster.node_exec(self.node, "sh", "-c", f"echo {digest} > {STATE}/digest")
        self.cluster.kubectl("label", "node", self.node, f"{LABEL}=true", "--overwrite")
        progress("simnode", f"{self.node} is a {self.machine.name} with {self._counts()}")

    def down(self) -> None:
        """Takes everything away again; pods on the node lose the links they hold."""
        remove(self.cluster, self.node)

    def _counts(self) -> str:
        netdevs = list_netdevs(self.machine)
        virtual = sum(netdev.physical_function is not None for netdev in netdevs)
        return f"{len(self.machine.gpus)} GPUs, {len(netdevs) - virtual} NIC ports, {virtual} VFs"


def remove(cluster: Nodes, node: str) -> None:
    """`down` for a node whose machine nobody remembers."""
    cluster.node_exec(node, "bash", "-c", _REMOVE)
    cluster.kubectl("label", "node", node, f"{LABEL}-")
    progress("simnode", f"{node} is an ordinary node again")


def links_table(machine: Machine) -> str:
    """The agent's links.tsv: name, MAC, MTU and device directory of every netdev, a line each."""
    lines = []
    for netdev in list_netdevs(machine):
        directory = "/".join(["devices", *machine.functions[netdev.owner].path])
        lines.append(f"{netdev.name}\t{netdev.mac or '-'}\t{netdev.mtu}\t{directory}\n")
    return "".join(lines)


def archive(machine: Machine) -> bytes:
    """Everything that goes below STATE, as a tar; the same machine gives the same bytes."""
    packed = io.BytesIO()
    # Some thousand small files: in memory it takes a third of the time.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="railmate-simnode-", dir=memory) as scratch,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        root = Path(scratch, "root")
        write_tree(machine, root)
        for part in ("sys", "proc"):
            _add_tree(tar, root / part, root)
        _add_devices(tar, list_char_devices(machine))
        _add_text(tar, "links.tsv", links_table(machine))
        _add_text(tar, "agent.sh", _AGENT.read_text())
        _add_text(tar, "machine.json", json.dumps({"machine": machine.name}) + "\n")
    return packed.getvalue()


def _add_tree(tar: tarfile.TarFile, directory: Path, root: Path) -> None:
    for path in [directory, *sorted(directory.rglob("*"))]:
        # Not gettarinfo(): it looks up the names of user and group for each of some thousand files.
        entry = tarfile.TarInfo(str(path.relative_to(root)))
        if path.is_symlink():
            entry.type, entry.linkname = tarfile.SYMTYPE, str(path.readlink())
            tar.addfile(entry)
        elif path.is_dir():
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        else:
            data = path.read_bytes()
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def _add_devices(tar: tarfile.TarFile, names: Sequence[str]) -> None:
    folders = sorted(
        {str(folder) for name in names for folder in Path("dev", name).parents if folder != Path()}
    )
    for folder in folders:
        entry = tarfile.TarInfo(folder)
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(entry)
    for name in names:
        entry = tarfile.TarInfo(f"dev/{name}")
        entry.type, entry.mode = tarfile.CHRTYPE, 0o666
        entry.devmajor, entry.devminor = _NULL_DEVICE
        tar.addfile(entry)


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode()
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def _main(argv: Sequence[str]) -> int:
    from harness.cluster import Cluster  # not needed by those who bring a cluster of their own

    parser = argparse.ArgumentParser(
        prog="hack/simnode",
        description="Turns a worker of the cluster (hack/cluster up) into a simulated GPU node, and back.",
    )
    parser.add_argument("action", choices=["up", "down"])
    parser.add_argument("--node", help="the worker's name (default: the cluster's first worker)")
    parser.add_argument(
        "--machine", type=Path, default=DEMO_MACHINE, help="facts of the machine (default: DGX A100)"
    )
    parser.add_argument(
        "--vfs",
        type=int,
        default=DEMO_VFS_PER_RAIL,
        metavar="N",
        help="VFs on each rail (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    cluster = Cluster()
    if options.node not in (None, *cluster.workers()):
        parser.error(f"no worker {options.node!r}; the cluster has {', '.join(cluster.workers())}")
    node = options.node or cluster.workers()[0]
    if options.action == "down":
        remove(cluster, node)
        return 0
    try:
        machine = load_machine(options.machine, vfs_per_rail=options.vfs)
    except FactsError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(
            f"--machine {options.machine}: {error.strerror}; the project's machines are in tests/machines"
        )
    SimNode(cluster, node, machine).up()
    return 0


if __name__ == "__main__":
    main_guard(_main)
