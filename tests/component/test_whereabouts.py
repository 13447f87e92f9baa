"""The whereabouts IPAM plugin, with its books in a real API server, asked as the driver asks it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.controlplane import ControlPlane
from harness.gobuild import PROGRAMS, module_source, program
from unit.claims.claims_netdevs import FakeNetdevs, World
from unit.claims.claims_world import FakeClaims, config, ref, state, uid, view

pytestmark = pytest.mark.long  # the plugin is built for it: 90 s on two cores

MODULE = "github.com/k8snetworkplumbingwg/whereabouts"
BOOKS = "/apis/whereabouts.cni.cncf.io/v1alpha1/namespaces/kube-system"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    source = module_source(PROGRAMS["whereabouts"].family, MODULE)
    with ControlPlane(tmp_path_factory.mktemp("plane")) as one:
        for path in sorted((source / "doc" / "crds").glob("whereabouts.cni.cncf.io_*.yaml")):
            one.kubectl("apply", "-f", str(path))
        one.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        yield one


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    directory = tmp_path / "bin"
    directory.mkdir()
    counted = directory / "whereabouts"
    counted.write_text(f'#!/bin/sh\necho "$CNI_COMMAND" >> {tmp_path}/calls\nexec {program("whereabouts")}\n')
    counted.chmod(0o755)
    fake = FakeNetdevs()
    monkeypatch.setattr("railmate.claims.state.snapshot", fake.snapshot)
    api = FakeClaims()
    root = tmp_path / "node"
    return World(root, api, fake, state(root, api, node=view(cni_dir=directory, node_exists=Path.exists)))


@pytest.fixture
def settings(plane: ControlPlane, tmp_path: Path) -> Path:
    """The file that its installer leaves in the node's /etc/cni/net.d/whereabouts.d; without one it does not run."""
    path = tmp_path / "whereabouts.conf"
    path.write_text(json.dumps({"kubernetes": {"kubeconfig": str(plane.kubeconfig())}}))
    return path


def prepared(world: World, settings: Path, number: int) -> tuple[str, ...]:
    """Addresses of a pod's only VF."""
    section = {"type": "whereabouts", "range": "10.88.0.0/28", "configuration_path": str(settings)}
    pod = f"pod-{number}"
    world.prepared(number, f"vf-{number}", pods=(pod,), configs=[config(ipam=section)])
    entry = world.ledger.get(uid(number))
    assert entry is not None
    return entry.nics[0].settings.addresses


def lent(plane: ControlPlane) -> tuple[list[str], dict[str, str]]:
    """Who has an address of the pool; and of the whole cluster, by address."""
    pools: list[dict[str, Any]] = plane.request("GET", f"{BOOKS}/ippools")["items"]
    reserved = plane.request("GET", f"{BOOKS}/overlappingrangeipreservations")["items"]
    owners = [one["podref"] for pool in pools for one in pool["spec"]["allocations"].values()]
    return sorted(owners), {one["metadata"]["name"]: one["spec"]["podref"] for one in reserved}


def test_two_pods_get_addresses_of_their_own_and_each_gives_back_its_own_once(
    world: World, plane: ControlPlane, settings: Path, tmp_path: Path
) -> None:
    assert prepared(world, settings, 1) == ("10.88.0.1/28",)
    assert prepared(world, settings, 2) == ("10.88.0.2/28",)
    assert lent(plane) == (
        ["team/pod-1", "team/pod-2"],
        {"10.88.0.1": "team/pod-1", "10.88.0.2": "team/pod-2"},
    )
    world.state.unprepare(ref(1))
    assert lent(plane) == (["team/pod-2"], {"10.88.0.2": "team/pod-2"})
    world.state.unprepare(ref(2))
    assert lent(plane) == ([], {})
    assert (tmp_path / "calls").read_text().split() == ["ADD", "ADD", "DEL", "DEL"]
