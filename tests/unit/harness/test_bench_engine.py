"""Which engine runs the cluster, and what the private one is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.engine import UPSTREAM_NODE_IMAGE, Engine, choose, daemon_configuration, enter_network
from harness.shell import HarnessError


@dataclass
class Machine:
    engine: bool
    image: bool

    def answers(self) -> bool:
        return self.engine

    def obtains(self, image: str) -> bool:
        assert self.engine, "an engine that does not answer is not asked for images"
        assert image == UPSTREAM_NODE_IMAGE
        return self.image


@pytest.mark.parametrize(
    ("machine", "chosen"),
    [
        (Machine(engine=True, image=True), "system"),
        (Machine(engine=True, image=False), "private"),
        (Machine(engine=False, image=False), "private"),
    ],
)
def test_system_engine_is_taken_when_it_answers_and_has_the_image(machine: Machine, chosen: str) -> None:
    assert choose("auto", machine) == chosen


def test_private_engine_can_be_demanded() -> None:
    assert choose("private", Machine(engine=True, image=True)) == "private"


def test_demanded_system_engine_that_is_missing_is_an_error() -> None:
    with pytest.raises(HarnessError, match="no container engine answers"):
        choose("system", Machine(engine=False, image=False))
    with pytest.raises(HarnessError, match=f"no image {UPSTREAM_NODE_IMAGE}"):
        choose("system", Machine(engine=True, image=False))


def test_unknown_engine_is_an_error() -> None:
    with pytest.raises(HarnessError, match="choose auto, system or private"):
        choose("podman", Machine(engine=True, image=True))


def test_private_engine_keeps_everything_in_its_own_directories() -> None:
    configuration = daemon_configuration(
        Path("/c/run/engine"), Path("/c/engine"), "railmate/0", Path("/c/bin/wrapper")
    )
    assert configuration["hosts"] == ["unix:///c/run/engine/docker.sock"]
    assert configuration["data-root"] == "/c/engine/docker"
    assert configuration["exec-root"] == "/c/run/engine/exec"
    assert configuration["cgroup-parent"] == "/railmate/0"
    assert configuration["default-runtime"] in configuration["runtimes"]  # type: ignore[operator]


def test_commands_enter_the_private_engines_network_only() -> None:
    assert enter_network(Engine("system"), ["kubectl"]) == ["kubectl"]
    assert enter_network(Engine("private", {}, 42), ["kubectl"])[1:] == ["-t", "42", "-n", "--", "kubectl"]
