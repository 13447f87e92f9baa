"""Long-running processes: started with their lifetime tied to ours or left behind on purpose, and ended by id."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.shell import need

# The kernel sends the parent-death signal when the *thread* that started the child ends (prctl(2),
# PR_SET_PDEATHSIG), so children are started from one thread that lives as long as the process.
_spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawn")


@dataclass(frozen=True)
class ProcessRecord:
    """A process that survives in a file: its pid counts only together with its start time and this boot."""

    pid: int
    started: int  # clock ticks since boot, /proc/<pid>/stat field 22
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessRecord:
        """Raises ProcessLookupError when there is no such process."""
        started = _start_ticks(pid)
        if started is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, started, _boot_id())

    @classmethod
    def load(cls, path: Path) -> ProcessRecord | None:
        """The record in a file; None when there is none or it cannot be read as one."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    def alive(self) -> bool:
        return self.boot == _boot_id() and _start_ticks(self.pid) == self.started

    def wait(self, seconds: float) -> bool:
        """Whether the process has ended within the time."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.alive():
                return True
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            return bool(poll.poll(seconds * 1000))
        finally:
            os.close(descriptor)

    def stop(self, grace: float = 10) -> None:
        """SIGTERM, and SIGKILL after `grace` seconds; returns when the process is gone."""
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
            if not self.alive():
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            if self.wait(seconds):
                return


def start(
    argv: Sequence[str | Path], log: Path, *, env: Mapping[str, str] | None = None, tied: bool = True,
    pass_fds: Sequence[int] = (), cwd: Path | None = None,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Starts a process with its output in `log`.

    Each gets its own session, so that Ctrl-C reaches us first and we end them in order.
    `tied`: it is killed when this process ends, however it ends.
    """
    words = [str(word) for word in argv]
    if tied:
        # The kernel sends the signal for a parent that ends from now on; one that ended before shows as another parent.
        unless_orphan = ["sh", "-c", '[ "$PPID" = "$0" ] && exec "$@"', str(os.getpid())]
        words = [need("setpriv", "util-linux"), "--pdeathsig", "KILL", "--", *unless_orphan, *words]
    log.parent.mkdir(parents=True, exist_ok=True)

    def spawn() -> subprocess.Popen[bytes]:
        with log.open("wb") as sink:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, cwd=cwd,
                env=None if env is None else {**os.environ, **env}, start_new_session=True, pass_fds=pass_fds,
            )  # fmt: skip

    return _spawner.submit(spawn).result()


def _start_ticks(pid: int) -> int | None:
    """Start time of a live process; None for none and for a zombie, which only waits to be collected."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name in parentheses may hold spaces
    return None if fields[0] in "ZX" else int(fields[19])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
