"""The claims' tests share one small world: see ``claims_world`` and ``claims_netdevs``."""

from __future__ import annotations

from pathlib import Path

import pytest
from claims_netdevs import FakeNetdevs, World
from claims_world import FakeClaims, state

import railmate.claims.attachments as attachments
import railmate.claims.preparation as preparation
import railmate.claims.presence as presence
import railmate.claims.reconcile as reconcile
import railmate.claims.strays as strays


@pytest.fixture
def netdevs(monkeypatch: pytest.MonkeyPatch) -> FakeNetdevs:
    fake = FakeNetdevs()
    monkeypatch.setattr(preparation, "snapshot", fake.snapshot)
    monkeypatch.setattr(preparation, "with_port", lambda nic, netdev: nic)
    for name in ("attach_all", "remove_all", "return_all"):
        monkeypatch.setattr(attachments, name, getattr(fake, name))
    monkeypatch.setattr(strays, "return_all", fake.return_all)
    monkeypatch.setattr(presence, "absent", fake.absent)
    monkeypatch.setattr(attachments, "return_rdma", lambda devices, netns: [])
    for module in (attachments, reconcile):
        monkeypatch.setattr(module, "is_namespace", lambda path: str(path) not in fake.gone)
    return fake


@pytest.fixture
def world(tmp_path: Path, netdevs: FakeNetdevs) -> World:
    api = FakeClaims()
    return World(tmp_path, api, netdevs, state(tmp_path, api))
