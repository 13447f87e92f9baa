"""What NVIDIA's management library adds to what sysfs and proc say of GPUs.

The library runs in a helper process (nvmlprobe.py) with a deadline. Whatever goes wrong with it, a
library that is missing, too old, forbidden, hanging or crashing, leaves attributes out and becomes a
warning. It fills in what is unknown and never replaces what the kernel said.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from railmate.inventory.address import is_address
from railmate.inventory.model import Gpu, GpuVendor, Partition
from railmate.inventory.reader import Reader

LIBRARY = "libnvidia-ml.so.1"
#: Where NVIDIA's GPU Operator puts its driver on the node, and where our container has the node's (chart).
DRIVER_ROOT = "/run/nvidia/driver"
_DIRECTORIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64")
# Drivers without persistence mode wake each GPU for the first call, which takes a second or two a GPU.
DEADLINE_S = 30
_GRACE_S = 1.0  # a killed process that sits in the kernel is left alone after that
_MIG_NAME = re.compile(r".*\bMIG ([0-9a-z.+]+)")


@dataclass(frozen=True, slots=True)
class Nvml:
    """How to reach the library. ``library`` is a path or a name for the dynamic loader."""

    library: str = LIBRARY
    deadline_s: int = DEADLINE_S


def find_library() -> str:
    """The driver container's library where there is one, else the loader's."""
    for directory in _DIRECTORIES:
        path = f"{DRIVER_ROOT}/{directory}/{LIBRARY}"
        if os.path.exists(path):
            return path
    return LIBRARY


def with_nvml(gpus: tuple[Gpu, ...], nvml: Nvml, proc_root: str, reader: Reader) -> tuple[Gpu, ...]:
    """The GPUs with what the library knows. Only those that NVIDIA's driver holds are asked about."""
    addresses = [g.address for g in gpus if g.vendor is GpuVendor.NVIDIA and g.function.driver == "nvidia"]
    if not addresses:
        return gpus
    facts = _ask(nvml, addresses, reader)
    version = facts.get("", {}).get("driverVersion")
    return tuple(_merged(gpu, facts.get(gpu.address), version, proc_root, reader) for gpu in gpus)


def _ask(nvml: Nvml, addresses: list[str], reader: Reader) -> Mapping[str, Mapping[str, Any]]:
    """Facts by address; under the empty one those of the driver."""
    output = _run(nvml, addresses, reader)
    facts: dict[str, dict[str, Any]] = {}
    for line in output.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue  # cut off by the deadline, which has its own warning
        if "problem" in said:
            reader.warn(nvml.library, said["problem"])
        else:
            facts.setdefault(said.get("address", ""), {}).update(said)
    return facts


def _run(nvml: Nvml, addresses: list[str], reader: Reader) -> str:
    """The helper's output as far as it came."""
    probe = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nvmlprobe.py")
    # The helper's own alarm is later: it is for the case that this process ends first.
    arguments = [str(nvml.deadline_s + 1), nvml.library, *addresses]
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", probe, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        reader.warn(nvml.library, f"cannot be asked, no process can be started ({error.strerror})")
        return ""
    try:
        output, _ = process.communicate(timeout=nvml.deadline_s)
    except subprocess.TimeoutExpired as expired:
        problem = f"gave no answer within {nvml.deadline_s} s; what it did not say is left out"
        reader.warn(nvml.library, problem + ". See dmesg for the driver's messages (Xid)")
        _end(process, nvml, reader)
        output = expired.output or b""
    else:
        _warn_of_end(process.returncode, nvml, reader)
    return bytes(output).decode(errors="replace")


def _end(process: subprocess.Popen[bytes], nvml: Nvml, reader: Reader) -> None:
    process.kill()
    if process.stdout is not None:
        process.stdout.close()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        reader.warn(nvml.library, f"process {process.pid} is stuck in the kernel and cannot be ended")


def _warn_of_end(code: int, nvml: Nvml, reader: Reader) -> None:
    if code < 0:
        how = signal.Signals(-code).name
        reader.warn(nvml.library, f"its process died of {how}; what it did not say is left out")
    elif code > 0:
        reader.warn(nvml.library, f"cannot be asked, its process ended with {code}")


def _merged(
    gpu: Gpu, said: Mapping[str, Any] | None, version: str | None, proc_root: str, reader: Reader
) -> Gpu:
    if said is None:
        return gpu
    uuid = said.get("uuid")
    if gpu.uuid is not None and uuid is not None and uuid != gpu.uuid:
        reader.warn(gpu.address, f"is {gpu.uuid} to the kernel and {uuid} to NVML; NVML is not believed")
        return gpu
    links = said.get("links") or {}
    return replace(
        gpu,
        uuid=gpu.uuid or uuid,
        product=gpu.product or said.get("product"),
        architecture=gpu.architecture or said.get("architecture"),
        driver_version=gpu.driver_version or version,
        memory_bytes=gpu.memory_bytes or said.get("memoryBytes"),
        compute_capability=said.get("computeCapability"),
        partition_mode="MIG" if said.get("mig") else None,
        partitions=tuple(_instance(gpu, one, proc_root, reader) for one in said.get("instances", ())),
        nvlinks=links.get("up"),
        nvlink_peers=tuple(peer for peer in links.get("peers", ()) if is_address(peer)),
    )


def _instance(gpu: Gpu, said: Mapping[str, Any], proc_root: str, reader: Reader) -> Partition:
    name = _MIG_NAME.fullmatch(said["name"])
    gi, ci = said["gpuInstance"], said["computeInstance"]
    return Partition(
        name=f"gi{gi}ci{ci}",
        profile=name[1] if name else None,
        uuid=said["uuid"],
        memory_bytes=said["memoryBytes"] or None,
        device_nodes=_capabilities(gpu, gi, ci, proc_root, reader),
    )


def _capabilities(gpu: Gpu, gi: int, ci: int, proc_root: str, reader: Reader) -> tuple[str, ...]:
    """The two device nodes that open a MIG instance, from the driver's ``access`` files
    (NVIDIA's MIG User Guide, "Device Nodes and Capabilities")."""
    nodes = []
    for below in (f"gi{gi}/access", f"gi{gi}/ci{ci}/access"):
        path = f"{proc_root}/driver/nvidia/capabilities/gpu{gpu.index}/mig/{below}"
        if not os.path.exists(path):
            continue
        minor = re.search(r"^DeviceFileMinor: *([0-9]{1,7})$", reader.text(path) or "", re.MULTILINE)
        if minor is None:
            reader.warn(path, "names no DeviceFileMinor")
        else:
            nodes.append(f"nvidia-caps/nvidia-cap{minor[1]}")
    return tuple(nodes)
