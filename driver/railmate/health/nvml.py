"""What NVIDIA's library says of GPUs while they run: which of them are lost, and which errors (Xid) they had.

The library runs in a helper process (nvmlevents.py): it may hang in the driver of a dying GPU, or crash. As long as it
runs the GPUs' driver is in use and cannot be unloaded; where the driver's container may not open the GPUs or has no
library (the chart's default), it ends at once and is tried again later.
"""

from __future__ import annotations

import json
import logging
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence, Set

log = logging.getLogger(__name__)

#: Seconds between two looks of the helper. It hears events at once.
_PERIOD = 5.0
#: Seconds without a word after which the helper is taken for stuck; it says one with each look.
_SILENCE = 60.0
#: Seconds until it is started again after it ended by itself; it was too early, or there is no library.
_AGAIN = 300.0
_TURN = 1.0


class NvmlWatch:
    """``run`` blocks until ``stop``; everything else may be called from any thread.

    ``changed`` is called, from the thread that runs, whenever ``lost`` has changed. ``period``, ``silence`` and
    ``again`` in seconds.
    """

    def __init__(
        self,
        library: str,
        gpus: Sequence[str],
        changed: Callable[[], None],
        period: float = _PERIOD,
        silence: float = _SILENCE,
        again: float = _AGAIN,
    ) -> None:
        self._library, self._gpus, self._changed = library, tuple(gpus), changed
        self._period, self._silence, self._again = period, silence, again
        self._lost: frozenset[str] = frozenset()
        self._problem = ""
        self._wake = threading.Event()
        self._stopping = threading.Event()

    def lost(self) -> Set[str]:
        """Addresses of GPUs that NVIDIA's driver cannot reach any more. Its last word counts when it no longer answers:
        it may be the lost GPU that keeps it from that."""
        return self._lost

    def update(self, gpus: Sequence[str]) -> None:
        """From now on ask about these GPUs."""
        if self._gpus != tuple(gpus):
            self._gpus = tuple(gpus)
            self._wake.set()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()

    def run(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            gpus = self._gpus
            try:
                if gpus:
                    self._ask(gpus)
            except OSError as error:
                self._say(f"cannot be asked, no process can be started ({error.strerror})")
            except Exception:
                log.exception("%s: trying again in %.0f s", self._library, self._again)
            self._set_lost(self._lost & frozenset(self._gpus))
            self._wake.wait(self._again)

    def _ask(self, gpus: Sequence[str]) -> None:
        command = [
            sys.executable,
            "-m",
            "railmate.health.nvmlevents",
            f"{self._period:g}",
            self._library,
            *gpus,
        ]
        helper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            self._listen(helper)
        finally:
            helper.kill()
            assert helper.stdin is not None
            assert helper.stdout is not None
            helper.stdin.close()
            helper.stdout.close()
            try:
                helper.wait(_TURN)
            except subprocess.TimeoutExpired:
                self._say(f"process {helper.pid} is stuck in the kernel and cannot be ended")

    def _listen(self, helper: subprocess.Popen[bytes]) -> None:
        assert helper.stdout is not None
        pending, heard = b"", time.monotonic()
        while not self._wake.is_set():
            if select.select([helper.stdout], [], [], _TURN)[0]:
                data = helper.stdout.read1(65536)  # type: ignore[attr-defined]
                if not data:
                    return
                *lines, pending = (pending + data).split(b"\n")
                heard = time.monotonic()
                for line in lines:
                    self._heard(json.loads(line))
            elif time.monotonic() - heard > self._silence:
                self._say(
                    f"gave no answer for {self._silence:.0f} s. See dmesg for the driver's messages (Xid)"
                )
                return

    def _heard(self, said: dict[str, object]) -> None:
        if "problem" in said:
            self._say(str(said["problem"]))
        elif "xid" in said:
            where = "See the kernel's log and NVIDIA's catalogue of Xid errors."
            log.warning("GPU %s: Xid %s. %s", said["address"], said["xid"], where)
        elif "lost" in said:
            address = {str(said["address"])}
            self._set_lost(self._lost | address if said["lost"] else self._lost - address)

    def _set_lost(self, lost: frozenset[str]) -> None:
        if lost != self._lost:
            self._lost = lost
            self._changed()

    def _say(self, problem: str) -> None:
        if problem != self._problem:  # once: it is the same at each try where there is no library
            log.info("%s: %s", self._library, problem)
        self._problem = problem
