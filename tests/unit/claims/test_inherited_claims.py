"""Claims that another process has prepared, and whose end nobody tells this one of."""

from __future__ import annotations

from functools import partial

import pytest
from claims_netdevs import World
from claims_world import DRIVER, claim, ref, sandbox, uid

from railmate.claims.reconcile import Reconciler
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.sandbox import Sandbox
from railmate.claims.surroundings import Surroundings


class Node:
    """A driver that has just started, on what is on the disk."""

    def __init__(self, world: World) -> None:
        self.world, self.live, self.repairs = world, dict[str, Sandbox](), list[str]()
        world.restart(around=Surroundings(repaired=self.repairs.append))
        self.runtime = True
        plugin = world.root / "plugins" / DRIVER
        files = RuntimeFiles(DRIVER, plugin, world.root / "cdi", plugin / "gate")
        self.reconciler = Reconciler(
            world.api, world.ledger, files, world.state.moves, partial(world.state.unprepare, inherited=True),
            lambda: self.live if self.runtime else None, world.state.answered,
        )  # fmt: skip

    @property
    def held(self) -> list[str]:
        return sorted(self.world.ledger.entries())


@pytest.fixture
def node(world: World) -> Node:
    """An earlier process has prepared a standalone claim; nobody has it reserved, but its pod is still ending."""
    world.prepared(1, "vf-0")
    world.state.attach(sandbox())
    free(world)
    node = Node(world)
    node.live = {"pod-1": sandbox()}
    node.reconciler.run()
    return node


def free(world: World) -> None:
    world.api.put(claim(1, "vf-0", pods=()))


def end_pod(node: Node) -> None:
    node.world.netdevs.gone.add("/run/netns/1")
    node.live = {}


def test_it_is_released_when_its_pod_has_ended(node: Node) -> None:
    assert node.reconciler.await_ends()
    assert node.held == [uid(1)]
    end_pod(node)
    node.reconciler.await_ends()
    assert node.held == []
    assert node.repairs == ["deleted claim"]
    assert not node.reconciler.await_ends()


def test_the_next_pods_claim_is_not_released_with_the_old_pod(node: Node) -> None:
    node.world.api.put(claim(1, "vf-0", pods=("pod-2",)))
    assert node.world.state.prepare(ref(), patience=0).devices
    end_pod(node)
    node.reconciler.await_ends()
    node.reconciler.run()
    assert node.held == [uid(1)]


def test_a_claim_that_was_reserved_anew_is_kept_before_it_is_prepared(node: Node) -> None:
    node.world.api.put(claim(1, "vf-0", pods=("pod-2",)))
    end_pod(node)
    node.reconciler.await_ends()
    assert node.held == [uid(1)]


def test_what_is_prepared_while_the_api_is_asked_is_kept(node: Node) -> None:
    """The answer was true when it was given."""
    end_pod(node)
    real = node.world.api.get_claim

    def ask(namespace: str, name: str) -> object:
        found = real(namespace, name)
        node.world.api.get_claim = real  # type: ignore[method-assign]
        node.world.api.put(claim(1, "vf-0", pods=("pod-2",)))
        node.world.state.prepare(ref(), patience=0)
        return found

    node.world.api.get_claim = ask  # type: ignore[method-assign, assignment]
    node.reconciler.await_ends()
    assert node.held == [uid(1)]


def test_a_claim_without_a_namespace_of_its_own_is_held_as_long_as_its_pod_has_a_sandbox(
    world: World,
) -> None:
    """A GPU alone moves nothing: only the runtime tells whether its pod still computes on it."""
    world.prepared(1, "gpu-0")
    world.api.put(claim(1, "gpu-0", pods=()))
    node = Node(world)
    node.live = {"pod-1": sandbox()}
    node.reconciler.run()
    assert node.held == [uid(1)]
    node.runtime = False
    node.reconciler.await_ends()
    assert node.held == [uid(1)], "a runtime that cannot be asked has not said that it ended"
    node.runtime, node.live = True, {"pod-2": sandbox("sandbox-2", "pod-2")}
    node.reconciler.await_ends()
    assert node.held == []


def test_the_api_is_asked_once_about_what_is_still_used_and_never_about_our_own(world: World) -> None:
    world.prepared(1, "vf-0")
    node = Node(world)
    world.prepared(2, "vf-1")
    world.api.gets = 0
    for _ in range(3):
        node.reconciler.run()
        node.reconciler.await_ends()
    assert world.api.gets == 1


def test_what_another_process_writes_later_is_inherited_too(world: World) -> None:
    """In a rolling update the old process may finish a prepare that the kubelet has given up, and given back to us."""
    old = world.state
    node = Node(world)
    node.reconciler.run()
    world.api.put(claim(1, "vf-0", pods=()))
    old.prepare(ref(), patience=0)
    assert node.held == [uid(1)]
    node.reconciler.run()
    assert node.held == []
