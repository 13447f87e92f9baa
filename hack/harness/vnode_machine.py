"""The virtual node's hardware as QEMU arguments: two sockets, four PCIe switches, eight GPUs, four NICs with SR-IOV.

A socket has a PCIe root bus of its own (pxb-pcie, in the socket's NUMA node), each root bus two root ports, each of
these a switch with three downstream ports: two GPUs and a NIC. `machine` is a pure function of the settings; the facts
that tests compare with what the node says (`switches`) are made from the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.vnode_disk import Boot
from harness.vnode_vfiouser import socket_name

SOCKETS, SWITCHES_PER_SOCKET, GPUS_PER_SWITCH = 2, 2, 2
GPUS = SOCKETS * SWITCHES_PER_SOCKET * GPUS_PER_SWITCH
MOST_VFS = 7  # sriov_totalvfs of QEMU's igb
AGENT_PORT = 4100  # in the node
HOST = "10.0.2.2"  # this machine, as the node reaches it
_ROOT_BUSES = (0x20, 0x80)
_VF_OFFSET, _VF_STRIDE = 128, 2  # routing ids of igb's VFs, from its SR-IOV capability
#: The first device. Without interrupt remapping VFIO gives no function to a program.
_IOMMU = ("-device", "intel-iommu,intremap=on,caching-mode=on")
#: Without what is quick on silicon and slow under TCG: a fifth level of page tables is a memory access more, the "fast"
#: string instructions go byte by byte, and SMAP, SMEP and UMIP end a translated block at every access to user memory.
#: That is a quarter of the processor time of starting programs, and two thirds of copying files.
_EMULATED = "max,la57=off,erms=off,fsrm=off,fzrm=off,fsrs=off,fsrc=off,smap=off,smep=off,umip=off"
_BUSES_PER_SWITCH = 5  # the root port's, the upstream port's and three downstream ports'


@dataclass(frozen=True)
class Settings:
    """What may differ from node to node.

    vfs: virtual functions a NIC (0 to 7). rdma: "exclusive" or "shared", whose RDMA devices a network namespace sees
    (rdma-system(8)). memory: MiB, of both sockets together; the node alone uses 500. iommu: another machine, without
    GPUs: an IOMMU, a NIC whose VFs are in groups of their own, and a NIC below a switch without ACS, all in one group.
    """

    vfs: int = 4
    rdma: str = "exclusive"
    memory: int = 3072
    acceleration: str = "tcg"
    iommu: bool = False


@dataclass(frozen=True)
class Switch:
    """One PCIe switch with the addresses of what is below it; `address` is its upstream port."""

    address: str
    numa_node: int
    gpus: tuple[str, ...]
    nic: str

    def vf(self, index: int) -> str:
        """Address of a VF of its NIC."""
        bus = int(self.nic[5:7], 16)
        routing = (bus << 8) + _VF_OFFSET + _VF_STRIDE * index
        return f"0000:{routing >> 8:02x}:{routing >> 3 & 0x1F:02x}.{routing & 7}"


def switches() -> tuple[Switch, ...]:
    """The switches in the order of their addresses: firmware numbers buses depth first, from each root bus on."""
    found = []
    for numa_node, root in enumerate(_ROOT_BUSES):
        for index in range(SWITCHES_PER_SOCKET):
            upstream = root + 1 + index * _BUSES_PER_SWITCH
            below = [f"0000:{upstream + 2 + port:02x}:00.0" for port in range(GPUS_PER_SWITCH + 1)]
            found.append(Switch(f"0000:{upstream:02x}:00.0", numa_node, tuple(below[:-1]), below[-1]))
    return tuple(found)


def machine(boot: Boot, settings: Settings, agent_port: int) -> list[str]:
    """QEMU's arguments. Paths of sockets and logs are relative to the directory that QEMU runs in."""
    return [
        "-M", "q35", *(_IOMMU if settings.iommu else ()), *_processors(settings),
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-kernel", str(boot.kernel), "-initrd", str(boot.initrd), "-append", _command_line(settings),
        "-chardev", "file,id=console,path=console.log", "-serial", "chardev:console",
        "-qmp", "unix:qmp.sock,server=on,wait=off",
        "-drive", f"if=none,id=root,file={_quoted(boot.disk)},format=raw,snapshot=on,cache=unsafe",
        # Later devices name their bus, or QEMU may try to put them on a pxb.
        "-device", "virtio-blk-pci,drive=root,bus=pcie.0",
        "-device", "virtio-scsi-pci,id=scsi,bus=pcie.0",
        "-device", "virtio-rng-pci,bus=pcie.0",
        "-netdev", f"user,id=own,hostfwd=tcp:127.0.0.1:{agent_port}-:{AGENT_PORT}",
        "-device", "virtio-net-pci,netdev=own,mac=52:54:00:00:00:fe,bus=pcie.0",
        *(_nics_behind_iommu() if settings.iommu else (part for socket in range(SOCKETS) for part in _socket(socket))),
    ]  # fmt: skip


