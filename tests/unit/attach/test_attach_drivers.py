"""Taking a function from its driver: a helper process writes, because the kernel may never answer."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from railmate.attach import drivers
from railmate.attach.drivers import DriverBinding
from railmate.attach.errors import AttachError

VF = "0000:0c:00.1"


@pytest.fixture
def binding(tmp_path: Path) -> DriverBinding:
    """A function that is bound to mlx5_core; nobody answers to what is written."""
    device = tmp_path / "bus/pci/devices" / VF
    driver = tmp_path / "bus/pci/drivers/mlx5_core"
    for directory in (device, driver):
        directory.mkdir(parents=True)
    (device / "driver").symlink_to(driver)
    (device / "driver_override").write_text("mlx5_core\n")
    (tmp_path / "bus/pci/drivers_probe").touch()
    return DriverBinding(tmp_path, VF)


def unbind_file(binding: DriverBinding) -> Path:
    return binding.directory.parents[1] / "drivers/mlx5_core/unbind"


def test_the_address_is_written_to_the_drivers_file(binding: DriverBinding) -> None:
    unbind_file(binding).touch()
    binding.rebind("mlx5_core")
    assert unbind_file(binding).read_text() == VF


def test_what_the_kernel_refuses_is_told_with_its_reason(binding: DriverBinding) -> None:
    unbind_file(binding).mkdir()
    with pytest.raises(AttachError, match=f"unbind does not take '{VF}': Is a directory"):
        binding.rebind("mlx5_core")


def test_a_kernel_that_waits_keeps_nobody_and_no_second_attempt_is_begun_meanwhile(
    binding: DriverBinding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO that nobody reads keeps its writer waiting as the kernel does."""
    os.mkfifo(unbind_file(binding))
    monkeypatch.setattr(drivers, "_UNBIND_PATIENCE", 0.3)
    for _ in range(2):
        with pytest.raises(AttachError, match="a process still has it open"):
            binding.rebind("mlx5_core")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(unbind_file(binding).read_text()))
    monkeypatch.setattr(drivers, "_UNBIND_PATIENCE", 10.0)
    reader.start()
    (binding.directory / "driver").unlink()  # the kernel's first step
    with pytest.raises(AttachError, match="bound to no driver"):  # nobody acts on drivers_probe here
        binding.rebind("mlx5_core")
    reader.join()
    assert read == [VF], "one process has written, once"
