"""What ends with a process, whatever ends that."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def in_a_process_of_its_own(work: Callable[[], None]) -> Iterator[None]:
    """It has done its work, lives on, and is killed at the end."""
    ready, written = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ready)
            work()
            os.write(written, b".")
            signal.pause()
        finally:
            os._exit(1)
    os.close(written)
    try:
        assert os.read(ready, 1) == b"."
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
