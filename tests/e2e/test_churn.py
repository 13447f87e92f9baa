"""Pods come and go at random while driver, containerd and kubelet are killed: nothing is lost, nothing is left."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from e2e.lab import Lab
from harness.soak import VICTIMS, Figures, Soak


def soak(lab: Lab, pods: int, show: Callable[[object], None]) -> Figures:
    found = Soak(lab, pods, random.SystemRandom().randrange(10**6)).run()
    show(found)
    return found


def test_sixty_pods_leave_nothing_behind(lab: Lab, figures: Callable[[object], None]) -> None:
    found = soak(lab, 60, figures)
    assert found.pods == 60
    assert found.kills.keys() == set(VICTIMS), "each was killed at least once"


@pytest.mark.long
def test_a_thousand_pods_leave_nothing_behind(lab: Lab, figures: Callable[[object], None]) -> None:
    found = soak(lab, 1000, figures)
    assert found.pods == 1000
    assert min(found.kills[one] for one in VICTIMS) >= 10
