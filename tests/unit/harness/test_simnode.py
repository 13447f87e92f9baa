"""The simulated GPU node: what is sent into the worker, and when."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import PurePosixPath

import pytest

from harness.machines import DEMO_MACHINE, MACHINES, Machine, list_char_devices, list_netdevs, load_machine
from harness.shell import HarnessError
from harness.simnode import STATE, SimNode, archive, links_table

SMALL_MACHINE = MACHINES / "lassen-p9.yaml"


class FakeCluster:
    """Keeps the digest file, and what else was run in the node."""

    def __init__(self) -> None:
        self.digest = ""
        self.installs: list[bytes] = []
        self.scripts: list[str] = []
        self.labels: list[str] = []
        self.broken = False

    def node_exec(
        self, node: str, *command: str, input: str | bytes | None = None, timeout: float | None = None
    ) -> str:
        assert node == "worker"
        script = command[-1]
        if script.startswith("cat "):
            return self.digest
        if script.startswith("echo "):
            self.digest = script.split()[1] + "\n"
        elif isinstance(input, bytes):
            self.installs.append(input)
        else:
            self.scripts.append(script)
            if self.broken:
                raise HarnessError("a link is in the way")
        return ""

    def kubectl(self, *arguments: str, input: str | None = None, timeout: float | None = None) -> str:
        self.labels.append(arguments[3])
        return ""


@pytest.fixture(scope="module")
def machine() -> Machine:
    return load_machine(DEMO_MACHINE, vfs_per_rail=2)


@pytest.fixture(scope="module")
def small() -> Machine:
    return load_machine(SMALL_MACHINE)


@pytest.fixture(scope="module")
def entries(machine: Machine) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(archive(machine))) as tar:
        return {entry.name: entry for entry in tar}


def test_every_netdev_of_the_machine_is_a_line_of_the_links_table(machine: Machine) -> None:
    rows = [line.split("\t") for line in links_table(machine).splitlines()]
    facts = list_netdevs(machine)
    assert [(row[0], row[1], row[2]) for row in rows] == [(f.name, f.mac, str(f.mtu)) for f in facts]
    assert sum(f.physical_function is not None for f in facts) == 16


def test_the_links_table_points_to_the_netdevs_in_the_tree(
    machine: Machine, entries: dict[str, tarfile.TarInfo]
) -> None:
    for line in links_table(machine).splitlines():
        name, _, _, directory = line.split("\t")
        assert entries[f"sys/{directory}/net/{name}"].isdir()
        assert entries[f"sys/class/net/{name}"].issym()


def test_device_nodes_are_clones_of_dev_null_that_anybody_may_open(
    machine: Machine, entries: dict[str, tarfile.TarInfo]
) -> None:
    found = {name for name, entry in entries.items() if entry.ischr()}
    assert found == {f"dev/{name}" for name in list_char_devices(machine)}
    assert {"dev/nvidia0", "dev/infiniband/uverbs0"} <= found
    for name in found:
        assert (entries[name].devmajor, entries[name].devminor, entries[name].mode) == (1, 3, 0o666)


def test_links_of_the_tree_stay_inside_it(entries: dict[str, tarfile.TarInfo]) -> None:
    links = {name: entry for name, entry in entries.items() if entry.issym()}
    assert links
    for name, entry in links.items():
        target = os.path.normpath(PurePosixPath(name).parent / entry.linkname)
        assert target in entries, f"{name} -> {entry.linkname}"


def test_the_same_machine_gives_the_same_archive(small: Machine) -> None:
    assert archive(small) == archive(small)


def test_a_second_up_checks_the_links_but_sends_nothing(small: Machine) -> None:
    cluster = FakeCluster()
    node = SimNode(cluster, "worker", small)
    node.up()
    node.up()
    assert len(cluster.installs) == 1
    assert len(cluster.scripts) == 2
    assert cluster.labels == ["railmate.dev/simulated=true"] * 2


def test_another_machine_replaces_the_one_before(small: Machine) -> None:
    cluster = FakeCluster()
    SimNode(cluster, "worker", small).up()
    SimNode(cluster, "worker", load_machine(MACHINES / "aws-p4d.yaml")).up()
    assert len(cluster.installs) == 2


def test_an_up_that_failed_is_done_over(small: Machine) -> None:
    cluster = FakeCluster()
    cluster.broken = True
    with pytest.raises(HarnessError):
        SimNode(cluster, "worker", small).up()
    assert cluster.labels == []
    cluster.broken = False
    SimNode(cluster, "worker", small).up()
    assert len(cluster.installs) == 2


def test_down_takes_away_the_links_the_state_and_the_label(small: Machine) -> None:
    cluster = FakeCluster()
    SimNode(cluster, "worker", small).down()
    (script,) = cluster.scripts
    assert "ip netns del railmate-fabric" in script
    assert f"rm -rf {STATE}" in script
    assert cluster.labels == ["railmate.dev/simulated-"]