def store_disk(path: Path) -> list[tuple[str, dict[str, object]]]:
    """QMP commands that give the running node a further disk, for reading and for writing that is lost."""
    return [
        ("human-monitor-command", {
            "command-line": f"drive_add 0 if=none,id=store,file={_quoted(path)},format=raw,snapshot=on,cache=unsafe"
        }),
        ("device_add", {"driver": "scsi-hd", "drive": "store", "bus": "scsi.0", "id": "store-disk", "serial": "store"}),
    ]  # fmt: skip


def _quoted(path: Path) -> str:
    return str(path).replace(",", ",,")


def _command_line(settings: Settings) -> str:
    # Reading HPET, which Linux would take for its clock here, leaves the emulated processor for QEMU's main thread each
    # time. TCG's TSCs are one counter, so they may be trusted.
    return (
        "console=ttyS0 panic=-1 quiet loglevel=4 pci=realloc tsc=reliable clocksource=tsc "
        "mitigations=off nokaslr audit=0 apparmor=0 nowatchdog transparent_hugepage=never rcupdate.rcu_expedited=1 "
        f"vnode.port={AGENT_PORT} vnode.rdma={settings.rdma}{' intel_iommu=on iommu=pt' if settings.iommu else ''}"
    )


def _processors(settings: Settings) -> Iterator[str]:
    accelerated = settings.acceleration == "kvm"
    yield from ("-accel", "kvm" if accelerated else "tcg,thread=multi")
    yield from ("-cpu", "host" if accelerated else _EMULATED, "-m", str(settings.memory))
    yield from ("-smp", f"{SOCKETS},sockets={SOCKETS},cores=1,threads=1")
    for node in range(SOCKETS):
        yield from ("-object", f"memory-backend-ram,id=memory{node},size={settings.memory // SOCKETS}M")
        yield from ("-numa", f"node,nodeid={node},memdev=memory{node},cpus={node}")
    yield from ("-numa", "dist,src=0,dst=1,val=21")


def _nics_behind_iommu() -> Iterator[str]:
    """QEMU's root ports have ACS, its switches have not."""
    for index in range(2):
        port = f"port{index}"
        yield from (
            "-device",
            f"pcie-root-port,id={port},hotplug=off,bus=pcie.0,chassis={1 + index},slot={index}",
        )
        if index == 1:
            yield from ("-device", f"x3130-upstream,id=up,bus={port}")
            yield from ("-device", "xio3130-downstream,id=down,hotplug=off,bus=up,chassis=3,slot=0")
            port = "down"
        yield from ("-netdev", f"hubport,hubid=0,id=fabric{index}")
        yield from ("-device", f"igb,bus={port},netdev=fabric{index},mac=52:54:00:ee:{index:02x}:ff")


def _socket(socket: int) -> Iterator[str]:
    root = f"root{socket}"
    yield from ("-device", f"pxb-pcie,id={root},bus_nr={_ROOT_BUSES[socket]},bus=pcie.0,numa_node={socket}")
    for index in range(SWITCHES_PER_SOCKET):
        switch = socket * SWITCHES_PER_SOCKET + index
        chassis = 1 + switch * (GPUS_PER_SWITCH + 2)
        port, up = f"port{switch}", f"up{switch}"
        slot = f"chassis={chassis},slot={index},addr={index}.0"
        yield from ("-device", f"pcie-root-port,id={port},hotplug=off,bus={root},{slot}")
        yield from ("-device", f"x3130-upstream,id={up},bus={port}")
        for down in range(GPUS_PER_SWITCH + 1):
            slot = f"chassis={chassis + 1 + down},slot={down},addr={down}.0"
            yield from ("-device", f"xio3130-downstream,id=down{switch}.{down},hotplug=off,bus={up},{slot}")
        for gpu in range(GPUS_PER_SWITCH):
            path = socket_name(switch * GPUS_PER_SWITCH + gpu)
            device = {
                "driver": "vfio-user-pci",
                "bus": f"down{switch}.{gpu}",
                "socket": {"type": "unix", "path": path},
            }
            yield from ("-device", json.dumps(device))
        # One hub is the fabric: every NIC and VF reaches every other.
        yield from ("-netdev", f"hubport,hubid=0,id=fabric{switch}")
        mac = f"52:54:00:ee:{switch:02x}:ff"
        yield from ("-device", f"igb,bus=down{switch}.{GPUS_PER_SWITCH},netdev=fabric{switch},mac={mac}")
