"""A driver whose kernel and API server answer as a test wants, for what goes wrong around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from claims_world import BOOT, DRIVER, FakeClaims, claim, ref, uid, view
from claims_world import sandbox as make_sandbox

import railmate.claims.attachments as attachments
import railmate.claims.preparation as preparation
import railmate.claims.presence as presence
import railmate.claims.reconcile as reconcile
import railmate.claims.strays as strays
from railmate.attach.model import (
    AttachedNetdev,
    MoveRequest,
    NetdevReturn,
    NetdevSnapshot,
    ReturnRequest,
    ReturnState,
)
from railmate.claims.attachments import Attachments
from railmate.claims.ledger import Ledger
from railmate.claims.reconcile import Reconciler
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.state import ClaimState
from railmate.claims.surroundings import Surroundings
from railmate.kube.errors import ApiError


class Api(FakeClaims):
    error: Exception | None = None

    def get_claim(self, namespace: str, name: str) -> dict[str, Any]:
        if self.error:
            self.gets += 1
            raise self.error
        if name not in self.claims:
            self.gets += 1
            raise ApiError(f'resourceclaims "{name}" not found', 404, "NotFound")
        return super().get_claim(namespace, name)


@dataclass
class Kernel:
    """Answers of the kernel: which namespaces there are, and what became of netdevs."""

    namespaces: set[str] = field(default_factory=lambda: {"/run/netns/1"})
    returns: dict[str, NetdevReturn] = field(default_factory=dict)  # by address; else: home
    asked: list[list[str]] = field(default_factory=list)
    error: Exception | None = None
    off_bus: set[str] = field(default_factory=set)  # PCI functions that are gone

    def snapshot(self, name: str, address: str, *rest: object) -> NetdevSnapshot:
        return NetdevSnapshot(address, name, "02:00:00:00:00:01", 1500, True, address)

    def attach_all(self, requests: list[MoveRequest], netns: Path, *alone: object) -> list[AttachedNetdev]:
        return [AttachedNetdev(r.snapshot.pci_address, r.name, 7, r.snapshot.mac, 1500) for r in requests]

    def return_all(self, requests: list[ReturnRequest], netns: Path | None) -> list[NetdevReturn]:
        if self.error:
            raise self.error
        addresses = [request.snapshot.pci_address for request in requests]
        self.asked.append(addresses)
        home = ReturnState.ALREADY_HOME
        return [
            self.returns.get(address, NetdevReturn(address, home, request.snapshot.name))
            for address, request in zip(addresses, requests, strict=True)
        ]

    def lose(self, address: str) -> None:
        self.returns[address] = NetdevReturn(address, ReturnState.LOST, None)


@dataclass
class World:
    root: Path
    api: Api
    kernel: Kernel

    def __post_init__(self) -> None:
        self.repairs: list[str] = []
        self.start()

    def start(self) -> None:
        """A new process on the same disk."""
        self.ledger = Ledger(self.plugin)
        around = Surroundings(
            repaired=self.repairs.append, on_bus=lambda address: address not in self.kernel.off_bus
        )
        self.files = RuntimeFiles(DRIVER, self.plugin, self.cdi, self.plugin / "gate")
        self.state = ClaimState(self.api, view(), self.ledger, self.files, BOOT, around)
        self.moves: Attachments = self.state.moves
        self.reconciler = Reconciler(
            self.api, self.ledger, self.files, self.moves, self.state.unprepare,
            answered=self.state.answered,
        )  # fmt: skip

    @property
    def plugin(self) -> Path:
        return self.root / "plugins" / DRIVER

    @property
    def cdi(self) -> Path:
        return self.root / "cdi"

    def spec(self, number: int = 1) -> Path:
        return self.cdi / f"{DRIVER}-claim-{uid(number)}.json"

    def metadata(self, number: int = 1) -> Path:
        return self.plugin / "dra-device-metadata" / uid(number)

    def attached(self, number: int = 1, device: str = "pair-0", netns: str | None = "/run/netns/1") -> None:
        self.prepared(number, device)
        self.state.attach(make_sandbox(netns=netns))

    def prepared(self, number: int = 1, device: str = "pair-0") -> None:
        self.api.put(claim(number, device))
        self.state.prepare(ref(number), patience=0)

    @property
    def gates(self) -> list[str]:
        return sorted(path.name for path in (self.plugin / "attached").iterdir())

    def picture(self) -> dict[str, bytes]:
        return {str(p.relative_to(self.root)): p.read_bytes() for p in self.root.rglob("*") if p.is_file()}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    kernel = Kernel()
    monkeypatch.setattr(preparation, "snapshot", kernel.snapshot)
    monkeypatch.setattr(attachments, "attach_all", kernel.attach_all)
    for module in (attachments, strays):
        monkeypatch.setattr(module, "return_all", kernel.return_all)
    monkeypatch.setattr(attachments, "return_rdma", lambda devices, netns: [])
    monkeypatch.setattr(presence, "absent", lambda expected, netns: [False] * len(expected))
    for module in (attachments, reconcile):
        monkeypatch.setattr(module, "is_namespace", lambda path: str(path) in kernel.namespaces)
    return World(tmp_path, Api(), kernel)
