"""Netdevs that exist in memory only, and a driver on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from railmate.attach.errors import AttachError
from railmate.attach.model import (
    AttachedNetdev,
    MoveRequest,
    NetdevReturn,
    NetdevSnapshot,
    ReturnRequest,
    ReturnState,
    SubInterfaceRequest,
)
from railmate.attach.presence import Expected
from railmate.claims.ledger import Ledger
from railmate.claims.state import ClaimState
from unit.claims.claims_world import DRIVER, VFS, FakeClaims, claim, ref, state, uid

HOST = "host"


class Killed(BaseException):
    """The process ends here: nothing after this line runs."""


@dataclass
class FakeNetdevs:
    """Where each VF's netdev is: (namespace, name). All-or-none moves, as the real functions promise."""

    where: dict[str, tuple[str, str]] = field(
        default_factory=lambda: {address: (HOST, f"vf{number}") for number, address in enumerate(VFS)}
    )
    gone: set[str] = field(default_factory=set)  # namespaces that have ended
    stuck: set[str] = field(default_factory=set)
    attach_error: BaseException | None = None
    return_error: Exception | None = None
    killed_after_move: bool = False
    moves: list[str] = field(default_factory=list)
    subs: dict[tuple[str, str], str] = field(default_factory=dict)  # (namespace, interface) -> its MAC
    looks: int = 0  # into a namespace
    sub_errors: list[str] = field(default_factory=list)

    def snapshot(self, name: str, address: str, *rest: object) -> NetdevSnapshot:
        if self.where.get(address) != (HOST, name):
            raise AttachError(f"netdev {name} of {address} is not on the host; is it in a pod?")
        return NetdevSnapshot(address, name, "02:00:00:00:00:01", 1500, True, address)

    def attach_all(
        self, requests: Sequence[MoveRequest | SubInterfaceRequest], netns: Path, *alone: object
    ) -> list[AttachedNetdev]:
        if self.attach_error:
            raise self.attach_error
        if str(netns) in self.gone:
            raise AttachError(f"network namespace {netns} does not exist any more")
        found = []
        for number, request in enumerate(requests):
            if isinstance(request, SubInterfaceRequest):
                self.subs[str(netns), request.name] = mac = request.sub.mac
                self.moves.append(f"{request.name} over {request.sub.port} in {netns}")
                found.append(
                    AttachedNetdev(
                        request.pci_address, request.name, 7 + number, mac, 1500, request.sub.share
                    )
                )
                continue
            self.where[request.snapshot.pci_address] = (str(netns), request.name)
            self.moves.append(f"{request.snapshot.name} to {netns} as {request.name}")
            found.append(
                AttachedNetdev(request.snapshot.pci_address, request.name, 7, request.snapshot.mac, 1500)
            )
        if self.killed_after_move:
            raise Killed
        return found

    def absent(self, expected: Sequence[Expected], netns: Path) -> list[bool]:
        self.looks += 1
        return [not self._is_in(one.netdev, str(netns)) for one in expected]

    def _is_in(self, netdev: ReturnRequest | SubInterfaceRequest | None, netns: str) -> bool:
        if isinstance(netdev, ReturnRequest):
            return self.where.get(netdev.snapshot.pci_address, ("",))[0] == netns
        return netdev is None or (netns, netdev.name) in self.subs

    def remove_all(self, requests: Sequence[SubInterfaceRequest], netns: Path) -> list[str]:
        if self.sub_errors:
            return self.sub_errors
        for request in requests:
            if self.subs.pop((str(netns), request.name), None):
                self.moves.append(f"{request.name} over {request.sub.port} ended")
        return []

    def return_all(self, requests: Sequence[ReturnRequest], netns: Path | None) -> list[NetdevReturn]:
        if self.return_error:
            raise self.return_error
        return [self._return(request, str(netns)) for request in requests]

    def _return(self, request: ReturnRequest, netns: str) -> NetdevReturn:
        address, home = request.snapshot.pci_address, request.snapshot.name
        place = self.where.get(address)
        if place is None:
            return NetdevReturn(address, ReturnState.LOST, None)
        if place[0] == HOST or netns in self.gone:
            self.where[address] = (HOST, home)
            return NetdevReturn(address, ReturnState.ALREADY_HOME, home)
        if address in self.stuck:
            return NetdevReturn(address, ReturnState.FAILED, place[1], ("Device or resource busy",))
        self.where[address] = (HOST, home)
        self.moves.append(f"{home} home")
        return NetdevReturn(address, ReturnState.RETURNED, home)

    def all_home(self) -> bool:
        return all(self.where[address] == (HOST, f"vf{number}") for number, address in enumerate(VFS))


@dataclass
class World:
    root: Path
    api: FakeClaims
    netdevs: FakeNetdevs
    state: ClaimState

    def restart(self, **more: Any) -> None:
        """A new process: only the disk is left."""
        self.state = state(self.root, self.api, **more)

    def prepared(self, number: int = 1, *devices: Any, **more: Any) -> None:
        self.api.put(claim(number, *devices, **more))
        self.state.prepare(ref(number), patience=0)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.root / "plugins" / DRIVER)

    @property
    def gates(self) -> list[str]:
        return sorted(path.name for path in self.ledger.attached_dir.iterdir())

    @property
    def specs(self) -> list[str]:
        return sorted(path.name for path in (self.root / "cdi").glob("*"))

    def spec(self, number: int = 1) -> Any:
        return json.loads((self.root / "cdi" / f"{DRIVER}-claim-{uid(number)}.json").read_text())

    def clean(self) -> bool:
        left = [path for path in self.root.rglob("*") if path.is_file() and path.suffix != ".lock"]
        return not left and self.netdevs.all_home() and not self.netdevs.subs
