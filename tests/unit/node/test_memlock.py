"""RLIMIT_MEMLOCK is asked of the runtime only where it will not fail the container for it."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from railmate.node.memlock import Memlock
from railmate.nri.events import UNLIMITED, ContainerInfo, Rlimit

SANDBOX, CONTAINER = "5a" * 32, "c0" * 32
WANTED = (Rlimit("RLIMIT_MEMLOCK", UNLIMITED, UNLIMITED),)
PLAIN = ContainerInfo(CONTAINER, "main", SANDBOX)
Node = Callable[..., Memlock]


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def plugin_dir(tmp_path: Path) -> Path:
    (tmp_path / "plugin").mkdir()
    return tmp_path / "plugin"


@pytest.fixture
def node(tmp_path: Path, plugin_dir: Path, told: list[str]) -> Node:
    def make(capabilities: str | None = None, limit: str = "8388608", owner: str = SANDBOX) -> Memlock:
        """A node on which the sandbox's process is 70 and the runtime's 60; without capabilities neither is seen."""
        if capabilities is not None:
            for pid, files in {
                70: {"cgroup": f"0::/kubepods/cri-containerd-{owner}.scope\n", "status": "PPid:\t60\n"},
                60: {
                    "status": f"Name:\tshim\nCapEff:\t{capabilities}\n",
                    "limits": f"Max locked memory         {limit:<20} {limit:<20} bytes\n",
                },
            }.items():
                (tmp_path / "proc" / str(pid)).mkdir(parents=True)
                for name, text in files.items():
                    (tmp_path / "proc" / str(pid) / name).write_text(text)
        return Memlock(plugin_dir, told.append, tmp_path / "proc")

    return make


def test_runtime_with_the_capability_is_asked(node: Node, told: list[str]) -> None:
    assert node("000001ffffffffff").limits(PLAIN, 70, SANDBOX) == WANTED
    assert told == []


def test_runtime_without_it_is_not_and_people_are_told_once(node: Node, told: list[str]) -> None:
    memlock = node("000001fffeffffff")
    assert memlock.limits(PLAIN, 70, SANDBOX) == ()
    assert memlock.limits(PLAIN, 70, SANDBOX) == ()
    (words,) = told
    assert "CAP_SYS_RESOURCE" in words


def test_runtime_whose_own_limit_is_none_needs_no_capability(node: Node, told: list[str]) -> None:
    assert node("000001fffeffffff", limit="unlimited").limits(PLAIN, 70, SANDBOX) == WANTED
    assert told == []


def test_process_of_the_same_number_in_another_pid_namespace_tells_nothing(
    node: Node, told: list[str]
) -> None:
    assert node("000001fffeffffff", owner="0b" * 32).limits(PLAIN, 70, SANDBOX) == ()
    assert told == []


def test_unseen_runtime_is_asked_only_after_the_gate_has_tried(node: Node, plugin_dir: Path) -> None:
    memlock = node()
    assert memlock.limits(PLAIN, 70, SANDBOX) == ()
    (plugin_dir / "memlock-raised").touch()
    assert memlock.limits(PLAIN, 70, SANDBOX) == WANTED


def test_what_the_gate_was_refused_is_told_once(node: Node, plugin_dir: Path, told: list[str]) -> None:
    memlock = node()
    memlock.look()
    assert told == []
    (plugin_dir / "memlock-refused").touch()
    memlock.look()
    memlock.look()
    assert len(told) == 1
    assert memlock.limits(PLAIN, 70, SANDBOX) == ()


# --- containers that run already
@pytest.fixture
def process(tmp_path: Path) -> Iterator[int]:
    """A running process that may lock 64 KiB, and 128 KiB at most."""
    limits = (64 << 10, 128 << 10)
    child = subprocess.Popen(
        ["sleep", "60"], preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)
    )
    (tmp_path / "proc" / str(child.pid)).mkdir(parents=True)
    (tmp_path / "proc" / str(child.pid) / "cgroup").write_text(f"0::/pod/{CONTAINER}\n")
    (tmp_path / "proc/self").symlink_to(str(os.getpid()))
    try:
        yield child.pid
    finally:
        child.kill()
        child.wait()


def test_running_container_is_repaired_where_the_driver_may(
    node: Node, process: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raising a hard limit takes CAP_SYS_RESOURCE, which this machine's root may lack: the soft one stands for both."""
    monkeypatch.setattr(resource, "RLIM_INFINITY", 128 << 10)
    container = ContainerInfo(CONTAINER, "main", SANDBOX, pid=process)
    assert node().repair([container]) == 1
    assert resource.prlimit(process, resource.RLIMIT_MEMLOCK) == (128 << 10, 128 << 10)
    assert node().repair([container]) == 0


def test_process_that_is_not_the_containers_is_left_alone(node: Node, process: int) -> None:
    assert node().repair([ContainerInfo("d1" * 32, "main", SANDBOX, pid=process)]) == 0
    assert node().repair([ContainerInfo(CONTAINER, "main", SANDBOX, pid=os.getpid())]) == 0
    assert resource.prlimit(process, resource.RLIMIT_MEMLOCK)[0] == 64 << 10


def test_driver_in_a_pid_namespace_of_its_own_touches_no_process(
    node: Node, process: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees the node's numbers, but to the kernel they mean its own processes."""
    monkeypatch.setattr(resource, "RLIM_INFINITY", 128 << 10)
    (tmp_path / "proc/self").unlink()
    (tmp_path / "proc/self").symlink_to("4711")
    assert node().repair([ContainerInfo(CONTAINER, "main", SANDBOX, pid=process)]) == 0
    assert resource.prlimit(process, resource.RLIMIT_MEMLOCK)[0] == 64 << 10
