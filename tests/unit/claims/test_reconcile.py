"""What is compared at start and every minute, and repaired."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from claims_netdevs import HOST, World
from claims_world import DRIVER, VFS, claim, ref, sandbox, uid, view

from railmate.claims.reconcile import Reconciler
from railmate.claims.runtime_files import RuntimeFiles
from railmate.claims.surroundings import Surroundings
from railmate.kube.errors import ApiError

Reconcile = Callable[[], Counter[str]]


def new_process(world: World, repaired: Counter[str]) -> Reconciler:
    plugin = world.root / "plugins" / DRIVER
    files = RuntimeFiles(DRIVER, plugin, world.root / "cdi", plugin / "gate")

    def count(what: str) -> None:
        repaired[what] += 1

    world.restart(around=Surroundings(repaired=count))
    return Reconciler(world.api, world.ledger, files, world.state.moves, world.state.unprepare)


@pytest.fixture
def reconciler(world: World) -> Reconciler:
    """Of a process that has just started."""
    return new_process(world, Counter())


@pytest.fixture
def reconcile(world: World) -> Reconcile:
    """One round of a process that has just started; what it repaired."""

    def run() -> Counter[str]:
        repaired: Counter[str] = Counter()
        new_process(world, repaired).run()
        return repaired

    return run


def delete_from_api(world: World, number: int) -> None:
    def get_claim(namespace: str, name: str) -> dict[str, object]:
        if name == f"claim-{number}":
            raise ApiError(f'resourceclaims "{name}" not found', 404, "NotFound")
        return world.api.claims[name]

    world.api.get_claim = get_claim  # type: ignore[method-assign]


def test_what_is_right_is_left_alone(world: World, reconcile: Reconcile) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    before = {path: path.stat().st_mtime_ns for path in world.root.rglob("*") if path.is_file()}
    assert reconcile() == Counter()
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_emptied_cdi_directory_is_filled_again(world: World, reconcile: Reconcile) -> None:
    world.prepared(1, "pair-0")
    spec = world.spec()
    for path in (world.root / "cdi").iterdir():
        path.unlink()
    assert reconcile() == {"CDI spec": 1}
    assert world.spec() == spec
    assert reconcile() == Counter()


def test_altered_spec_is_written_again(world: World, reconcile: Reconcile) -> None:
    world.prepared(1, "pair-0")
    spec = world.spec()
    (path,) = (world.root / "cdi").iterdir()
    path.write_text("{}")
    reconcile()
    assert world.spec() == spec


def test_files_of_unknown_claims_go_and_foreign_ones_stay(world: World, reconcile: Reconcile) -> None:
    world.prepared(1, "pair-0")
    world.ledger.drop(uid(1))
    world.ledger.open_gate(uid(1), "sandbox-1")
    foreign = [
        world.root / "cdi" / name for name in ("nvidia.yaml", f"other.dev-claim-{uid(1)}.json", "notes.txt")
    ]
    for path in foreign:
        path.write_text("{}")
    reconcile()
    assert sorted((world.root / "cdi").iterdir()) == sorted(foreign)
    assert world.gates == []


def test_netdev_of_an_ended_namespace_comes_home(world: World, reconcile: Reconcile) -> None:
    """containerd restarted: the end of an older sandbox is never told."""
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    world.netdevs.gone.add("/run/netns/1")
    assert reconcile() == {"ended namespace": 1}
    assert world.netdevs.all_home()
    assert world.gates == []
    assert set(world.ledger.entries()) == {uid(1)}, "its claim is the kubelet's to release"


def test_gate_markers_follow_the_ledger(world: World, reconcile: Reconcile) -> None:
    world.prepared(1, "pair-0")
    world.prepared(2, "pair-1", pods=("pod-2",))
    world.state.attach(sandbox())
    world.ledger.close_gate(uid(1))
    world.ledger.open_gate(uid(1), "old")
    world.ledger.open_gate(uid(2), "never")
    reconcile()
    assert world.gates == [f"{uid(1)}.sandbox-1"]


def test_claim_that_ended_while_no_driver_ran_is_released(world: World, reconcile: Reconcile) -> None:
    world.prepared(1, "pair-0")
    delete_from_api(world, 1)
    assert reconcile()["deleted claim"] == 1
    assert world.clean()


def test_claim_that_was_replaced_is_released(world: World, reconcile: Reconcile) -> None:
    world.prepared(1, "pair-0")
    other = claim(1, "pair-1")
    other["metadata"]["uid"] = uid(7)
    world.api.put(other)
    assert reconcile()["deleted claim"] == 1
    assert world.ledger.entries() == {}


def test_claim_is_kept_while_its_pod_still_runs(world: World, reconcile: Reconcile) -> None:
    """After a force delete the claim is gone at once and the pod's processes are not. Released now, its GPU
    would be given to a second pod beside the first."""
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    delete_from_api(world, 1)
    reconcile()
    assert set(world.ledger.entries()) == {uid(1)}
    assert world.netdevs.where[VFS[0]] == ("/run/netns/1", "net1")
    world.state.check(sandbox(), [uid(1)])


def test_api_that_does_not_answer_releases_nothing(world: World, reconcile: Reconcile) -> None:
    world.prepared(1, "pair-0")

    def get_claim(namespace: str, name: str) -> dict[str, object]:
        raise ApiError("connection refused")

    world.api.get_claim = get_claim  # type: ignore[method-assign]
    assert reconcile() == Counter()
    assert set(world.ledger.entries()) == {uid(1)}


def test_one_broken_claim_does_not_keep_the_others_from_repair(world: World, reconcile: Reconcile) -> None:
    for number in (0, 1):
        world.prepared(number + 1, f"vf-{number}", pods=(f"pod-{number}",))
        world.state.attach(sandbox(f"s{number}", f"pod-{number}", f"/run/netns/{number}"))
        world.netdevs.gone.add(f"/run/netns/{number}")
    real = world.netdevs._return

    def fail_first(request: object, netns: str) -> object:
        if netns == "/run/netns/0":
            raise OSError("odd")
        return real(request, netns)  # type: ignore[arg-type]

    world.netdevs._return = fail_first  # type: ignore[method-assign,assignment]
    reconcile()
    assert world.netdevs.where[VFS[1]] == (HOST, "vf1")


# --- a netdev that comes home late, under another name
def test_stray_netdev_gets_its_name_back(world: World, reconcile: Reconcile) -> None:
    world.prepared(1, "vf-0")
    world.state.attach(sandbox())
    del world.netdevs.where[VFS[0]]
    world.state.unprepare(ref(1))
    world.netdevs.where[VFS[0]] = (HOST, "net1")
    assert reconcile() == {"stray netdev": 1}
    assert world.clean()


def test_stray_netdev_that_is_claimed_at_once_keeps_its_own_name(world: World) -> None:
    """Prepare must not take the name it came home under for its own."""

    def netdev_of(address: str) -> str | None:
        namespace, name = world.netdevs.where[address]
        return name if namespace == HOST else None

    world.restart(node=view(netdev_of=netdev_of))
    world.prepared(1, "vf-0")
    world.state.attach(sandbox())
    del world.netdevs.where[VFS[0]]
    world.state.unprepare(ref(1))
    world.netdevs.where[VFS[0]] = (HOST, "net1")
    world.prepared(2, "vf-0", pods=("pod-2",))
    world.state.attach(sandbox("sandbox-2", "pod-2", "/run/netns/2"))
    world.state.detach("sandbox-2")
    assert world.netdevs.where[VFS[0]] == (HOST, "vf0")


def test_damaged_stray_file_is_no_reason_to_stop(world: World, reconcile: Reconcile, tmp_path: Path) -> None:
    world.prepared(1, "vf-0")
    world.state.attach(sandbox())
    del world.netdevs.where[VFS[0]]
    world.state.unprepare(ref(1))
    (stray,) = world.root.rglob(f"{VFS[0]}.json")
    for text in ("", "[]", "null", '"x"', "{}", "\x00"):
        stray.write_text(text)
        reconcile()


def test_claim_is_released_as_soon_as_its_pod_has_ended(world: World, reconciler: Reconciler) -> None:
    world.prepared(1, "pair-0")
    world.state.attach(sandbox())
    delete_from_api(world, 1)
    reconciler.run()
    assert reconciler.await_ends()
    world.netdevs.gone.add("/run/netns/1")
    assert not reconciler.await_ends()
    assert world.ledger.entries() == {}
    assert world.netdevs.all_home()
