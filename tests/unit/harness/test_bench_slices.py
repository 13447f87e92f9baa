"""``hack/bench slices``: prints what a node is in the API, and fails where the usual node is too much."""

from __future__ import annotations

import pytest

import harness.bench_slices as module
from harness.bench import main
from harness.machines import MACHINES, load_machine
from railmate.publish.devices import OfferOptions


@pytest.fixture
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    dgx = load_machine(MACHINES / "dgx-a100.yaml", 4)
    found = [(module._LIMITED, dgx, OfferOptions()), ("few", dgx, OfferOptions(lone_vfs=0))]
    monkeypatch.setattr(module, "machines", lambda: found)


@pytest.mark.usefixtures("one_machine")
def test_it_prints_slices_bytes_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slices"]) == 0
    rows = {line[:34].strip(): line[34:].split(maxsplit=2) for line in capsys.readouterr().out.splitlines()}
    slices, size, devices = rows[module._LIMITED]
    assert (slices, devices) == ("2", "8 pair, 1 node, 8 gpu, 24 rdma-vf")
    assert int(rows["few"][1]) < int(size) <= module.LIMIT_BYTES


@pytest.mark.usefixtures("one_machine")
def test_more_than_the_limit_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_BYTES", 15_000)
    assert main(["slices"]) == 1
