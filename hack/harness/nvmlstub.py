"""A ``libnvidia-ml.so.1`` that answers from the same machine facts as the sysfs tree (tests/nvml/nvml.c)."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.machines import Machine, digest
from railmate.inventory.model import GpuVendor

SOURCE = Path(__file__).resolve().parents[2] / "tests" / "nvml" / "nvml.c"
FACTS_VARIABLE = "NVML_STUB_FACTS"
_GIB = 1 << 30
_USUAL_MEMORY = 80 * _GIB
_AMPERE = (8, 0, 7)  # compute capability and NVML's number of the architecture


class StubError(Exception):
    """The library cannot be built; the message holds what the compiler said."""


@dataclass(frozen=True)
class Mig:
    """One MIG instance of the GPU at ``address``."""

    address: str
    gpu_instance: int
    compute_instance: int = 0
    profile: str = "1g.5gb"
    memory_bytes: int = 5 * _GIB


def build(directory: Path, *definitions: str) -> Path:
    """Compiles the library into ``directory``; ``OLD_DRIVER`` is the one definition it knows.

    Raises StubError without a C compiler, or when it fails.
    """
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise StubError("no C compiler found. Install one (Debian, Ubuntu: apt-get install gcc libc6-dev).")
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / "libnvidia-ml.so.1"
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", *(f"-D{name}" for name in definitions),
         "-o", str(library), str(SOURCE)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise StubError(f"{SOURCE} cannot be compiled:\n{done.stderr}")
    return library


def memory_of(product: str | None) -> int:
    """Bytes, from the product's name (``NVIDIA A100-SXM4-40GB``)."""
    match = re.search(r"(\d+)GB", product or "")
    return int(match[1]) * _GIB if match else _USUAL_MEMORY


def write_facts(
    machine: Machine,
    path: Path,
    migs: Iterable[Mig] = (),
    links: Iterable[tuple[str, str]] = (),
    rules: Iterable[str] = (),
) -> Path:
    """Writes what the library shall answer for the machine's NVIDIA GPUs.

    ``links`` are NVLinks, (GPU, peer); a peer ``-`` is a link that is down. ``rules`` are lines such as
    ``hang nvmlInit_v2``, ``crash nvmlDeviceGetUUID 0000:07:00.0``, ``fail nvmlDeviceGetMemoryInfo 4``.
    """
    lines = [f"driver {machine.nvidia_driver or '550.54.15'}"]
    for address, gpu in machine.gpus.items():
        if gpu.vendor is GpuVendor.NVIDIA:
            major, minor, architecture = _AMPERE
            lines.append(
                f"gpu {address} {gpu.uuid} {memory_of(gpu.product)} {major}.{minor} {architecture} "
                f"{gpu.product or 'NVIDIA Graphics Device'}"
            )
    for mig in migs:
        d = digest(machine.name, mig.address, f"mig{mig.gpu_instance}.{mig.compute_instance}")
        uuid = f"MIG-{d[:8]}-{d[8:12]}-{d[12:16]}-{d[16:20]}-{d[20:32]}"
        lines.append(
            f"mig {mig.address} {uuid} {mig.gpu_instance} {mig.compute_instance} {mig.memory_bytes} {mig.profile}"
        )
    lines += [f"link {gpu} {peer}" for gpu, peer in links]
    path.write_text("\n".join([*lines, *rules]) + "\n")
    return path
