"""The virtual node's hardware: the addresses that firmware gives it, and QEMU's arguments."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from harness import vnode
from harness.shell import HarnessError
from harness.vnode_disk import Boot, cpio, dependencies
from harness.vnode_machine import Settings, machine, store_disk, switches

BOOT = Boot(Path("/cache/vmlinuz"), Path("/cache/initrd"), Path("/cache/root.ext4"))


def devices(arguments: list[str]) -> list[str]:
    return [value for name, value in itertools.pairwise(arguments) if name == "-device"]


def test_four_switches_on_two_sockets_have_two_gpus_and_a_nic_each() -> None:
    first, second, third, fourth = switches()
    assert (first.address, first.numa_node) == ("0000:21:00.0", 0)
    assert first.gpus == ("0000:23:00.0", "0000:24:00.0")
    assert first.nic == "0000:25:00.0"
    assert (second.address, second.numa_node, second.nic) == ("0000:26:00.0", 0, "0000:2a:00.0")
    assert (third.address, third.numa_node) == ("0000:81:00.0", 1)
    assert (fourth.gpus, fourth.numa_node) == (("0000:88:00.0", "0000:89:00.0"), 1)


def test_vfs_are_where_the_nics_offset_and_stride_put_them() -> None:
    assert [switches()[0].vf(index) for index in range(4)] == [
        "0000:25:10.0", "0000:25:10.2", "0000:25:10.4", "0000:25:10.6",
    ]  # fmt: skip
    assert switches()[3].vf(6) == "0000:8a:11.4"


def test_every_device_sits_on_a_bus_that_is_there_and_has_an_id_of_its_own() -> None:
    found = devices(machine(BOOT, Settings(), 4000))
    ids = [match[1] for one in found for match in re.finditer(r"\bid=([^,]+)", one)]
    assert len(ids) == len(set(ids))
    buses = {match[1] for one in found for match in re.finditer(r'\bbus(?:=|": ")([^,"]+)', one)}
    assert buses <= {*ids, "pcie.0"}
    ports = [one for one in found if "chassis=" in one]
    assert len({re.search(r"chassis=\d+", one)[0] for one in ports}) == len(ports)  # type: ignore[index]


def test_the_machine_has_eight_gpus_and_four_nics() -> None:
    found = devices(machine(BOOT, Settings(), 4000))
    assert sum("vfio-user-pci" in one for one in found) == 8
    assert sum(one.startswith("igb,") for one in found) == 4


def test_the_agent_is_reached_through_loopback_only() -> None:
    (own,) = [one for one in machine(BOOT, Settings(), 4711) if one.startswith("user,")]
    assert own == "user,id=own,hostfwd=tcp:127.0.0.1:4711-:4100"


def test_nothing_of_a_run_is_written_to_the_cached_disks() -> None:
    drives = [one for one in machine(BOOT, Settings(), 4000) if one.startswith("if=none")]
    commands = [str(arguments) for _, arguments in store_disk(Path("/cache/store.ext4"))]
    assert all("snapshot=on" in one for one in [*drives, commands[0]])
    assert len(drives) == 1


def test_a_comma_in_a_path_does_not_end_it() -> None:
    boot = Boot(BOOT.kernel, BOOT.initrd, Path("/a,b/root.ext4"))
    (drive,) = [one for one in machine(boot, Settings(), 4000) if one.startswith("if=none")]
    assert "file=/a,,b/root.ext4," in drive


def test_memory_is_split_between_the_sockets_and_kvm_is_used_when_asked_for() -> None:
    arguments = machine(BOOT, Settings(memory=4096, acceleration="kvm"), 4000)
    assert sum("size=2048M" in one for one in arguments) == 2
    assert arguments[arguments.index("-accel") + 1] == "kvm"


def test_the_rdma_mode_reaches_the_kernels_command_line() -> None:
    arguments = machine(BOOT, Settings(rdma="shared"), 4000)
    assert "vnode.rdma=shared" in arguments[arguments.index("-append") + 1].split()


@pytest.mark.parametrize("chosen", ["kvm", "tcg"])
def test_the_acceleration_can_be_chosen(monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setenv(vnode.ACCELERATION_VARIABLE, chosen)
    assert vnode.acceleration() == chosen


def test_an_unknown_acceleration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vnode.ACCELERATION_VARIABLE, "xen")
    with pytest.raises(HarnessError, match="kvm or tcg"):
        vnode.acceleration()


def test_too_little_memory_is_said_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(vnode, "available_memory", lambda: 3000)
    with pytest.raises(HarnessError, match=r"needs 3584 MiB of memory and 3000 are available"):
        vnode.VirtualNode(tmp_path / "run", Settings()).start()


def test_a_node_that_was_never_started_is_down_and_can_be_stopped(tmp_path: Path) -> None:
    node = vnode.VirtualNode(tmp_path / "run")
    assert not node.up
    node.stop()
    with pytest.raises(HarnessError, match="hack/vnode up"):
        _ = node.channel


def test_modules_come_after_what_they_need_and_once_each() -> None:
    listing = (
        "kernel/fs/ext4/ext4.ko.xz: kernel/fs/jbd2/jbd2.ko.xz kernel/lib/crc16.ko.xz\n"
        "kernel/fs/jbd2/jbd2.ko.xz:\n"
        "kernel/drivers/virtio/virtio_pci.ko.xz: kernel/drivers/virtio/virtio.ko.xz\n"
        "kernel/lib/crc16.ko.xz:\n"
        "kernel/drivers/virtio/virtio.ko.xz:\n"
        "kernel/drivers/block/virtio-blk.ko.xz: kernel/drivers/virtio/virtio.ko.xz\n"
    )
    order = [
        Path(one).name for one in dependencies(listing, ["virtio_pci", "virtio_blk", "ext4", "built_in"])
    ]
    assert sorted(order) == [
        "crc16.ko.xz", "ext4.ko.xz", "jbd2.ko.xz", "virtio-blk.ko.xz", "virtio.ko.xz", "virtio_pci.ko.xz",
    ]  # fmt: skip
    assert order.index("virtio.ko.xz") < order.index("virtio_pci.ko.xz")
    assert order[-1] == "ext4.ko.xz"


def test_the_initial_ram_disk_is_an_archive_that_can_be_read_back() -> None:
    packed = cpio({"bin": (0o040755, b""), "bin/sh": (0o100755, b"#!"), "init": (0o100755, b"12345")})
    found, place = {}, 0
    while True:
        assert place % 4 == 0
        assert packed[place : place + 6] == b"070701"
        fields = [int(packed[place + 6 + 8 * i : place + 14 + 8 * i], 16) for i in range(13)]
        mode, size, length = fields[1], fields[6], fields[11]
        name = packed[place + 110 : place + 110 + length - 1].decode()
        data = (place + 110 + length + 3) & ~3
        if name == "TRAILER!!!":
            break
        found[name] = (mode, packed[data : data + size])
        place = (data + size + 3) & ~3
    assert found == {"bin": (0o040755, b""), "bin/sh": (0o100755, b"#!"), "init": (0o100755, b"12345")}
