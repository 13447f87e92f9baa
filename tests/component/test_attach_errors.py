"""An attach that fails at any of its changes leaves everything as it was.

Nobody lists the changes: an undisturbed attach tells which messages and settings it makes, and then each of them fails
in turn: before it is made, and after, as where the kernel refuses a later part of a message. Netdevs and namespaces are
real. RDMA devices are simulated (``rdma_kernel``), those of the PCI function and soft ones, in exclusive mode.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from component.netdev_lab import Pod, pods, run, veths
from component.test_attach_settings import FULL
from railmate.attach import sysctl
from railmate.attach.errors import AttachError
from railmate.attach.model import MoveRequest, NetdevSnapshot, ReturnRequest, SubInterfaceRequest
from railmate.attach.netdev import attach_all, return_all, snapshot
from railmate.attach.rdmamodel import RdmaDeviceRef
from railmate.inventory.rdmanetlink import DELLINK, NEWLINK, SET
from railmate.netlink import GENERIC, Netlink
from unit.attach.rdma_kernel import HOST, POD, RdmaKernel, Socket

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces: needs root")

ADDRESSES = ("0000:c1:00.1", "0000:c1:00.2")
#: CTRL_CMD_GETFAMILY and ETHTOOL_MSG_*_GET: they change nothing.
_READS = frozenset({3, 4, 9, 11, 13, 15, 17, 19, 21})
_RDMA = 20
BEFORE, AFTER = "before", "after"


class Namespaces:
    """What `RdmaKernel.netdevs` is for it: a netdev's namespace, of the real ones."""

    def __init__(self, pod: Pod) -> None:
        self._pod = pod

    def get(self, name: str) -> str | None:
        if Path("/sys/class/net", name).exists():
            return HOST
        return POD if name in self._pod.links() else None


class Rdma(RdmaKernel):
    """The simulated RDMA subsystem of the real namespaces."""

    def __init__(self, pod: Pod) -> None:
        self._host, self._pod = Path("/proc/thread-self/ns/net").stat().st_ino, pod.path.stat().st_ino
        super().__init__()
        self.netdevs = Namespaces(pod)  # type: ignore[assignment]

    def place(self, fd: int) -> str:
        return {self._host: HOST, self._pod: POD}[os.fstat(fd).st_ino]

    @property
    def here(self) -> str:  # type: ignore[override]
        return {self._host: HOST, self._pod: POD}[Path("/proc/thread-self/ns/net").stat().st_ino]

    @here.setter
    def here(self, value: str) -> None:
        """Only the real one counts."""

    def state(self) -> list[tuple[Any, ...]]:
        return sorted(
            (d.name, d.guid, d.soft or "", d.netdev or "", d.namespace) for d in self.devices.values()
        )


