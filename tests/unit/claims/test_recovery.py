"""After a reconnect to the runtime and after a crash: what is missing is attached, what is left over comes home."""

from __future__ import annotations

import errno
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from claims_netdevs import FakeNetdevs, Killed, World
from claims_world import (
    VFS,
    FakeClaims,
    claim,
    ref,
    sandbox,
    state,
    uid,
)

from railmate import files
from railmate.attach.errors import AttachError


def test_synchronize_attaches_what_is_missing(world: World) -> None:
    world.prepared(1, "pair-0")
    world.restart()
    world.state.synchronize([sandbox()])
    world.state.check(sandbox(), [uid(1)])


def test_synchronize_leaves_alone_what_is_right(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    moves = list(world.netdevs.moves)
    world.restart()
    world.state.synchronize([sandbox(), sandbox("stranger", "stranger", "/run/netns/9")])
    assert world.netdevs.moves == moves
    world.state.check(sandbox(), [uid(1)])


def test_synchronize_takes_back_from_dead_sandboxes(world: World) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    world.netdevs.gone.add("/run/netns/1")
    world.restart()
    world.state.synchronize([])
    assert world.netdevs.all_home()
    assert world.gates == []


def test_synchronize_moves_on_to_the_pods_living_sandbox(world: World) -> None:
    """The runtime lists the dead sandbox of the pod as well; it is not among the live ones."""
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    world.netdevs.gone.add("/run/netns/1")
    second = sandbox("sandbox-2", netns="/run/netns/2")
    world.restart()
    world.state.synchronize([second])
    world.state.check(second, [uid(1)])
    assert world.gates == [f"{uid(1)}.sandbox-2"]


@pytest.mark.parametrize(
    "error", [AttachError("busy"), OSError(errno.EIO, "input/output"), ValueError("odd")]
)
def test_synchronize_never_raises_and_goes_on_with_the_rest(world: World, error: Exception) -> None:
    world.prepared(1, "vf-0")
    world.prepared(2, "vf-1", pods=("pod-2",))
    world.state.attach(sandbox())
    world.netdevs.return_error = error
    second = sandbox("sandbox-2", "pod-2", "/run/netns/2")
    world.state.synchronize([second])
    world.state.check(second, [uid(2)])


def test_kill_between_move_and_completion_is_made_good(world: World) -> None:
    world.prepared(1, "pair-0")
    world.netdevs.killed_after_move = True
    with pytest.raises(Killed):
        world.state.attach(sandbox())
    assert world.gates == [], "the gate stays closed"
    world.netdevs.killed_after_move = False
    world.restart()
    world.state.synchronize([sandbox()])
    world.state.check(sandbox(), [uid(1)])
    assert world.netdevs.where[VFS[0]] == ("/run/netns/1", "net1")
    world.state.unprepare(ref(1))
    assert world.clean()


def test_kill_between_move_and_completion_and_then_the_pod_is_gone(world: World) -> None:
    world.prepared(1, "pair-0")
    world.netdevs.killed_after_move = True
    with pytest.raises(Killed):
        world.state.attach(sandbox())
    world.restart()
    world.state.unprepare(ref(1))
    assert world.clean()


def test_kill_at_any_file_operation_ends_as_if_nothing_had_happened(
    tmp_path: Path, netdevs: FakeNetdevs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepare, attach, detach, unprepare; the process ends at the n-th write or removal, for each n there is, and
    all is asked again."""
    left = 0

    def dying(real: Any) -> Any:
        def wrapper(*arguments: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            return real(*arguments, **more)

        return wrapper

    monkeypatch.setattr(files, "write_bytes", dying(files.write_bytes))
    monkeypatch.setattr(files, "remove", dying(files.remove))
    for step in count(1):
        root, api = tmp_path / str(step), FakeClaims(claim(1, "pair-0"))
        root.mkdir()
        left = step
        world = World(root, api, netdevs, state(root, api))
        if not killed_once(world):
            assert step > 10, "the sweep met no step"
            return
        assert world.clean(), f"killed at step {step}"


def killed_once(world: World) -> bool:
    """A pod's life, in which a verb that was cut short is asked again by a new process; whether one was."""
    killed = False
    for number, verb in enumerate(
        (
            lambda: world.state.prepare(ref(1), patience=0),
            lambda: world.state.attach(sandbox()),
            lambda: world.state.check(sandbox(), [uid(1)]),
            lambda: world.state.detach("sandbox-1"),
            lambda: world.state.unprepare(ref(1)),
        )
    ):
        try:
            verb()
        except Killed:
            killed = True
            world.restart()
            world.state.synchronize([sandbox()] if number < 3 else [])
            verb()
    return killed
