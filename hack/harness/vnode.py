"""The virtual GPU node: booted, asked, ended.

    with VirtualNode(tmp_path) as node:
        print(node.channel.run("railmate", "topology"))

Its PCI tree, NUMA nodes, SR-IOV, netdevs, RDMA devices and namespaces are a real kernel's. The GPUs are functions that
look like H100s and do nothing (vnode_vfiouser.py, vnode_guest/nvidia.c); the NICs' RDMA is soft RoCE
(vnode_guest/devices).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.cache import cache_dir
from harness.process import ProcessRecord, start
from harness.shell import HarnessError, progress, tail
from harness.vnode_channel import Channel
from harness.vnode_disk import OWN_DIR, Boot, boot_files, own_code
from harness.vnode_machine import GPUS, Settings, machine
from harness.vnode_packages import UnavailableError, qemu_command

ACCELERATION_VARIABLE = "RAILMATE_VNODE_ACCEL"
#: Memory, in MiB, that must be available beside what the node is given.
_SPARE_MEMORY = 512
# A boot takes about 30 s of processor time under TCG. One that hangs spins or waits for ever; on a busy machine only
# the time that QEMU got says which it is.
_BOOT_CPU_SECONDS, _BOOT_SECONDS = 150, 420
_ATTEMPTS = 2  # about one boot in 26 hangs under TCG
_PROGRAMS = ("gpus", "qemu")
_READY = "ready"  # a file: its devices are there


class VirtualNode:
    """One virtual node, with everything of its run in a directory of its own; several may run at once.

    The processes end with `stop`, with the context, and when this process ends in whatever way.
    """

    def __init__(self, directory: Path, settings: Settings | None = None) -> None:
        self.directory = directory.absolute()
        self._settings = settings
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> VirtualNode:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, tied: bool = True) -> None:
        """Boots the node and returns when its devices are there and the driver's code is in it.

        `tied=False` leaves it running after this process; `VirtualNode(directory).stop()` ends it.
        Raises HarnessError with the end of the console when it does not come up, twice.
        """
        settings = self._settings or Settings(acceleration=acceleration())
        check_memory(settings.memory)
        boot = boot_files()
        own_code()  # built before the node waits for it
        began = time.monotonic()
        try:
            for attempt in range(1, _ATTEMPTS + 1):
                progress("vnode", f"booting ({settings.acceleration}, {settings.memory} MiB)")
                try:
                    self._boot(settings, boot, tied)
                    break
                except HarnessError as error:
                    console = tail(self.directory / "console.log", 15)
                    if attempt == _ATTEMPTS:
                        raise HarnessError(
                            f"{error}\nend of the virtual node's console:\n{console}"
                        ) from error
                    progress("vnode", f"did not come up, trying once more: {error}\n{console}")
            progress("vnode", f"up after {time.monotonic() - began:.0f} s; making VFs and RDMA devices")
            self._set_up(settings)
            (self.directory / _READY).touch()
        except BaseException:
            self.stop()
            raise
        progress("vnode", f"ready after {time.monotonic() - began:.0f} s")

    def stop(self) -> None:
        """Ends the node and removes its directory. May be repeated."""
        for name in reversed(_PROGRAMS):
            if record := ProcessRecord.load(self._record(name)):
                record.stop(grace=5)
        for process in self._processes.values():
            process.wait()
        self._processes.clear()
        shutil.rmtree(self.directory, ignore_errors=True)

    def running(self) -> dict[str, bool]:
        """Program of this machine -> whether it runs."""
        records = {name: ProcessRecord.load(self._record(name)) for name in _PROGRAMS}
        return {name: record is not None and record.alive() for name, record in records.items()}

    @property
    def up(self) -> bool:
        """Whether it runs, answers and has its devices."""
        return (self.directory / _READY).exists() and all(self.running().values()) and self.channel.answers()

    @property
    def channel(self) -> Channel:
        """For commands in the node, and files to and from it."""
        return Channel(int(self._state()["port"]))

    @property
    def settings(self) -> Settings:
        """What it was started with."""
        return Settings(**self._state()["settings"])

    def sync(self) -> None:
        """Brings the code of the tree as it is now into the node, where it is not there already."""
        own = own_code()
        target = f"{OWN_DIR}-{own.parent.name.rpartition('-')[2]}"
        if self.channel.execute(["readlink", OWN_DIR]).stdout.decode().strip() == target:
            return
        scratch = f"{target}.{os.getpid()}"
        self.channel.put(own, scratch)
        # A link is replaced in one step; a command that runs in the meantime has the old code or the new.
        replace = 'mv -T "$1" "$2" || rm -rf "$1"; ln -sfn "$2" "$1" && mv -T "$1" "$3"'
        self.channel.run("sh", "-c", replace, "sh", scratch, target, OWN_DIR)

    def monitor(self, commands: Iterable[tuple[str, dict[str, object]]]) -> list[Any]:
        """QEMU monitor commands (QMP), one after the other; their results. Raises HarnessError when one is refused."""
        results = []
        descriptor = os.open(self.directory, os.O_PATH)
        try:
            with socket.socket(socket.AF_UNIX) as link:
                link.settimeout(30)
                link.connect(
                    f"/proc/self/fd/{descriptor}/qmp.sock"
                )  # a socket's own path may be 107 bytes only
                stream = link.makefile("rw")
                stream.readline()  # the greeting
                for name, arguments in (("qmp_capabilities", {}), *commands):
                    stream.write(json.dumps({"execute": name, "arguments": arguments}) + "\n")
                    stream.flush()
                    results.append(_result(stream, name))
        except OSError as error:
            raise HarnessError(f"QEMU's monitor in {self.directory} does not answer: {error}") from error
        finally:
            os.close(descriptor)
        return results[1:]

    def _boot(self, settings: Settings, boot: Boot, tied: bool) -> None:
        """One attempt; returns when the agent answers."""
        self.stop()
        self.directory.mkdir(parents=True, exist_ok=True)
        port = _free_port()
        state = {"port": port, "settings": asdict(settings)}
        (self.directory / "state.json").write_text(json.dumps(state))
        self._start_gpus(tied)
        command, environment = qemu_command()
        arguments = [*command, *machine(boot, settings, port)]
        self._start("qemu", arguments, {**environment, "TMPDIR": str(self.directory)}, tied)
        self._await_agent()

    def _set_up(self, settings: Settings) -> None:
        """VFs, RDMA devices and the driver's code."""
        self.channel.run("/usr/lib/vnode/devices", str(settings.vfs), timeout=300)
        self.sync()

    def _start_gpus(self, tied: bool) -> None:
        argv = [sys.executable, "-m", "harness.vnode_vfiouser", ".", str(GPUS)]
        self._start("gpus", argv, {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}, tied)
        deadline = time.monotonic() + 20
        while "ready" not in self._log("gpus").read_text():
            if self._processes["gpus"].poll() is not None or time.monotonic() > deadline:
                raise HarnessError(f"the simulated GPUs do not start:\n{tail(self._log('gpus'))}")
            time.sleep(0.05)

    def _start(self, name: str, argv: list[str] | list[str | Path], env: dict[str, str], tied: bool) -> None:
        process = start(argv, self._log(name), env=env, tied=tied, cwd=self.directory)
        self._processes[name] = process
        ProcessRecord.of(process.pid).save(self._record(name))

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def _record(self, name: str) -> Path:
        return self.directory / f"{name}.process.json"

    def _await_agent(self) -> None:
        began = time.monotonic()
        while not self.channel.answers(seconds=10):
            for name, process in self._processes.items():
                if process.poll() is not None:
                    said = tail(self._log(name))
                    raise HarnessError(f"{name} ended with code {process.returncode}:\n{said}")
            passed, used = time.monotonic() - began, cpu_seconds(self._processes["qemu"].pid)
            if passed > _BOOT_SECONDS or used > _BOOT_CPU_SECONDS:
                raise HarnessError(
                    f"the virtual node does not answer after {passed:.0f} s, {used:.0f} of them on a processor"
                )
            time.sleep(0.2)

    def _state(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.directory / "state.json").read_text()))
        except OSError as error:
            raise HarnessError("no virtual node runs; start one: hack/vnode up") from error