class Changes:
    """Counts what changes the kernel, and has one of it fail when asked for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self._number, self._when = 0, BEFORE
        ask, write = Netlink._ask, sysctl._write_all
        changes = self

        def asking(self: Netlink, kind: int, body: bytes, flags: int) -> Iterator[bytes]:
            name = _change(self, kind, body)
            if name is None:
                return ask(self, kind, body, flags)
            return iter(changes._made(name, lambda: list(ask(self, kind, body, flags))))

        def writing(root: str, interface: str, values: dict[str, str]) -> None:
            for key, value in values.items():
                changes._made(f"sysctl {key}", lambda one={key: value}: write(root, interface, one))  # type: ignore[misc]

        patch.setattr(Netlink, "_ask", asking)
        patch.setattr(sysctl, "_write_all", writing)

    def arm(self, number: int = 0, when: str = BEFORE) -> None:
        self.names, self._number, self._when = [], number, when

    def _made(self, name: str, change: Callable[[], Any]) -> Any:
        self.names.append(name)
        fails = len(self.names) == self._number
        if fails and self._when == BEFORE:
            raise OSError(errno.EIO, "it was made to fail")
        found = change()
        if fails:
            raise OSError(errno.EIO, "it was made to fail")
        return found


def _change(netlink: Netlink, kind: int, body: bytes) -> str | None:
    protocol = getattr(netlink._socket, "proto", _RDMA)
    if protocol == GENERIC:
        return None if body[0] in _READS else f"ethtool {body[0]}"
    if protocol == _RDMA:
        return f"rdma {kind & 0xFF}" if kind in (SET, NEWLINK, DELLINK) else None
    # of each four message types the third reads (linux/rtnetlink.h)
    return f"rtnetlink {kind}" if kind & 3 != 2 else None


@pytest.fixture
def pod() -> Iterator[Pod]:
    with pods("ae") as (made,):
        yield made


@pytest.fixture
def rdma(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> Rdma:
    found = Rdma(pod)
    real = socket.socket

    def make(family: int = -1, kind: int = -1, protocol: int = -1, *rest: Any) -> Any:
        return Socket(found, found.here) if protocol == _RDMA else real(family, kind, protocol, *rest)

    monkeypatch.setattr("railmate.netlink.socket.socket", make)
    return found


@pytest.fixture
def vfs(rdma: Rdma) -> Iterator[list[NetdevSnapshot]]:
    """Two VFs that are up, each with an RDMA device of its own and a soft one."""
    with veths("ae") as make:
        found = []
        for number, address in enumerate(ADDRESSES, 1):
            name = make(number, queues=4)
            run("ip", "link", "set", name, "up")
            run("ip", "address", "add", f"10.66.{number}.1/24", "dev", name)
            rdma.add(f"mlx5_{number}", guid=number)
            rdma.add(f"rxe{number}", soft="rxe", netdev=name)
            soft = (RdmaDeviceRef(f"rxe{number}", soft="rxe"),)
            found.append(replace(snapshot(name, address), soft_rdma=soft))
        yield found


def picture(vfs: list[NetdevSnapshot], pod: Pod, rdma: Rdma) -> dict[str, Any]:
    """All of the VFs, of the pod's network, and of RDMA devices."""
    found: dict[str, Any] = {
        vf.name: replace(snapshot(vf.name, vf.pci_address), soft_rdma=vf.soft_rdma) for vf in vfs
    }
    for what in ("link", "address", "rule", "neighbour"):
        found[what] = pod.json(what, "show")
    found["route"] = pod.json("route", "show", "table", "all")
    return found | {"rdma": rdma.state()}


def requests_for(vfs: list[NetdevSnapshot]) -> list[MoveRequest | SubInterfaceRequest]:
    first, second = (
        (vf, (RdmaDeviceRef(f"mlx5_{n}", f"0000:0000:0000:000{n}"), *vf.soft_rdma))
        for n, vf in enumerate(vfs, 1)
    )
    other = replace(
        FULL, mac="02:00:00:00:77:78", rules=(replace(FULL.rules[0], priority=1001),),
        addresses=("10.79.0.2/24",), routes=(), neighbours=(),
    )  # fmt: skip
    return [MoveRequest(first[0], "net1", FULL, first[1]), MoveRequest(second[0], "net2", other, second[1])]


def test_an_attach_that_fails_at_any_of_its_changes_leaves_everything_as_it_was(
    vfs: list[NetdevSnapshot], pod: Pod, rdma: Rdma, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_for(vfs)
    before = picture(vfs, pod, rdma)
    changes = Changes(monkeypatch)
    changes.arm()
    attached = attach_all(requests, pod.path)
    names = list(changes.names)
    assert {name.partition(" ")[0] for name in names} == {"rtnetlink", "ethtool", "sysctl", "rdma"}
    assert {place for *_, place in rdma.state()} == {POD}
    back = [
        ReturnRequest(one.snapshot, at, one.settings)
        for one, at in zip(requests, attached, strict=True)
        if isinstance(one, MoveRequest)
    ]
    rdma_home(rdma)
    changes.arm()
    assert [one.problems for one in return_all(back, pod.path)] == [(), ()]
    assert picture(vfs, pod, rdma) == before
    for number, name in enumerate(names, 1):
        for when in (BEFORE, AFTER):
            changes.arm(number, when)
            with pytest.raises(AttachError):
                attach_all(requests, pod.path)
            changes.arm()
            assert picture(vfs, pod, rdma) == before, f"after an error {when} change {number} ({name})"


def rdma_home(rdma: Rdma) -> None:
    """What `return_rdma` does, which goes before the netdevs."""
    for device in rdma.devices.values():
        if device.soft is None:
            device.namespace = HOST
