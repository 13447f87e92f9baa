"""AMD, Intel and Habana devices, from DRM, accel and kfd."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.synthetic import synthetic
from harness.sysfs import write_tree
from railmate.inventory.model import Gpu, GpuVendor, Inventory
from railmate.inventory.scan import scan
from unit.inventory.trees import (
    add_kfd_node,
    add_processor_node,
    add_xcp_device,
    function_directory,
    write,
)

GIB = 1 << 30
TREE = "pci0000:00\n  00:01.0 mi300x driver=amdgpu\npci0001:00\n  02:00.0 mi300x driver=amdgpu"
FIRST, SECOND = "0000:00:01.0", "0001:02:00.0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_tree(synthetic(TREE), tmp_path)
    for address in (FIRST, SECOND):
        write(function_directory(tmp_path, address) / "mem_info_vram_total", str(192 * GIB))
    add_processor_node(tmp_path, 0)
    return tmp_path


def inventory_of(root: Path) -> Inventory:
    return scan(root / "sys", root / "proc")


def gpu_at(inventory: Inventory, address: str) -> Gpu:
    return next(gpu for gpu in inventory.gpus if gpu.address == address)


def partitioned(root: Path, count: int = 8) -> None:
    directory = function_directory(root, SECOND)
    write(directory / "current_compute_partition", "CPX")
    write(directory / "current_memory_partition", "NPS4")
    add_kfd_node(root, 1, FIRST, 128, memory=192 * GIB, unique_id=0xABC)
    add_kfd_node(root, 2, SECOND, 129, memory=24 * GIB, unique_id=0x100)
    for ordinal in range(1, count):
        add_kfd_node(root, 2 + ordinal, SECOND, 135 + ordinal, ordinal, 24 * GIB, 0x100 + ordinal)
        add_xcp_device(root, ordinal, 135 + ordinal, 8 + ordinal)


def test_an_accelerator_has_memory_from_drm_and_its_architecture_from_kfd(root: Path) -> None:
    add_kfd_node(root, 1, FIRST, 128, memory=191 * GIB)
    inventory = inventory_of(root)
    gpu = gpu_at(inventory, FIRST)
    assert gpu.vendor is GpuVendor.AMD
    assert (gpu.memory_bytes, gpu.architecture, gpu.partitions) == (192 * GIB, "gfx942", ())
    assert gpu_at(inventory, SECOND).architecture is None
    assert inventory.warnings == ()


def test_partitions_share_their_gpus_address_and_have_nodes_of_their_own(root: Path) -> None:
    partitioned(root)
    inventory = inventory_of(root)
    assert inventory.warnings == ()
    assert [gpu.address for gpu in inventory.gpus] == [FIRST, SECOND]
    gpu = gpu_at(inventory, SECOND)
    assert gpu.partition_mode == "CPX/NPS4"
    assert [part.name for part in gpu.partitions] == [f"xcp{ordinal}" for ordinal in range(8)]
    assert {part.profile for part in gpu.partitions} == {"CPX"}
    assert {part.memory_bytes for part in gpu.partitions} == {24 * GIB}
    assert len({part.uuid for part in gpu.partitions}) == 8
    assert gpu.partitions[0].device_nodes == ("dri/renderD129", "dri/card1")
    assert gpu.partitions[3].device_nodes == ("dri/renderD138", "dri/card11")
    assert len(gpu.device_nodes) == 16
    assert set(gpu.device_nodes) == {node for part in gpu.partitions for node in part.device_nodes}
    assert gpu_at(inventory, FIRST).partitions == ()
    assert gpu_at(inventory, FIRST).device_nodes == ("dri/renderD128", "dri/card0")


def test_kernels_that_put_the_partition_into_the_function_number(root: Path) -> None:
    for ordinal in range(4):
        add_kfd_node(root, 1 + ordinal, SECOND.replace(".0", f".{ordinal}"), 129 + ordinal)
    inventory = inventory_of(root)
    assert len(gpu_at(inventory, SECOND).partitions) == 4
    assert inventory.warnings == ()


def test_without_drms_attributes_uuid_and_memory_come_from_kfd(root: Path) -> None:
    directory = function_directory(root, FIRST)
    for attribute in ("unique_id", "mem_info_vram_total"):
        (directory / attribute).unlink()
    add_kfd_node(root, 1, FIRST, 128, memory=64 * GIB, unique_id=0xC0FFEE)
    gpu = gpu_at(inventory_of(root), FIRST)
    assert (gpu.uuid, gpu.memory_bytes) == ("0000000000c0ffee", 64 * GIB)
    assert gpu.product == "AMD Instinct MI300X"  # by device id; the board has no name in its FRU memory


def test_a_compute_node_of_no_known_gpu_is_named(root: Path) -> None:
    place = add_kfd_node(root, 7, "0000:77:00.0", 128)
    inventory = inventory_of(root)
    assert len(inventory.gpus) == 2
    assert any(str(place / "properties") in warning for warning in inventory.warnings)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"simd_count many\n", b"simd_count 4\nrubbish here\n"])
def test_properties_that_make_no_sense_cost_their_node_only(content: bytes, root: Path) -> None:
    partitioned(root)
    place = root / "sys/class/kfd/kfd/topology/nodes/4/properties"
    place.write_bytes(content)
    inventory = inventory_of(root)
    assert len(gpu_at(inventory, SECOND).partitions) == 7
    assert content == b"" or any(str(place) in warning for warning in inventory.warnings)


@pytest.mark.parametrize(
    ("attribute", "content", "field"),
    [
        ("unique_id", "not hexadecimal", "uuid"),
        ("unique_id", "0000000000000000", "uuid"),
        ("mem_info_vram_total", "lots", "memory_bytes"),
        ("mem_info_vram_total", "-1", "memory_bytes"),
        ("mem_info_vram_total", "0", "memory_bytes"),
        ("current_compute_partition", "what is this", "partition_mode"),
    ],
)
def test_attributes_that_make_no_sense_are_unknown(
    attribute: str, content: str, field: str, root: Path
) -> None:
    write(function_directory(root, FIRST) / attribute, content)
    inventory = inventory_of(root)
    assert getattr(gpu_at(inventory, FIRST), field) is None
    if content.strip("0"):
        assert any(attribute in warning for warning in inventory.warnings)


@pytest.mark.parametrize("name", ["\x1b[2J", "two\nlines", "x" * 300])
def test_a_product_name_that_no_one_could_read_is_not_shown(name: str, root: Path) -> None:
    file = function_directory(root, FIRST) / "product_name"
    write(file, name)
    inventory = inventory_of(root)
    assert gpu_at(inventory, FIRST).product == "AMD Instinct MI300X"
    assert any(str(file) in warning for warning in inventory.warnings)


def test_intel_and_habana(tmp_path: Path) -> None:
    tree = (
        "pci0000:00\n  00:06.0 038000 8086:0bda - driver=i915\n  00:07.0 120000 1da3:1020 - driver=habanalabs"
    )
    write_tree(synthetic(tree), tmp_path)
    write(function_directory(tmp_path, "0000:00:06.0") / "drm/card0/lmem_total_bytes", str(48 * GIB))
    (function_directory(tmp_path, "0000:00:07.0") / "accel/accel0").mkdir(parents=True)
    inventory = inventory_of(tmp_path)
    intel, habana = inventory.gpus
    assert (intel.vendor, intel.memory_bytes) == (GpuVendor.INTEL, 48 * GIB)
    assert habana.vendor is GpuVendor.OTHER
    assert "accel/accel0" in habana.device_nodes
    assert inventory.warnings == ()


@pytest.mark.parametrize(
    "what",
    [
        "120000 8086:7d1d - driver=intel_vpu",  # a processor's NPU
        "120000 8086:0b2b 8086:0000",  # an FPGA
        "030000 1002:164e 1002:164e driver=amdgpu",  # graphics in an AMD processor
        "038000 1002:1586 - driver=amdgpu",
    ],
)
def test_what_a_processor_or_another_accelerator_has_of_the_vendors_is_no_gpu(
    what: str, tmp_path: Path
) -> None:
    write_tree(synthetic(f"pci0000:00\n  00:05.0 {what}\n  00:06.0 mi300x driver=amdgpu"), tmp_path)
    assert [gpu.address for gpu in inventory_of(tmp_path).gpus] == ["0000:00:06.0"]