def lasting_directory() -> Path:
    """Where the node of hack/vnode is, which outlives the command that started it."""
    return cache_dir() / "run" / "vnode"


def acceleration() -> str:
    """ "kvm" where the processor itself can run a guest, else "tcg"; RAILMATE_VNODE_ACCEL overrules.

    /dev/kvm alone says too little: inside some virtual machines it is there and runs no ordinary kernel.
    """
    chosen = os.environ.get(ACCELERATION_VARIABLE)
    if chosen not in (None, "", "kvm", "tcg"):
        raise HarnessError(f"{ACCELERATION_VARIABLE}={chosen}: kvm or tcg is meant")
    if chosen:
        return chosen
    hardware = any(Path("/sys/module", name).is_dir() for name in ("kvm_intel", "kvm_amd"))
    return "kvm" if hardware and os.access("/dev/kvm", os.R_OK | os.W_OK) else "tcg"


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used, 0 when there is none (proc_pid_stat(5), utime and stime)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def available_memory() -> int:
    """MiB that new processes may have without swapping, as the kernel estimates it."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) // 1024
    return 0


def check_memory(wanted: int) -> None:
    """Raises UnavailableError when this machine has too little memory for a node of so many MiB."""
    available = available_memory()
    if available < wanted + _SPARE_MEMORY:
        raise UnavailableError(
            f"the virtual node needs {wanted + _SPARE_MEMORY} MiB of memory and {available} are available; "
            "end what takes it, or give the node less with --memory"
        )


def _free_port() -> int:
    """Another process may take it before QEMU does; then the second attempt has another."""
    with contextlib.closing(socket.socket()) as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])


def _result(stream: Any, name: str) -> Any:
    while line := stream.readline():
        answer = json.loads(line)
        if "error" in answer:
            raise HarnessError(f"QEMU refuses {name}: {answer['error']['desc']}")
        if "return" in answer:
            return answer["return"]
    raise HarnessError(f"QEMU ended while it worked on {name}")
