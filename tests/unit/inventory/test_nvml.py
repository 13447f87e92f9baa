"""NVIDIA's library adds to the inventory, and nothing that it does can harm it.

The library is a stub in C that answers from the facts that the sysfs tree is written from.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.machines import MACHINES, Machine, load_machine
from harness.nvmlstub import FACTS_VARIABLE, Mig, build, write_facts
from harness.sysfs import write_tree
from railmate.inventory import nvml as nvml_module
from railmate.inventory.model import Gpu, Inventory
from railmate.inventory.nvml import Nvml
from railmate.inventory.scan import scan
from railmate.publish.devices import OfferOptions, build_offer
from railmate.topology.analyze import analyze
from railmate_api.attributes import KIND_GPU, MEMORY

GIB = 1 << 30
FIRST, SECOND, LAST = "0000:07:00.0", "0000:0f:00.0", "0000:bd:00.0"


@pytest.fixture(scope="module")
def machine() -> Machine:
    return load_machine(MACHINES / "dgx-a100.yaml")


@pytest.fixture(scope="module")
def tree(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dgx")
    write_tree(machine, root)
    return root


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def old_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("old"), "OLD_DRIVER")


class Ask:
    """Scans the tree with a library and the facts that it shall answer from."""

    def __init__(self, tree: Path, machine: Machine, facts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tree, self.machine, self.facts = tree, machine, facts
        monkeypatch.setenv(FACTS_VARIABLE, str(facts))

    def __call__(
        self,
        library: Path,
        *rules: str,
        migs: tuple[Mig, ...] = (),
        links: tuple[tuple[str, str], ...] = (),
        deadline_s: int = 20,
    ) -> Inventory:
        write_facts(self.machine, self.facts, migs, links, rules)
        return scan(self.tree / "sys", self.tree / "proc", Nvml(str(library), deadline_s))


@pytest.fixture
def ask(tree: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    return Ask(tree, machine, tmp_path / "facts", monkeypatch)


@pytest.fixture(scope="module")
def without(tree: Path) -> Inventory:
    """What sysfs and proc alone say."""
    return scan(tree / "sys", tree / "proc")


def by_address(inventory: Inventory) -> dict[str, Gpu]:
    return {gpu.address: gpu for gpu in inventory.gpus}


def test_memory_and_capability_are_added_and_what_the_kernel_says_stays(
    ask: Ask, library: Path, without: Inventory
) -> None:
    inventory = ask(library)
    assert inventory.warnings == ()
    assert len(inventory.gpus) == 8
    assert {gpu.memory_bytes for gpu in inventory.gpus} == {40 * GIB}
    assert {gpu.compute_capability for gpu in inventory.gpus} == {"8.0"}
    for gpu, before in zip(inventory.gpus, without.gpus, strict=True):
        assert before.memory_bytes is None
        assert (gpu.uuid, gpu.product, gpu.driver_version, gpu.architecture, gpu.device_nodes) == (
            before.uuid,
            before.product,
            before.driver_version,
            before.architecture,
            before.device_nodes,
        )


def test_memory_from_the_library_is_published_as_capacity(
    ask: Ask, library: Path, without: Inventory
) -> None:
    def memory(inventory: Inventory) -> list[int | None]:
        devices = build_offer(inventory, analyze(inventory), OfferOptions()).devices
        return [device.capacity.get(MEMORY) for device in devices if device.kind == KIND_GPU]

    assert memory(without) == [None] * 8
    assert memory(ask(library)) == [40 * GIB] * 8


def test_without_the_kernel_drivers_own_files_uuid_and_product_come_from_the_library(
    machine: Machine, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(machine, tmp_path / "m")
    monkeypatch.setenv(FACTS_VARIABLE, str(write_facts(machine, tmp_path / "facts")))
    inventory = scan(tmp_path / "m/sys", tmp_path / "noproc", Nvml(str(library)))
    assert [(g.uuid, g.product) for g in inventory.gpus] == [
        (facts.uuid, facts.product) for facts in machine.gpus.values()
    ]
    assert inventory.gpus[0].driver_version == "535.183.01"


def test_mig_instances_are_found_with_their_device_nodes(
    machine: Machine, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(machine, tmp_path)
    minor = machine.gpus[SECOND].minor
    capabilities = tmp_path / f"proc/driver/nvidia/capabilities/gpu{minor}/mig"
    for below, number in (("gi1", 12), ("gi1/ci0", 13)):
        (capabilities / below).mkdir(parents=True, exist_ok=True)
        (capabilities / below / "access").write_text(f"DeviceFileMinor: {number}\nDeviceFileMode: 292\n")
    migs = (Mig(SECOND, 1, 0, "3g.20gb", 20 * GIB), Mig(SECOND, 5, 1, "1c.2g.10gb", 10 * GIB))
    ask = Ask(tmp_path, machine, tmp_path / "facts", monkeypatch)
    inventory = ask(library, migs=migs)
    gpu = by_address(inventory)[SECOND]
    assert gpu.partition_mode == "MIG"
    assert [(p.name, p.profile, p.memory_bytes) for p in gpu.partitions] == [
        ("gi1ci0", "3g.20gb", 20 * GIB),
        ("gi5ci1", "1c.2g.10gb", 10 * GIB),
    ]
    assert all(p.uuid is not None and p.uuid.startswith("MIG-") for p in gpu.partitions)
    assert gpu.partitions[0].device_nodes == ("nvidia-caps/nvidia-cap12", "nvidia-caps/nvidia-cap13")
    assert gpu.partitions[1].device_nodes == ()
    others = [other for other in inventory.gpus if other.address != SECOND]
    assert all(other.partition_mode is None and other.partitions == () for other in others)
    assert inventory.warnings == ()


def test_nvlinks_that_are_up_are_counted_and_their_ends_named(ask: Ask, library: Path) -> None:
    switch = "0000:c4:00.0"
    inventory = ask(library, links=((FIRST, switch), (FIRST, SECOND), (FIRST, SECOND), (FIRST, "-")))
    gpus = by_address(inventory)
    assert (gpus[FIRST].nvlinks, gpus[FIRST].nvlink_peers) == (3, (SECOND, switch))
    assert (gpus[LAST].nvlinks, gpus[LAST].nvlink_peers) == (None, ())
    assert inventory.warnings == ()


def test_symbols_that_an_old_driver_lacks_cost_their_attributes_only(ask: Ask, old_library: Path) -> None:
    inventory = ask(old_library, migs=(Mig(FIRST, 1),), links=((FIRST, SECOND),))
    assert {gpu.memory_bytes for gpu in inventory.gpus} == {40 * GIB}
    assert {gpu.compute_capability for gpu in inventory.gpus} == {None}
    assert all(gpu.partitions == () and gpu.nvlinks is None for gpu in inventory.gpus)
    assert inventory.gpus[0].architecture == "Ampere"
    assert inventory.warnings == ()


def test_a_library_that_is_not_there_is_named_once(ask: Ask, tmp_path: Path, without: Inventory) -> None:
    inventory = ask(tmp_path / "libnvidia-ml.so.1")
    assert inventory.gpus == without.gpus
    (warning,) = inventory.warnings
    assert str(tmp_path / "libnvidia-ml.so.1") in warning


def test_a_file_that_is_no_library_is_named_once(ask: Ask, tmp_path: Path, without: Inventory) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("rubbish")
    inventory = ask(tmp_path / "libnvidia-ml.so.1")
    assert inventory.gpus == without.gpus
    assert len(inventory.warnings) == 1


@pytest.mark.parametrize("code", [1, 4, 9, 18, 999, 12345])
def test_a_library_that_refuses_to_start_adds_nothing(
    code: int, ask: Ask, library: Path, without: Inventory
) -> None:
    inventory = ask(library, f"fail nvmlInit_v2 {code}")
    assert inventory.gpus == without.gpus
    (warning,) = inventory.warnings
    assert "nvmlInit_v2" in warning


@pytest.mark.parametrize(
    ("function", "attribute"),
    [
        ("nvmlDeviceGetMemoryInfo", "memory_bytes"),
        ("nvmlDeviceGetCudaComputeCapability", "compute_capability"),
        ("nvmlDeviceGetNvLinkState", "nvlinks"),
    ],
)
def test_a_permission_that_is_missing_costs_its_attribute_only(
    function: str, attribute: str, ask: Ask, library: Path
) -> None:
    links = ((FIRST, SECOND), (SECOND, FIRST))
    whole, part = ask(library, links=links), ask(library, f"fail {function} 4 {FIRST}", links=links)
    assert getattr(by_address(whole)[FIRST], attribute) is not None
    assert getattr(by_address(part)[FIRST], attribute) is None
    assert by_address(part)[SECOND] == by_address(whole)[SECOND]
    assert any(FIRST in warning and "no permission" in warning for warning in part.warnings)


def test_a_gpu_that_is_lost_does_not_hide_the_others(ask: Ask, library: Path) -> None:
    inventory = ask(library, f"fail nvmlDeviceGetHandleByPciBusId_v2 15 {FIRST}")
    assert [gpu.memory_bytes is None for gpu in inventory.gpus] == [True] + [False] * 7
    (warning,) = inventory.warnings
    assert FIRST in warning
    assert "lost" in warning


@pytest.mark.parametrize("function", ["nvmlInit_v2", "nvmlSystemGetDriverVersion", "nvmlDeviceGetUUID"])
def test_a_library_that_hangs_is_given_up_at_the_deadline(
    function: str, ask: Ask, library: Path, without: Inventory
) -> None:
    begin = time.monotonic()
    inventory = ask(library, f"hang {function}", deadline_s=1)
    assert time.monotonic() - begin < 10
    assert inventory.gpus == without.gpus
    (warning,) = inventory.warnings
    assert "within 1 s" in warning
    assert children() == []


def test_what_came_before_a_hang_is_kept(ask: Ask, library: Path) -> None:
    inventory = ask(library, f"hang nvmlDeviceGetMigMode {LAST}", deadline_s=6)
    assert all(gpu.memory_bytes == 40 * GIB for gpu in inventory.gpus)
    assert len(inventory.warnings) == 1


def test_a_library_that_crashes_takes_only_its_own_process_along(ask: Ask, library: Path) -> None:
    inventory = ask(library, f"crash nvmlDeviceGetName {SECOND}")
    assert [gpu.memory_bytes is None for gpu in inventory.gpus] == [False] + [True] * 7
    (warning,) = inventory.warnings
    assert "SIGABRT" in warning


def test_a_library_that_speaks_of_another_gpu_is_not_believed(
    ask: Ask, library: Path, without: Inventory
) -> None:
    ask(library)
    text = ask.facts.read_text().replace(str(without.gpus[0].uuid), "GPU-another")
    ask.facts.write_text(text)
    inventory = scan(ask.tree / "sys", ask.tree / "proc", Nvml(str(library)))
    assert inventory.gpus[0] == without.gpus[0]
    assert inventory.gpus[1].memory_bytes == 40 * GIB
    assert any("GPU-another" in warning for warning in inventory.warnings)


def test_a_replaced_root_never_asks_this_machines_library(
    tree: Path, monkeypatch: pytest.MonkeyPatch, without: Inventory
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    assert scan(tree / "sys", tree / "proc") == without


def test_gpus_that_another_driver_holds_are_not_asked_about(
    machine: Machine, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(machine, tmp_path)
    for link in (tmp_path / "sys/bus/pci/devices").iterdir():
        if link.name in machine.gpus:
            (link.resolve() / "driver").unlink()
    monkeypatch.setattr(nvml_module, "_run", lambda *_: pytest.fail("the library was asked"))
    inventory = scan(tmp_path / "sys", tmp_path / "proc", Nvml(str(library)))
    assert len(inventory.gpus) == 8


def test_the_stub_answers_nvidias_own_bindings_alike(ask: Ask, library: Path, without: Inventory) -> None:
    """Stub and probe could share a wrong structure; NVIDIA's nvidia-ml-py has the right ones."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    inventory = ask(library, migs=(Mig(FIRST, 3),), links=((FIRST, "0000:c4:00.0"),))
    program = """
import json, pynvml as n
n.nvmlInit()
print()
h = n.nvmlDeviceGetHandleByPciBusId(b"0000:07:00.0")
m = n.nvmlDeviceGetMigDeviceHandleByIndex(h, 1)
p = n.nvmlDeviceGetNvLinkRemotePciInfo(h, 0)
print(json.dumps([n.nvmlDeviceGetUUID(h), n.nvmlDeviceGetName(h), n.nvmlDeviceGetMemoryInfo(h).total,
    list(n.nvmlDeviceGetCudaComputeCapability(h)), n.nvmlDeviceGetMigMode(h)[0], n.nvmlDeviceGetUUID(m),
    n.nvmlDeviceGetGpuInstanceId(m), n.nvmlDeviceGetMemoryInfo(m).total, p.bus, p.device, p.busId]))
"""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    gpu = by_address(inventory)[FIRST]
    (part,) = gpu.partitions
    assert json.loads(done.stdout.splitlines()[-1]) == [
        gpu.uuid, gpu.product, gpu.memory_bytes, [8, 0], 1, part.uuid, 3, part.memory_bytes, 0xC4, 0,
        "00000000:C4:00.0",
    ]  # fmt: skip


def children() -> list[str]:
    """Ids of the processes that this one has started and that are still there."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
