"""Pods come and go at random while driver, containerd and kubelet are killed: nothing is lost, nothing is left."""

from __future__ import annotations

import random

import pytest

from e2e.lab import Lab
from harness.soak import Figures, Soak


def soak(lab: Lab, pods: int, capsys: pytest.CaptureFixture[str]) -> Figures:
    figures = Soak(lab, pods, random.SystemRandom().randrange(10**6)).run()
    with capsys.disabled():
        print(f"\n{figures}")
    return figures


def test_sixty_pods_leave_nothing_behind(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    figures = soak(lab, 60, capsys)
    assert figures.pods == 60
    assert figures.kills.total() >= 3


@pytest.mark.long
def test_a_thousand_pods_leave_nothing_behind(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert soak(lab, 1000, capsys).pods == 1000
