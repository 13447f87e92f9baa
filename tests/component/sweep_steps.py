"""The steps of a process: each change to the file system and each changing netlink message, as an audit hook sees them
(sys.addaudithook; PEP 578), whichever code makes it."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

BEFORE, AFTER = "before", "after"
_GENERIC = 16  # NETLINK_GENERIC
#: CTRL_CMD_GETFAMILY; ETHTOOL_MSG_FEATURES_GET, _PRIVFLAGS_GET, _RINGS_GET, _CHANNELS_GET, _COALESCE_GET, _PAUSE_GET:
#: they change nothing.
_GENERIC_READS = frozenset({3, 11, 13, 15, 17, 19, 21})
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# Not mode, owner and times: between the making of a file and its renaming they are no state of their own.
_CHANGING = frozenset(
    f"os.{name}" for name in ("rename", "remove", "mkdir", "rmdir", "link", "symlink", "truncate")
)


class Steps:
    """Counts this process's side effects and, when asked for, ends it right before or right after one of them."""

    def __init__(self) -> None:
        self.counting = False
        self.names: list[str] = []
        self._number, self._when = 0, BEFORE
        sys.addaudithook(self._audit)
        for name in ("send", "sendto", "sendmsg"):
            setattr(socket.socket, name, self._sending(getattr(socket.socket, name)))

    def arm(self, number: int = 0, when: str = BEFORE) -> None:
        self.names, self._number, self._when, self.counting = [], number, when, True

    def unseen(self, act: Callable[[], None]) -> None:
        """What the kernel does is no step of the process."""
        counting, self.counting = self.counting, False
        try:
            act()
        finally:
            self.counting = counting

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.counting:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITING and isinstance(path, str):
                self._step(f"open {Path(path).name}")
        elif event == "subprocess.Popen":
            self._step(f"run {Path(os.fsdecode(arguments[0])).name}")
        elif event in _CHANGING:
            path = arguments[0]
            self._step(f"{event} {path if isinstance(path, int) else Path(os.fsdecode(path)).name}")

    def _sending(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def send(sock: socket.socket, data: Any, *rest: Any, **more: Any) -> Any:
            if self.counting and sock.family == socket.AF_NETLINK:
                first = data[0] if isinstance(data, (list, tuple)) else data
                kind = struct.unpack_from("=H", bytes(first), 4)[0]
                command = bytes(first)[16] if sock.proto == _GENERIC else None
                # of each four message types the third reads (linux/rtnetlink.h)
                if command not in _GENERIC_READS and (command is not None or kind & 3 != 2):
                    self._step(f"netlink message {kind if command is None else f'generic {command}'}")
            return real(sock, data, *rest, **more)

        return send

    def _step(self, name: str) -> None:
        self.names.append(name)
        if len(self.names) != self._number:
            return
        if self._when == BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        sys.setprofile(self._next_event)

    def _next_event(self, frame: FrameType, event: str, argument: Any) -> None:
        """The first thing the thread does after the change was made, whatever that is."""
        if frame.f_code.co_filename != __file__:
            os.kill(os.getpid(), signal.SIGKILL)


def forked(work: Callable[[], Any], answer: Path, dies: bool = False) -> Any:
    """Run ``work`` in a process of its own; its result, which comes by way of the file ``answer``. ``dies``: it must be
    killed."""
    pid = os.fork()
    if pid == 0:
        try:
            result = {"result": work()}
        except BaseException:
            result = {"error": traceback.format_exc()}
        answer.write_text(json.dumps(result))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if dies:
        if not os.WIFSIGNALED(status):
            raise AssertionError(f"the process was not killed: {answer.read_text()}")
        return None
    outcome = json.loads(answer.read_text())
    answer.unlink()
    if "error" in outcome:
        raise AssertionError(outcome["error"])
    return outcome["result"]
