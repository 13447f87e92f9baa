"""What a pod sees of its NIC, asked of the real kernel. A VF is one end of a veth pair.

This kernel has no RDMA subsystem as a rule: what needs one is in tests/e2e/vnode.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import railmate.claims.observation as observation
from railmate.attach.errors import NamespaceGoneError
from railmate.attach.namespaces import open_namespace, with_namespace
from railmate.attach.rdmalook import Wanted, look, mount_sysfs
from railmate.attach.rdmamodel import RdmaDeviceRef
from railmate.cdi.spec import DeviceNode
from railmate.claims.ledger import Ledger
from railmate.claims.observation import Observations
from railmate.claims.records import Attachment, Entry, PreparedDevice, PreparedNic
from railmate.claims.runtime_files import RuntimeFiles
from railmate.inventory.rdmanetlink import netns_mode
from unit.claims.claims_world import BOOT, DRIVER, ref, uid

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces: needs root")

POD = f"rmr{os.getpid()}"
ADDRESS = "0000:c1:00.1"


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def pod() -> Iterator[Path]:
    ip("netns", "add", POD)
    try:
        ip("-netns", POD, "link", "add", "net1", "type", "veth", "peer", "name", "peer")
        for name in ("net1", "peer"):
            ip("-netns", POD, "link", "set", name, "up")
        ip("-netns", POD, "addr", "add", "10.9.0.1/24", "dev", "net1")
        ip("-netns", POD, "addr", "add", "fd00::9/64", "dev", "net1", "nodad")
        yield Path("/run/netns") / POD
    finally:
        ip("netns", "delete", POD)


def test_addresses_are_those_of_the_pods_interface(pod: Path) -> None:
    (seen,) = look([Wanted(ADDRESS, "net1", RdmaDeviceRef("mlx5_0"))], pod)
    assert seen.pci_address == ADDRESS
    assert seen.addresses[:2] == ("10.9.0.1/24", "fd00::9/64")
    assert seen.rdma_device is None
    assert seen.has_subsystem is (netns_mode() is not None)


def test_an_interface_that_is_gone_has_no_address(pod: Path) -> None:
    (seen,) = look([Wanted(ADDRESS, "net7")], pod)
    assert seen.addresses == ()


def test_a_pod_that_has_ended_is_told(tmp_path: Path) -> None:
    with pytest.raises(NamespaceGoneError):
        look([Wanted(ADDRESS, "net1")], tmp_path / "gone")


def test_sysfs_from_inside_shows_the_pods_devices_only_and_stays_invisible(pod: Path) -> None:
    before = Path("/proc/self/mountinfo").read_text()

    def names() -> tuple[set[str], str]:
        fd = mount_sysfs()
        try:
            listing = os.open("class/net", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
            try:
                return {one.name for one in Path(f"/proc/self/fd/{listing}").iterdir()}, Path(
                    "/proc/self/mountinfo"
                ).read_text()
            finally:
                os.close(listing)
        finally:
            os.close(fd)

    with open_namespace(pod) as fd:
        inside, mounts = with_namespace(fd, lambda _: names())
    assert {"net1", "peer"} <= inside
    assert not Path("/sys/class/net/net1").exists()
    assert mounts == before


# --- remembered
@pytest.fixture
def node(tmp_path: Path) -> tuple[Ledger, RuntimeFiles, Observations]:
    plugin = tmp_path / "plugin"
    ledger = Ledger(plugin)
    files = RuntimeFiles(DRIVER, plugin, tmp_path / "cdi", tmp_path / "gate")
    return ledger, files, Observations(ledger, files, tmp_path / "sys", Path("/dev"))


def attached(netns: Path, soft: str | None = None) -> Entry:
    nic = PreparedNic(ADDRESS, "net1", rdma=(RdmaDeviceRef("rxe0", soft=soft),))
    nodes = [
        DeviceNode(f"/dev/{name}", f"/dev/{name}")
        for name in ("nvidia0", "infiniband/uverbs0", "infiniband/rdma_cm")
    ]
    device = PreparedDevice("main", "node1", "pair-0", ("0000:07:00.0",), (nic,), tuple(nodes))
    return Entry(
        ref(1), ("pod-1",), (device,), BOOT, None, Attachment("s1", "pod-1", "team/p", str(netns), True)
    )


def test_what_was_told_is_remembered_and_what_was_seen_since_is_not_told_yet(
    pod: Path, node: tuple[Ledger, RuntimeFiles, Observations]
) -> None:
    ledger, _, observations = node
    ledger.put(attached(pod))

    def look_again() -> tuple[Entry, bool | None]:
        found = observations.observe(uid(1))
        assert found is not None
        assert found.seen is not None
        return found, found.seen.told

    first, told = look_again()
    assert told is False
    observations.note_told(first)
    _, told = look_again()
    assert told is True, "it is what was told"
    ip("-netns", POD, "addr", "add", "10.9.0.2/24", "dev", "net1")
    news, told = look_again()
    assert told is False
    observations.note_told(first)  # the report of what was seen before ends late
    assert ledger.get(uid(1)) == news
    ledger.drop(uid(1))
    observations.note_told(news)
    assert ledger.get(uid(1)) is None, "a claim that was released does not come back"


def test_what_the_pod_sees_is_in_the_ledger_and_on_disk(
    pod: Path, node: tuple[Ledger, RuntimeFiles, Observations]
) -> None:
    ledger, files, observations = node
    ledger.put(attached(pod))
    found = observations.observe(uid(1))
    assert found is not None
    assert found.seen is not None
    assert found.seen.nics[0].addresses == ("10.9.0.1/24", "fd00::9/64")
    assert ledger.get(uid(1)) == found
    assert files.complete(found), "the reconciler finds nothing to repair"
    assert files.complete(found.with_attachment(None)), "nor between two sandboxes"


def test_a_pod_that_got_another_sandbox_meanwhile_is_not_described_by_the_old_one(
    pod: Path, node: tuple[Ledger, RuntimeFiles, Observations], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, _, observations = node
    entry = attached(pod)
    ledger.put(entry)
    real = observation.look

    def look_slowly(*arguments: object) -> object:
        at = replace(entry.attachment, sandbox="s2") if entry.attachment else None
        ledger.put(entry.with_attachment(at))
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(observation, "look", look_slowly)
    assert observations.observe(uid(1)) is None
    now = ledger.get(uid(1))
    assert now is not None
    assert now.seen is None


@pytest.mark.parametrize("soft", ["rxe", None])
def test_a_device_that_came_anew_has_its_new_character_devices_in_the_spec(
    pod: Path, node: tuple[Ledger, RuntimeFiles, Observations], tmp_path: Path, soft: str | None
) -> None:
    """A soft one was made anew, one of a PCI function has new numbers after its move."""
    _, files, observations = node
    entry = attached(pod, soft=soft)
    files.write(entry)
    where = "class" if soft else f"bus/pci/devices/{ADDRESS}"
    place = tmp_path / "sys" / where / "infiniband_verbs/uverbs7"
    place.mkdir(parents=True)
    (place / "ibdev").write_text("rxe0\n")
    now = observations.refreshed(entry)
    (path,) = (tmp_path / "cdi").glob("*.json")
    (device,) = json.loads(path.read_text())["devices"]
    assert [one["path"] for one in device["containerEdits"]["deviceNodes"]] == [
        "/dev/nvidia0", "/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs7",
    ]  # fmt: skip
    assert [one.path for one in now.devices[0].nodes][-1] == "/dev/infiniband/uverbs7"
    assert observations.refreshed(now) == now
